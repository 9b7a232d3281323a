"""What `penstock verify` prints, and what its exit status says."""

from __future__ import annotations

import json

import pytest
import typer

from penstock.cli.verify import parse_part, print_report
from penstock.comparison.report import ColumnDifference, ColumnKind, Counts, Difference, Kind, Report, TableReport
from penstock.lsn import Lsn

EQUAL = TableReport("shop.items", Counts(equal=2000), seconds=1.5)
DIFFERENT = TableReport(
    "shop.orders",
    Counts(equal=9, missing=1, extra=1, changed=22),
    (
        Difference(Kind.CHANGED, {"region": "eu", "id": 17}, ("note", "paid")),
        Difference(Kind.MISSING, {"region": None, "id": 18}),
        Difference(Kind.EXTRA, {}, destination={"note": "it's"}),
    ),
)
LEFT_OUT = TableReport("shop.visits", reason="it is being copied")


def report(*tables: TableReport, sample: float = 1.0) -> Report:
    return Report(Lsn(0x1B91DD0), tables, sample, 0.84)


def test_people_see_counts_keys_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(EQUAL, DIFFERENT, LEFT_OUT))
    assert capsys.readouterr().out.splitlines() == [
        "shop.items   2,000 rows, equal",
        "shop.orders  DIFFERENT: 1 missing, 1 extra, 22 changed; 9 equal",
        "  changed  region='eu' id=17: note, paid",
        "  missing  region=NULL id=18",
        "  extra    one row",
        '    destination: note="it\'s"',
        "  and 21 rows more",
        "shop.visits  not compared: it is being copied",
        "1 equal, 1 different, 1 not compared, at 0/1B91DD0; changes waited for 0.8 s",
    ]


def test_people_see_columns_that_differ_and_what_was_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    columns = (
        ColumnDifference(ColumnKind.MISSING, "a", "int4", None),
        ColumnDifference(ColumnKind.EXTRA, "b", None, "text"),
        ColumnDifference(ColumnKind.RENAMED, "c", "c", "d"),
        ColumnDifference(ColumnKind.TYPE, "e", "int32", "string"),
    )
    table = TableReport("shop.items", Counts(equal=2), columns=columns, not_compared=("columns: hidden",))
    assert report(table).exit_code == 1
    print_report(report(table))
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "shop.items  DIFFERENT: 4 columns; 2 equal",
        "  column a (int4) is missing at the destination",
        "  column b (text) exists only at the destination",
        "  column c is called d at the destination",
        "  column e is string at the destination, and should be int32",
        "  not compared: columns: hidden",
    ]
    found = table.to_json()
    assert found["columns"][3] == {"kind": "type", "column": "e", "source": "int32", "destination": "string"}
    assert found["not_compared"] == ["columns: hidden"]


def test_one_of_several_outputs_is_named_and_a_sample_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(EQUAL, sample=0.01), "lake")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "lake:"
    assert last == "1 equal in a sample of 0.01 of the rows, at 0/1B91DD0; changes waited for 0.8 s"


def test_rows_that_were_not_judged_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    moved = TableReport("shop.items", Counts(equal=1990, unsettled=10))
    print_report(Report(Lsn(0x1B91DD0), (moved,), exact=False))
    assert capsys.readouterr().out.splitlines() == [
        "shop.items  1,990 rows, equal; 10 rows changed meanwhile",
        (
            "1 unsettled, at 0/1B91DD0 or close to it, because there was always an open transaction; "
            "changes waited for 0.0 s"
        ),
    ]


def test_a_difference_counts_more_than_what_could_not_be_compared() -> None:
    assert report(EQUAL).exit_code == 0
    assert report(EQUAL, DIFFERENT, LEFT_OUT).exit_code == 1
    assert report(EQUAL, LEFT_OUT).exit_code == 2
    assert report().exit_code == 2
    assert report(EQUAL, TableReport("shop.items", Counts(equal=1990, unsettled=10))).exit_code == 2


def test_json_has_counts_and_no_values_unless_they_were_asked_for() -> None:
    found = json.loads(json.dumps(report(DIFFERENT, LEFT_OUT).to_json()))
    orders, visits = found["tables"]
    assert found["position"] == "0/1B91DD0"
    assert (orders["source_rows"], orders["destination_rows"]) == (32, 32)
    assert orders["differences"][0] == {
        "kind": "changed",
        "key": {"region": "eu", "id": 17},
        "columns": ["note", "paid"],
    }
    assert orders["differences"][2] == {"kind": "extra", "key": {}, "destination": {"note": "it's"}}
    assert visits == {"table": "shop.visits", "result": "not compared", "reason": "it is being copied"}


@pytest.mark.parametrize(("text", "part"), [("1%", 0.01), ("100%", 1.0), ("0.5", 0.5), ("1", 1.0)])
def test_a_part_is_a_percentage_or_a_number(text: str, part: float) -> None:
    assert parse_part(text) == pytest.approx(part)


@pytest.mark.parametrize("text", ["0", "0%", "101%", "2", "-1%", "a bit", "", "%", "nan"])
def test_what_is_no_part_of_a_whole_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a fraction"):
        parse_part(text)
