-- Search documents: those that a sink rejected, and where polling is. The quarantine was in a schema of its own.

create table {schema}.quarantine (
    pipeline_id text not null,
    index_name text not null,
    id text not null,
    reason text not null,
    position pg_lsn,
    body_hash text not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    attempts bigint not null,
    wanted bigint not null,
    primary key (pipeline_id, index_name, id)
);
comment on table {schema}.quarantine is 'documents that a sink rejected; wanted is 1 if a user asked for a retry';

create table {schema}.poll_positions (
    pipeline_id text not null,
    position jsonb not null,
    primary key (pipeline_id)
);
comment on table {schema}.poll_positions is 'where polling for changes is; none before its first start';

do $$ begin if to_regclass('penstock_documents.quarantine') is not null then insert into {schema}.quarantine select owner, index_name, id, reason, '0/0'::pg_lsn + position::numeric, body_hash, first_at, last_at, attempts, wanted::int from penstock_documents.quarantine on conflict do nothing; end if; end $$;
