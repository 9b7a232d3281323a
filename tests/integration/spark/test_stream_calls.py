"""The calls of a streaming query, in Spark's order, in a process that ends between any two of them.

`test_changes.py` runs queries on Spark. Here the calls alone are made, as Spark makes them (see
`penstock.datasource.changes`), with a log of offsets and of commits, because a start takes a second instead of many.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from penstock.changes.frames import spark_type_name
from penstock.datasource import changes
from penstock.datasource.changes import ChangesReader, StreamOptions, _shown
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, connect
from tests.e2e.support import wait_for

ENDED = 9


class Log:
    """Spark's checkpoint, and a sink that keeps what it was given by batch."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"
        self.offsets: list[dict[str, Any]] = []
        self.commits = 0
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self.attempts: list[tuple[int, list[dict[str, Any]]]] = []
        self.repeated: list[tuple[list[Any], list[Any]]] = []
        if self._path.exists():
            vars(self).update(pickle.loads(self._path.read_bytes()))

    def save(self) -> None:
        content = {name: value for name, value in vars(self).items() if name != "_path"}
        aside = self._path.with_suffix(".new")
        aside.write_bytes(pickle.dumps(content))
        aside.replace(self._path)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The changes of committed batches, in order."""
        rows = [row for number in range(self.commits) for row in self.batches[number]]
        return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_ordinal"]))


class Spark:
    """Makes the calls of one run of a query; `step` is called before and after each."""

    def __init__(self, folder: Path, reader: ChangesReader, step: Callable[[], None]) -> None:
        self.log = Log(folder)
        self._reader = reader
        self._step = step

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self._step()
        result = method(*arguments)
        self._step()
        return result

    def start(self) -> None:
        """Restart from the log."""
        if self.log.offsets:
            last = self.log.offsets[-1]
            assert self._call(self._reader.partitions, last, last) == []
            if self.log.commits < len(self.log.offsets):
                self._run_batch()

    def trigger(self) -> None:
        """Plan and run a batch, if there is something to do."""
        latest = self._call(self._reader.latestOffset)
        if self.log.offsets and latest == self.log.offsets[-1]:
            return
        self.log.offsets.append(latest)
        self.log.save()
        if len(self.log.offsets) > 1:
            self._call(self._reader.commit, self.log.offsets[-2])
        self._run_batch()

    def _run_batch(self) -> None:
        number = len(self.log.offsets) - 1
        begin = self.log.offsets[number - 1] if number else self._call(self._reader.initialOffset)
        parts = self._call(self._reader.partitions, begin, self.log.offsets[number])
        rows: list[dict[str, Any]] = []
        for part in pickle.loads(pickle.dumps(list(parts))):
            for batch in self._reader.read(part):
                assert isinstance(batch, pa.RecordBatch)
                rows += batch.to_pylist()
        rows.sort(key=lambda row: (row["_commit_lsn"], row["_ordinal"], row.get("id") or 0))
        if number in self.log.batches:
            self.log.repeated.append((self.log.batches[number], rows))
        self.log.attempts.append((number, rows))
        self.log.batches[number] = rows
        self.log.save()
        self._step()
        self.log.commits = number + 1
        self.log.save()
        self._step()


def reader_of(database: Any, folder: Path, **options: str) -> ChangesReader:
    """What Spark gets for these options after `load()`."""
    given = {"url": database.dsn, "slot": "calls", "spoolLocation": str(folder / "spool")} | options
    parsed = StreamOptions.of(given)
    with connect(parsed.feed.source, Role.CATALOG) as connection:
        columns = _shown(parsed.describe(connection))
    return ChangesReader(parsed, [(field.name, spark_type_name(field.type)) for field in columns])


def run_until_killed(steps: int, database: Any, folder: Path, **options: str) -> None:
    """Run a query in a process that is killed after so many steps."""
    pid = os.fork()
    if pid == 0:
        try:
            left = iter(range(steps))
            reader = reader_of(database, folder, **options)

            def step() -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            spark = Spark(folder, reader, step)
            spark.start()
            while True:
                spark.trigger()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(ENDED)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it failed before"


def run_to_the_end(database: Any, folder: Path, **options: str) -> Log:
    """Run a query until it has everything that is committed now."""
    [(text,)] = database.execute("select pg_current_wal_flush_lsn()::text")
    database.execute("select pg_logical_emit_message(true, 'x', 'y')")
    reader = reader_of(database, folder, **options)
    spark = Spark(folder, reader, lambda: None)
    try:
        spark.start()

        def reached() -> bool:
            spark.trigger()
            captured = reader._planner._feed.captured()  # pyright: ignore
            return reaches(captured, Lsn.parse(text)) and spark.log.offsets[-1:] == [reader.latestOffset()]

        wait_for(reached, "everything")
    finally:
        reader.stop()
    return spark.log


def state_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Apply changes in order, as a sink that upserts by key."""
    state: dict[int, dict[str, Any]] = {}
    for row in rows:
        cells = {name: value for name, value in row.items() if not name.startswith("_")}
        if row["_op"] == "truncate":
            state.clear()
        elif row["_op"] == "delete":
            state.pop(row["id"], None)
        else:
            old = (row["_old"] or row)["id"]
            before = state.pop(old, {}) if row["_op"] == "update" else {}
            state[row["id"]] = cells | {name: before.get(name) for name in row["_unchanged"]}
    return state


