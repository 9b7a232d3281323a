"""Random transactions, in batches cut anywhere, with restarts and replays: what readers see is what the changes say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes import columns
from penstock.changes.batch import Rows
from penstock.changes.events import Unchanged
from penstock.changes.steps import Segment
from penstock.destinations.base import Tasks
from penstock.destinations.delta import destination as planning
from penstock.destinations.delta import files, fill, tasks, write
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import TasksFailed
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.workers.process_tasks import ProcessTasks
from tests.support.examples import examples
from tests.unit.changes.random_changes import KEYED, SCHEMAS
from tests.unit.destinations.delta.following import OPTIONS, PLANS, follow
from tests.unit.destinations.delta.reading import read_rows, replay_history


@pytest.mark.trap(25, 26, 27, 28, 29, 31, 32)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "mirror")
@settings(max_examples=examples(5), deadline=None)
@given(seed=st.integers(0, 1 << 32), schema=st.sampled_from(SCHEMAS), plan=PLANS)
def test_readers_see_what_the_changes_say(
    options: dict[str, Any], seed: int, schema: TableSchema, plan: list[list[int]]
) -> None:
    follow(seed, schema, options, plan)


def test_a_transaction_of_gigabytes_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large is a matter of some numbers; here they are small."""
    monkeypatch.setattr(columns, "LARGE_BYTES", 10)
    monkeypatch.setattr(write, "PIECE_BYTES", 200)
    monkeypatch.setattr(tasks, "SLICE_ROWS", 5)
    monkeypatch.setattr(fill, "FILL_BYTES", 10)
    monkeypatch.setattr(files, "_WIDE_ROW_BYTES", 1)
    monkeypatch.setattr(files, "_WIDE_GROUP_BYTES", 200)
    for number, options in enumerate(OPTIONS):
        for seed, schema in enumerate(SCHEMAS[number % 2 :: 2]):
            follow(seed, schema, options, [[40, 3], [5, 30]])


def peak_while_written(destination: DeltaDestination, source: ScriptedSource) -> int:
    """Write the changes of a source, and return the peak memory of Arrow meanwhile."""
    batch, before = source.batch(), pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        assert destination.write_events(batch).result().tables == {}
    finally:
        pa.set_memory_pool(before)
    return pool.max_memory()


def peak_of(folder: Path, mode: str, count: int) -> int:
    """Return the peak memory of Arrow when one transaction inserts `count` rows and updates them."""
    source = ScriptedSource(folder / "segments", segment_rows=125)
    destination = DeltaDestination(folder / "lake", maintenance=False, mode=mode)
    destination.startup(make_context())
    destination.drop_table_for_copy(KEYED, "attempt-1")
    destination.write_table_rows(KEYED, source.copy(KEYED, []))
    row: dict[str, Any] = {column.name: None for column in KEYED.columns}
    with source.transaction() as transaction:
        for number in range(count):
            transaction.insert(KEYED, row | {"id": number, "note": "n" * 200})
        for number in range(count):
            transaction.update(KEYED, row | {"id": number, "note": "n" * 100 + str(number)})
    peak = peak_while_written(destination, source)
    rows = read_rows(folder / "lake", KEYED) if mode != "history" else replay_history(folder / "lake", KEYED)
    assert sorted(each["note"] for each in rows or []) == sorted("n" * 100 + str(each) for each in range(count))
    return peak


