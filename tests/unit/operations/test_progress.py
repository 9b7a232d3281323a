"""What `penstock run` has to tell about a pipeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from penstock.config.units import format_bytes, format_seconds
from penstock.copy.progress import CopyProgress
from penstock.errors import ConfigError
from penstock.lsn import Lsn
from penstock.operations.lag import Behind
from penstock.operations.progress import Progress
from penstock.source.slots import Blocker
from penstock.state import DataSync, Errored, IndexBuild, IndexStatus, Init, Ready, RetryPolicy
from penstock.workers import ApplyStatus, CopyStatus, Outage, SnapshotWait

PLAN = CopyProgress("public.a", ranges=4, bytes=4 << 20, estimated_rows=1234, clock=lambda: 10.0, since=0.0)
HALF = PLAN.advance(rows=700, bytes=2 << 20, ranges=2)
WHOLE = HALF.advance(rows=500, bytes=2 << 20, ranges=2)


def watched(phases: Any, copies: Any = None, changes: int = 0, paused: bool = False) -> Any:
    status = ApplyStatus(Lsn(1), Lsn(1), changes, 1, 0)
    return SimpleNamespace(
        output="tables",
        table_ids={},
        phases=phases,
        copies=copies or {},
        waits={},
        status=status,
        paused=paused,
        error=None,
    )


def test_copies_are_told_when_they_begin_and_end_and_each_once():
    pipeline = watched({"public.a": DataSync(), "public.b": Init()}, {"public.a": CopyStatus("1", PLAN)})
    progress = Progress(pipeline, lambda status: None)
    said = [notice.text for _ in range(2) for notice in progress.look()[0]]
    assert said == ["copying public.a: 4.0 MB, about 1,234 rows"]
    pipeline.copies = {"public.a": CopyStatus("1", HALF)}
    notices, look = progress.look()
    assert notices == []
    assert look is not None
    assert look.copies == (HALF,)
    pipeline.copies = {"public.a": CopyStatus("1", WHOLE, 2.0), "public.b": CopyStatus("2", PLAN, 0.1)}
    said = [notice.text for _ in range(2) for notice in progress.look()[0]]
    # Nobody has counted the rows of the second: it was read by a data frame.
    assert said == [
        "copied public.a: 1,200 rows, 4.0 MB, in 2.0 s",
        "copied public.b: 4.0 MB, about 1,234 rows, in 0.1 s",
    ]


def test_a_copy_that_failed_is_not_under_way_and_its_next_attempt_is_told():
    failed = Errored("bad", None, RetryPolicy(), DataSync(), datetime.now(UTC))
    pipeline = watched({"public.a": failed}, {"public.a": CopyStatus("1", HALF)})
    progress = Progress(pipeline, lambda status: None, prefix="lake: ")
    notices, look = progress.look()
    assert [notice.text for notice in notices] == [
        "lake: copying public.a: 4.0 MB, about 1,234 rows",
        "lake: stopped public.a: bad",
    ]
    assert look is not None
    assert look.copies == ()
    pipeline.phases, pipeline.copies = {"public.a": DataSync()}, {"public.a": CopyStatus("2", PLAN)}
    (notice,) = progress.look()[0]
    assert (notice.event, notice.table, notice.output) == ("copying", "public.a", "tables")
    assert notice.facts["ranges"] == 4


def test_a_table_that_stopped_before_the_process_started_is_told_with_its_own_time():
    before = Errored("bad", None, RetryPolicy(), DataSync(), datetime(2026, 1, 31, 12, tzinfo=UTC))
    pipeline = watched({"public.a": before, "public.b": Ready()})
    progress = Progress(pipeline, lambda status: None)
    (old,) = progress.look()[0]
    assert (old.event, old.table, old.at) == ("stopped", "public.a", before.since.timestamp())
    pipeline.phases = {"public.a": DataSync(), "public.b": replace(before, since=datetime.fromtimestamp(7, UTC))}
    assert [(new.table, new.at) for new in progress.look()[0]] == [("public.b", 7.0)]
    # A phase keeps the time of the first failure: of a later one, the time is that of the look.
    pipeline.phases = {"public.a": replace(before, attempts=1), "public.b": replace(before, position_lost=False)}
    assert [(new.table, new.at) for new in progress.look()[0]] == [("public.a", None), ("public.b", None)]


def test_a_renamed_table_is_reported_as_such_and_its_copy_not_again():
    pipeline = watched({"a.old": Ready(), "a.x": Ready()}, {"a.old": CopyStatus("1", WHOLE, 2.0)})
    pipeline.table_ids = {"a.old": 7, "a.x": 8}
    progress = Progress(pipeline, lambda status: None)
    progress.look()
    pipeline.phases, pipeline.copies = {"a.new": Ready()}, {"a.new": CopyStatus("1", WHOLE, 2.0)}
    pipeline.table_ids = {"a.new": 7}
    notices, _ = progress.look()
    assert [(notice.event, notice.text) for notice in notices] == [
        ("renamed", "a.old was renamed to a.new"),
        ("left", "a.x is no longer in the publication; its data stays at the destination"),
    ]
    assert (notices[0].table, notices[0].facts) == ("a.new", {"before": "a.old"})
    assert progress.look()[0] == []
    # Two tables exchange their names.
    pipeline.phases, pipeline.table_ids = {"a.new": Ready(), "a.y": Ready()}, {"a.new": 7, "a.y": 9}
    progress.look()
    pipeline.table_ids, pipeline.copies = {"a.new": 9, "a.y": 7}, {"a.y": CopyStatus("1", WHOLE, 2.0)}
    assert [notice.text for notice in progress.look()[0]] == ["a.new was renamed to a.y", "a.y was renamed to a.new"]


def test_a_look_has_tables_rate_and_lag():
    now = [0.0]
    failed = Errored("bad", None, RetryPolicy(), DataSync(), datetime.now(UTC))
    pipeline = watched({"a.a": Ready(), "a.b": Ready(), "a.c": failed})
    progress = Progress(pipeline, lambda status: Behind(2048, 1.25), clock=lambda: now[0])
    notices, _ = progress.look()
    assert [notice.text for notice in notices] == ["stopped a.c: bad"]
    now[0], pipeline.status = 8.0, ApplyStatus(Lsn(1), Lsn(1), 1000, 1, 0)
    progress.look()
    now[0], pipeline.status = 10.0, ApplyStatus(Lsn(1), Lsn(1), 5000, 1, 0)
    notices, look = progress.look()
    assert notices == []
    assert look is not None
    assert look.line == "streaming: 2 of 3 tables ready, 1 errored; 2,000 changes/s; lag 2.0 kB, 1.2 s"
    assert look.facts["lag_bytes"] == 2048
    pipeline.paused, pipeline.phases = True, {"a.a": Ready()}
    notices, look = progress.look()
    assert sorted(notice.event for notice in notices) == ["left", "left"]
    assert look is not None
    assert look.line.startswith("paused: 1 of 1 table ready; ")


def test_an_output_that_cannot_be_written_does_not_claim_to_stream():
    pipeline = watched({"a.a": Ready()})
    progress = Progress(pipeline, lambda status: Behind(2048, 1.25))
    pipeline.status = replace(pipeline.status, outage=Outage("the disk is full", "Free space.", 3600.0))
    _, look = progress.look()
    assert look is not None
    assert look.line == "waiting since 01:00 UTC, lag 2.0 kB, 1.2 s: the disk is full"
    assert look.facts["failing"] == "the disk is full"
    pipeline.paused = True
    _, look = progress.look()
    assert look is not None
    assert look.line.startswith("paused: ")


def test_indexes_are_told_when_they_are_filled_and_when_they_serve_and_each_once():
    def build(name: str, status: IndexStatus, number: str = "1", changed: int = 0) -> IndexBuild:
        return IndexBuild(name, number, "abc", status, "somebody asked for it", changed=changed)

    output = watched({})
    output.stopped = {}
    output.indexes = {"a": build("a", IndexStatus.WANTED), "b": build("b", IndexStatus.SEEDED)}
    progress = Progress(output, lambda status: Behind(0, 0.0), prefix="documents: ")
    said = [notice.text for _ in range(2) for notice in progress.look()[0]]
    assert said == ["documents: filling index a: somebody asked for it"]
    output.indexes = {"a": build("a", IndexStatus.FILLING, changed=7), "b": build("b", IndexStatus.SEEDED, changed=3)}
    notices, look = progress.look()
    assert notices == []
    assert look is not None
    assert look.line.startswith("streaming: 1 of 2 indexes complete, 1 filling; ")
    assert (look.facts["indexes"], look.facts["seeded"]) == (2, 1)
    output.indexes = {"a": build("a", IndexStatus.SEEDED), "b": build("b", IndexStatus.SEEDED)}
    said = [notice.text for _ in range(2) for notice in progress.look()[0]]
    assert said == ["documents: index a is complete and in use"]
    # So quick that nobody has seen it being filled.
    output.indexes = {"a": build("a", IndexStatus.SEEDED, "2"), "b": build("b", IndexStatus.SEEDED)}
    (notice,) = progress.look()[0]
    assert (notice.event, notice.table) == ("seeded", "a")
    # An index that no longer fits is not filled until it does.
    output.indexes = {"a": build("a", IndexStatus.WANTED, "3"), "b": build("b", IndexStatus.SEEDED)}
    output.stopped = {"a": ConfigError("there is no column", hint="Correct it.")}
    (notice,) = [notice for _ in range(2) for notice in progress.look()[0]]
    assert (notice.event, notice.text) == ("stopped", "documents: index a stopped: there is no column")
    assert notice.facts == {"reason": "there is no column", "solution": "Correct it."}


def test_quantities_for_people():
    assert [format_bytes(size) for size in (0, 1023, 1536, 300 << 20, 5 << 50)] == [
        "0 B", "1023 B", "1.5 kB", "300 MB", "5120 TB"
    ]  # fmt: skip
    assert [format_seconds(seconds) for seconds in (0.04, 9.96, 45.2, 100, 7500, 270000)] == [
        "0.0 s", "10.0 s", "45 s", "2 min", "2 h 05 min", "3 d 03 h"
    ]  # fmt: skip


def test_whom_a_copy_waits_for_is_told_once_and_again_when_it_is_somebody_else():
    def wait(*pids: str) -> SnapshotWait:
        blockers = tuple(Blocker("session", pid, "shop", "app", "psql", 60.0) for pid in pids)
        return SnapshotWait(blockers, datetime(2026, 1, 1, tzinfo=UTC))

    pipeline = watched({"public.a": DataSync()})
    progress = Progress(pipeline, lambda status: None)
    pipeline.waits = {"public.a": wait("7", "8")}
    (said,) = [notice.text for _ in range(2) for notice in progress.look()[0]]
    assert said == (
        "waiting to copy public.a until these transactions end: "
        "pid 7 (app@shop, psql, open for 60 s), pid 8 (app@shop, psql, open for 60 s)"
    )
    pipeline.waits = {"public.a": wait("8")}
    (notice,) = progress.look()[0]
    assert notice.facts == {
        "blockers": ["pid 8 (app@shop, psql, open for 60 s)"],
        "since": "2026-01-01T00:00:00+00:00",
    }
    pipeline.waits = {}
    assert progress.look()[0] == []
