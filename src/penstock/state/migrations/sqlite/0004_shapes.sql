create table table_shapes (
    pipeline_id text not null,
    table_id integer not null,
    shape text not null,
    primary key (pipeline_id, table_id)
);
