"""What makes the snowflake destination exactly once: a server that is away, lost answers, killed processes, late
writers, tasks that run twice. On fakesnow, by the real connector."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.batch import EventBatch
from penstock.changes.events import Unchanged
from penstock.destinations.base import Destination
from penstock.destinations.snowflake import SnowflakeDestination, tasks
from penstock.errors import (
    ConfigError,
    DestinationUnavailable,
    PenstockError,
    SchemaNotFollowed,
    TableRejected,
    ValuesNotSent,
)
from penstock.schema import Column, PostgresType
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS
from penstock.testing.snowflake import DATABASE, EmulatedSnowflake
from tests.e2e.support import wait_for
from tests.integration.destinations.snowflake.test_contract import HistoryHarness, SnowflakeHarness, SoftHarness
from tests.integration.destinations.snowflake.writer import Job

HARNESSES = {"mirror": SnowflakeHarness, "soft_delete": SoftHarness, "history": HistoryHarness}
LINE = {"level": 1, "line": "same"}
BATCHES = 6
AMOUNT = 'A\'m "ö" \\n'
"""A name with everything that SQL and JSON quote."""

Step = tuple[SnowflakeHarness, ScriptedSource, Destination]


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


@pytest.fixture
def harness(server: EmulatedSnowflake, place: str, request: pytest.FixtureRequest) -> SnowflakeHarness:
    mode = getattr(request, "param", "mirror")
    return HARNESSES[mode](server, place, mode=mode, timeout=1.0)


@pytest.fixture
def begun(harness: SnowflakeHarness, tmp_path: Path) -> Step:
    """A table with a key and one without, copied, and a destination that follows them."""
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context())
    copy_all(source, destination)
    return harness, source, destination


def copy_all(source: ScriptedSource, destination: Destination, **how: Any) -> None:
    for schema, rows in ((ORDERS, [order(1), order(2)]), (LINES, [LINE] * 2)):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows, **how))


def change(source: ScriptedSource, number: int) -> EventBatch:
    """A batch that shows it if a change is lost or there twice."""
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(10 + number))
        transaction.update(ORDERS, order(1, f"update {number}"))
        transaction.insert(LINES, LINE)
        transaction.insert(LINES, {"level": number, "line": "other"})
        transaction.delete(LINES, {"level": number, "line": "other"})
    return source.batch()


def expect(harness: SnowflakeHarness, count: int) -> None:
    orders = [order(1, f"update {count - 1}"), order(2), *(order(10 + number) for number in range(count))]
    for schema, wanted in ((ORDERS, orders), (LINES, [LINE] * (2 + count))):
        assert sorted(harness.rows(schema) or [], key=repr) == sorted(wanted, key=repr)


def restart(harness: SnowflakeHarness, destination: Destination) -> Destination:
    destination.shutdown()
    successor = harness.open()
    successor.startup(make_context())
    return successor


def write(destination: Destination, batch: EventBatch) -> None:
    result = destination.write_events(batch).result(30)
    assert [each.error for each in result.tables.values() if each.error is not None] == []


def error_of(destination: Destination, batch: EventBatch) -> PenstockError:
    result = destination.write_events(batch).result(30)
    [error] = [each.error for each in result.tables.values() if each.error is not None]
    return error


@pytest.mark.trap(28)
@pytest.mark.parametrize(
    ("harness", "match", "when"),
    [
        ("mirror", "^put", "before"),
        ("mirror", "^merge|^copy", "after"),
        ("mirror", "^commit", "before"),
        ("history", "^copy", "after"),
        ("history", "PENSTOCK_TABLES. set", "after"),
    ],
    indirect=["harness"],
)
def test_a_batch_that_failed_anywhere_is_written_once(begun: Step, server: EmulatedSnowflake, match: str, when: str):
    """Whether Snowflake had the statement when the connection broke is unknown; the replay has other boundaries."""
    harness, source, destination = begun
    first = change(source, 0)
    write(destination, first)
    server.cut(match, when=when)
    second = change(source, 1)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(second)
    assert server.heal()["hits"] > 0
    expect(harness, 1)
    third = change(source, 2)
    destination = restart(harness, destination)
    assert destination.position(ORDERS.table_id) == first.end
    write(destination, source.batch(first.begin, third.end))
    expect(harness, 3)


@pytest.mark.parametrize("harness", ["mirror", "history"], indirect=True)
def test_a_commit_whose_answer_is_lost_counts(begun: Step, server: EmulatedSnowflake) -> None:
    harness, source, destination = begun
    server.cut("^commit", when="after", skip=1)
    batch = change(source, 0)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch)
    server.heal()
    write(destination, batch)
    write(destination, change(source, 1))
    expect(harness, 2)


def test_a_copy_whose_commit_has_no_answer_can_be_repeated(
    harness: SnowflakeHarness, server: EmulatedSnowflake, tmp_path: Path
) -> None:
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context())
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    rows = source.copy(ORDERS, [order(1), order(2)])
    server.cut("^commit", when="after")
    with pytest.raises(DestinationUnavailable):
        destination.write_table_rows(ORDERS, rows)
    server.heal()
    destination = restart(harness, destination)
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(1), order(2)], attempt="attempt-2"))
    assert harness.rows(ORDERS) == [order(1), order(2)]


def test_a_process_that_was_replaced_changes_nothing(begun: Step) -> None:
    harness, source, late = begun
    write(late, change(source, 0))
    successor = harness.open()
    successor.startup(replace(make_context(), epoch=1))
    batch = change(source, 1)
    write(successor, batch)
    with suppress(PenstockError):
        late.write_events(batch).result(30)
    later = change(source, 2)
    with suppress(PenstockError):
        late.write_events(later).result(30)
    expect(harness, 2)
    write(successor, later)
    expect(harness, 3)


@pytest.mark.trap(28)
def test_a_transaction_that_was_aborted_in_its_middle_is_not_committed_in_part(
    begun: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process hangs between two statements; its successor aborts the transaction, and then it goes on."""
    harness, source, late = begun
    merge = tasks._Merge.merge
    successors: list[Destination] = []

    def hang(self: Any) -> str:
        if not successors:
            successors.append(harness.open())
            successors[0].startup(replace(make_context(), epoch=1))
        return merge(self)

    monkeypatch.setattr(tasks._Merge, "merge", hang)
    with source.transaction() as transaction:
        transaction.truncate(ORDERS)
        transaction.insert(ORDERS, order(5))
    batch = source.batch()
    with suppress(PenstockError):
        late.write_events(batch).result(30)
    assert sorted(harness.rows(ORDERS) or [], key=repr) == [order(1), order(2)]
    write(successors[0], batch)
    assert harness.rows(ORDERS) == [order(5)]


