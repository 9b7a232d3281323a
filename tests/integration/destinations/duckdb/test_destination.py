"""What the duckdb destination does by itself: faults of the file, other programs that use it, names, modes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from penstock.changes.events import Row, Unchanged, Unrepresentable
from penstock.destinations.duckdb import DuckDbDestination, apply
from penstock.destinations.duckdb.control import Control
from penstock.destinations.duckdb.copying import finish_copy, write_range
from penstock.errors import ConfigError, DestinationUnavailable, IllegalTransition, LeaseLost, TableRejected
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import ITEMS, ORDERS
from tests.support.disks import CannotMount, SmallDisk
from tests.support.duckdb import Duck

SECONDS = 60.0
"""Opens the file, says so, and waits to be ended."""
HOLDER = (
    "import duckdb, sys; c = duckdb.connect(sys.argv[1], read_only=True); print('open', flush=True); sys.stdin.read()"
)


@pytest.fixture
def duck(tmp_path: Path) -> Duck:
    return Duck(str(tmp_path / "lake.db"))


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "source")


def copy(
    destination: DuckDbDestination,
    source: ScriptedSource,
    schema: TableSchema,
    rows: Sequence[Row],
    *,
    attempt: str = "attempt-1",
) -> None:
    destination.drop_table_for_copy(schema, attempt)
    destination.write_table_rows(schema, source.copy(schema, rows, attempt=attempt))


def write(destination: DuckDbDestination, batch: Any) -> None:
    """Write a batch; raise the error of the first table that failed."""
    for result in destination.write_events(batch).result(SECONDS).tables.values():
        if result.error is not None:
            raise result.error


def order(number: int, note: Any = "a note", due: Any = None) -> dict[str, Any]:
    return {"id": number, "note": note, "due": due}


def notes(duck: Duck) -> list[tuple[Any, ...]]:
    return duck.query("select id, note from public.orders order by id")


# Crashes, fences and lost answers

KILLED = """
import os, pickle, signal, sys
from penstock.destinations.duckdb import DuckDbDestination
from penstock.destinations.duckdb.database import Session
from penstock.testing.destinations import make_context

path, batch, is_before = pickle.loads(sys.stdin.buffer.read())
run = Session.run

def killed(self, statement, values=()):
    if statement == "commit" and is_before:
        os.kill(os.getpid(), signal.SIGKILL)
    run(self, statement, values)
    if statement == "commit":
        os.kill(os.getpid(), signal.SIGKILL)

