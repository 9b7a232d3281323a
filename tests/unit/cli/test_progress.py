"""What `penstock run` tells about a pipeline."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

from penstock.cli.lag import Behind
from penstock.cli.progress import Progress, format_bytes
from penstock.copy.progress import CopyProgress
from penstock.lsn import Lsn
from penstock.state import DataSync, Errored, Init, Ready, RetryPolicy
from penstock.workers import ApplyStatus, CopyStatus

PLAN = CopyProgress("public.a", ranges=1, bytes=3 << 20, estimated_rows=1234)


def watched(phases, copies=None, changes=0, paused=False):
    return SimpleNamespace(
        phases=phases, copies=copies or {}, status=ApplyStatus(Lsn(1), Lsn(1), changes, 1, 0), paused=paused
    )


def test_copies_are_told_when_they_begin_and_end_and_each_once():
    said: list[str] = []
    pipeline = watched({"public.a": DataSync(), "public.b": Init()}, {"public.a": CopyStatus("1", PLAN)})
    progress = Progress(pipeline, lambda status: None, said.append, seconds=0)
    progress.update()
    progress.update()
    pipeline.copies = {"public.a": CopyStatus("1", PLAN, 2.0), "public.b": CopyStatus("2", PLAN, 0.1)}
    progress.update()
    progress.update()
    assert said == [
        "copying public.a: 3.0 MB, about 1,234 rows",
        "copied public.a: 3.0 MB, about 1,234 rows, in 2.0 s",
        "copied public.b: 3.0 MB, about 1,234 rows, in 0.1 s",
    ]


def test_the_status_line_has_tables_rate_and_lag():
    said: list[str] = []
    now = [0.0]
    failed = Errored("bad", None, RetryPolicy(), DataSync(), datetime.now(UTC))
    pipeline = watched({"a.a": Ready(), "a.b": Ready(), "a.c": failed})
    progress = Progress(
        pipeline, lambda status: Behind(2048, 1.25), said.append, seconds=10, clock=lambda: now[0]
    )  # fmt: skip
    progress.update()
    assert said == ["stopped a.c: bad"]
    now[0], pipeline.status = 8.0, ApplyStatus(Lsn(1), Lsn(1), 1000, 1, 0)
    progress.update()
    now[0], pipeline.status = 10.0, ApplyStatus(Lsn(1), Lsn(1), 5000, 1, 0)
    progress.update()
    assert said[1:] == ["streaming: 2 of 3 tables ready, 1 errored; 2,000 changes/s; lag 2.0 kB, 1.2 s"]


def test_sizes_for_people():
    assert [format_bytes(size) for size in (0, 1023, 1536, 300 << 20, 5 << 50)] == [
        "0 B", "1023 B", "1.5 kB", "300 MB", "5120 TB"
    ]  # fmt: skip
