-- Search indexes: how each was last built, which ranges of a build are done, and what is left to do besides.

create table index_builds (
    pipeline_id text not null,
    index_name text not null,
    build text not null,
    fingerprint text not null,
    status text not null check (status in ('wanted', 'filling', 'seeded')),
    reason text not null,
    plan text not null,
    changed integer not null,
    updated_at text not null,
    primary key (pipeline_id, index_name)
);

create table index_ranges (
    pipeline_id text not null,
    index_name text not null,
    build text not null,
    part integer not null,
    documents integer not null,
    primary key (pipeline_id, index_name, build, part)
);

create table index_work (
    pipeline_id text not null,
    index_name text not null,
    number integer not null,
    work text not null check (work in ('removal', 'fan_out')),
    details text not null,
    primary key (pipeline_id, index_name, number)
);
