"""Random transactions, in batches cut anywhere, with restarts and replays: what readers see is what the changes say."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes import columns
from penstock.changes.batch import EventBatch, Rows
from penstock.changes.events import Unchanged
from penstock.changes.steps import Segment
from penstock.destinations.base import Tasks
from penstock.destinations.batch_events import batch_events
from penstock.destinations.delta import destination as planning
from penstock.destinations.delta import files, fill, tasks, write
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import FOLDERS
from penstock.errors import TasksFailed
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.workers.process_tasks import ProcessTasks
from tests.support.examples import examples
from tests.unit.changes.random_changes import KEYED, SCHEMAS, RandomTable
from tests.unit.destinations.delta.reading import read_rows, read_table, replay_history

OPTIONS: list[dict[str, Any]] = [
    {},
    {"deletion_vectors": False},
    {"mode": "soft_delete"},
    {"mode": "soft_delete", "deletion_vectors": False},
    {"mode": "history"},
]


def frozen(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


class Model:
    """Rows by changes one by one, and those that are gone: the last state of a key, or each row of a table without."""

    def __init__(self, schema: TableSchema, rows: list[dict[str, Any]]) -> None:
        self.schema = schema
        self.mirror = MirrorTable(schema, rows)
        self.gone: list[dict[str, Any]] = []

    def apply(self, batch: EventBatch) -> None:
        for event in batch_events(batch):
            before = self.mirror.rows()
            self.mirror.apply(event)
            self._bury(before, self.mirror.rows())

    def _bury(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        if not self.schema.key:
            # An update to the same cells is a removal and a new row, too; it does not show here, nor in the lake.
            left = frozen(after)
            for row in before:
                if left[text := repr(sorted(row.items()))]:
                    left[text] -= 1
                else:
                    self.gone.append(row)
            return
        there = {self._key(row) for row in after}
        self.gone = [row for row in self.gone if self._key(row) not in there]
        self.gone += [row for row in before if self._key(row) not in there]

    def _key(self, row: dict[str, Any]) -> str:
        return repr([row[column.name] for column in self.schema.key])


class Follower:
    """A destination that is started again now and then, and gets batches twice."""

    def __init__(self, folder: Path, schema: TableSchema, options: dict[str, Any], random: Random) -> None:
        self.lake = folder / "lake"
        self.schema = schema
        self.options = options
        self.random = random
        self.source = ScriptedSource(folder / "segments", segment_rows=random.choice([None, 3]))
        self.table = RandomTable(schema, random)
        first = self.table.fill(6)
        self.destination = self._open()
        self.destination.drop_table_for_copy(schema, "attempt-1")
        self.destination.write_table_rows(schema, self.source.copy(schema, first, ranges=2))
        self.model = Model(schema, first)
        self.cuts: list[Lsn] = [self.source.position]

    def step(self, transactions: list[int]) -> None:
        for changes in transactions:
            self.table.transact(self.source, changes)
        batch = self.source.batch()
        self.model.apply(batch)
        if self.random.random() < 0.3:
            self.destination = self._open()
        # Also together with what came before, which is in already.
        again = self.source.batch(self.random.choice(self.cuts), batch.end)
        for each in (batch, again) if self.random.random() < 0.5 else (again, batch):
            assert self.destination.write_events(each).result().tables == {}
        self.cuts.append(batch.end)
        if self.random.random() < 0.5:
            self.compact()
        self.check()

    def compact(self) -> None:
        log = DeltaLog(LocalStorage(self.lake / FOLDERS.table(self.schema)))
        compact(log, LocalTasks(), CompactionSettings(min_files=2, dead_fraction=0.1))

    def check(self) -> None:
        expected = self.model.mirror.rows()
        if self.options.get("mode") == "history":
            assert frozen(replay_history(self.lake, self.schema) or []) == frozen(expected)
            changes = read_table(self.lake, self.schema)
            assert changes is not None
            keys = list(zip(changes["_commit_lsn"].to_pylist(), changes["_ordinal"].to_pylist(), strict=True))
            keys = [key for key in keys if key[1] >= 0]
            assert len(keys) == len(set(keys)), "a change is there twice"
            return
        assert frozen(read_rows(self.lake, self.schema) or []) == frozen(expected)
        if self.options.get("mode") == "soft_delete":
            everything = frozen(read_rows(self.lake, self.schema, deleted=True) or [])
            if self.schema.key:
                assert everything == frozen([*expected, *self.model.gone])
            else:
                assert not frozen([*expected, *self.model.gone]) - everything

    def _open(self) -> DeltaDestination:
        destination = DeltaDestination(self.lake, maintenance=False, **self.options)
        destination.startup(make_context())
        return destination


def follow(seed: int, schema: TableSchema, options: dict[str, Any], plan: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        follower = Follower(Path(folder), schema, options, Random(seed))
        follower.check()
        for transactions in plan:
            follower.step(transactions)


PLANS = st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=4), min_size=1, max_size=4)


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