def write(connection: Any, choose: Random) -> None:
    with connection.transaction():
        for _ in range(choose.randint(1, 4)):
            given = {"id": choose.randint(1, 40), "to": choose.randint(41, 80), "text": str(choose.random())}
            statement = choose.choice(
                (
                    "insert into t values (%(id)s, %(text)s, repeat(%(text)s, 9000)) on conflict do nothing",
                    "insert into t select i, 'x' from generate_series(%(id)s::int, %(to)s) i on conflict do nothing",
                    "update t set name = %(text)s where id = %(id)s",
                    "update t set name = null where id >= %(id)s",
                    "update t set big = repeat(%(text)s, 9000) where id = %(id)s",
                    "update t set id = %(to)s where id = %(id)s and not exists (select from t where id = %(to)s)",
                    "delete from t where id between %(id)s and %(id)s + 3",
                )
            )
            connection.execute(statement.encode(), given)
    if choose.random() < 0.03:
        connection.execute("truncate t")


@pytest.mark.trap(2, 3, 4, 7, 25, 27, 28, 53)
@pytest.mark.parametrize("start", ["latest", "snapshot"])
def test_a_query_that_ends_between_any_two_calls_loses_and_doubles_nothing(
    database: Any, tmp_path: Path, start: str
) -> None:
    database.execute("create table t (id int primary key, name text, big text)")
    database.execute("alter table t alter column big set storage external")
    if start == "snapshot":
        database.execute("insert into t select i, 'first', repeat('b', 9000) from generate_series(1, 30) i")
    options = {"table": "t", "startingPosition": start, "maxRowsPerBatch": "15"}
    choose = Random(11)
    with database.connect() as connection:
        for steps in (3, 4, 5, 6, 7, 8, 9, 10, *(choose.randint(5, 25) for _ in range(8))):
            run_until_killed(steps, database, tmp_path, **options)
            for _ in range(10):
                write(connection, choose)
            if choose.random() < 0.3:
                wait_for(lambda: not locked(tmp_path / "spool" / "lock"), "capture to end")
                shutil.rmtree(tmp_path / "spool")
        log = run_to_the_end(database, tmp_path, **options)
        rows = [{"id": id_, "name": name, "big": big} for id_, name, big in connection.execute("select * from t")]
    assert {row["id"]: row for row in rows} == state_of(log.rows)
    found = [(row["_commit_lsn"], row["_ordinal"]) for row in log.rows if row["_op"] != "snapshot"]
    assert len(found) == len(set(found)), "no change is in two batches"
    assert len(found) > 100
    assert log.repeated, "some batch was interrupted"
    for first, again in log.repeated:
        assert first == again or (again == [] and first[-1]["_op"] == "snapshot")


