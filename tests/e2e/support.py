"""Shared by the end-to-end tests: published databases, settings, waiting, and writers that keep a journal."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import psycopg

from penstock.capture import CaptureProcess, CaptureSettings, Reading
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings
from penstock.tables import TablesOutput, TablesSettings
from penstock.workers import BatchSettings
from tests.support import oracle
from tests.support.counting import CountingCoordinator
from tests.support.oracle import check_transactions, normalised
from tests.support.replay import Replayable, Table, read_spool
from tests.support.waiting import pause
from tests.support.workload import read_rows

PUBLICATION = "e2e"
HANG_SECONDS = 120.0
"""A guard against hangs, more than ten times what anything here takes."""
_Result = TypeVar("_Result")


def wait_for(look: Callable[[], _Result], what: str, timeout: float = HANG_SECONDS) -> _Result:
    """Call `look` until it returns something true, and return that."""
    begun = time.monotonic()
    while not (seen := look()):
        if time.monotonic() > begun + timeout:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        pause(begun)
    return seen


def current_position(database: Any) -> Lsn:
    """Return a boundary after every transaction whose commit has returned."""
    with database.connect() as connection:
        return oracle.current_position(connection)


def tables_settings(database: Any, folder: Path, name: str = "e2e", *, interval: float = 0.05, **changes: Any) -> Any:
    """A pipeline of all tables in `public`; publication and slot have its name, the spool is in `folder`."""
    settings = TablesSettings(
        id=name,
        source=SourceSettings(database.dsn),
        publication=name,
        slot=f"{name}_{database.name[-12:]}",
        spool=SpoolSettings(folder / "spool", min_free_bytes=0),
        tables=("public.*",),
        batches=BatchSettings(interval=interval),
    )
    return replace(settings, **changes)


class Background:
    """Calls `step` with a connection, again and again in a thread, until the end of the block.

    `count` says how often it was called. An error ends the thread, and the block raises it.
    """

    def __init__(self, database: Any, step: Callable[[Any], object], pause: float = 0.01) -> None:
        self._database = database
        self._step = step
        self._pause = pause
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    @property
    def has_ended(self) -> bool:
        """True if an error ended the thread."""
        return self._error is not None

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._database.connect() as connection:
                while not self._stop.wait(self._pause):
                    self._step(connection)
                    self.count += 1
        except BaseException as error:
            self._error = error


def updates_of_both() -> Callable[[Any], None]:
    """A step for `Background`: a transaction that changes rows 1 to 100 of the tables `a` and `b`."""
    numbers = itertools.count(1)

    def step(connection: Any) -> None:
        number = next(numbers)
        with connection.transaction():
            for table in "ab":
                connection.execute(f"update {table} set n = %s where id %% 7 = %s and id <= 100", [number, number % 7])

    return step


class Alone:
    """One output with a coordinator of its own; it has all that the running output has."""

    def __init__(self, output: Any) -> None:
        self.definition = output
        self.coordinator = CountingCoordinator([output])

    def __enter__(self) -> Alone:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        running = next(iter(self.coordinator), self.definition)
        return getattr(running, name)

    def start(self) -> None:
        self.coordinator.start()

    def shutdown(self) -> None:
        self.coordinator.shutdown()


def tables_alone(*arguments: Any, **options: Any) -> Alone:
    """A `TablesOutput` alone, not started."""
    return Alone(TablesOutput(*arguments, **options))


@dataclass
class Stream:
    """A database that publishes the tables `things`, `others` and `journal`, with slots and spools by name."""

    database: Any
    """Anything with `dsn`, `connect` and `execute`."""
    folder: Path
    url: str = ""
    """Where capture connects; by default the database itself."""
    slots: list[str] = field(default_factory=list)

    def create(self, identity: str = "default") -> None:
        self.database.execute(
            f"""
            create table things (id bigint primary key, writer int, payload text, moment timestamptz default now());
            create table others (id bigint primary key, payload text);
            create table unpublished (id bigint, payload text);
            create table journal (id bigint primary key, xid xid8, changes int);
            alter table things replica identity {identity};
            create publication {PUBLICATION} for table things, others, journal;
            """
        )

    def slot(self, name: str = "one") -> str:
        """Create a slot and return its name on the server."""
        full = f"{name}_{self.database.name}"
        self.database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [full])
        return full

    def settings(
        self, name: str = "one", *, work_mem: str = "64MB", spool: dict[str, Any] | None = None, **changes: Any
    ):
        bounds = {"min_free_bytes": 0} | (spool or {})
        settings = CaptureSettings(
            source=SourceSettings(
                f"{self.url or self.database.dsn}?options={quote(f'-c logical_decoding_work_mem={work_mem}')}",
                connect_timeout=5,
            ),
            slot=f"{name}_{self.database.name}",
            publication=PUBLICATION,
            spool=SpoolSettings(self.folder / name, **bounds),
        )
        return replace(settings, **changes)

    def position(self) -> Lsn:
        return current_position(self.database)

    def flushed_position(self) -> Lsn:
        """Return a boundary after everything so far; an unpublished commit makes the server send up to it."""
        with self.database.connect() as connection:
            position = oracle.current_position(connection)
            connection.execute("insert into unpublished values (0, 'flush')")
        return position

    def walsender(self, name: str = "one") -> int | None:
        """Return the process id of the walsender that uses the slot."""
        rows = self.database.execute(
            "select active_pid from pg_replication_slots where slot_name = %s", [f"{name}_{self.database.name}"]
        )
        return rows[0][0] if rows else None

    def confirmed(self, name: str = "one") -> Lsn:
        rows = self.database.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
            [f"{name}_{self.database.name}"],
        )
        return Lsn.parse(rows[0][0])

    def reader(self, name: str = "one") -> SpoolReader:
        return SpoolReader(self.folder / name)

    def wait_captured(self, process: CaptureProcess, position: Lsn) -> None:
        assert process.wait_captured(position, HANG_SECONDS), f"stopped at {process.status}"

    def check(self, name: str = "one") -> Replayable:
        """Check that the spool contains what the journal lists, and replays to the contents of the tables."""
        spool = read_spool(self.folder / name)
        with self.database.connect() as connection:
            listed = connection.execute("select xid::text::bigint & 4294967295, changes from journal").fetchall()
            found = spool.transactions()
            # The journal does not know the commit order; reading the spool checks that by its positions.
            place = {xid: at for at, (xid, _) in enumerate(found)}
            check_transactions(spool, sorted(listed, key=lambda row: place.get(row[0], 0)))
            for versions in spool.schemas.values():
                schema = versions[-1]
                table = Table(schema.name, schema, [])
                for change in spool.changes:
                    if change.table_id == schema.table_id:
                        table.apply(change)
                columns = [column.name for column in schema.columns]
                rows = read_rows(connection, psycopg.sql.Identifier(schema.namespace, schema.name), columns)
                assert table.rows() == type(table.rows())(normalised(rows, schema)), schema.name
        return spool


@contextlib.contextmanager
def following(stream: Stream, name: str = "one") -> Iterator[None]:
    """A registered reader that acknowledges everything immediately."""
    stop = threading.Event()

    def follow() -> None:
        reader = stream.reader(name)
        position = reader.readers.position("follower")
        while not stop.is_set():
            if position is not None and reader.wait(position, 0.05):
                position = reader.captured
                assert position is not None
                reader.readers.advance("follower", position)
                reader.forget(position)

    stream.reader(name).readers.register("follower", stream.confirmed(name))
    thread = threading.Thread(target=follow, name="follower")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def watch_connection(stream: Stream, capture: CaptureProcess, reading: Reading, seconds: float) -> None:
    """Check that the connection and its state stay the same for some time."""
    walsender = wait_for(stream.walsender, "a connection")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert stream.walsender() == walsender, "the server closed the connection"
        assert capture.status.reading is reading
        threading.Event().wait(0.5)
    assert capture.restarts == 0


class Writers:
    """Threads that run transactions and record them in the journal; a context manager."""

    _numbers = itertools.count(1)

    def __init__(self, stream: Stream, count: int = 3, *, seed: int = 0, big: int = 0, pause: float = 0.02) -> None:
        self._stream = stream
        self._stop = threading.Event()
        self._pause = pause
        self._errors: list[BaseException] = []
        self.committed = 0
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(f"{seed}-{number}"), number <= big))
            for number in range(1, count + 1)
        ]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, number: int, choose: random.Random, big: bool) -> None:
        try:
            with self._stream.database.connect() as connection:
                while not self._stop.wait(choose.random() * self._pause):
                    write_transaction(connection, number, choose, big=big)
                    self.committed += 1
        except BaseException as error:
            self._errors.append(error)


def write_transaction(connection: psycopg.Connection, writer: int, choose: random.Random, *, big: bool = False) -> None:
    """Run one transaction on this writer's rows, partly rolled back; its last row records it in the journal."""
    size = 1500 if big else 20
    rows = choose.randint(1, 60 if big else 12)
    changes = 0
    with connection.transaction(force_rollback=choose.random() < 0.1):
        changes += insert_things(connection, writer, rows, size, choose)
        connection.execute("savepoint part")
        inside = insert_things(connection, writer, rows, size, choose)
        inside += connection.execute(
            "update things set payload = payload || '+' where writer = %s and id %% 7 = %s",
            [writer, choose.randrange(7)],
        ).rowcount
        if choose.random() < 0.5:
            connection.execute("rollback to savepoint part")
        else:
            changes += inside
        changes += connection.execute(
            "delete from things where writer = %s and id %% 5 = %s", [writer, choose.randrange(5)]
        ).rowcount
        list_in_journal(connection, changes)


def insert_things(connection: psycopg.Connection, writer: int, count: int, size: int, choose: random.Random) -> int:
    numbers = [next(Writers._numbers) for _ in range(count)]
    payloads = [choose.randbytes(size).hex() for _ in range(count)]
    return connection.execute(
        "insert into things select id, %s, payload from unnest(%s::bigint[], %s::text[]) t (id, payload)",
        [writer, numbers, payloads],
    ).rowcount


def list_in_journal(connection: psycopg.Connection, changes: int) -> None:
    connection.execute(
        "insert into journal values (%s, pg_current_xact_id(), %s)", [next(Writers._numbers), changes + 1]
    )


def write_rows(stream: Stream, count: int, size: int, *, per_transaction: int = 50, seed: int = 1) -> None:
    """Insert rows in plain transactions, each recorded in the journal."""
    choose = random.Random(seed)
    with stream.database.connect() as connection:
        for first in range(0, count, per_transaction):
            with connection.transaction():
                changes = insert_things(connection, 0, min(per_transaction, count - first), size, choose)
                list_in_journal(connection, changes)
