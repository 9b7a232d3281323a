"""A library with every sort of relation, and ways to build its documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from penstock.documents.build import build_documents, compile_build
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import IndexSpecification, parse_specification
from tests.conftest import Database

SCHEMA = """
create schema lib;
create schema "Other";
create type lib.genre as enum ('novel', 'essay', 'poem');
create domain lib.pages as integer check (value > 0);

create table lib.authors (id int primary key, name text not null, mentor_id int references lib.authors);
create table lib.books (
    id bigint primary key, title text, genre lib.genre, pages lib.pages, price numeric(10, 2), rating float8,
    published timestamptz, printed timestamp, day date, cover bytea, meta jsonb, labels text[], cost money,
    code uuid, latitude float8, longitude float8, author_id bigint, removed_at timestamptz, hidden boolean default false
);
create table lib.chapters (
    book_id bigint not null references lib.books on delete cascade, number int not null, title text, words int,
    primary key (book_id, number)
);
create table lib.notes (
    id int primary key, book_id bigint, chapter int, body text, stars int,
    foreign key (book_id, chapter) references lib.chapters on delete cascade on update cascade
);
create table "Other"."Tags" ("Code" text primary key, "Label" text);
create table lib.book_tags (
    book_id bigint references lib.books on delete cascade, tag text references "Other"."Tags" on update cascade,
    weight int, primary key (book_id, tag)
);
create table lib.blurbs (id int primary key, book_id bigint, said text, at date);
"""


@pytest.fixture
def library(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A connection as Penstock has them, to a database with the library's tables, all empty."""
    database.execute(SCHEMA)
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        yield connection


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(library: psycopg.Connection[Any]) -> Build:
    """`build(text, [1, 2])` gives the documents by id; None where there is none."""

    def build_all(text: str, *keys: Sequence[Any]) -> dict[str, Any]:
        specification = parse_specification(text, "books")
        query = compile_build(specification, catalog_of(library, specification))
        built = build_documents(library, query, [[str(each) for each in part] for part in keys])
        return {row["id"]: row["body"] and json.loads(row["body"]) for row in built.to_pylist()}

    return build_all


def catalog_of(connection: psycopg.Connection[Any], *specifications: IndexSpecification) -> SourceCatalog:
    return load_catalog(connection, {name for each in specifications for name in each.tables()})
