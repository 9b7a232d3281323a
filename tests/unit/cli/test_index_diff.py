"""How `penstock index diff` shows what it does and what it found."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.progress import Progress

from penstock.cli import index as index_diff
from penstock.documents.diff import Difference, DiffReport, Kind

EQUAL = DiffReport("customers", 1200)
DIFFERENT = DiffReport(
    "orders",
    30,
    (
        Difference("7", Kind.DIFFERENT, ("note", "lines[1].price")),
        Difference("8", Kind.MISSING),
        Difference("9", Kind.UNSETTLED, ("note",)),
        *(Difference(str(number), Kind.EXTRA) for number in range(100, 112)),
    ),
    complete=False,
)
MOVING = DiffReport("visits", 5, (Difference("1", Kind.UNSETTLED),))


@pytest.mark.parametrize(
    ("reports", "status"), [([EQUAL], 0), ([EQUAL, DIFFERENT, MOVING], 1), ([EQUAL, MOVING], 2), ([], 0)]
)
def test_the_exit_status_says_what_was_found(reports: list[DiffReport], status: int) -> None:
    assert index_diff._exit_status(reports) == status


def test_people_get_counts_examples_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for report in (EQUAL, DIFFERENT, MOVING):
        index_diff._print_diff(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "customers: 1,200 documents compared, all equal"
    assert lines[1] == "orders: 30 documents compared: 1 missing, 12 extra, 1 different, 1 unsettled"
    assert lines[2] == "  different  7  note, lines[1].price"
    assert lines[3] == "  missing    8"
    assert "  … and 5 more; --json lists all" in lines
    assert lines[-2] == "visits: 5 documents compared: 1 unsettled"
    assert sum("index rebuild" in line for line in lines) == 1, "what only moved needs no remedy"


def test_machines_get_everything() -> None:
    facts = json.loads(json.dumps(index_diff._to_json([EQUAL, DIFFERENT])))
    assert facts["result"] == "different"
    orders = facts["indexes"][1]
    assert (orders["missing"], orders["extra"], orders["complete"]) == (1, 12, False)
    assert len(orders["differences"]) == 15
    assert orders["differences"][0] == {"id": "7", "kind": "different", "fields": ["note", "lines[1].price"]}


def test_a_bar_shows_how_far_it_is_and_what_does_not_match() -> None:
    written = io.StringIO()
    with Progress(console=Console(file=written, force_terminal=True, width=100)) as progress:
        bars = index_diff._Bars(progress, {"orders": 40})
        bars.on_compared("orders", 10)
        bars.on_compared("orders", 40)
        bars.on_rechecking("orders", 3)
        bars.on_rechecking("unknown", 1)
    assert "orders (3 still differ)" in written.getvalue()


def test_lines_are_few() -> None:
    said: list[str] = []
    lines = index_diff._Lines(said.append)
    for _ in range(3):
        lines.on_compared("orders", 10)
        lines.on_rechecking("orders", 2)
    assert said == ["orders: checking 2 documents again, not equal yet"]
