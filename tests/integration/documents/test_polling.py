"""Polling on a real server: what commits late is seen, nothing comes twice without need, and positions survive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from penstock.changes.segment import Operation
from penstock.documents.base import Change, Observer, SnapshotTable
from penstock.documents.builder import DocumentKeys, PostgresDocuments
from penstock.documents.catalog import load_catalog
from penstock.documents.diff import IndexDiff, Kind, Patience
from penstock.documents.engine import Engine
from penstock.documents.images import WantedColumns
from penstock.documents.polling import (
    XMIN,
    PollingCapture,
    PollPosition,
    PollPositions,
    PollSettings,
    open_positions,
    polled_catalog,
    polled_tables,
    sees_all_sessions,
)
from penstock.documents.relation_map import open_relation_map
from penstock.documents.sinks import MemorySink
from penstock.errors import ConfigError
from penstock.lsn import Lsn
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.patterns import TableName
from penstock.specification import parse_specification
from tests.conftest import Database

ROWS = TableName("public", "rows")
STAMP = "updated_at"


class Poller:
    """A capture that is asked poll by poll."""

    def __init__(
        self,
        database: Database,
        positions: PollPositions,
        cursor: str = XMIN,
        *,
        overlap: float = 0.0,
        chunk: int = 1000,
    ) -> None:
        self.source = SourceSettings(database.dsn)
        with connect(self.source, Role.CATALOG) as connection:
            catalog = polled_catalog(load_catalog(connection, [ROWS]))
        tables = polled_tables(catalog, {ROWS: WantedColumns(("id", "parent"))}, {ROWS: cursor})
        self.capture = PollingCapture(
            self.source, tables, positions, settings=PollSettings(interval=0, overlap=overlap, chunk=chunk)
        )
        self.capture.prepare()
        self._connection = connect(self.source, Role.CATALOG)
        self._position = positions.load()

    def poll(self, *, confirm: bool = True) -> list[int]:
        """The ids that one poll delivers."""
        found: list[Change] = []
        polling = self.capture._poll(self._connection, self._position)
        while True:
            try:
                found.append(next(polling))
            except StopIteration as end:
                self._position = end.value
                break
        for each in found if confirm else []:
            each.ack.confirm()
        return sorted(
            int(id_) for each in found for rows in each.changes.rows for id_ in rows.new["id"].texts.to_pylist()
        )

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def poller(database: Database) -> Iterator[Callable[..., Poller]]:
    database.execute(
        "create table rows (id int primary key, parent int, updated_at timestamptz not null default now());"
        "insert into rows select n, 1 from generate_series(1, 5) n"
    )
    made: list[Poller] = []

    def make(cursor: str = XMIN, positions: PollPositions | None = None, **options: Any) -> Poller:
        made.append(Poller(database, positions or open_positions("memory:", "p"), cursor, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextmanager
def open_transaction(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database.dsn) as connection:
        yield connection


BOTH = pytest.mark.parametrize("cursor", [XMIN, STAMP])


@BOTH
def test_what_was_there_is_for_the_backfill_and_what_comes_after_is_seen_once(
    database: Database, poller: Callable[..., Poller], cursor: str
) -> None:
    polls = poller(cursor)
    assert polls.poll() in ([], [1, 2, 3, 4, 5])
    database.execute("insert into rows values (6, 1)")
    assert polls.poll() == [6]
    database.execute("update rows set parent = 2, updated_at = now() where id in (2, 6)")
    assert polls.poll() == [2, 6]
    assert polls.poll() == []


@BOTH
def test_a_transaction_that_commits_late_is_seen(
    database: Database, poller: Callable[..., Poller], cursor: str
) -> None:
    polls = poller(cursor)
    polls.poll()
    with open_transaction(database) as late:
        late.execute("insert into rows values (100, 1)")
        database.execute("insert into rows values (6, 1)")
        assert polls.poll() == [6]
        database.execute("insert into rows values (7, 1)")
        assert polls.poll() == [7], "what was delivered while it was open does not come again"
        late.commit()
    assert polls.poll() == [100]
    assert polls.poll() == []


@BOTH
def test_a_transaction_that_began_to_write_late_is_seen(
    database: Database, poller: Callable[..., Poller], cursor: str
) -> None:
    """It has its time from its beginning, and its number from its first write."""
    polls = poller(cursor)
    with open_transaction(database) as late:
        late.execute("select now()")
        database.execute("insert into rows values (6, 1)")
        polls.poll()
        polls.poll()
        late.execute("insert into rows values (100, 1)")
        assert polls.poll() == []
        late.commit()
    assert polls.poll() == [100]


@BOTH
def test_a_prepared_transaction_is_seen_when_it_is_committed(
    database: Database, poller: Callable[..., Poller], cursor: str
) -> None:
    polls = poller(cursor)
    polls.poll()
    database.execute("begin; insert into rows values (100, 1); prepare transaction 'held'")
    database.execute("insert into rows values (6, 1)")
    assert polls.poll() == [6], "no session has it open"
    database.execute("commit prepared 'held'")
    assert polls.poll() == [100]


def test_rows_of_subtransactions_that_commit_late_are_seen(database: Database, poller: Callable[..., Poller]) -> None:
    polls = poller()
    polls.poll()
    with open_transaction(database) as late:
        late.execute("insert into rows values (100, 1)")
        late.execute("savepoint s")
        late.execute("insert into rows values (101, 1)")
        database.execute("insert into rows values (6, 1)")
        assert polls.poll() == [6]
        late.execute("savepoint t")
        late.execute("insert into rows values (102, 1)")
        late.execute("rollback to t")
        late.commit()
    assert polls.poll() == [100, 101]


@BOTH
def test_after_a_restart_a_late_transaction_is_seen_too(
    database: Database, poller: Callable[..., Poller], cursor: str
) -> None:
    positions = open_positions("memory:", "p")
    polls = poller(cursor, positions)
    with open_transaction(database) as late:
        late.execute("insert into rows values (100, 1)")
        database.execute("insert into rows values (6, 1)")
        polls.poll()
        late.commit()
    again = poller(cursor, positions).poll()
    assert 100 in again
    assert set(again) <= {1, 2, 3, 4, 5, 6, 100}


def test_what_was_not_confirmed_comes_again(database: Database, poller: Callable[..., Poller]) -> None:
    positions = open_positions("memory:", "p")
    polls = poller(positions=positions)
    polls.poll()
    database.execute("insert into rows values (6, 1)")
    assert polls.poll(confirm=False) == [6]
    database.execute("insert into rows values (7, 1)")
    assert polls.poll() == [7]
    assert poller(positions=positions).poll() == [6, 7], "a later poll does not move past an earlier one"
    assert poller(positions=positions).poll() == []


def test_large_polls_come_in_pieces_and_move_the_position_at_their_end(
    database: Database, poller: Callable[..., Poller]
) -> None:
    positions = open_positions("memory:", "p")
    polls = poller(positions=positions, chunk=10)
    polls.poll()
    before = positions.load()
    database.execute("insert into rows select n, 1 from generate_series(100, 134) n")
    polling = polls.capture._poll(polls._connection, polls._position)
    pieces = [next(polling) for _ in range(4)]
    assert [len(each.changes.rows[0]) for each in pieces] == [10, 10, 10, 5]
    for each in pieces[:3]:
        each.ack.confirm()
    with pytest.raises(StopIteration):
        next(polling)
    assert positions.load() == before
    pieces[3].ack.confirm()
    assert positions.load() != before


def test_times_of_sessions_that_are_hidden_need_an_overlap(database: Database, poller: Callable[..., Poller]) -> None:
    role = f"blind_{database.name[-12:]}"
    database.execute(f"create role {role} login; grant select on rows to {role}")
    try:
        with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
            connection.execute(f"set role {role}")
            assert not sees_all_sessions(connection)
            connection.execute("reset role")
            assert sees_all_sessions(connection)
    finally:
        database.execute(f"drop owned by {role}; drop role {role}")
    polls = poller(STAMP, overlap=60.0)
    polls.poll()
    database.execute("insert into rows values (6, 1, now() - interval '30 seconds')")
    assert polls.poll() == [6], "a clock that is late"


def test_times_without_a_zone_are_taken_as_utc(database: Database, poller: Callable[..., Poller]) -> None:
    database.execute("alter table rows alter updated_at type timestamp using now() at time zone 'UTC'")
    database.execute("alter table rows alter updated_at set default now() at time zone 'UTC'")
    polls = poller(STAMP)
    polls.poll()
    database.execute("insert into rows values (6, 1)")
    assert polls.poll() == [6]


def test_what_polling_cannot_see_is_not_seen(database: Database, poller: Callable[..., Poller]) -> None:
    by_number, by_time = poller(XMIN), poller(STAMP)
    by_number.poll(), by_time.poll()
    database.execute("delete from rows where id = 1")
    database.execute("update rows set parent = 9 where id = 2")
    database.execute("update rows set id = 30, updated_at = now() where id = 3")
    assert by_number.poll() == [2, 30]
    assert by_time.poll() == [30], "nobody has set the time of 2"


def test_transaction_numbers_that_have_wrapped_around_are_told_apart(
    database: Database, poller: Callable[..., Poller]
) -> None:
    polls = poller()
    polls.poll()
    whole = database.execute("select pg_current_xact_id()::text::int8")[0][0]
    text = (
        "select ($1::int8 + ((s - $1::int8 % 4294967296) + 6442450944) % 4294967296 - 2147483648)"
        " from unnest($2::int8[]) s"
    )
    now = (7 << 32) + 5
    shorts = [4, 5, 4294967295, (whole & 0xFFFFFFFF)]
    with connect(polls.source, Role.CATALOG) as connection, psycopg.RawCursor(connection) as cursor:
        found = [row[0] for row in cursor.execute(text, [now, shorts]).fetchall()]
    assert found[:3] == [now - 1, now, now - 6]


@pytest.mark.parametrize("kind", ["file", "memory", "postgres"])
def test_positions_are_remembered_in_the_state(database: Database, tmp_path: Any, kind: str) -> None:
    url = {"file": f"sqlite:///{tmp_path}/state.db", "memory": "memory:", "postgres": database.dsn}[kind]
    positions = open_positions(url, "shop:documents")
    assert positions.load() is None
    for order in (1, 2):
        positions.store(PollPosition(order, 7, {"public.rows": 9}))
    assert positions.load() == PollPosition(2, 7, {"public.rows": 9})
    if kind != "memory":
        again = open_positions(url, "shop:documents")
        assert again.load() == positions.load()
        with closing(open_positions(url, "other")) as other:
            assert other.load() is None
        again.close()
    positions.close()


def test_tables_that_cannot_be_polled_are_refused(database: Database) -> None:
    database.execute("create table keyless (a int); create table keyed (id int primary key, name text)")
    names = [TableName("public", "keyless"), TableName("public", "keyed")]
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        catalog = polled_catalog(load_catalog(connection, names))
    with pytest.raises(ConfigError, match=r"public\.keyless has no primary key"):
        polled_tables(catalog, {names[0]: WantedColumns(("a",))})
    with pytest.raises(ConfigError, match=r"public\.keyed\.name is text; polling needs a timestamp"):
        polled_tables(catalog, {names[1]: WantedColumns(("id",))}, default="name")


class Hears(Observer):
    """Ends polling when the documents are as they should be."""

    def __init__(self, stop: threading.Event, done: Callable[[], bool]) -> None:
        self._stop, self._done = stop, done
        self.live = threading.Event()

    def on_live_started(self) -> None:
        self.live.set()

    def on_batch_committed(self, statistics: Any) -> None:
        if self.live.is_set() and self._done():
            self._stop.set()


@BOTH
def test_documents_follow_by_polling_also_rows_that_move(database: Database, cursor: str) -> None:
    database.execute(
        """
        create table parents (id int primary key, name text, updated_at timestamptz not null default now());
        create table kids (id int primary key, parent_id int, name text, updated_at timestamptz not null default now());
        alter table kids replica identity full;
        insert into parents select n, 'p' || n from generate_series(1, 20) n;
        insert into kids select n, 1 + n % 20, 'k' || n from generate_series(1, 60) n;
        """
    )
    specification = parse_specification(
        """
