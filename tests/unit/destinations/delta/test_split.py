"""A large part of a batch that is split over tasks: the lake is the same as if one task had applied it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.batch import Rows
from penstock.changes.events import Unchanged
from penstock.changes.segment import segment_layout
from penstock.changes.steps import Segment
from penstock.destinations.base import TableResult
from penstock.destinations.delta import split, tasks
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.layout import Mode, new_layout
from penstock.destinations.delta.maintenance.cleanup import Vacuum, vacuum
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.delta.tasks import TableWork
from penstock.destinations.naming import FOLDERS
from penstock.errors import PenstockError, TasksFailed
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import LINES, ORDERS
from tests.support.examples import examples
from tests.unit.changes.random_changes import SCHEMAS
from tests.unit.destinations.delta.following import OPTIONS, PLANS, follow
from tests.unit.destinations.delta.orders import assert_durable, copied, expected, notes, order, started, write
from tests.unit.destinations.delta.reading import read_rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of six changes is large, and a table is always split again. Tasks unite the groups."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 5)
    monkeypatch.setattr(split, "GROUP_BYTES", 1)
    monkeypatch.setattr(split, "PATIENCE", 0)
    monkeypatch.setattr(split, "DRIVER_BYTES", 0)


FEW_KEYS = split.DRIVER_BYTES
"""Groups of the tests touch fewer keys than this."""


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    """Segments of two changes."""
    return ScriptedSource(tmp_path / "segments", segment_rows=2)


def jobs(running: LocalTasks, verb: str) -> int:
    """The number of jobs that did this."""
    return sum(each.startswith(verb) for each in running.jobs)


def change(destination: DeltaDestination, source: ScriptedSource, *rows: dict[str, Any]) -> TableResult:
    """Update these rows in one transaction."""
    with source.transaction() as transaction:
        for row in rows:
            transaction.update(ORDERS, row)
    return write(destination, source.batch())


def storage_of(lake: Path) -> LocalStorage:
    return LocalStorage(lake / FOLDERS.table(ORDERS))


def notes_left(lake: Path) -> list[str]:
    return [file.path for file in storage_of(lake).list(split.NOTES_FOLDER)]


@pytest.mark.trap(25, 26, 27, 28, 29, 30, 31, 32)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "mirror")
@settings(max_examples=examples(5), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    schema=st.sampled_from(SCHEMAS),
    plan=PLANS,
    in_driver=st.sampled_from([0, 100, FEW_KEYS]),
)
def test_readers_see_what_the_changes_say(
    options: dict[str, Any], seed: int, schema: TableSchema, plan: list[list[int]], in_driver: int
) -> None:
    split.DRIVER_BYTES = in_driver
    follow(seed, schema, options, plan, LocalTasks(parallel=3))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "mirror")
@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    schema=st.sampled_from(SCHEMAS),
    plan=PLANS,
    in_driver=st.sampled_from([0, 100, FEW_KEYS]),
)
def test_readers_see_what_the_changes_say_for_long(
    options: dict[str, Any], seed: int, schema: TableSchema, plan: list[list[int]], in_driver: int
) -> None:
    split.DRIVER_BYTES = in_driver
    follow(seed, schema, options, plan, LocalTasks(parallel=3))


@pytest.mark.usefixtures("small")
def test_a_later_group_replaces_rows_of_an_earlier_one(lake: Path, source: ScriptedSource) -> None:
    """The groups are united without a comparison: none of them needs a row from before it."""
    running = LocalTasks(parallel=3)
    destination = copied(lake, source, running)
    rows = [order(0, "a"), order(1, "a"), order(2, "a"), order(0, "b"), order(3, "a"), order(0, "c"), order(1, "c")]
    assert_durable(change(destination, source, *rows))
    assert notes(lake) == expected(n0="c", n1="c", n2="a", n3="a")
    assert (jobs(running, "write"), jobs(running, "compare"), jobs(running, "unite")) == (1, 0, 1)
    assert notes_left(lake) == []


@pytest.mark.trap(25)
@pytest.mark.usefixtures("small")
def test_an_omitted_value_of_a_row_that_no_other_group_touches_is_filled_in_parallel(
    lake: Path, source: ScriptedSource
) -> None:
    running = LocalTasks(parallel=3)
    destination = copied(lake, source, running)
    due = [order(number) | {"note": Unchanged, "due": date(2024, 1, 1)} for number in range(8)]
    assert_durable(change(destination, source, *due))
    assert notes(lake) == expected()
    assert (jobs(running, "compare"), jobs(running, "unite")) == (1, 1)
    assert_durable(change(destination, source, *due))
    assert jobs(running, "unite") == 2


@pytest.mark.trap(25)
def test_an_omitted_value_is_taken_from_the_row_of_an_earlier_group(
    lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a group is applied again, after the others; and so that this does not become the rule, the next large parts
    of the table are not split."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 5)
    monkeypatch.setattr(split, "GROUP_BYTES", 1)
    monkeypatch.setattr(split, "PATIENCE", 2)
    monkeypatch.setattr(split, "DRIVER_BYTES", 0)
    running = LocalTasks(parallel=3)
    destination = copied(lake, source, running)
    rows = [*(order(number, f"first {number}") for number in range(5)), order(1) | {"note": Unchanged}]
    assert_durable(change(destination, source, *rows))
    assert notes(lake) == expected(**{f"n{number}": f"first {number}" for number in range(5)})
    assert jobs(running, "unite") == 1
    for number in range(3):
        assert jobs(running, "unite") == 1
        assert_durable(change(destination, source, *(order(each, f"{number}") for each in range(6))))
        assert notes(lake) == expected(**{f"n{each}": f"{number}" for each in range(6)})
    assert jobs(running, "unite") == 2


@pytest.mark.trap(29)
@pytest.mark.usefixtures("small")
def test_groups_of_a_table_without_a_key_never_remove_the_same_row(lake: Path, source: ScriptedSource) -> None:
    running = LocalTasks(parallel=3)
    destination = started(lake, running)
    line = {"level": 1, "line": "same"}
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [line] * 10))
    with source.transaction() as transaction:
        for _ in range(7):
            transaction.delete(LINES, line)
    assert destination.write_events(source.batch()).result().tables == {}
    assert read_rows(lake, LINES) == [line] * 3
    assert (jobs(running, "compare"), jobs(running, "unite")) == (1, 1)


@pytest.mark.trap(33)
@pytest.mark.usefixtures("small")
def test_a_group_that_cannot_be_read_stops_its_table_and_nothing_of_it_is_visible(
    lake: Path, source: ScriptedSource
) -> None:
    destination = copied(lake, source, LocalTasks(parallel=3))
    position = destination.position(ORDERS.table_id)
    with source.transaction() as transaction:
        for number in range(9):
            transaction.update(ORDERS, order(number, "new"))
    batch = source.batch()
    segments = [segment for step in batch.tables[0].steps if isinstance(step, Rows) for segment in step.segments]
    for damaged in (segments[-1], segments[0]):
        content = Path(damaged.path).read_bytes()
        Path(damaged.path).write_bytes(b"")
        assert isinstance(write(destination, batch).error, PenstockError)
        Path(damaged.path).write_bytes(content)
        assert (notes(lake), destination.position(ORDERS.table_id)) == (expected(), position)
        assert notes_left(lake) == []
    assert_durable(write(destination, batch))
    assert notes(lake) == expected(**{f"n{number}": "new" for number in range(9)})


@pytest.mark.usefixtures("small")
def test_notes_that_a_crash_left_are_removed_by_vacuum(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source, CrashingTasks(parallel=3))
    with pytest.raises(TasksFailed):
        change(destination, source, *(order(number, "new") for number in range(9)))
    storage = storage_of(lake)
    storage.put(f"{split.NOTES_FOLDER}/{uuid.uuid4()}.keys", b"of a process that was killed")
    assert vacuum(Vacuum(storage, 0, time.time() + 1)).files > 1
    assert notes_left(lake) == []
    assert notes(lake) == expected()


class CrashingTasks(LocalTasks):
    """Executors that are lost when groups are united."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        if function is split.unite:
            raise TasksFailed("executors were lost")
        return super().run(items, function, description=description)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("deletion_vectors", "unite_jobs"), [(True, 0), pytest.param(False, 1, id="whole files are written again")]
)
def test_the_driver_unites_groups_with_few_keys_without_a_job(
    deletion_vectors: bool, unite_jobs: int, lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "DRIVER_BYTES", FEW_KEYS)
    running = LocalTasks(parallel=3)
    destination = copied(lake, source, running, deletion_vectors=deletion_vectors)
    assert_durable(change(destination, source, *(order(number % 7, f"note {number}") for number in range(21))))
    assert notes(lake) == expected(**{f"n{number}": f"note {number + 14}" for number in range(7)})
    assert jobs(running, "unite") == unite_jobs
    assert notes_left(lake) == []


