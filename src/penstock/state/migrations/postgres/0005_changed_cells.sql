create table {schema}.changed_cells (
    pipeline_id text not null,
    table_id bigint not null,
    cells bigint not null,
    primary key (pipeline_id, table_id)
);
comment on table {schema}.changed_cells is 'how many cells of each table out_of_range changed since its copy began';
