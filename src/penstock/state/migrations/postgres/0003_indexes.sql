-- Search indexes: how each was last built, which ranges of a build are done, and what is left to do besides.

create table {schema}.index_builds (
    pipeline_id text not null,
    index_name text not null,
    build text not null,
    fingerprint text not null,
    status text not null check (status in ('wanted', 'filling', 'seeded')),
    reason text not null,
    plan jsonb not null,
    changed bigint not null,
    updated_at timestamptz not null,
    primary key (pipeline_id, index_name)
);
comment on table {schema}.index_builds is 'the last build of each search index; changed counts documents that changes wrote meanwhile';

create table {schema}.index_ranges (
    pipeline_id text not null,
    index_name text not null,
    build text not null,
    part bigint not null,
    documents bigint not null,
    primary key (pipeline_id, index_name, build, part)
);
comment on table {schema}.index_ranges is 'the ranges of a build whose documents are durable';

create table {schema}.index_work (
    pipeline_id text not null,
    index_name text not null,
    number bigint not null,
    work text not null check (work in ('removal', 'fan_out')),
    details jsonb not null,
    primary key (pipeline_id, index_name, number)
);
comment on table {schema}.index_work is 'removal: keys that went while their index was built; fan_out: changes whose documents are many, and still to be built';