destination = DuckDbDestination(path)
destination.startup(make_context())
Session.run = killed
destination.write_events(batch)
"""


@pytest.mark.trap(28)
@pytest.mark.parametrize("is_before", [True, False], ids=["before the commit", "after the commit"])
def test_a_killed_process_has_written_rows_and_position_or_neither(duck, source, is_before):
    destination = duck.started()
    copy(destination, source, ORDERS, [order(1, "large"), order(5)])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 1})
        transaction.insert(ORDERS, order(3))
        transaction.delete(ORDERS, order(5))
    batch = source.batch()
    sent = pickle.dumps((duck.path, batch, is_before))
    ended = subprocess.run([sys.executable, "-c", KILLED], input=sent)
    assert ended.returncode == -signal.SIGKILL
    destination = duck.started()
    assert destination.position(ORDERS.table_id) == (batch.begin if is_before else batch.end)
    write(destination, batch)
    write(destination, batch)
    assert notes(duck) == [(2, "large"), (3, "a note")]


def test_a_process_that_lost_its_lease_changes_nothing(duck, source):
    old = duck.started(replace(make_context(), epoch=1))
    copy(old, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    first = source.batch()
    new = duck.started(replace(make_context(), epoch=2))
    write(new, first)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
    batch = source.batch()
    assert isinstance(old.write_events(batch).result().of(ORDERS.table_id).error, LeaseLost)
    assert notes(duck) == [(1, "a note"), (2, "a note")]
    with pytest.raises(LeaseLost):
        old.drop_table_for_copy(ORDERS, "attempt-9")
    write(new, batch)
    assert [number for number, _ in notes(duck)] == [1, 2, 3]


def test_tasks_that_run_twice_or_late_write_once(duck, source, monkeypatch):
    destination = duck.started()
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    late = source.copy(ORDERS, [order(9)])
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    monkeypatch.setattr("penstock.testing.destinations.script.pickle.dumps", lambda value: value)
    monkeypatch.setattr("penstock.testing.destinations.script.pickle.loads", lambda value: value)
    module = "penstock.destinations.duckdb.destination"
    with monkeypatch.context() as patched:
        patched.setattr(f"{module}.write_range", _twice(write_range))
        patched.setattr(f"{module}.finish_copy", _twice(finish_copy))
        destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(1)], attempt="attempt-2"))
    with pytest.raises(IllegalTransition):
        destination.write_table_rows(ORDERS, late)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    with monkeypatch.context() as patched:
        patched.setattr(f"{module}.apply_work", _twice(apply.apply_work))
        write(destination, source.batch())
    assert notes(duck) == [(1, "a note"), (2, "a note")]


def _twice(function: Any) -> Any:
    def twice(*arguments: Any) -> Any:
        function(*arguments)
        return function(*arguments)

    return twice


# The file, and other programs


def test_a_program_that_has_the_file_open_makes_all_tables_wait(duck, source):
    """It is named by its number; nothing is lost meanwhile. A connection of this process changes nothing."""
    destination = duck.started(lock_timeout=0.2)
    copy(destination, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    command = [sys.executable, "-c", HOLDER, duck.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(DestinationUnavailable, match=rf"is open in another process \(PID {holder.pid}\)"):
            destination.write_events(batch)
        assert notes(duck) == [(1, "a note")], "several programs may read"
        holder.stdin.close()
    with duckdb.connect(duck.path) as connection:
        write(destination, batch)
        assert connection.execute("select count(*) from public.orders").fetchall() == [(2,)]
    assert notes(duck) == [(1, "a note"), (2, "a note")]


def test_a_full_disk_makes_all_tables_wait(tmp_path, source):
    try:
        disk = SmallDisk(tmp_path / "disk", megabytes=24)
    except CannotMount as error:
        pytest.skip(str(error))
    with disk:
        duck = Duck(str(disk.folder / "lake.db"))
        destination = duck.started()
        copy(destination, source, ORDERS, [order(1)])
        with source.transaction() as transaction:
            for number in range(2, 3_000):
                transaction.insert(ORDERS, order(number, os.urandom(500).hex()))
            transaction.delete(ORDERS, order(1))
        batch = source.batch()
        disk.fill()
        with pytest.raises(DestinationUnavailable):
            destination.write_events(batch)
        with pytest.raises(DestinationUnavailable):
            copy(destination, source, ITEMS, [order(number, os.urandom(500).hex()) for number in range(3_000)])
        disk.free()
        write(destination, batch)
        write(destination, batch)
        assert duck.query("select count(*), min(id), count(distinct id) from public.orders") == [(2_998, 2, 2_998)]


def test_a_place_that_cannot_work_is_refused(duck, source, tmp_path):
    for options in (
        {"mode": "append"},
        {"lock_timeout": 0},
        {"data_path": "x"},
    ):
        with pytest.raises(ConfigError):
            duck.open(**options)
    other = tmp_path / "text.db"
    other.write_text("not a database" * 500)
    for refused in (other, tmp_path / "missing" / "lake.db"):
        with pytest.raises(ConfigError):
            DuckDbDestination(str(refused)).probe()
    with pytest.raises(ConfigError, match="on one machine"):
        duck.open().startup(make_context(tasks=LocalTasks(elsewhere=True)))
    duck.open().probe()
    assert not Path(duck.path).exists()
    destination = duck.started()
    with duckdb.connect(duck.path) as connection:
        connection.execute("create schema public; create table public.orders (id int)")
    with pytest.raises(TableRejected, match="Penstock did not create it"):
        destination.drop_table_for_copy(ORDERS, "attempt-1")
    Path(duck.path).unlink()
    with pytest.raises(DestinationUnavailable, match="is the disk mounted"):
        destination.drop_table_for_copy(ORDERS, "attempt-1")
    assert not Path(duck.path).exists()


# Names, modes, values


def test_names_may_be_hostile(tmp_path, source):
    """DuckDB ignores case, has a column of its own, and the schema has the name of the file."""
    duck = Duck(str(tmp_path / "public.db"))
    names = ["id", "rowid", "RowID", 'a "quoted" name', "_deleted_at", "penstock_number", "due"]
    columns = (
        *(replace(ORDERS.columns[0], name="id"),),
        *(replace(ORDERS.columns[1], name=name, attnum=at) for at, name in enumerate(names[1:-1], 2)),
        replace(ORDERS.columns[2], attnum=9),
    )
    schema = replace(ORDERS, name='Odd"; drop', columns=columns)
    for mode, table in (("soft_delete", schema), ("mirror", replace(schema, table_id=7, name="odd"))):
        destination = duck.started(make_context(mode), mode=mode)
        row = dict.fromkeys(names, "text") | {"id": 1, "due": Unrepresentable("infinity")}
        copy(destination, source, table, [row])
        with source.transaction() as transaction:
            transaction.update(table, row | {"rowid": Unchanged, "due": Unchanged, "penstock_number": "new"})
        write(destination, source.batch())
        (found,) = (row for row in duck.rows(table) or ())
        values = [value for name, value in found.items() if name != "_deleted_at" or mode == "mirror"]
        assert values[:1] == [1]
        assert sorted(map(str, values[1:-1])) == sorted(["new", *["text"] * 4])
        assert values[-1] == Unrepresentable("infinity")


def test_deleted_rows_stay_marked_also_in_a_new_copy(duck, source):
    destination = duck.started(mode="soft_delete")
    copy(destination, source, ORDERS, [order(1), order(2), order(3)])
    with source.transaction() as transaction:
        transaction.delete(ORDERS, order(1))
        transaction.update(ORDERS, order(9), old={"id": 2})
    write(destination, source.batch())
    query = "select id, note, _deleted_at is null from public.orders order by id"
    gone = [(1, "a note", False), (2, "a note", False), (3, "a note", True), (9, "a note", True)]
    assert duck.query(query) == gone
    copy(destination, source, ORDERS, [order(2, "again")], attempt="attempt-2")
    assert duck.query(query) == [gone[0], (2, "again", True), (3, "a note", False), (9, "a note", False)]
    with source.transaction() as transaction:
        transaction.truncate(ORDERS)
    write(destination, source.batch())
    assert duck.query("select count(*) from public.orders where _deleted_at is null") == [(0,)]


def test_errors_contain_no_values(duck, source, monkeypatch):
    destination = duck.started()
    copy(destination, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2, "a secret"))

    def fail(*_: Any, **__: Any) -> None:
        raise duckdb.ConversionException("Could not convert 'a secret'")

    monkeypatch.setattr(Control, "save", fail)
    error = destination.write_events(source.batch()).result().of(ORDERS.table_id).error
    assert error is not None
    assert "secret" not in str(error)
    assert notes(duck) == [(1, "a note")]


def test_rows_without_a_key_are_found_by_all_their_texts(duck, source):
    """Also if two values do not fit, and the change names them in another order; 0 is not -0."""
    number = replace(ORDERS.columns[2], name="ends", attnum=4)
    ratio = Column("ratio", 5, PostgresType(701, "float8"))
    columns = tuple(replace(column, identity=True) for column in (*ORDERS.columns, number, ratio))
    schema = replace(ORDERS, columns=tuple(replace(column, primary_key_position=None) for column in columns),
                     replica_identity=ReplicaIdentity.FULL)  # fmt: skip
    destination = duck.started()
    one = order(1, "x", Unrepresentable("infinity")) | {"ends": Unrepresentable("-infinity"), "ratio": 0.0}
    other = one | {"ratio": -0.0}
    fits = one | {"due": None}
    copy(destination, source, schema, [one, one, other, fits])
    with source.transaction() as transaction:
        transaction.delete(schema, {name: one[name] for name in ("ratio", "ends", "due", "note", "id")})
        transaction.delete(schema, other)
    write(destination, source.batch())
    rows = duck.rows(schema) or []
    assert sorted(map(str, rows)) == sorted(map(str, [one, fits]))
    # The texts go with their columns.
    narrow = replace(schema, columns=tuple(each for each in schema.columns if each.name not in ("due", "ends")))
    with source.transaction() as transaction:
        transaction.delete(narrow, {name: one[name] for name in ("id", "note", "ratio")})
    write(destination, source.batch())
    assert len(duck.rows(schema) or ()) == 1


def test_a_task_of_an_earlier_process_that_comes_late_changes_nothing(duck, source, monkeypatch):
    """It waited for the file while the next process started."""
    old = duck.started(replace(make_context(), epoch=1))
    copy(old, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    new = duck.started(replace(make_context(), epoch=2))
    assert isinstance(old.write_events(batch).result().of(ORDERS.table_id).error, LeaseLost)
    write(new, batch)
    assert notes(duck) == [(1, "a note"), (2, "a note")]


def test_a_table_that_somebody_dropped_stops_alone(duck, source):
    destination = duck.started()
    copy(destination, source, ORDERS, [order(1)])
    copy(destination, source, ITEMS, [order(1)])
    with duckdb.connect(duck.path) as connection:
        connection.execute("drop table public.orders")
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
        transaction.insert(ITEMS, order(2))
    result = destination.write_events(source.batch()).result(SECONDS)
    assert isinstance(result.of(ORDERS.table_id).error, TableRejected)
    assert result.of(ITEMS.table_id).error is None
    assert len(duck.rows(ITEMS) or ()) == 2
    copy(destination, source, ORDERS, [order(3)], attempt="attempt-2")
    assert notes(duck) == [(3, "a note")]
