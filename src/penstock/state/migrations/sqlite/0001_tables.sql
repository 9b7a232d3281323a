-- Everything a pipeline remembers. Positions are boundaries: all that commits below is in; 16 digits, so that they sort
-- as text. Times are UTC.

create table pipelines (
    pipeline_id text primary key,
    epoch integer not null,
    holder text,
    host text,
    pid integer,
    machine text,
    started text,
    since text,
    expires text
);

create table table_states (
    pipeline_id text not null,
    table_id integer not null,
    sequence integer not null,
    phase text not null check (phase in ('init', 'data_sync', 'finished_copy', 'sync_done', 'ready', 'errored')),
    details text not null,
    updated_at text not null,
    primary key (pipeline_id, table_id)
);

create table table_state_history (
    pipeline_id text not null,
    table_id integer not null,
    ring integer not null,
    sequence integer not null,
    phase text not null,
    details text not null,
    epoch integer not null,
    recorded_at text not null,
    primary key (pipeline_id, table_id, ring)
);

create table table_schemas (
    pipeline_id text not null,
    table_id integer not null,
    commit_lsn text not null,
    ordinal integer not null,
    definition text not null,
    primary key (pipeline_id, table_id, commit_lsn, ordinal)
);

create table destination_tables (
    pipeline_id text not null,
    table_id integer not null,
    destination_table_id text not null,
    status text not null check (status in ('applying', 'applied')),
    commit_lsn text not null,
    ordinal integer not null,
    replication_mask text not null,
    previous_commit_lsn text,
    previous_ordinal integer,
    previous_replication_mask text,
    primary key (pipeline_id, table_id)
);

create table replication_progress (
    pipeline_id text not null,
    worker text not null check (worker in ('apply', 'table_sync')),
    table_id integer not null,
    flush_lsn text not null,
    lineage text not null,
    primary key (pipeline_id, worker, table_id),
    check ((worker = 'apply') = (table_id = 0))
);

create table table_positions (
    pipeline_id text not null,
    table_id integer not null,
    position text not null,
    lineage text not null,
    primary key (pipeline_id, table_id)
);

create table commands (
    pipeline_id text not null,
    number integer not null,
    token text not null,
    kind text not null,
    tables text not null,
    options text not null,
    status text not null check (status in ('pending', 'accepted', 'done', 'refused')),
    reason text,
    requested_by text not null,
    requested_at text not null,
    answered_at text,
    epoch integer not null,
    primary key (pipeline_id, number)
);
