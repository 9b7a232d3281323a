"""Differences between an index and its database: every sort is found, and what is only late is not reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from penstock.documents.base import readable
from penstock.documents.builder import DocumentKeys, PostgresDocuments
from penstock.documents.catalog import load_catalog
from penstock.documents.diff import DiffReport, IndexDiff, Kind, Patience
from penstock.documents.mapping import index_mapping
from penstock.documents.sinks import CountingSink, MemorySink
from penstock.errors import ConfigError
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import parse_specification
from tests.conftest import Database

BOOKS = parse_specification(
    """
version: 1
table: books
soft_delete: {column: gone}
fields:
  - {text: title}
  - {has_many: chapters, table: chapters, foreign_key: book_id, primary_key: [book_id, no], fields: [{text: name}]}
""",
    "books",
)
CHAPTERS = parse_specification("version: 1\ntable: chapters\nfields: [{text: name}]", "chapters")
VERSION = 1 << 60


class World:
    """Two indexes of a library, equal to it."""

    def __init__(self, database: Database, connections: list[psycopg.Connection[Any]]) -> None:
        self.database = database
        self.connection = connections[0]
        self.catalog = load_catalog(self.connection, BOOKS.tables() | CHAPTERS.tables())
        self.documents = PostgresDocuments(connections[0], connections[1], [BOOKS, CHAPTERS], chunk=7)
        self.sink = MemorySink()
        for each in (BOOKS, CHAPTERS):
            self.sink.ensure_index(index_mapping(each))
            for keys in self.documents.every_key(each.name):
                for row in self.documents.build(keys).to_pylist():
                    if row["body"] is not None:
                        self.sink.upsert(each.name, row["id"], row["version"], row["body"])
            self.sink.flush(True)
            self.sink.mark_seeded(each.name)

    def diff(self, index: str = "books", patience: Patience | None = None) -> IndexDiff:
        specification = {"books": BOOKS, "chapters": CHAPTERS}[index]
        keys = DocumentKeys.of(specification, self.catalog)
        return IndexDiff(self.documents, keys, self.sink, patience=patience or Patience(0))

    def put(self, id_: str, body: Any, index: str = "books") -> None:
        self.sink.upsert(index, id_, VERSION, json.dumps(body))
        self.sink.flush(True)

    def remove(self, id_: str, index: str = "books") -> None:
        self.sink.delete(index, id_, VERSION)
        self.sink.flush(True)


@pytest.fixture
def world(database: Database) -> Iterator[World]:
    database.execute(
        """
        create table books (id int primary key, title text, gone boolean not null default false);
        create table chapters (book_id int, no int, name text, primary key (book_id, no));
        insert into books select n, 'book ' || n, n % 10 = 0 from generate_series(1, 50) n;
        insert into chapters select b, n, 'chapter ' || n from generate_series(1, 50) b, generate_series(1, 3) n;
        """
    )
    settings = SourceSettings(database.dsn)
    with connect(settings, Role.CATALOG) as one, connect(settings, Role.CATALOG) as other:
        yield World(database, [one, other])


def found(report: DiffReport) -> dict[str, tuple[Kind, tuple[str, ...]]]:
    return {each.id: (each.kind, each.fields) for each in report.differences}


def test_what_is_equal_is_equal(world: World) -> None:
    report = world.diff().full()
    assert (report.equal, report.complete, report.compared) == (True, True, 45)
    assert world.diff("chapters").full().compared == 150
    sample = world.diff().sample(world.connection, 20)
    assert (sample.equal, sample.complete) == (True, False)
    assert 15 <= sample.compared <= 40


def test_every_sort_of_difference_is_found_with_its_place(world: World) -> None:
    world.remove("3")
    world.put("4", {"title": "other", "chapters": [{"name": "chapter 1"}, {"name": "x"}, {"name": "chapter 3"}]})
    world.put("5", {"title": "book 5", "chapters": [], "more": 1})
    world.put("20", {"title": "removed in the database", "chapters": []})
    world.put("999", {"title": "never there"})
    report = world.diff().full()
    assert found(report) == {
        "3": (Kind.MISSING, ()),
        "4": (Kind.DIFFERENT, ("title", "chapters[1].name")),
        "5": (Kind.DIFFERENT, ("chapters", "more")),
        "20": (Kind.EXTRA, ()),
        "999": (Kind.EXTRA, ()),
    }
    assert report.differs
    assert {kind: report.count(kind) for kind in Kind} == {
        Kind.MISSING: 1,
        Kind.DIFFERENT: 2,
        Kind.EXTRA: 2,
        Kind.UNSETTLED: 0,
        Kind.UNBUILDABLE: 0,
    }


def test_fields_that_are_not_stored_are_not_compared(world: World) -> None:
    world.put("4", {"chapters": [{}, {}, {}]})
    world.put("5", {"chapters": [{}, {}]})
    keys = DocumentKeys.of(replace(BOOKS, source_excludes=("title", "chapters.name")), world.catalog)
    report = IndexDiff(world.documents, keys, world.sink, patience=Patience(0)).full()
    assert found(report) == {"5": (Kind.DIFFERENT, ("chapters",))}


def test_ids_that_no_key_can_have_are_extra(world: World) -> None:
    for id_ in ("no number", "007", "77"):
        world.put(id_, {})
    assert set(found(world.diff().full())) == {"no number", "007", "77"}
    for id_ in ("1", "1:2:3", "1:x", "01:2"):
        world.put(id_, {}, "chapters")
    assert found(world.diff("chapters").full()) == dict.fromkeys(("1", "1:2:3", "1:x", "01:2"), (Kind.EXTRA, ()))


def test_a_sample_of_everything_finds_what_is_missing_and_extra(world: World) -> None:
    world.remove("3")
    world.put("999", {})
    assert set(found(world.diff().sample(world.connection, 100))) == {"3", "999"}


def test_what_is_only_late_is_not_reported(world: World) -> None:
    world.database.execute("update books set title = 'new' where id = 7")
    late = Patience(60, pause=lambda _: world.put("7", {"title": "new", "chapters": chapters()}))
    assert world.diff(patience=late).full().equal


def test_a_document_that_never_stands_still_is_not_judged(world: World) -> None:
    clock = iter(range(100))
    world.remove("8")

    def change(_: float) -> None:
        world.database.execute("update books set title = title || '!' where id = 7")

    world.database.execute("update books set title = 'new' where id = 7")
    report = world.diff(patience=Patience(5, pause=change, clock=lambda: next(clock))).full()
    assert found(report) == {"7": (Kind.UNSETTLED, ("title",)), "8": (Kind.MISSING, ())}


def test_keys_are_named_by_columns_or_by_the_id(world: World) -> None:
    keys = DocumentKeys.of(CHAPTERS, world.catalog)
    assert keys.named(world.connection, ["1", "2"]).keys == (["1"], ["2"])
    assert keys.named(world.connection, ["1:2"]).keys == (["1"], ["2"])
    assert keys.parse("a%3Ab%25:2") == ("a:b%", "2")
    with pytest.raises(ConfigError, match=r"identified by 2 values \(book_id, no\), but 3 were given"):
        keys.named(world.connection, ["1", "2", "3"])
    prefixed = DocumentKeys.of(replace(CHAPTERS, id_prefix="eu-"), world.catalog)
    with pytest.raises(ConfigError, match=r"identified by book_id \(int4\), no \(int4\)") as raised:
        prefixed.named(world.connection, ["eu-1", "2"])
    assert "without the prefix 'eu-'" in str(raised.value.hint)


def test_a_sink_that_keeps_nothing_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="sink 'counting' keeps no documents"):
        readable(CountingSink(), "counting")
    assert readable(MemorySink(), "memory").facts("nothing").documents == 0


def chapters() -> list[dict[str, str]]:
    return [{"name": f"chapter {n}"} for n in (1, 2, 3)]


PRICES = parse_specification(
    """
