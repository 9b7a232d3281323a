"""Compares a table of the source, in a snapshot, with the version that a destination has pinned.

First, tasks read both sides and return sums of digests by bucket (`scan`). If they are equal, the comparison is done.
Otherwise tasks read the buckets that differ again and compare their rows one by one (`differences`). The amount of data
that passes through the driver depends on the number of pieces and buckets, never on the number of rows.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import field_names
from penstock.comparison.differences import Compared, Files, Key, compare_buckets, describe
from penstock.comparison.report import Counts, Difference, TableReport
from penstock.comparison.scan import (
    BucketSums,
    Collected,
    Collection,
    Piece,
    Scan,
    Side,
    SideRows,
    collect_piece,
    find_buckets,
    sum_piece,
)
from penstock.comparison.schemas import ColumnComparison, ComparedColumn, compare_columns
from penstock.comparison.source_rows import SourceReader
from penstock.copy import CopyRows
from penstock.copy.progress import RangeRead
from penstock.destinations.base import PinnedTable, Tasks
from penstock.errors import ConfigError
from penstock.observe.reports import listening
from penstock.workers.process_tasks import ProcessTasks

MAX_PIECES = 256
"""For each side: every piece returns its sums."""
_BUCKET_ROWS = 1024
_ROW_BYTES = 200
_BUCKETS = (16, 8192)
_DETAILED_ROWS = 200_000
"""Approximate number of rows that are written with all their cells, so that some can be shown."""
_COMPARED_ROWS = 1_000_000
"""Approximate number of rows that one task compares at a time."""


@dataclass(frozen=True, slots=True)
class Around:
    """How to compare with a destination that was pinned before the snapshot, and again after it."""

    later: PinnedTable
    recent: tuple[int, int]
    """Transactions before the first number had ended when the destination was first pinned; the snapshot shows no
    transaction from the second number on."""


OnProgress = Callable[[float], None]
"""Receives the fraction that is done."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How tables are compared."""

    sample: float = 1.0
    show_values: bool = False
    shown: int = 20
    """How many differing rows of each table are described."""
    work_folder: Path | None = None
    """Folder for the rows that differ. None means the system's folder for temporary files."""
    is_shared: bool = True
    """False if tasks run on machines that do not see this folder: then this process reads the rows that differ."""

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample is {self.sample}, but a fraction of the rows is above 0 and at most 1")


def compare_table(
    rows: CopyRows,
    pinned: PinnedTable,
    tasks: Tasks,
    settings: CompareSettings | None = None,
    on_progress: OnProgress | None = None,
    around: Around | None = None,
) -> TableReport:
    """Compare a table at the position of `pinned`, or `around` it; `rows` says how its source is split into ranges."""
    settings = settings or CompareSettings()
    began = time.monotonic()
    columns = compare_columns(rows, pinned)
    if not columns.rows:
        return _report(rows, columns, Counts(), (), began)
    scan = plan_scan(rows, pinned, columns.same, settings, around)
    pieces = _plan_pieces(rows.ranges, pinned.parts)
    watched = _Watched(tasks, len(pieces), on_progress or _ignore)
    sums = {side: BucketSums.nothing(scan.buckets) for side in (Side.SOURCE, Side.DESTINATION)}
    found = watched.run(pieces, partial(sum_piece, scan), description=f"compare {scan.table}")
    for piece, each in zip(pieces, found, strict=True):
        sums[piece.side].merge(each)
    suspicious = sums[Side.SOURCE].differing(sums[Side.DESTINATION])
    counts = Counts(equal=int(sums[Side.SOURCE].counts[~suspicious].sum()))
    differences: Sequence[Difference] = ()
    if suspicious.any():
        sizes = sums[Side.SOURCE].counts + sums[Side.DESTINATION].counts
        if around is not None:
            groups = _grouped(around.later.parts)
            pieces += [Piece(len(pieces) + at, Side.LATER, group) for at, group in enumerate(groups)]
        if not settings.is_shared:
            watched = _Watched(ProcessTasks(), len(pieces), on_progress or _ignore)
        more, differences = _look_closer(scan, pieces, watched, suspicious, sizes, settings)
        counts += more
    return _report(rows, columns, counts, differences, began)


def _report(
    rows: CopyRows, columns: ColumnComparison, counts: Counts, differences: Sequence[Difference], began: float
) -> TableReport:
    return TableReport(
        str(rows.schema),
        counts,
        tuple(differences),
        time.monotonic() - began,
        columns=columns.differences,
        not_compared=columns.not_compared,
    )


def plan_scan(
    rows: CopyRows,
    pinned: PinnedTable,
    columns: Sequence[ComparedColumn],
    settings: CompareSettings,
    around: Around | None = None,
) -> Scan:
    """Return how these columns of both sides of a table are read."""
    schema = rows.schema
    key = {column.attnum for column in schema.key}
    numbers = [each.column.column.attnum for each in columns]
    return Scan(
        table=str(schema),
        columns=pa.schema([pa.field(each.column.field_name, each.type) for each in columns]),
        key=tuple(place for place, attnum in enumerate(numbers) if attnum in key),
        sides={
            Side.SOURCE: SideRows(
                SourceReader(rows.reader, around is not None), tuple(each.column.field_name for each in columns)
            ),
            Side.DESTINATION: SideRows(pinned.reader, tuple(each.destination for each in columns)),
            **({} if around is None else {Side.LATER: _side_of(around.later, numbers)}),
        },
        buckets=_count_buckets(rows),
        sample=settings.sample,
        recent=None if around is None else around.recent,
    )


