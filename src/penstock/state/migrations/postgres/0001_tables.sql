-- Everything a pipeline remembers. Positions are boundaries: all that commits below is in.

create table {schema}.pipelines (
    pipeline_id text primary key,
    epoch bigint not null,
    holder text,
    host text,
    pid bigint,
    machine text,
    started text,
    since timestamptz,
    expires timestamptz
);
comment on table {schema}.pipelines is 'who drives each pipeline; the epoch grows with every change of hands';

create table {schema}.table_states (
    pipeline_id text not null,
    table_id bigint not null,
    sequence bigint not null,
    phase text not null check (phase in ('init', 'data_sync', 'finished_copy', 'sync_done', 'ready', 'errored')),
    details jsonb not null,
    updated_at timestamptz not null,
    primary key (pipeline_id, table_id)
);
comment on table {schema}.table_states is 'the phase of each table, by the table''s oid at the source';

create table {schema}.table_state_history (
    pipeline_id text not null,
    table_id bigint not null,
    ring integer not null,
    sequence bigint not null,
    phase text not null,
    details jsonb not null,
    epoch bigint not null,
    recorded_at timestamptz not null,
    primary key (pipeline_id, table_id, ring)
);
comment on table {schema}.table_state_history is 'the latest phases of each table; order by sequence';

create table {schema}.table_schemas (
    pipeline_id text not null,
    table_id bigint not null,
    commit_lsn pg_lsn not null,
    ordinal bigint not null,
    definition jsonb not null,
    primary key (pipeline_id, table_id, commit_lsn, ordinal)
);
comment on table {schema}.table_schemas is 'versions of schemas, each valid from the change (commit_lsn, ordinal) on';

create table {schema}.destination_tables (
    pipeline_id text not null,
    table_id bigint not null,
    destination_table_id text not null,
    status text not null check (status in ('applying', 'applied')),
    commit_lsn pg_lsn not null,
    ordinal bigint not null,
    replication_mask text not null,
    previous_commit_lsn pg_lsn,
    previous_ordinal bigint,
    previous_replication_mask text,
    primary key (pipeline_id, table_id)
);
comment on table {schema}.destination_tables is 'what each table is at the destination, and with which schema version';

create table {schema}.replication_progress (
    pipeline_id text not null,
    worker text not null check (worker in ('apply', 'table_sync')),
    table_id bigint not null,
    flush_lsn pg_lsn not null,
    lineage jsonb not null,
    primary key (pipeline_id, worker, table_id),
    check ((worker = 'apply') = (table_id = 0))
);
comment on table {schema}.replication_progress is 'what is durable at the destination, and on which server that counts';

create table {schema}.table_positions (
    pipeline_id text not null,
    table_id bigint not null,
    position pg_lsn not null,
    lineage jsonb not null,
    primary key (pipeline_id, table_id)
);
comment on table {schema}.table_positions is 'how far each table is durable, for destinations that do not know it themselves';

create table {schema}.commands (
    pipeline_id text not null,
    number bigint not null,
    token text not null,
    kind text not null,
    tables jsonb not null,
    options jsonb not null,
    status text not null check (status in ('pending', 'accepted', 'done', 'refused')),
    reason text,
    requested_by text not null,
    requested_at timestamptz not null,
    answered_at timestamptz,
    epoch bigint not null,
    primary key (pipeline_id, number)
);
comment on table {schema}.commands is 'what people asked for, and the answers';
