"""The traps of documents, one by one: with the measure the documents are right, without it they are not.

Each test runs twice. The second time the measure is patched away, and what it guards against is there to see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql

from penstock.changes.steps import Segment
from penstock.documents import builder, expressions, paths
from penstock.documents.base import Sink
from penstock.documents.builds import Builds
from penstock.documents.catalog import load_catalog
from penstock.documents.mapping import index_mapping
from penstock.documents.output import DocumentsSettings
from penstock.documents.paths import Entry
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.writer import BuildJob, DocumentWriter, SharedSink
from penstock.source.connections import Role, SourceSettings, connect
from penstock.spool import SpoolReader
from penstock.testing.destinations.script import LocalTasks
from tests.conftest import Database
from tests.e2e.documents import PEOPLE, Site, run, specifications
from tests.e2e.support import wait_for
from tests.support.document_sink import FileSink

BOTH_WAYS = pytest.mark.parametrize("on", [True, False], ids=["with", "without"])
TABLES = """
create schema w;
create table w.teams (code text primary key, label text, lead_id int);
create table w.people (id int primary key, name text, email text, boss_id int, team_code text);
create table w.orders (id bigint primary key, person_id bigint, status text);
"""


Patch = pytest.MonkeyPatch


def make_site(database: Any, folder: Path, sink: FileSink | None = None, **indexes: str) -> Site:
    database.execute(TABLES)
    sink = sink or FileSink(folder / "documents.db")
    return Site(database, folder, specifications(**indexes or {"people": PEOPLE}), sink, sink.documents)


@BOTH_WAYS
@pytest.mark.trap(41)
def test_documents_are_built_when_their_changes_can_be_seen(
    make_server: Callable[..., Any], tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(builder, "wait_until_visible", lambda connection, xids: None)
    server = make_server(settings={"synchronous_standby_names": "nobody"})
    local = "options=-c%20synchronous_commit%3Dlocal"

    class Local(Database):
        @property
        def dsn(self) -> str:
            return f"{self.server.dsn(self.name)}?{local}"

        def execute(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
            with self.connect() as connection:
                connection.execute("set synchronous_commit = local")
                cursor = connection.execute(query, parameters)
                return cursor.fetchall() if cursor.description else []

    with server.connect() as connection:
        connection.execute("set synchronous_commit = local")
        connection.execute("create database documents")
    site = make_site(Local(server, "documents"), tmp_path)
    site.database.execute("insert into w.people (id, name) values (1, 'before')")
    output = site.output()
    with run(output):
        site.wait_settled(output)
        seen = output.status.batches

        def change() -> None:
            with server.connect("documents") as writer:
                writer.execute("update w.people set name = 'after'")

        writer = threading.Thread(target=change)
        writer.start()
        wait_for(lambda: _has_changes(tmp_path), "the change to be captured")
        if not on:
            wait_for(lambda: output.status.batches > seen, "the change to be followed")
        assert site.read("people")["1"]["name"] == "before"
        with server.connect() as operator:
            operator.execute("alter system set synchronous_standby_names = ''")
            operator.execute("select pg_reload_conf()")
        writer.join()
        site.wait_settled(output)
        assert site.read("people")["1"]["name"] == ("after" if on else "before")


def _has_changes(folder: Path) -> bool:
    reader = SpoolReader(folder / "spool")
    begin = reader.begin
    steps = [step for entry in reader.entries(begin) for step in entry.steps] if begin is not None else []
    return any(isinstance(step, Segment) and step.table == "w.people" for step in steps)


@BOTH_WAYS
@pytest.mark.trap(42)
def test_a_deleted_child_leaves_its_parents_document(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    site = make_site(database, tmp_path)
    database.execute("insert into w.people (id, name) values (1, 'a'), (2, 'b')")
    database.execute("insert into w.orders values (1, 1, 'new'), (2, 1, 'new')")
    output = site.output()
    with run(output):
        site.wait_settled(output)
        if not on:
            monkeypatch.setattr(RelationMap, "lookup", lambda self, relation, keys: [])
        database.execute("delete from w.orders where id = 1")
        database.execute("update w.orders set person_id = 2 where id = 2")
        site.wait_settled(output)
        assert site.read("people")["1"]["order_count"] == (0 if on else 2)
        assert site.read("people")["2"]["order_count"] == 1


@BOTH_WAYS
@pytest.mark.trap(43)
def test_equal_keys_name_one_document(database: Any, tmp_path: Path, monkeypatch: Patch, on: bool) -> None:
    if not on:
        monkeypatch.setattr(expressions, "_CANONICAL", {})
    site = make_site(database, tmp_path, priced="version: 1\nschema: w\ntable: prices\nfields: [{text: label}]")
    database.execute("create table w.prices (amount numeric primary key, label text)")
    database.execute("insert into w.prices values (1.50, 'cheap')")
    output = site.output()
    with run(output):
        site.wait_settled(output)
        database.execute("update w.prices set amount = 1.5, label = 'still'")
        site.wait_settled(output)
        assert site.read("priced") == {key: {"label": "still"} for key in (["1.5"] if on else ["1.50", "1.5"])}


@BOTH_WAYS
@pytest.mark.trap(44)
def test_an_old_body_that_lands_late_changes_nothing(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(SharedSink, "write", _write_without_versions)
    site = make_site(database, tmp_path)
    database.execute("insert into w.people (id, name) values (1, 'old')")
    late: list[pa.Table] = []

    class Holding(FileSink):
        """Keeps what it should write, as a process does that is about to be thought dead."""

        def write(self, batch: pa.Table) -> None:
            late.append(batch)

        def flush(self, caught_up: bool) -> Any:
            return super().flush(False)

    output = site.output()
    with run(output):
        site.wait_settled(output)
        built_by = output._engine.documents.for_tasks()
        zombie = BuildJob(built_by, SharedSink(Holding(tmp_path / "documents.db")))
        zombie(ResolvedKeys("people", (["1"],)))
        database.execute("update w.people set name = 'new'")
        site.wait_settled(output)
        assert site.read("people")["1"]["name"] == "new"
        site.sink.write(late[0])
        site.sink.flush(False)
        assert site.read("people")["1"]["name"] == ("new" if on else "old")


def _write_without_versions(self: SharedSink, index: str, built: pa.Table, write: Any = SharedSink.write) -> Any:
    place = built.schema.get_field_index("version")
    same = pa.repeat(pa.scalar(1, pa.int64()), built.num_rows)
    return write(self, index, built.set_column(place, built.schema.field("version"), same))


ARRIVED, GO_ON = threading.Event(), threading.Event()


class LateRanges(FileSink):
    """Forgets removals, and its ranges write only when they are told to."""

    def filling(self, index: str) -> Sink:
        only = self.facts(index).filling
        return _LateRange(self.path, forgetful=True, only=only)


class _LateRange(FileSink):
    def write(self, batch: pa.Table) -> None:
        ARRIVED.set()
        assert GO_ON.wait(60)
        super().write(batch)

    def count(self, index: str) -> int | None:
        return None


@BOTH_WAYS
@pytest.mark.trap(45)
def test_what_went_while_an_index_was_built_does_not_come_back(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(Builds, "recorded", frozenset())
    ARRIVED.clear()
    GO_ON.clear()
    site = make_site(database, tmp_path, LateRanges(tmp_path / "documents.db", forgetful=True))
    database.execute("insert into w.people (id, name) values (1, 'a'), (2, 'b')")
    output = site.output(LocalTasks())
    with run(output):
        assert ARRIVED.wait(60)
        seen = output.status.batches
        database.execute("delete from w.people where id = 1")
        wait_for(lambda: output.status.batches > seen, "the removal to be written")
        GO_ON.set()
        site.wait_settled(output)
        assert site.read("people").keys() == ({"2"} if on else {"1", "2"})


class Countless(FileSink):
    """Does not say how many documents it has: then nobody notices that there are too many."""

    def filling(self, index: str) -> Sink:
        return Countless(self.path, only=self.facts(index).filling)

    def count(self, index: str) -> int | None:
        return None


@BOTH_WAYS
@pytest.mark.trap(47)
def test_an_index_is_filled_into_an_empty_generation(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(Countless, "reindex", lambda self, mapping: None)
    site = make_site(database, tmp_path, Countless(tmp_path / "documents.db"))
    database.execute("insert into w.people (id, name) values (1, 'a')")
    # An earlier attempt has left something, and nobody knows of it.
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        catalog = load_catalog(connection, site.specifications[0].tables())
    site.sink.ensure_index(index_mapping(site.specifications[0], catalog))
    site.sink.upsert("people", "ghost", 1, "{}")
    site.sink.flush(False)
    output = site.output()
    with run(output):
        site.wait_settled(output)
        assert site.read("people").keys() == ({"1"} if on else {"1", "ghost"})


@BOTH_WAYS
@pytest.mark.trap(48)
def test_a_row_that_many_documents_show_is_no_large_batch(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(DocumentWriter, "_waves", _all_in_one_wave)
    site = make_site(database, tmp_path)
    site.settings = DocumentsSettings(chunk_documents=10, wave_chunks=2)
    database.execute("insert into w.teams values ('a', 'before')")
    database.execute("insert into w.people (id, team_code) select n, 'a' from generate_series(1, 300) n")
    output = site.output()
    with run(output):
        site.wait_settled(output)
        site.sink.largest_write = 0
        database.execute("update w.teams set label = 'after'")
        site.wait_settled(output)
        assert {each["team"]["label"] for each in site.read("people").values()} == {"after"}
        assert site.sink.largest_write == (10 if on else 300)


def _all_in_one_wave(self: DocumentWriter, keys: Iterable[ResolvedKeys]) -> Iterator[list[ResolvedKeys]]:
    together: dict[str, list[list[str]]] = {}
    for each in keys:
        columns = together.setdefault(each.index, [[] for _ in each.keys])
        for column, values in zip(columns, each.keys, strict=True):
            column += values
    for index, columns in together.items():
        yield [ResolvedKeys(index, tuple(columns))]


PAID = """
version: 1
schema: w
table: people
fields:
  - has_many: orders
    table: orders
    foreign_key: person_id
    primary_key: id
    filters: [{column: status, op: eq, value: paid}]
    fields: [{long: id}]