@pytest.mark.parametrize("mode", ["mirror", "soft_delete", "history"])
def test_a_task_has_only_a_slice_in_memory(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak is the same for a transaction that is eight times as large."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 250)
    small, large = (peak_of(tmp_path / str(count), mode, count) for count in (500, 2_000))
    assert large < 1.5 * small


def peak_of_omitted(folder: Path, mode: str, count: int) -> int:
    """Return the peak memory of Arrow when one transaction updates `count` rows and omits their large values."""
    source = ScriptedSource(folder / "segments")
    row: dict[str, Any] = {column.name: None for column in KEYED.columns} | {"note": "n" * 20_000}
    destination = DeltaDestination(folder / "lake", maintenance=False, mode=mode)
    destination.startup(make_context())
    destination.drop_table_for_copy(KEYED, "attempt-1")
    destination.write_table_rows(KEYED, source.copy(KEYED, [row | {"id": number} for number in range(count)]))
    with source.transaction() as transaction:
        for number in range(count):
            transaction.update(KEYED, row | {"id": number, "detail": "new", "note": Unchanged})
    peak = peak_while_written(destination, source)
    rows = read_rows(folder / "lake", KEYED) or []
    assert [(each["note"], each["detail"]) for each in rows] == [("n" * 20_000, "new")] * count
    return peak


@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_omitted_values_are_read_in_parts(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of a few kilobytes may omit values of gigabytes; its peak is the same for four times the rows."""
    monkeypatch.setattr(fill, "FILL_BYTES", 1 << 20)
    monkeypatch.setattr(files, "_WIDE_GROUP_BYTES", 200_000)
    small, large = (peak_of_omitted(tmp_path / str(count), mode, count) for count in (400, 1_600))
    assert large < 1.5 * small


def test_a_slice_is_limited_by_the_memory_of_its_rows() -> None:
    """Segments are compressed: ten of a megabyte may have gigabytes of rows."""
    key = OrderKey(Lsn(1), 0)
    segment = Segment(1, "public.t", "v", "file", 1, 1 << 20, key, key, memory=tasks.SLICE_BYTES // 2)
    parts = tasks.slices([Rows(KEYED, "v", (segment,) * 10)])
    assert [[len(step.segments) for step in part] for part in parts if isinstance(part, list)] == [[2]] * 5


@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_a_stop_does_not_wait_for_a_huge_transaction(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after a slice, nothing of it is visible, and the next process writes it as a whole."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 5)
    monkeypatch.setattr(planning, "SHARED_ROWS", 20)
    source, written = ScriptedSource(tmp_path / "segments", segment_rows=5), 0
    running = ProcessTasks()
    row: dict[str, Any] = {column.name: None for column in KEYED.columns}

    def start(tasks_: Tasks) -> DeltaDestination:
        destination = DeltaDestination(tmp_path / "lake", maintenance=False, mode=mode)
        destination.startup(make_context(tasks=tasks_))
        return destination

    def write_and_stop(*arguments: Any, **options: Any) -> Any:
        nonlocal written
        written += 1
        running.close()
        return write_rows(*arguments, **options)

    destination = start(running)
    destination.drop_table_for_copy(KEYED, "attempt-1")
    destination.write_table_rows(KEYED, source.copy(KEYED, []))
    before = DeltaLog(LocalStorage(tmp_path / "lake" / FOLDERS.table(KEYED)), "keyed").refresh()
    with source.transaction() as transaction:
        for number in range(100):
            transaction.insert(KEYED, row | {"id": number})
    batch = replace(source.batch(), alone=True)
    write_rows = write.write_rows
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "write_rows", write_and_stop)
        error = destination.write_events(batch).result().of(KEYED.table_id).error
    assert isinstance(error, TasksFailed)
    assert written == 1
    after = DeltaLog(LocalStorage(tmp_path / "lake" / FOLDERS.table(KEYED)), "keyed").refresh()
    assert (before and before.version) == (after and after.version)
    assert start(ProcessTasks()).write_events(batch).result().tables == {}
    rows = read_rows(tmp_path / "lake", KEYED) if mode != "history" else replay_history(tmp_path / "lake", KEYED)
    assert sorted(each["id"] for each in rows or []) == list(range(100))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "mirror")
@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 1 << 32), schema=st.sampled_from(SCHEMAS), plan=PLANS)
def test_readers_see_what_the_changes_say_for_long(
    options: dict[str, Any], seed: int, schema: TableSchema, plan: list[list[int]]
) -> None:
    follow(seed, schema, options, plan)