@pytest.mark.trap(19, 28, 53)
@pytest.mark.parametrize("is_spool_lost", [False, True])
def test_a_copy_that_is_interrupted_is_replaced_by_another_one(
    database: Any, tmp_path: Path, is_spool_lost: bool
) -> None:
    """Whatever a sink does with a batch that comes again: it has the rows of the source, each once."""
    database.execute("create table t (id int primary key, name text, big text)")
    database.execute("alter table t alter column big set storage external")
    database.execute("insert into t select i, 'first', repeat('b', 9000) from generate_series(1, 30) i")
    options = {"table": "t", "startingPosition": "snapshot"}
    # After the first copy; after the batch that replaces it, which is empty; after the second copy.
    for number, steps in enumerate((6, 8, 8), 1):
        run_until_killed(steps, database, tmp_path, **options)
        database.execute(f"delete from t where id = {number}; insert into t values ({100 + number}, 'new')")
        database.execute(f"update t set name = 'x' where id = {10 + number}; update t set id = -id where id = 20")
        wait_for(lambda: not locked(tmp_path / "spool" / "lock"), "capture to end")
        if is_spool_lost:
            shutil.rmtree(tmp_path / "spool")
    log = run_to_the_end(database, tmp_path, **options)
    wanted = {row[0]: dict(zip(("id", "name", "big"), row, strict=True)) for row in database.execute("table t")}
    assert any(rows and rows[-1]["_op"] == "snapshot" for rows, _ in log.repeated), "a copy was interrupted"
    skipping = dict(reversed(log.attempts))
    sinks = {
        "replaces the batch": list(log.batches.items()),
        "skips the batch": sorted(skipping.items()),
        "applies the batch again": log.attempts,
    }
    found = {name: state_of([row for _, rows in batches for row in rows]) for name, batches in sinks.items()}
    assert found == dict.fromkeys(sinks, wanted)
    replaced = [row for number in range(log.commits) for row in log.batches[number]]
    copies = [place for place, row in enumerate(replaced) if row["_op"] == "snapshot"]
    assert len({replaced[place]["_commit_lsn"] for place in copies}) == 1, "one copy is left"
    assert {row["_op"] for row in replaced[: copies[0]]} == {"truncate"}


@pytest.mark.trap(3, 28)
def test_a_restart_may_have_another_limit_of_rows(database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, name text, big text)")
    choose, limits = Random(3), ("3", "1000", "1", "40", "7")
    run_until_killed(6, database, tmp_path, table="t", maxRowsPerBatch="5")
    with database.connect() as connection:
        for limit in limits:
            for _ in range(10):
                write(connection, choose)
            run_until_killed(choose.randint(5, 25), database, tmp_path, table="t", maxRowsPerBatch=limit)
        log = run_to_the_end(database, tmp_path, table="t")
        rows = connection.execute("select * from t").fetchall()
    assert sorted(tuple(row.values()) for row in state_of(log.rows).values()) == sorted(rows)
    found = [(row["_commit_lsn"], row["_ordinal"]) for row in log.rows]
    assert len(found) == len(set(found)) > 50
    for first, again in log.repeated:
        assert first == again


