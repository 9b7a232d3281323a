"""How it is shown: bars, lines, records."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.check import findings_table, print_report
from penstock.cli.display import MOST_BARS, Bars, Lines, Records, make_table, opened_display, print_unwrapped, render
from penstock.copy.progress import CopyProgress
from penstock.lsn import Lsn
from penstock.observe import LogFormat, configure_logging
from penstock.observe.logs import JsonFormatter
from penstock.operations.lag import Behind
from penstock.operations.progress import Notice, OutputLook
from penstock.retry import Backoff
from penstock.source.preflight import Check, Report, Severity, Status
from penstock.state import DataSync, Ready


def copy(table: str, done: int) -> CopyProgress:
    plan = CopyProgress(table, ranges=10, bytes=100 << 20, estimated_rows=1000, clock=lambda: 20.0, since=0.0)
    return plan.advance(rows=100 * done, bytes=done * (10 << 20), ranges=done) if done else plan


def look(*copies: CopyProgress, output: str = "tables") -> OutputLook:
    phases: dict[str, Any] = {"public.ready": Ready()} | {each.table: DataSync() for each in copies}
    return OutputLook(output, False, phases, copies, 0, 43.0, Lsn(1), Behind(0, 0.0))


def shown(looks: list[OutputLook], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(render(looks, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_each_copy_has_a_bar_and_the_last_line_is_the_status():
    lines = shown([look(copy("public.big", 4), copy("public.other", 0))], 140)
    assert len(lines) == 3
    assert lines[0].startswith("public.big ")
    for part in ("━", "40%", "4/10 ranges", "400 rows", "40.0 MB of 100 MB", "30 s left"):
        assert part in lines[0]
    assert " 0% " in lines[1]
    assert "left" not in lines[1]
    assert lines[2] == "streaming: 1 of 3 tables ready, 2 copying; 43 changes/s; lag 0 B, 0.0 s"


def test_a_name_with_a_line_break_does_not_look_like_a_line_of_the_log():
    hostile = "public.a\n2026-01-31T12:00:00.000Z warning penstock"
    lines: list[str] = []
    display = Lines(lines.append, 0.001, clock=iter((0.0, 1.0, 2.0)).__next__)
    display.tell(Notice("copied", f"copied {hostile}: 0 rows", "tables", hostile))
    display.show([look(copy(hostile, 4))])
    assert len(lines) == 3
    assert [line for line in lines if "\n" in line] == []
    assert "\\n2026" in lines[0]


def test_a_small_table_is_being_read_until_its_only_range_is_whole():
    small = CopyProgress("public.small", ranges=1, bytes=100, estimated_rows=5, clock=lambda: 20.0, since=0.0)
    assert "reading" in shown([look(small)], 140)[0]
    assert "%" not in shown([look(small)], 140)[0]
    assert "100%" in shown([look(small.advance(rows=5, bytes=100, ranges=1))], 140)[0]


def test_the_most_serious_findings_of_check_stand_last_and_are_named_in_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Check("first", Severity.CRITICAL, Status.FAILED, "critical", "Mend it."),
        Check("second", Severity.INFO, Status.PASSED, "well"),
        Check("third", Severity.WARNING, Status.FAILED, "so so", "Look at it."),
    ]
    monkeypatch.setenv("COLUMNS", "160")
    print_report(Report("h:1/d", tuple(found)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.split()[1] for line in lines[1:4]] == ["second", "third", "first"]
    assert lines[-1] == "h:1/d is not ready (1 critical, 1 warning): first"


def test_a_narrow_terminal_has_room_for_name_bar_percent_and_time():
    lines = shown([look(copy("public.big", 4))], 60)
    assert all(len(line) <= 60 for line in lines)
    assert "40%" in lines[0]
    assert "30 s left" in lines[0]
    assert "ranges" not in lines[0]
    assert lines[1].endswith("…")


def test_what_is_read_but_not_durable_yet_is_finishing():
    assert shown([look(copy("public.big", 10))], 140)[0].endswith("finishing")


def test_many_copies_do_not_fill_the_screen():
    lines = shown([look(*(copy(f"public.t{number}", 1) for number in range(MOST_BARS + 3)))], 140)
    assert len(lines) == MOST_BARS + 2
    assert lines[-2] == "… and 3 more copies"


def test_several_outputs_are_told_apart():
    lines = shown([look(copy("public.a", 1), output="lake"), look(output="search")], 140)
    assert lines[0].startswith("lake: public.a ")
    assert lines[1].startswith("lake: streaming: ")
    assert lines[2].startswith("search: streaming: 1 of 1 table ready")


def test_lines_come_at_their_interval():
    said: list[str] = []
    now = [0.0]
    lines = Lines(said.append, 10.0, clock=lambda: now[0])
    lines.say("hello")
    lines.show([look(copy("public.big", 4))])
    assert said == ["hello"]
    now[0] = 10.0
    lines.show([look(copy("public.big", 4))])
    lines.show([look(copy("public.big", 5))])
    assert said[1:] == [
        "copying public.big: 4 of 10 ranges, 400 rows, 40.0 MB of 100 MB (40%), about 30 s left",
        "streaming: 1 of 2 tables ready, 1 copying; 43 changes/s; lag 0 B, 0.0 s",
    ]
    never = Lines(said.append, 0.0, clock=lambda: now[0])
    now[0] = 1e6
    never.show([look()])
    assert len(said) == 3


def test_records_have_fields_at_any_log_level(capsys: pytest.CaptureFixture[str]):
    configure_logging("warning", LogFormat.JSON)
    now = [0.0]
    with opened_display(quiet=False, as_json=True, seconds=0.0) as display:
        display.say("following")
        display.tell(Notice("copied", "copied public.a", "tables", "public.a", {"rows_done": 7}))
        records = Records(10.0, clock=lambda: now[0])
        now[0] = 10.0
        records.show([look(copy("public.big", 4))])
    logging.getLogger("penstock.run").info("not any more")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"][:9] for line in lines] == ["following", "copied pu", "copying p", "streaming"]
    assert {"event": "copied", "table": "public.a", "output": "tables", "rows_done": 7}.items() <= lines[1].items()
    assert {"event": "copy", "ranges_done": 4, "rows_done": 400, "fraction": 0.4}.items() <= lines[2].items()
    assert {"event": "status", "ready": 1, "tables": 2, "lag_bytes": 0}.items() <= lines[3].items()


def test_fields_hold_no_passwords():
    record = logging.LogRecord("penstock.run", logging.INFO, "", 0, "text", (), None)
    record.facts = {"reason": "postgresql://me:hunter2@h/d", "rows": 1}
    assert "hunter2" not in JsonFormatter().format(record)


def test_what_has_happened_stands_above_the_bars():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with Bars(console) as bars:
        bars.show([look(copy("public.big", 4))])
        bars.tell(Notice("copied", "copied public.small", "tables", "public.small"))
        bars.show([look(copy("public.big", 5))])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("40%") < text.index("copied public.small") < text.index("50%")
    # Nothing of the bars stays: their lines are cleared at the end.
    assert "\x1b[2K" in text[text.rindex("50%") :]


def test_paths_are_not_broken_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("table", "location")
    table.add_row("public.a", "/srv/" + "x" * 40)
    table.add_row("public.b", "/srv/b")
    print_unwrapped(Console(width=20), table)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["table     location", "public.a  /srv/" + "x" * 40, "public.b  /srv/b"]


def test_remedies_are_below_their_findings_in_a_narrow_terminal():
    found = [Check("wal_level", Severity.CRITICAL, Status.FAILED, "wal_level is replica", "Set it to logical.")]
    narrow, wide = io.StringIO(), io.StringIO()
    for file, width in ((narrow, 80), (wide, 160)):
        Console(width=width, file=file).print(findings_table(found, width))
    assert [line.strip() for line in narrow.getvalue().splitlines()[1:]] == [
        "critical  wal_level  wal_level is replica",
        "→ Set it to logical.",
    ]
    assert "wal_level is replica  Set it to logical." in wide.getvalue()


def test_a_source_that_is_away_is_told_within_80_columns() -> None:
    line = replace(look(), source_lost_since=1_794_898_442.0).line
    assert line == "streaming: 1 of 1 table ready; source unreachable since 2026-11-17 06:54 UTC"
    assert len(line) < 80


def test_only_the_first_of_several_failures_in_a_row_is_a_warning() -> None:
    backoff = Backoff()
    assert backoff.log_level == logging.WARNING
    backoff.next_delay()
    assert backoff.log_level == logging.INFO
    backoff.reset()
    assert backoff.log_level == logging.WARNING