version: 1
table: books
fields:
  - {text: title}
  - {avg: mean, table: prices, foreign_key: book_id, column: price}
""",
    "prices",
)


def test_documents_that_cannot_be_built_are_reported_and_are_not_extra(world: World) -> None:
    world.database.execute("""
        create table prices (id int primary key, book_id int, price numeric);
        insert into prices select n, n, n from generate_series(1, 50) n
    """)
    documents = PostgresDocuments(world.connection, world.documents._building, [PRICES], chunk=7)
    world.sink.ensure_index(index_mapping(PRICES))
    for keys in documents.every_key("prices"):
        for row in documents.build(keys).to_pylist():
            world.sink.upsert("prices", row["id"], row["version"], row["body"])
    world.sink.flush(True)
    world.sink.mark_seeded("prices")
    world.put("x", {"title": "no key is like this"}, "prices")
    world.remove("9", "prices")
    world.database.execute("update prices set price = 1e400 where id in (7, 9)")

    def diff() -> IndexDiff:
        keys = DocumentKeys.of(PRICES, documents.catalog)
        return IndexDiff(documents, keys, world.sink, patience=Patience(0.6))

    wanted = {"7": (Kind.UNBUILDABLE, ()), "9": (Kind.UNBUILDABLE, ()), "x": (Kind.EXTRA, ())}
    full = diff().full()
    assert (found(full), full.compared, full.differs, full.complete) == (wanted, 51, True, True)
    # The sample of the sink has the one, and the sample of the database the other.
    assert found(diff().sample(world.connection, 100)) == wanted
    world.database.execute("update prices set price = 7 where id = 7; delete from prices where id = 9")
    assert found(diff().full()) == {"9": (Kind.MISSING, ()), "x": (Kind.EXTRA, ())}