class TwiceTasks(LocalTasks):
    """Runs every task twice, as Spark may do."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        LocalTasks.run(self, items, function, description=description)
        return LocalTasks.run(self, items, function, description=description)


@pytest.mark.parametrize("harness", ["mirror", "soft_delete", "history"], indirect=True)
def test_tasks_may_run_twice(harness: SnowflakeHarness, tmp_path: Path) -> None:
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context(tasks=TwiceTasks()))
    copy_all(source, destination, ranges=2)
    staged = harness.server.state()["files"]
    write(destination, change(source, 0))
    write(destination, change(source, 1))
    expect(harness, 2)
    assert harness.server.state()["files"] == staged


@pytest.mark.parametrize("harness", ["mirror", "soft_delete"], indirect=True)
def test_omitted_values_follow_rows_whose_keys_change_and_change_places(begun: Step) -> None:
    harness, source, destination = begun
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "one"))
        transaction.update(ORDERS, order(2, "two"))
    write(destination, source.batch())
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(9, Unchanged), old={"id": 1})
        transaction.update(ORDERS, order(1, Unchanged), old={"id": 2})
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 9})
        transaction.insert(ORDERS, order(3, "three"))
        transaction.update(ORDERS, order(3, Unchanged))
    write(destination, source.batch())
    assert sorted(harness.rows(ORDERS) or [], key=repr) == [order(1, "two"), order(2, "one"), order(3, "three")]
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(77, Unchanged))
    assert isinstance(error_of(destination, source.batch()), ValuesNotSent)
    assert len(harness.rows(ORDERS) or []) == 3


@pytest.mark.parametrize("restarts", [True, False])
def test_schema_changes_and_what_needs_a_new_copy(begun: Step, server: EmulatedSnowflake, restarts: bool) -> None:
    harness, source, destination = begun
    key, note, due = ORDERS.columns
    amount = Column(AMOUNT, 4, PostgresType(20, "int8"))
    wider = replace(ORDERS, columns=(key, replace(note, name="due"), replace(due, name="note"), amount))
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
        transaction.insert(wider, {"id": 4, "due": "text", "note": None, AMOUNT: 5})
    # The rows are committed, and the view is not replaced: the next batch or the next process does it.
    server.cut("^create or replace view")
    batch = source.batch()
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch)
    server.heal()
    if restarts:
        destination = restart(harness, destination)
    write(destination, batch)
    found = {row["id"]: row for row in harness.rows(wider) or []}
    assert found[4] == {"id": 4, "due": "text", "note": None, AMOUNT: 5}
    assert found[1] == {"id": 1, "due": "a note", "note": None, AMOUNT: None}
    # A column of an attempt that failed has left nothing behind that a column of another type could meet.
    as_text = replace(wider, columns=(*wider.columns[:3], replace(amount, type=PostgresType(25, "text"))))
    with source.transaction() as transaction:
        transaction.insert(as_text, {"id": 6, "due": "text", "note": None, AMOUNT: "007"})
    assert isinstance(error_of(destination, source.batch()), SchemaNotFollowed)


def test_a_value_that_snowflake_refuses_stops_its_table_only(
    begun: Step, server: EmulatedSnowflake, place: str
) -> None:
    """Somebody dropped the generation. The other table goes on, and no value is in the error."""
    harness, source, destination = begun
    [name] = [
        row["TABLE_NAME"]
        for row in server.rows(
            f"select TABLE_NAME from {DATABASE}.INFORMATION_SCHEMA.TABLES where TABLE_SCHEMA = '{place}'"
        )
        if row["TABLE_NAME"].startswith("PUBLIC__ORDERS__G")
    ]
    server.rows(f'drop table "{DATABASE}"."{place}"."{name}"')
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "a secret cell"))
        transaction.insert(LINES, LINE)
    error = error_of(destination, source.batch())
    assert isinstance(error, TableRejected)
    assert "secret" not in f"{error} {error.hint}"
    assert harness.rows(LINES) == [LINE] * 3


def test_check_finds_a_server_that_is_away_and_one_that_works(harness: SnowflakeHarness, server: EmulatedSnowflake):
    harness.open().probe()
    server.cut(".")
    with pytest.raises(DestinationUnavailable):
        harness.open().probe()
    server.heal()
    options = {**server.options(harness.place), "endpoint": "http://127.0.0.1:9", "timeout": 1.0}
    with pytest.raises((DestinationUnavailable, ConfigError)):
        SnowflakeDestination(**options).probe()


def killed(server: EmulatedSnowflake, place: str, folder: Path, mode: str, kills: Sequence[int]) -> None:
    """Kill processes after so many statements; at the end every change is there once."""
    harness = HARNESSES[mode](server, place, mode=mode)
    source, destination = ScriptedSource(folder / "segments"), harness.open()
    destination.startup(make_context())
    copy_all(source, destination)
    destination.shutdown()
    batches = tuple(change(source, number) for number in range(BATCHES))
    job = Job(server.options(place, mode=mode), batches)
    file = folder / "job"
    file.write_bytes(pickle.dumps(job))
    for count in kills:
        before = server.state()["seen"]
        process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("writer.py")), str(file)])
        wait_for(
            lambda: server.state()["seen"] >= before + count or process.poll() is not None,  # noqa: B023
            "a statement",
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    job.write()
    expect(harness, BATCHES)


@pytest.mark.trap(28)
@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_killed_processes_lose_and_repeat_nothing(server: EmulatedSnowflake, place: str, tmp_path: Path, mode: str):
    killed(server, place, tmp_path, mode, (18, 23))


@pytest.mark.soak
def test_many_killed_processes_lose_and_repeat_nothing(server: EmulatedSnowflake, tmp_path: Path) -> None:
    seed, trials = int(os.environ.get("PENSTOCK_SOAK_SEED", "1")), int(os.environ.get("PENSTOCK_SOAK_TRIALS", "20"))
    for trial in range(trials):
        chance = random.Random(seed + trial)
        mode = chance.choice(sorted(HARNESSES))
        folder = tmp_path / str(trial)
        folder.mkdir()
        kills = [chance.randint(4, 60) for _ in range(4)]
        print(f"trial {trial} seed {seed + trial} mode {mode} kills {kills}")
        killed(server, f"T_{seed}_{trial}", folder, mode, kills)