version: 1
table: parents
fields:
  - {text: name}
  - {has_many: kids, table: kids, foreign_key: parent_id, primary_key: id, fields: [{text: name}]}
""",
        "parents",
    )
    source = SourceSettings(database.dsn)
    stop = threading.Event()
    with connect(source, Role.CATALOG) as one, connect(source, Role.CATALOG) as other:
        catalog = polled_catalog(load_catalog(one, specification.tables()))
        relations = open_relation_map("memory:", "p")
        documents = PostgresDocuments(one, other, [specification], relations, catalog=catalog)
        tables = polled_tables(catalog, documents.resolver.wanted, default=cursor)
        positions = open_positions("memory:", "p")
        capture = PollingCapture(source, tables, positions, settings=PollSettings(interval=0.01), stop=stop)
        for relation in relations.prepare(documents.resolver.tracked):
            relations.seed(one, relation, Lsn(0))
        sink = MemorySink()

        def followed() -> bool:
            found = sink.documents("parents")
            new = [each["name"] for each in found["7"]["kids"]]
            return found["3"]["name"] == "changed" and not found["6"]["kids"] and "new" in new

        hears = Hears(stop, followed)
        engine = threading.Thread(target=Engine(capture, documents, sink, observer=hears).run)
        engine.start()
        assert hears.live.wait(60)
        database.execute("update parents set name = 'changed', updated_at = now() where id = 3")
        database.execute("update kids set parent_id = 5, updated_at = now() where parent_id = 6")
        database.execute("insert into kids values (100, 7, 'new')")
        engine.join(60)
        assert not engine.is_alive()
        compared = IndexDiff(documents, DocumentKeys.of(specification, catalog), sink, patience=Patience(0)).full()
        assert compared.equal, compared
        database.execute("delete from kids where id = 100")
        after = IndexDiff(documents, DocumentKeys.of(specification, catalog), sink, patience=Patience(0)).full()
        assert [(each.id, each.kind) for each in after.differences] == [("7", Kind.DIFFERENT)], "diff sees what is gone"


def test_a_backfill_reads_every_row(database: Database, poller: Callable[..., Poller]) -> None:
    changes = list(poller(chunk=2).capture.snapshot([SnapshotTable(ROWS, ("id",))]))
    assert [len(each.changes.rows[0]) for each in changes] == [2, 2, 1]
    assert all(each.changes.is_snapshot for each in changes)
    assert set(changes[0].changes.rows[0].operations) == {Operation.INSERT}