def _side_of(pinned: PinnedTable, numbers: Sequence[int]) -> SideRows:
    names = dict(zip((column.attnum for column in pinned.schema.columns), field_names(pinned.schema), strict=True))
    return SideRows(pinned.reader, tuple(names.get(attnum) for attnum in numbers))


def _look_closer(
    scan: Scan,
    pieces: Sequence[Piece],
    tasks: _Watched,
    suspicious: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    settings: CompareSettings,
) -> tuple[Counts, Sequence[Difference]]:
    """Read the buckets that differ again and compare their rows one by one."""
    with _work_folder(settings.work_folder) as folder:
        collection = Collection(folder, suspicious, _detailed(suspicious, sizes))
        tasks.begin(len(pieces))
        collected = tasks.run(pieces, partial(collect_piece, scan, collection), description=f"compare {scan.table}")
        files = _join(folder, collected, list(scan.sides))
        groups = _group_buckets(suspicious, sizes)
        compared: list[Compared] = tasks.run(
            groups, partial(compare_buckets, files, settings.shown), description=f"compare {scan.table}"
        )
        counts = sum((each.counts for each in compared), Counts())
        keys = list(itertools.islice((key for each in compared for key in each.keys), settings.shown))
        unseen = _buckets_of(keys, scan.buckets) & ~collection.detailed
        if unseen.any():
            collection = Collection(folder, unseen, unseen)
            again = tasks.run(pieces, partial(collect_piece, scan, collection), description=f"compare {scan.table}")
            files = _join(folder, [*collected, *again], list(scan.sides))
        [differences] = tasks.run(
            [keys],
            partial(_describe, scan, files, settings.show_values),
            description=f"describe differences in {scan.table}",
        )
        return counts, differences[: settings.shown]


def _describe(scan: Scan, files: Files, show_values: bool, keys: list[Key]) -> list[Difference]:
    return describe(scan, files, keys, show_values)


class _Watched:
    """Runs pieces in tasks that leave room for others, and reports progress."""

    def __init__(self, tasks: Tasks, pieces: int, on_progress: OnProgress) -> None:
        self._tasks = tasks
        self._on_progress = on_progress
        self._pieces = pieces
        self._done: set[int] = set()

    def begin(self, pieces: int) -> None:
        """Start another pass over all pieces."""
        self._pieces, self._done = pieces, set()

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        with listening(self._take), self._tasks.copying():
            return self._tasks.run(items, function, description=description)

    def _take(self, read: object) -> None:
        if not isinstance(read, RangeRead):
            return
        self._done.add(read.index)
        self._on_progress(len(self._done) / max(1, self._pieces))


def _plan_pieces(ranges: Sequence[Any], parts: Sequence[Any]) -> list[Piece]:
    """Alternate between the sides, because only the source's pieces wait for the server."""
    sides = [
        [(Side.SOURCE, group) for group in _grouped(ranges)],
        [(Side.DESTINATION, group) for group in _grouped(parts)],
    ]
    turns = [each for pair in itertools.zip_longest(*sides) for each in pair if each is not None]
    return [Piece(index, side, group) for index, (side, group) in enumerate(turns)]


def _grouped(items: Sequence[Any]) -> list[tuple[Any, ...]]:
    count = min(len(items), MAX_PIECES)
    borders = [len(items) * number // max(1, count) for number in range(count + 1)]
    return [tuple(items[first:end]) for first, end in itertools.pairwise(borders)]


def _count_buckets(rows: CopyRows) -> int:
    """Estimate from the server's statistics, or from the table's size if it has no statistics."""
    low, high = _BUCKETS
    estimated = max(rows.estimated_rows or 0, rows.estimated_bytes // _ROW_BYTES)
    return min(high, max(low, estimated // _BUCKET_ROWS))


def _detailed(suspicious: NDArray[np.bool_], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Choose some of the buckets that differ, at least one, with a limited number of rows in total."""
    at = np.flatnonzero(suspicious)
    few = at[: max(1, int(np.searchsorted(np.cumsum(sizes[at]), _DETAILED_ROWS, side="right")))]
    chosen = np.zeros(len(suspicious), np.bool_)
    chosen[few] = True
    return chosen


def _buckets_of(keys: Sequence[Key], buckets: int) -> NDArray[np.bool_]:
    found = np.zeros(buckets, np.bool_)
    if keys:
        found[find_buckets(np.array(keys, np.uint64).T, buckets)] = True
    return found


def _group_buckets(suspicious: NDArray[np.bool_], sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ranges of buckets, each with about as many rows as one task should compare."""
    at = np.flatnonzero(suspicious)
    numbers = np.cumsum(sizes[at]) // _COMPARED_ROWS
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    return [(int(at[first]), int(at[end - 1]) + 1) for first, end in zip(starts, [*starts[1:], len(at)], strict=True)]


def _join(folder: str, collected: Sequence[Collected], sides: Sequence[Side]) -> Files:
    def names(side: Side, rows: bool) -> tuple[str, ...]:
        found = [each.rows if rows else each.digests for each in collected if each.side is side]
        return tuple(itertools.chain.from_iterable(found))

    return Files(
        folder,
        digests={side: names(side, rows=False) for side in sides},
        rows={side: names(side, rows=True) for side in sides},
    )


@contextmanager
def _work_folder(parent: Path | None) -> Iterator[str]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="penstock-verify-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ignore(fraction: float) -> None:
    pass