def test_a_batch_does_not_wait_for_capture_while_captured_rows_are_left(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("create table t (id int primary key)")
    reader = reader_of(database, tmp_path, table="t", maxRowsPerBatch="1")
    spark = Spark(tmp_path, reader, lambda: None)
    try:
        spark.trigger()
        for number in range(3):
            database.execute("insert into t values (%s)", [number])
        [(text,)] = database.execute("select pg_current_wal_flush_lsn()::text")
        database.execute("select pg_logical_emit_message(true, 'x', 'y')")
        feed = reader._planner._feed  # pyright: ignore
        wait_for(lambda: reaches(feed.captured(), Lsn.parse(text)), "capture")
        wait_for(lambda: spark.trigger() or spark.log.rows, "the first row")
        waits: list[Any] = []
        monkeypatch.setattr(feed.reader, "wait", lambda *arguments: waits.append(arguments))
        spark.trigger()
        spark.trigger()
        assert [row["id"] for row in spark.log.rows] == [0, 1, 2]
        assert waits == []
        spark.trigger()
        assert len(waits) == 1
    finally:
        reader.stop()


@pytest.mark.trap(10)
def test_a_new_checkpoint_on_an_old_slot_skips_nothing(database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    database.execute("insert into t values (1)")
    # A copy that nobody has finished, and whose position must not count for another query.
    run_until_killed(5, database, tmp_path, table="t", startingPosition="snapshot")
    database.execute("insert into t values (2)")
    run_until_killed(6, database, tmp_path, table="t", startingPosition="snapshot")
    (tmp_path / "log").unlink(missing_ok=True)
    database.execute("insert into t values (3)")
    log = run_to_the_end(database, tmp_path, table="t", startingPosition="latest")
    assert [row["id"] for row in log.rows] == [2, 3]
    wait_for(lambda: not locked(tmp_path / "spool" / "lock"), "capture to end")
    (tmp_path / "log").unlink()
    database.execute("insert into t values (4)")
    log = run_to_the_end(database, tmp_path, table="t", startingPosition="snapshot")
    assert sorted(row["id"] for row in log.rows) == [1, 2, 3, 4]


@pytest.mark.trap(18)
def test_a_table_that_another_one_replaces_under_its_name_ends_the_query(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_LOOK_SECONDS", 0.0)
    database.execute("create table t (id int primary key); create table new_t (id int primary key)")
    reader = reader_of(database, tmp_path, table="t")
    try:
        reader.latestOffset()
        database.execute("alter table t rename to old_t")
        reader.latestOffset()
        database.execute("alter table new_t rename to t")
        with pytest.raises(PenstockError, match=r"is another table now.*Start a new query"):
            reader.latestOffset()
    finally:
        reader.stop()


@pytest.mark.trap(18)
def test_a_publication_that_is_altered_ends_the_query(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_LOOK_SECONDS", 0.0)
    database.execute("create table t (id int primary key); create role other_owner superuser")
    try:
        run_to_the_end(database, tmp_path, table="t")
        database.execute("alter publication calls owner to other_owner; insert into t values (1)")
        log = run_to_the_end(database, tmp_path, table="t")
        assert [row["id"] for row in log.rows] == [1], "another owner changes nothing"
        database.execute("alter publication calls set (publish = 'insert')")
        database.execute("delete from t")
        database.execute("alter publication calls set (publish = 'insert, update, delete, truncate')")
        with pytest.raises(PenstockError, match=r"was altered.*Start a new query"):
            run_to_the_end(database, tmp_path, table="t")
        (tmp_path / "log").unlink()
        reader = reader_of(database, tmp_path, table="t")
        try:
            reader.latestOffset()
            database.execute("alter publication calls set (publish = 'insert'); insert into t values (2)")

            def is_refused() -> bool:
                # It is never idle.
                database.execute("insert into t select max(id) + 1 from t")
                try:
                    reader.latestOffset()
                except PenstockError as error:
                    return "was altered" in str(error)
                return False

            wait_for(is_refused, "the error")
        finally:
            reader.stop()
    finally:
        database.execute("reassign owned by other_owner to current_user; drop role other_owner")


@pytest.mark.trap(4, 54)
def test_a_spool_that_is_deleted_while_the_query_runs_is_read_from_the_slot_again(
    database: Any, tmp_path: Path
) -> None:
    database.execute("create table t (id int primary key)")
    reader = reader_of(database, tmp_path, table="t")
    spark = Spark(tmp_path, reader, lambda: None)
    try:
        spark.trigger()
        database.execute("insert into t values (1)")
        wait_for(lambda: (spark.trigger(), spark.log.rows)[1] != [], "the change")
        shutil.rmtree(tmp_path / "spool")
        database.execute("insert into t values (2)")

        with pytest.raises(PenstockError, match=r"was deleted while the query ran.*start it again"):
            spark.trigger()
        # Capture restarts in a folder that it creates.
        wait_for(lambda: locked(tmp_path / "spool" / "lock"), "the folder")
    finally:
        reader.stop()
    wait_for(lambda: not locked(tmp_path / "spool" / "lock"), "capture to end")
    log = run_to_the_end(database, tmp_path, table="t")
    assert [row["id"] for row in log.rows] == [1, 2]


def locked(path: Path) -> bool:
    """True while capture holds the lock of a spool."""
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
