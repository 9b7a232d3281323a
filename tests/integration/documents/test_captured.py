"""From the write-ahead log to documents: changes as capture delivers them, with keys of every type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.capture import CaptureSettings
from penstock.changes.batch import EventBatch, build_batch
from penstock.documents.catalog import load_catalog
from penstock.documents.images import Changes, changes_in_pieces
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import Resolver
from penstock.documents.side_tables import PostgresTables
from penstock.lsn import Lsn
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.slots import create_slot
from penstock.specification import parse_specification
from penstock.spool import SpoolReader, SpoolSettings
from tests.conftest import Database
from tests.support.oracle import capture_until, current_position

Connection = psycopg.Connection[Any]

# A type, and two values of it.
TYPES = {
    "int": ("1", "2"),
    "bigint": ("1", "9007199254740993"),
    "numeric": ("1.50", "123456789012345678901234567890123456789012.5"),
    "numeric(10,2)": ("1.50", "-7.00"),
    "text": ("a:b %", ""),
    "varchar(20)": ("x", "Ä\\"),
    "char(5)": ("x", "yz"),
    "public.citext": ("MiXed", "other"),
    "uuid": ("6fa459ea-ee8a-3ca4-894e-db77e160355e", "00000000-0000-0000-0000-000000000001"),
    "boolean": ("true", "false"),
    "date": ("2026-01-02", "infinity"),
    "timestamp": ("2026-01-02 03:04:05.678901", "0044-03-15 00:00:00 BC"),
    "timestamptz": ("2026-01-02 03:04:05+00", "infinity"),
    "bytea": ("\\x00ff", "\\x"),
    "public.mood": ("good", "bad"),
    "public.small": ("1", "2"),
}


@dataclass
class Stream:
    """A slot and its spool."""

    source: Connection
    settings: CaptureSettings
    position: Lsn

    def take(self) -> EventBatch:
        """All that was committed since the last call."""
        end = capture_until(self.settings, current_position(self.source))
        reader = SpoolReader(self.settings.spool.path)
        entries = reader.entries(self.position)
        begin, self.position = self.position, end
        tables = {step.table_id for entry in entries for step in entry.steps if hasattr(step, "table_id")}
        return build_batch(
            entries,
            begin=begin,
            end=end,
            positions=dict.fromkeys(tables, begin),
            schemas={},
            schema_of=reader.load_schema,
        )


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with connect(SourceSettings(database.dsn), Role.STATE) as connection:
        yield connection


@pytest.fixture
def stream(database: Database, tmp_path: Path) -> Iterator[Stream]:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as source:
        source.execute("create extension citext schema public")
        source.execute("create type public.mood as enum ('bad', 'good')")
        source.execute("create domain public.small as int check (value < 100)")
        for number, type_ in enumerate(TYPES):
            source.execute(f"create table public.p{number} (k {type_} primary key, x int)")
            source.execute(f"create table public.c{number} (id int primary key, k {type_}, x int)")
        source.execute("create publication pub for all tables")
        spool = SpoolSettings(tmp_path / "spool", min_free_bytes=0)
        settings = CaptureSettings(SourceSettings(database.dsn), f"documents_{database.name[-12:]}", "pub", spool)
        begin = create_slot(source, settings.slot).confirmed_flush_lsn
        yield Stream(source, settings, begin)


def specification(number: int):
    text = f"version: 1\ntable: p{number}\nfields: [{{count: c, table: c{number}, foreign_key: k}}]"
    return parse_specification(text, f"i{number}")


def collect(stream: Stream, resolver: Resolver) -> Changes:
    """What was captured since the last call, in one piece."""
    [changes] = changes_in_pieces(stream.take(), resolver.wanted, 1_000_000)
    return changes


def ids(resolver: Resolver, source: Connection, changes: Changes) -> dict[str, set[str]]:
    resolution = resolver.resolve(source, changes)
    found: dict[str, set[str]] = {}
    for part in resolution.documents:
        found.setdefault(part.index, set()).update(part.keys[0])
    resolver.remember(resolution)
    return found


@pytest.mark.trap(42, 43)
def test_keys_of_every_type_lead_from_a_child_to_its_document(stream: Stream, state: Connection) -> None:
    source = stream.source
    specifications = [specification(number) for number in range(len(TYPES))]
    catalog = load_catalog(source, {name for each in specifications for name in each.tables()})
    relations = RelationMap(PostgresTables(lambda: state), "types")
    resolver = Resolver(specifications, catalog, relations)
    for number, values in enumerate(TYPES.values()):
        for each in values:
            source.execute(f"insert into public.p{number} values (%s, 1)", [each])
        source.execute(f"insert into public.c{number} values (1, %s, 1)", [values[0]])
    for table in relations.prepare(resolver.tracked):
        relations.seed(source, table, stream.position)
    canonical = {
        f"i{number}": {str(row[0]) for row in source.execute(_canonical_text(number, type_)).fetchall()}
        for number, type_ in enumerate(TYPES)
    }
    assert ids(resolver, source, collect(stream, resolver)) == canonical

    for number, values in enumerate(TYPES.values()):
        source.execute(f"update public.c{number} set k = %s", [values[1]])
    moved = collect(stream, resolver)
    assert moved.xids
    assert ids(resolver, source, moved) == canonical, "both parents"

    for number in range(len(TYPES)):
        source.execute(f"delete from public.c{number}")
    deleted = ids(resolver, source, collect(stream, resolver))
    assert {index: len(found) for index, found in deleted.items()} == dict.fromkeys(canonical, 1)
    assert all(found < canonical[index] for index, found in deleted.items())

    for number in range(len(TYPES)):
        source.execute(f"delete from public.p{number}")
    assert ids(resolver, source, collect(stream, resolver)) == canonical


@pytest.mark.trap(25, 42)
def test_a_large_link_that_was_not_sent_is_no_null(stream: Stream, state: Connection) -> None:
    source = stream.source
    source.execute("alter table public.c4 alter k set storage external")
    source.execute("alter table public.p4 drop constraint p4_pkey")
    source.execute("alter table public.p4 add y int primary key generated always as identity")
    long = "x" * 5000
    text = (
        "version: 1\ntable: p4\nfields: [{belongs_to: c, column: x, table: c4, primary_key: id, fields: [{text: k}]}]"
    )
    owner = parse_specification(text, "owner")
    text = "version: 1\ntable: c4\ndoc_id: k\nfields: [{integer: x}]"
    large = parse_specification(text, "large")
    source.execute("insert into public.c4 values (1, %s, 1)", [long])
    relations = RelationMap(PostgresTables(lambda: state), "large")
    resolver = Resolver([owner, large], load_catalog(source, owner.tables() | large.tables()), relations)
    for table in relations.prepare(resolver.tracked):
        relations.seed(source, table, stream.position)
    stream.take()
    source.execute("update public.c4 set x = 2")
    changes = collect(stream, resolver)
    (rows,) = changes.rows
    assert not rows.new["k"].sent.any()
    assert ids(resolver, source, changes) == {"large": {long}}
    source.execute("delete from public.c4")
    assert ids(resolver, source, collect(stream, resolver)) == {"large": {long}}


@pytest.mark.trap(32)
def test_a_truncate_of_the_stream_is_one_here(stream: Stream) -> None:
    specifications = [specification(0)]
    catalog = load_catalog(stream.source, specifications[0].tables())
    resolver = Resolver(specifications, catalog)
    stream.source.execute("truncate public.c0, public.c1")
    changes = collect(stream, resolver)
    assert [str(each) for each in changes.truncated] == ["public.c0"]
    assert resolver.resolve(stream.source, changes).whole_indexes == {"i0"}


def _canonical_text(number: int, type_: str) -> Any:
    value = {
        "numeric": "trim_scale(k)::text",
        "numeric(10,2)": "trim_scale(k)::text",
        "public.citext": "lower(k::text)",
        "bytea": r"'\x' || encode(k, 'hex')",
    }.get(type_, "k::text")
    return f"select {value} from public.p{number}"
