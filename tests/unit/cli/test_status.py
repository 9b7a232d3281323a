"""How a status looks, and what a run leaves for it."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli import status
from penstock.cli.status import render
from penstock.copy.progress import CopyProgress
from penstock.errors import RESYNC
from penstock.headroom import Room
from penstock.lsn import Lsn
from penstock.operations.lag import Behind
from penstock.operations.progress import CaptureLook, OutputLook, StatusFile
from penstock.operations.signals import Ended
from penstock.operations.status import reason_of_copy
from penstock.operations.status_model import (
    IndexState,
    LeftOutTable,
    OutputStatus,
    PipelineStatus,
    SlotStatus,
    SourceStatus,
    SupervisorStatus,
    TableError,
    TableStatus,
    status_facts,
)
from penstock.state import Catchup, DataSync, FinishedCopy, Init, LeaseInfo, MemoryStore, Ready, SyncDone

NOW = datetime(2026, 11, 15, 11, 0, tzinfo=UTC)
DRIVER = LeaseInfo(1, "vm", 42, NOW, NOW, gone=False)
SLOT = SlotStatus("shop", True, 7, "0/10", 0, 2048, "reserved")
READY = TableStatus("public.a", 1, "tables", "ready", "0/10", None, rows=1000, bytes=81920, lag_bytes=300)
COPYING = TableStatus("public.b", 2, "tables", "data_sync", None, None, copy={"fraction": 0.45, "rows_done": 1234})
OUTPUT = OutputStatus("tables", False, "0/10", 300, 1.5, 43.0, (READY, COPYING))
STATUS = PipelineStatus("shop", {"pid": 42}, SourceStatus("h:1/d", "18.6", "0/20", SLOT), (OUTPUT,), driver=DRIVER)


def shown(found: PipelineStatus, width: int = 120, *, urgent_first: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(found, urgent_first=urgent_first))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_running_pipeline() -> None:
    assert shown(STATUS) == [
        "pipeline  shop, run by process 42 on vm since 2026-11-15 11:00:00 UTC",
        "source    h:1/d, PostgreSQL 18.6, at 0/20",
        "slot      shop: read by server process 7, at 0/10, retains 2.0 kB of WAL on the server",
        "output    at 0/10; streaming; 43 changes/s; lag 300 B, 1.5 s",
        "",
        "table     phase                               rows     size  position    lag",
        "public.a  ready                             ~1,000  80.0 kB  0/10      300 B",
        "public.b  data_sync 45%, 1,234 rows copied",
    ]


def test_a_table_is_one_line_although_its_name_has_a_line_break() -> None:
    hostile = replace(READY, table="public.a\nslot      shop: lost")
    found = shown(replace(STATUS, outputs=(replace(OUTPUT, tables=(hostile, COPYING)),)))
    assert len(found) == len(shown(STATUS))
    assert r"public.a\nslot      shop: lost  ready" in "\n".join(found)


def test_the_lag_of_each_stage_fits_into_80_columns() -> None:
    index = IndexState("orders", "public.orders", "abc", "seeded", seeded=True, reason="", quarantined=2)
    waiting = IndexState("lost", "public.lost", "abc", "wanted", seeded=False, reason="it did not fit the database")
    found = replace(
        STATUS,
        capture=CaptureLook("streaming", 5 << 20, 0.4),
        spool=Room(12 << 20, 4 << 30, "spool.max_bytes"),
        outputs=(
            replace(OUTPUT, changes_per_second=123456.0, acknowledged_lag_bytes=7 << 20, acknowledged_lag_seconds=2.0),
            OutputStatus("documents", False, "0/10", 300, 1.5, 43.0, indexes=(index, waiting)),
        ),
    )
    lines = shown(found, width=80)
    assert max(map(len, lines)) <= 80
    for line in (
        "capture   streaming; lag 5.0 MB, 0.4 s",
        "spool     12.0 MB, 4.0 GB left (spool.max_bytes)",
        "output    tables: at 0/10; streaming; 123,456 changes/s; lag 300 B, 1.5 s",
        "          acknowledged: lag 7.0 MB, 2.0 s",
        "lost waits to be filled: it did not fit the database",
        "orders: 2 documents in quarantine",
        "  penstock index quarantine retry orders --all",
    ):
        assert line in lines, lines


def test_room_that_runs_out_is_shown_with_the_time_that_is_left() -> None:
    room = Room(3 << 30, 1 << 30, "max_slot_wal_keep_size", 2400.0, is_short=True)
    slot = replace(SLOT, retained_bytes=3 << 30, safe_bytes=1 << 30, room=room)
    spool = Room(5 << 20, 2 << 30, "spool.max_bytes", 7200.0)
    found = replace(STATUS, source=replace(STATUS.source, slot=slot), spool=spool)
    assert shown(found)[2:5] == [
        "slot      shop: read by server process 7, at 0/10, retains 3.0 GB of WAL on the server",
        "          1.0 GB left, for about 40 min (max_slot_wal_keep_size)",
        "spool     5.0 MB, 2.0 GB left, for about 2 h 00 min (spool.max_bytes)",
    ]
    unlimited = replace(SLOT, retained_bytes=3 << 30)
    line = shown(replace(STATUS, source=replace(STATUS.source, slot=unlimited)))[3]
    assert line == "          only the server's disk is the limit: set max_slot_wal_keep_size"


def test_watching_keeps_the_head_of_a_status_that_is_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tuple(replace(READY, table=f"public.t{number:02}") for number in range(60))
    found = replace(STATUS, outputs=(replace(OUTPUT, tables=tables),))
    console = Console(file=io.StringIO(), width=120, height=24, color_system=None, force_terminal=True)
    texts: list[str] = []

    def watch(*_: object) -> PipelineStatus:
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]
        if len(texts) == 2:
            raise Ended
        return found

    monkeypatch.setattr(status, "wide_console", lambda: console)
    monkeypatch.setattr(status, "pipeline_status", watch)
    status._watch(None, None, 0.0, as_json=False)  # type: ignore[arg-type]
    lines = [line.strip() for line in texts[1].splitlines()]
    assert any(line.endswith("run by process 42 on vm since 2026-11-15 11:00:00 UTC") for line in lines)
    assert len(lines) <= 24
    assert not any("public.t59" in line for line in lines)


def test_a_supervised_pipeline() -> None:
    waiting = SupervisorStatus("vm", 41, 2, "ended at T: killed by SIGKILL", "2026-11-17T06:54:13+00:00")
    lines = shown(replace(STATUS, supervisor=waiting))
    assert lines[1:4] == [
        "          supervised by process 41, 2 restarts",
        "          the run before ended at T: killed by SIGKILL",
        "          starts again at 2026-11-17 06:54:13 UTC",
    ]
    assert "supervised by process 41, 1 restart" in shown(replace(STATUS, supervisor=replace(waiting, restarts=1)))[1]


def test_a_destination_that_cannot_be_written_is_shown_with_the_reason_and_the_remedy() -> None:
    failing = replace(
        OUTPUT,
        failing="the disk is full",
        failing_since="2026-11-17T06:54:03+00:00",
        hint="Free space.",
        changes_per_second=0.0,
    )
    assert shown(replace(STATUS, outputs=(failing,)))[3:6] == [
        "output    at 0/10; waiting; 0 changes/s; lag 300 B, 1.5 s",
        "          cannot write since 2026-11-17 06:54:03 UTC, retrying: the disk is full",
        "          Free space.",
    ]


def test_a_table_that_is_left_out_is_named_once() -> None:
    left_out = LeftOutTable("public.c", "public.c is left out: it has no replica identity", "Run: alter table …")
    lines = shown(replace(STATUS, source=replace(STATUS.source, left_out=(left_out,))))
    assert lines[3:5] == ["left out  public.c: it has no replica identity", "          Run: alter table …"]


def test_a_pipeline_that_does_not_run_says_how_it_ended_and_how_to_resume() -> None:
    killed = replace(STATUS, driver=None, running=None, last_run="ended after T without giving a reason")
    assert shown(killed)[1:3] == [
        "          the last run ended after T without giving a reason",
        "          to resume, run: penstock run",
    ]
    failed = replace(killed, last_run="ended after T: error: bad. Repair it, then run: penstock run.")
    assert shown(failed)[1:3] == [
        "          the last run ended after T: error: bad. Repair it, then run: penstock run.",
        "source    h:1/d, PostgreSQL 18.6, at 0/20",
    ]


def test_a_slot_that_is_gone_has_a_remedy_unless_the_pipeline_never_ran() -> None:
    gone = replace(STATUS, source=replace(STATUS.source, slot=SlotStatus("shop", False)))
    assert shown(gone)[2] == "slot      shop: does not exist"
    assert shown(gone)[3].startswith("          The changes since the slot was dropped are lost. To create a new slot")
    never = replace(gone, driver=None, running=None, outputs=(replace(OUTPUT, tables=(), position=None),))
    assert shown(never)[3].startswith("output    at the beginning")


def test_a_terminal_with_few_lines_shows_first_what_needs_attention() -> None:
    error = TableError("too big", "Make it smaller.", "resync", "2026-11-15T10:00:00+00:00", None, 1, True)
    many = tuple(replace(READY, table=f"public.t{number:03}", id=10 + number) for number in range(100))
    stopped = replace(READY, table="public.z", id=3, phase="errored", error=error)
    found = replace(STATUS, outputs=(replace(OUTPUT, tables=(*many, COPYING, stopped)),))
    first = shown(found, 80, urgent_first=True)[:24]
    assert any(line.startswith("public.z stopped at") for line in first)
    tables = [line.split()[0] for line in first if line.startswith("public.") and "stopped" not in line]
    assert tables[:3] == ["public.z", "public.b", "public.t000"]


def test_a_lost_slot_and_a_table_that_stopped() -> None:
    error = TableError("too big", "Make it smaller.", "resync", "2026-11-15T10:00:00+00:00", None, 1, True)
    output = replace(OUTPUT, tables=(replace(READY, phase="errored", error=error),), changes_per_second=None)
    source = replace(STATUS.source, slot=replace(SLOT, lost=True))
    lines = shown(replace(STATUS, driver=None, running=None, source=source, outputs=(output,)))
    assert lines[0] == "pipeline  shop, not running"
    assert lines[2] == "slot      shop: lost: its changes can no longer be read"
    assert lines[3].startswith("          The changes can no longer be read. To create a new slot and copy the tables")
    assert lines[-3:] == [
        "public.a stopped at 2026-11-15 10:00:00 UTC: too big",
        "  Make it smaller.",
        "  then: penstock resync public.a",
    ]


def test_a_remedy_that_is_the_command_stands_there_once() -> None:
    error = TableError("dropped", f"Copy it again: {RESYNC}.", "resync", "2026-11-15T10:00:00+00:00", None, 1, False)
    output = replace(OUTPUT, tables=(replace(READY, phase="errored", error=error),))
    assert shown(replace(STATUS, outputs=(output,)))[-1] == "  Copy it again: penstock resync public.a."


def test_a_table_that_is_copied_again_says_why() -> None:
    output = replace(OUTPUT, tables=(READY, replace(COPYING, copied_because="public.b: its key changed")))
    assert shown(replace(STATUS, outputs=(output,)))[-1] == "public.b is copied again: its key changed"


def test_values_that_a_policy_changed_are_shown() -> None:
    output = replace(OUTPUT, tables=(replace(READY, changed_cells=1234), COPYING))
    said = "public.a: out_of_range changed 1,234 values since the copy of the table"
    assert shown(replace(STATUS, outputs=(output,)))[-1] == said


def test_a_log_whose_table_changed_silently_says_so() -> None:
    change = "partition public.a_1 was attached, before 0/5"
    output = replace(OUTPUT, tables=(replace(READY, silent_change=change),))
    assert shown(replace(STATUS, outputs=(output,)))[-2:] == [
        f"public.a: rows changed at the source without changes in the stream: {change}",
        "  to add a new copy: penstock resync public.a",
    ]


def test_why_a_table_is_copied_is_known_until_it_is_ready() -> None:
    store = MemoryStore("shop")
    store.acquire_lease()
    phases = [Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(1)), Ready(), Init("its key changed"), DataSync()]
    reasons: list[str | None] = []
    for phase in [*phases, FinishedCopy(), SyncDone(Lsn(2))]:
        store.update_table_replication_state(1, phase)
        reasons.append(reason_of_copy(frozenset(), store, 1, phase))
    assert reasons == [*[None] * 5, *["its key changed"] * 3, None]


def test_long_transactions_are_named() -> None:
    source = replace(STATUS.source, long_transactions=("pid 9 (me@shop, psql, open for 75 s)",))
    assert shown(replace(STATUS, source=source))[3] == (
        "waiting   for an open transaction: pid 9 (me@shop, psql, open for 75 s)"
    )


def test_an_output_that_nobody_runs_any_more_is_named() -> None:
    lines = shown(replace(STATUS, forgotten={"second": "0/5"}))
    assert lines[4:6] == [
        "output    second: no longer in the config, but holds the slot at 0/5",
        "          penstock teardown --output second",
    ]


def test_several_outputs_have_names() -> None:
    second = replace(OUTPUT, output="second", paused=True, tables=(replace(READY, output="second"),))
    lines = shown(replace(STATUS, outputs=(OUTPUT, second)))
    assert lines[3].startswith("output    tables: at 0/10; streaming")
    assert lines[4].startswith("output    second: at 0/10; paused")
    assert lines[6].split()[:3] == ["table", "output", "phase"]


def test_with_several_outputs_a_remedy_names_its_output() -> None:
    error = TableError("a.Odd b: bad", f"Copy it: {RESYNC}.", "resync", "2026-11-15T10:00:00+00:00", None, 1, False)
    stopped = replace(READY, table="a.Odd b", output="second", phase="errored", error=error)
    second = replace(OUTPUT, output="second", tables=(stopped,))
    assert shown(replace(STATUS, outputs=(OUTPUT, second)))[-2:] == [
        "second: a.Odd b stopped at 2026-11-15 10:00:00 UTC: bad",
        "  Copy it: penstock resync 'a.Odd b' --output second.",
    ]


def test_machines_get_what_people_get() -> None:
    facts = status_facts(STATUS)
    assert set(facts) == {
        "pipeline",
        "running",
        "source",
        "outputs",
        "forgotten",
        "last_run",
        "spool",
        "supervisor",
        "capture",
        "problems",
    }
    assert facts["outputs"][0]["tables"][1]["copy"]["rows_done"] == 1234
    assert facts["source"]["slot"]["retained_bytes"] == 2048


def test_what_a_run_leaves_can_be_read_again(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, clock=lambda: 99.0)
    assert file.read() == {}
    copy = CopyProgress("public.b", 4, 400, since=0.0, clock=lambda: 1.0).advance(rows=7, bytes=100)
    phases = {"public.a": Catchup(Lsn(5)), "public.b": DataSync()}
    look = OutputLook("tables", True, phases, (copy,), 10, 2.5, Lsn(16), Behind(300, 1.26))
    file.write([look])
    (found,) = StatusFile(tmp_path).read().values()
    assert (found.at, found.paused, found.changes_per_second, found.lag_seconds) == (99.0, True, 2.5, 1.3)
    assert found.phases == {"public.a": "catchup", "public.b": "data_sync"}
    assert found.copies["public.b"]["rows_done"] == 7
    # A moment later it is left as it is.
    file.write([replace(look, paused=False)])
    assert StatusFile(tmp_path).read()["tables"].paused


def test_a_file_that_cannot_be_understood_is_as_good_as_none(tmp_path: Path) -> None:
    for content in ("", "[]", '{"tables": {"at": 1, "more": 2}}', '{"tables": 3}'):
        (tmp_path / "status.json").write_text(content)
        assert StatusFile(tmp_path).read() == {}
    # Nor does a disk that cannot be written stop anybody.
    look = OutputLook("tables", True, {}, (), 10, 2.5, Lsn(16), None)
    StatusFile(tmp_path / "missing").write([look])
