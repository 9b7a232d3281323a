create table publications (
    pipeline_id text not null,
    name text not null,
    membership text not null,
    primary key (pipeline_id, name)
);
