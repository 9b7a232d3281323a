-- Search documents: those that a sink rejected, and where polling is.

create table quarantine (
    pipeline_id text not null,
    index_name text not null,
    id text not null,
    reason text not null,
    position text,
    body_hash text not null,
    first_at text not null,
    last_at text not null,
    attempts integer not null,
    wanted integer not null,
    primary key (pipeline_id, index_name, id)
);

create table poll_positions (
    pipeline_id text not null,
    position text not null,
    primary key (pipeline_id)
);
