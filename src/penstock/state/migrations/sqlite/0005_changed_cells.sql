create table changed_cells (
    pipeline_id text not null,
    table_id integer not null,
    cells integer not null,
    primary key (pipeline_id, table_id)
);