"""


@BOTH_WAYS
@pytest.mark.trap(49)
def test_a_row_that_fails_a_filter_now_leaves_its_document(
    database: Any, tmp_path: Path, monkeypatch: Patch, on: bool
) -> None:
    if not on:
        monkeypatch.setattr(paths, "_joins_up", _filtered_joins_up)
    site = make_site(database, tmp_path, people=PAID)
    database.execute("insert into w.people (id) values (1)")
    database.execute("insert into w.orders values (1, 1, 'paid')")
    output = site.output()
    with run(output):
        site.wait_settled(output)
        assert site.read("people")["1"] == {"orders": [{"id": 1}]}
        database.execute("update w.orders set status = 'refunded'")
        site.wait_settled(output)
        assert site.read("people")["1"] == {"orders": [] if on else [{"id": 1}]}


def _filtered_joins_up(entry: Entry, specification: Any, catalog: Any, join: Any = paths._joins_up) -> Any:
    """Only what passes the relation's filters now leads to a document."""
    joins, top = join(entry, specification, catalog)
    if not entry.is_junction:
        table, filters = catalog.table(entry.table), entry.relations[-1].filters
        below = [replace(each, name=f"v{number}") for number, each in enumerate(table.select(entry.columns))]
        link = expressions.equal_columns("f", table.select(entry.columns), "s", below)
        passing = expressions.conjunction([link, *expressions.conditions(filters, "f", table)])
        joins.insert(0, sql.SQL("join {} on {}").format(expressions.from_table(table, "f", filters), passing))
    return joins, top
