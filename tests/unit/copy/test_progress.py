"""How far a copy is."""

from __future__ import annotations

from penstock.copy import CopyRange, CopyRows, Leaf, RangeReader
from penstock.copy.progress import CopyCounter, CopyProgress, RangeRead
from penstock.lsn import Lsn
from penstock.observe.reports import listening, tell
from penstock.schema import TableSchema
from penstock.source import SourceSettings


def test_progress_goes_by_bytes() -> None:
    now = 10.0
    progress = CopyProgress("public.t", ranges=4, bytes=400, clock=lambda: now, since=0.0)
    assert (progress.fraction, progress.seconds_left) == (0.0, None)
    progress = progress.advance(rows=7, bytes=100)
    assert (progress.fraction, progress.seconds, progress.seconds_left, progress.rows_done) == (0.25, 10.0, 30.0, 7)
    progress = progress.advance(rows=1, bytes=100, ranges=3)
    assert (progress.fraction, progress.seconds_left, progress.rows_done) == (1.0, 0.0, 8)


def test_the_time_that_is_left_runs_down_until_the_next_range() -> None:
    now = [0.0]
    progress = CopyProgress("public.t", ranges=4, bytes=400, clock=lambda: now[0], since=0.0)
    now[0] = 10.0
    progress = progress.advance(rows=1, bytes=100)
    seen: list[float | None] = []
    for now[0] in (10.0, 15.0, 50.0):
        seen.append(progress.seconds_left)
    assert seen == [30.0, 25.0, 0.0]


def test_empty_tables_are_done_when_their_range_is() -> None:
    progress = CopyProgress("public.t", ranges=1, bytes=0, clock=lambda: 1.0, since=0.0)
    assert progress.fraction == 0.0
    assert progress.advance(rows=0, bytes=0).fraction == 1.0


def ranges(*sizes: int) -> CopyRows:
    parts = tuple(CopyRange(1, index, Leaf(1, 1, 1, 1, (1,)), 0, None, size) for index, size in enumerate(sizes))
    schema = TableSchema(1, "public", "t", ())
    return CopyRows(RangeReader(SourceSettings("postgresql://h/d"), "snapshot", schema), "attempt", Lsn(1), parts)


def test_a_range_that_is_read_twice_counts_once() -> None:
    counter = CopyCounter(ranges(100, 300), clock=lambda: 1.0)
    with listening(counter.take):
        for index, rows in ((1, 30), (1, 30), (7, 1)):
            tell(RangeRead(index, rows))
    tell(RangeRead(0, 10))
    progress = counter.progress
    assert (progress.ranges_done, progress.rows_done, progress.bytes_done, progress.fraction) == (1, 30, 300, 0.75)


def test_whoever_listens_inside_hears_alone() -> None:
    outer: list[RangeRead] = []
    inner: list[RangeRead] = []
    with listening(outer.append):
        with listening(inner.append):
            tell(RangeRead(0, 1))
        tell(RangeRead(1, 2))
    assert (inner, outer) == ([RangeRead(0, 1)], [RangeRead(1, 2)])
