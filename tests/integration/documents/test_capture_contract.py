"""What every `ChangeCapture` does, by logical replication and by polling: deliver, resume, repeat, read a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.capture import CaptureSettings
from penstock.documents.base import BatchStatistics, Change, ChangeCapture, NoopObserver, SnapshotTable
from penstock.documents.builder import PostgresDocuments
from penstock.documents.catalog import load_catalog
from penstock.documents.engine import Engine
from penstock.documents.polling import PollingCapture, PollSettings, open_positions, polled_catalog, polled_tables
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.documents.sinks import MemorySink
from penstock.documents.wal import WalCapture
from penstock.errors import TablesAltered
from penstock.lsn import Lsn
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.patterns import TableName
from penstock.source.slots import create_slot
from penstock.specification import parse_specification
from penstock.spool import SpoolReader, SpoolSettings
from penstock.state import MemoryStore
from tests.conftest import Database
from tests.support.oracle import capture_until, current_position

PEOPLE = TableName("public", "people")
SPECIFICATION = parse_specification(
    """
version: 1
table: people
fields:
  - {text: name}
  - {has_many: orders, table: orders, foreign_key: person_id, primary_key: id, fields: [{text: status}]}
""",
    "people",
)


class Captured:
    """A database, and captures of its changes that share one position."""

    polled = False

    def __init__(self, database: Database, folder: Path, stack: ExitStack) -> None:
        self.database = database
        self.folder = folder
        self.source = SourceSettings(database.dsn)
        self._stack = stack
        self.relations: RelationMap = stack.enter_context(closing(open_relation_map("memory:", "contract")))
        self.documents = self.compile()
        for relation in self.relations.prepare(self.documents.resolver.tracked):
            self.relations.seed(self.connect(), relation, Lsn(0))

    def connect(self) -> Any:
        return self._stack.enter_context(connect(self.source, Role.CATALOG))

    def compile(self) -> PostgresDocuments:
        one = self.connect()
        catalog = load_catalog(one, SPECIFICATION.tables())
        catalog = polled_catalog(catalog) if self.polled else catalog
        return PostgresDocuments(one, self.connect(), [SPECIFICATION], self.relations, catalog=catalog)

    def capture(self, **options: Any) -> ChangeCapture:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        """Run a statement; its changes can be received when this returns."""
        self.database.execute(statement)


class Streamed(Captured):
    def __init__(self, database: Database, folder: Path, stack: ExitStack) -> None:
        database.execute("create publication pub for all tables")
        spool = SpoolSettings(folder / "spool", min_free_bytes=0)
        self.settings = CaptureSettings(SourceSettings(database.dsn), f"contract_{database.name[-12:]}", "pub", spool)
        super().__init__(database, folder, stack)
        self.position = create_slot(self.connect(), self.settings.slot).confirmed_flush_lsn
        self.store = MemoryStore("contract")
        self.store.acquire_lease()
        stack.callback(self.store.close)
        self.reader = SpoolReader(spool.path)
        self.reader.readers.register("contract", self.position)
        self.execute("select pg_logical_emit_message(true, 'contract', 'so that there is a spool')")
        ancestry = self.reader.ancestry
        assert ancestry is not None
        self.store.use_lineage(ancestry)

    def execute(self, statement: str) -> None:
        super().execute(statement)
        capture_until(self.settings, current_position(self.connect()))

    def capture(self, **options: Any) -> WalCapture:
        begin = self.store.get_replication_progress() or self.position
        spool = self.settings.spool.path
        return WalCapture("contract", spool, self.source, self.store, begin, self.documents, **options)


class Polled(Captured):
    polled = True

    def __init__(self, database: Database, folder: Path, stack: ExitStack) -> None:
        super().__init__(database, folder, stack)
        self.stop = threading.Event()
        self.positions = stack.enter_context(closing(open_positions("memory:", "contract")))
        self.capture().prepare()

    def capture(self, **options: Any) -> PollingCapture:
        tables = polled_tables(self.documents.catalog, self.documents.wanted)
        settings = PollSettings(interval=0.01, overlap=0)
        return PollingCapture(self.source, tables, self.positions, settings=settings, stop=self.stop)


@pytest.fixture
def filled(database: Database) -> Database:
    database.execute(
        "create table people (id int primary key, name text);"
        "create table orders (id int primary key, person_id int, status text);"
        "insert into people select n, 'person ' || n from generate_series(1, 3) n;"
        "insert into orders select n, n, 'new' from generate_series(1, 3) n"
    )
    return database


@pytest.fixture(params=[Streamed, Polled], ids=["wal", "polling"])
def captured(request: pytest.FixtureRequest, filled: Database, tmp_path: Path) -> Iterator[Captured]:
    with ExitStack() as stack:
        yield request.param(filled, tmp_path, stack)


def next_changes(live: Iterator[Change], ids: set[str]) -> list[Change]:
    """Changes until all these people were among them."""
    found: list[Change] = []
    while ids - {id_ for each in found for id_ in people_in(each)}:
        found.append(next(live))
    return found


def people_in(change: Change) -> set[str]:
    rows = [rows for rows in change.changes.rows if rows.table == PEOPLE]
    return {id_ for each in rows for id_ in each.new["id"].texts.to_pylist()}


def test_changes_are_delivered_until_they_are_confirmed(captured: Captured) -> None:
    captured.execute("insert into people values (10, 'ten')")
    for _ in range(2):
        next_changes(captured.capture().live(), {"10"})  # nobody confirms
    confirmed = next_changes(captured.capture().live(), {"10"})
    for each in confirmed:
        each.ack.confirm()
    captured.execute("insert into people values (11, 'eleven')")
    again = next_changes(captured.capture().live(), {"11"})
    if not captured.polled:  # a poll is confirmed when it has been read to its end
        assert "10" not in {id_ for each in again for id_ in people_in(each)}


def test_a_capture_resumes_once_something_was_confirmed(captured: Captured) -> None:
    captured.execute("insert into people values (10, 'ten')")
    capture = captured.capture()
    for each in next_changes(capture.live(), {"10"}):
        each.ack.confirm()
    assert captured.capture().resumes()


def test_a_snapshot_has_the_current_rows_and_ends(captured: Captured) -> None:
    captured.execute("insert into people values (10, 'ten')")
    changes = list(captured.capture().snapshot([SnapshotTable(PEOPLE, ("id",))]))
    assert all(each.changes.is_snapshot for each in changes)
    assert set().union(*map(people_in, changes)) == {"1", "2", "3", "10"}
    for each in changes:
        each.ack.confirm()


def test_the_lag_is_in_bytes_where_it_has_a_meaning(captured: Captured) -> None:
    captured.execute("insert into people values (10, 'ten')")
    lag = captured.capture().lag()
    assert lag is None if captured.polled else isinstance(lag, int) and lag > 0


class Until(NoopObserver):
    """Stops the engine when the documents are as they should be, and changes the database when it is live."""

    def __init__(self, stop: threading.Event, changes: Callable[[], None], done: Callable[[], bool]) -> None:
        self._stop, self._changes, self._done = stop, changes, done

    def on_live_started(self) -> None:
        self._changes()

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        if self._done():
            self._stop.set()


def test_the_engine_fills_an_index_and_follows_it(captured: Captured) -> None:
    sink, stop = MemorySink(), threading.Event()
    if isinstance(captured, Polled):
        captured.stop = stop

    def changes() -> None:
        captured.execute("update people set name = 'changed' where id = 1")
        captured.execute("update orders set person_id = 3 where id = 2")
        captured.execute("insert into people values (10, 'ten')")

    def done() -> bool:
        found = sink.documents("people")
        return "10" in found and len(found["3"]["orders"]) == 2 and found["1"]["name"] == "changed"

    Engine(captured.capture(), captured.documents, sink, observer=Until(stop, changes, done), stop=stop).run()
    assert sink.is_seeded("people")
    assert sink.documents("people") == {
        "1": {"name": "changed", "orders": [{"status": "new"}]},
        "2": {"name": "person 2", "orders": []},
        "3": {"name": "person 3", "orders": [{"status": "new"}, {"status": "new"}]},
        "10": {"name": "ten", "orders": []},
    }


# Only by logical replication


@pytest.fixture
def streamed(filled: Database, tmp_path: Path) -> Iterator[Streamed]:
    with ExitStack() as stack:
        yield Streamed(filled, tmp_path, stack)


def test_a_large_transaction_comes_in_pieces_and_moves_the_position_at_its_end(streamed: Streamed) -> None:
    streamed.execute("insert into people select n, 'many' from generate_series(100, 199) n")
    capture = streamed.capture(piece_changes=30)
    live = capture.live()
    pieces = next_changes(live, {"199"})
    counts = [each.count for each in pieces if each.count]
    assert sum(counts) == 100
    assert max(counts) <= 30
    before = capture.status.acknowledged
    for each in pieces[:-1]:
        each.ack.confirm()
    assert capture.status.acknowledged == before
    pieces[-1].ack.confirm()
    assert capture.status.acknowledged != before
    assert capture.status.changes == 100
    assert streamed.store.get_replication_progress() == capture.status.acknowledged
    assert streamed.reader.readers.position("contract") == capture.status.acknowledged


def test_what_was_not_confirmed_is_received_again_after_an_error(streamed: Streamed) -> None:
    capture = streamed.capture()
    streamed.execute("insert into people values (10, 'ten')")
    lost = next_changes(capture.live(), {"10"})
    capture.opened()
    for each in lost:
        each.ack.confirm()  # too late: it is delivered again
    assert streamed.store.get_replication_progress() is None
    assert next_changes(capture.live(), {"10"})


def test_a_barrier_is_passed_when_all_changes_before_it_are_confirmed(streamed: Streamed) -> None:
    streamed.execute("insert into people values (10, 'ten')")
    capture = streamed.capture()
    is_passed = capture.barrier()
    assert not is_passed()
    streamed.execute("insert into people values (11, 'eleven')")
    for each in next_changes(capture.live(), {"11"}):
        each.ack.confirm()
    assert is_passed()


@pytest.mark.remedy("TablesAltered")
def test_rows_with_columns_that_were_not_compiled_are_told_once(streamed: Streamed) -> None:
    streamed.execute("alter table people alter id type bigint; insert into people values (10, 'ten')")
    capture = streamed.capture()
    with pytest.raises(TablesAltered, match=r"public\.people changed since the indexes were compiled"):
        next_changes(capture.live(), {"10"})
    capture.documents = streamed.compile()
    assert next_changes(capture.live(), {"10"})


# Only by polling: the publication and the slot of a stream exist before its spool does


def test_live_ensures_its_set_up(filled: Database, tmp_path: Path) -> None:
    with ExitStack() as stack:
        polled = Polled(filled, tmp_path, stack)
        polled.positions.forget()
        assert not polled.capture().resumes()
        polled.stop.set()
        assert list(polled.capture().live()) == []
        assert polled.capture().resumes()
