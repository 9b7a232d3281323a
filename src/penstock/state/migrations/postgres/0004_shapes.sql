create table {schema}.table_shapes (
    pipeline_id text not null,
    table_id bigint not null,
    shape jsonb not null,
    primary key (pipeline_id, table_id)
);
comment on table {schema}.table_shapes is 'what the catalog said of each table when it was copied or last looked at';
