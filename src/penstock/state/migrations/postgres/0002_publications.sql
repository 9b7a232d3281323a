create table {schema}.publications (
    pipeline_id text not null,
    name text not null,
    membership jsonb not null,
    primary key (pipeline_id, name)
);
comment on table {schema}.publications is 'the versions of the catalog rows that were acted upon: what left and came back since is copied anew';
