"""How far a copy is."""

from __future__ import annotations

from penstock.copy.progress import CopyProgress


def test_progress_goes_by_bytes() -> None:
    now = 10.0
    progress = CopyProgress("public.t", ranges=4, bytes=400, clock=lambda: now, since=0.0)
    assert (progress.fraction, progress.seconds_left) == (0.0, None)
    progress = progress.advance(rows=7, bytes=100)
    assert (progress.fraction, progress.seconds, progress.seconds_left, progress.rows_done) == (0.25, 10.0, 30.0, 7)
    progress = progress.advance(rows=1, bytes=100, ranges=3)
    assert (progress.fraction, progress.seconds_left, progress.rows_done) == (1.0, 0.0, 8)


def test_empty_tables_are_done_when_their_range_is() -> None:
    progress = CopyProgress("public.t", ranges=1, bytes=0, clock=lambda: 1.0, since=0.0)
    assert progress.fraction == 0.0
    assert progress.advance(rows=0, bytes=0).fraction == 1.0
