"""Delta tables whose copy is continued: what the next attempt takes over, and what it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.events import Unchanged
from penstock.copy.plan import CopyRange, Leaf, plan_ranges
from penstock.copy.resume import FinishedRanges, KeyRange, ResumableCopy, blocks_by_heap, usable
from penstock.destinations.delta import copy as delta_copy
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.maintenance.cleanup import Vacuum, vacuum
from penstock.destinations.delta.resume import COPIES_FOLDER, forget_copies
from penstock.destinations.delta.storage import LocalStorage
from penstock.errors import PenstockError, TableRewritten
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import ORDERS
from tests.unit.destinations.delta.orders import notes, order, started

COPY = "copy-1"
BEFORE = [order(number) for number in range(10)]
"""One in each block."""
AFTER = [*BEFORE[:1], None, BEFORE[2], order(11), BEFORE[4], order(55), *BEFORE[6:], order(1, "new")]
"""One was updated and moved, 3 was deleted, 5 has the key 55, and 11 took the place of 3."""


@dataclass(frozen=True)
class BlockReader:
    """Reads blocks of one row. For keys it returns every row, as a server would that considers all of them equal."""

    blocks: tuple[pa.RecordBatch, ...]
    broken: int | None = None

    def read(self, part: CopyRange | KeyRange) -> Iterator[pa.RecordBatch]:
        yield from self.blocks if isinstance(part, KeyRange) else self.blocks[part.first_block : part.end_block]
        if part.index == self.broken:
            raise PenstockError("the connection is lost")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_copy, "FILE_BYTES", 1)


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "spool")


def attempt(
    source: ScriptedSource,
    destination: DeltaDestination,
    name: str,
    rows: Sequence[Any],
    *,
    changes: Callable[[], Any] = list,
    broken: int | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[FinishedRanges, ...]:
    """Copy blocks with one row each, and return what was taken over."""
    destination.drop_table_for_copy(ORDERS, name)
    finished = usable(destination.finished_ranges(ORDERS, COPY), "same")
    leaf = Leaf(7, 1, len(rows), 10 * len(rows), ())
    copy = source.copy(ORDERS, [row for row in rows if row is not None], attempt=name)
    blocks = tuple(
        source.copy(ORDERS, [row]).ranges[0].batches[0] if row is not None else copy.ranges[0].batches[0][:0]
        for row in rows
    )
    ranges: Any = plan_ranges(ORDERS.table_id, [leaf], range_bytes=20, finished=blocks_by_heap(finished))
    resumable = ResumableCopy(COPY, "same", changes, (leaf,), finished)
    reader: Any = BlockReader(blocks, broken)
    meanwhile()
    destination.write_table_rows(ORDERS, replace(copy, ranges=ranges, reader=reader, resumable=resumable))
    return finished


def interrupted(source: ScriptedSource, destination: DeltaDestination) -> None:
    """Read four of five ranges."""
    with pytest.raises(PenstockError, match="connection is lost"):
        attempt(source, destination, "11111111", BEFORE, broken=4)


def changed(source: ScriptedSource) -> Callable[[], Any]:
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "new"))
        transaction.delete(ORDERS, {"id": 3})
        transaction.update(ORDERS, order(55), old={"id": 5})
        transaction.insert(ORDERS, order(11))
    steps = [step for changes in source.batch().tables for step in changes.steps]
    return partial(list, steps)


def records(lake: Path) -> list[Path]:
    return sorted(lake.rglob(f"{COPIES_FOLDER}/*/*.json"))


@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
@pytest.mark.parametrize("deletion_vectors", [True, False])
def test_a_resumed_copy_has_the_rows_of_its_last_snapshot(
    tmp_path: Path, source: ScriptedSource, mode: str, deletion_vectors: bool
):
    destination = started(tmp_path / "lake", mode=mode, deletion_vectors=deletion_vectors)
    interrupted(source, destination)
    assert len(records(tmp_path)) == 4
    changes = changed(source)
    finished = attempt(source, destination, "22222222", AFTER, changes=changes)
    assert sorted(blocks[1:3] for each in finished for blocks in each.blocks) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert notes(tmp_path / "lake") == {row["id"]: row["note"] for row in AFTER if row is not None}
    assert not records(tmp_path)


def test_several_attempts_add_up(tmp_path: Path, source: ScriptedSource):
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    changes = changed(source)
    with pytest.raises(PenstockError, match="changes are gone"):
        attempt(source, destination, "22222222", AFTER, changes=partial(gone, "changes are gone"))
    finished = attempt(source, started(tmp_path / "lake"), "33333333", AFTER, changes=changes)
    assert len(finished) > 4
    assert notes(tmp_path / "lake") == {row["id"]: row["note"] for row in AFTER if row is not None}


def gone(text: str) -> Any:
    raise PenstockError(text)


@pytest.mark.parametrize("truncates", [True, False])
def test_a_change_without_a_key_ends_the_attempt(tmp_path: Path, source: ScriptedSource, truncates: bool):
    """Nobody knows which rows it changed, so the copy starts again."""
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    with source.transaction() as transaction:
        if truncates:
            transaction.truncate(ORDERS)
        else:
            transaction.update(ORDERS, {**order(1), "id": Unchanged})
    steps = [step for changes in source.batch().tables for step in changes.steps]
    with pytest.raises(PenstockError):
        attempt(source, destination, "22222222", AFTER, changes=partial(list, steps))


def test_ranges_of_a_committed_copy_are_not_taken_over(tmp_path: Path, source: ScriptedSource):
    """The process may end between the commit and storing that the copy is complete."""
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    kept = {path: path.read_bytes() for path in records(tmp_path)}
    attempt(source, destination, "22222222", BEFORE)
    for number, live in enumerate([True, False]):
        for path, content in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # The second time, the files were part of the table, but are no longer.
        assert not attempt(source, destination, f"{number}{number}{live!s:_<6}", AFTER)
        assert notes(tmp_path / "lake") == {row["id"]: row["note"] for row in AFTER if row is not None}


def test_a_record_without_its_file_does_not_count(tmp_path: Path, source: ScriptedSource):
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    files = sorted(tmp_path.rglob("copy-11111111-*.parquet"))
    files[0].unlink()
    assert len(attempt(source, destination, "22222222", BEFORE)) == 3
    assert notes(tmp_path / "lake") == {row["id"]: row["note"] for row in BEFORE}


def test_a_file_that_is_deleted_before_the_commit_ends_the_attempt(tmp_path: Path, source: ScriptedSource):
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    file = min(tmp_path.rglob("copy-11111111-*.parquet"))
    with pytest.raises(TableRewritten, match="were deleted"):
        attempt(source, destination, "22222222", BEFORE, meanwhile=file.unlink)


def test_vacuum_spares_files_of_a_copy_that_may_be_resumed(tmp_path: Path, source: ScriptedSource):
    destination = started(tmp_path / "lake")
    interrupted(source, destination)
    (log,) = tmp_path.rglob("_delta_log")
    storage, later = LocalStorage(log.parent), time.time() + 60
    before = sorted(tmp_path.rglob("copy-11111111-*"))
    assert vacuum(Vacuum(storage, 0.0, later)).files == 0
    assert sorted(tmp_path.rglob("copy-11111111-*")) == before
    forget_copies(storage)
    assert vacuum(Vacuum(storage, 0.0, later)).files == len(before)