@pytest.mark.parametrize("parallel", [1, 3])
def test_what_fits_into_a_slice_is_one_job_as_ever(parallel: int, lake: Path, source: ScriptedSource) -> None:
    running = LocalTasks(parallel=parallel)
    destination = copied(lake, source, running)
    before = len(running.jobs)
    assert_durable(change(destination, source, *(order(number, "new") for number in range(9))))
    assert len(running.jobs) == before + 1


@pytest.mark.usefixtures("small")
def test_without_other_tasks_nothing_is_split(lake: Path, source: ScriptedSource) -> None:
    running = LocalTasks(parallel=1)
    destination = copied(lake, source, running)
    assert_durable(change(destination, source, *(order(number, "new") for number in range(9))))
    assert jobs(running, "unite") == 0


@pytest.mark.parametrize(
    ("sizes", "parallel", "expected_groups"),
    [
        ([40, 40], 8, [[40], [40]]),
        ([10] * 8, 2, [[10] * 4, [10] * 4]),
        ([10] * 20, 8, [[10] * 3, [10] * 4, [10] * 3, [10] * 3, [10] * 4, [10] * 3]),
        ([90, 5, 5], 2, [[90], [5, 5]]),
        ([5, 5, 90], 2, [[5, 5], [90]]),
        ([30, 30], 8, None),
        ([100], 8, None),
    ],
)
def test_groups_have_about_the_same_size(
    sizes: list[int], parallel: int, expected_groups: list[list[int]] | None, tmp_path: Path
) -> None:
    """Sizes are in MiB; a group has at least 32, unless there would be only one."""
    key = OrderKey(Lsn(1), 0)
    segments = tuple(Segment(1, "public.t", "v", "file", 1, 1, key, key, memory=size << 20) for size in sizes)
    layout = new_layout(ORDERS, Mode.MIRROR, segment_layout(ORDERS).arrow_schema)
    # Steps end anywhere.
    steps = tuple(Rows(ORDERS, "v", some) for some in (segments[:1], segments[1:]) if some)
    work = TableWork(1, "public.t", LocalStorage(tmp_path), layout, steps, (), stages=(layout,) * len(steps))
    found = split.split(work, parallel)
    groups = (
        None
        if found is None
        else [
            [segment.memory >> 20 for step in group.work.steps if isinstance(step, Rows) for segment in step.segments]
            for group in found.groups
        ]
    )
    assert groups == expected_groups
    for group in () if found is None else found.groups:
        assert len(group.work.steps) == len(group.work.stages)
