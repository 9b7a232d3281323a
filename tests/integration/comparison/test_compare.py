"""Equal tables are found equal; a changed cell, a missing row and an extra row are found, and named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.comparison.report import ColumnDifference, ColumnKind, Counts, Difference, Kind
from penstock.copy import CopySettings
from penstock.errors import NotComparable
from penstock.source import Role, connect
from penstock.values import OutOfRange, TypeSettings
from tests.integration.comparison.support import DESTINATIONS, Place, exit_code
from tests.integration.copy.conftest import PUBLICATION, Source
from tests.integration.copy.test_values import ROWS, fill

SMALL = CopySettings(range_bytes=64 << 10, chunk_bytes=8 << 10)
COUNT = 5000


@pytest.fixture
def source(database: Any) -> Iterator[Source]:
    made = Source(database)
    yield made
    made.close()


@pytest.fixture
def any_source(any_database: Any) -> Iterator[Source]:
    made = Source(any_database)
    yield made
    made.close()


@pytest.fixture(params=DESTINATIONS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    own = {"url": request.getfixturevalue("database").dsn} if request.param.startswith("postgres") else {}
    return Place(request.param, tmp_path, **own)


def make_orders(source: Source) -> None:
    source.execute("create table t (region text, id int, note text, paid numeric(12, 2), primary key (region, id))")
    source.execute(
        f"insert into t select 'r' || i % 3, i, 'note ' || i, i * 1.5 from generate_series(1, {COUNT}) i; analyze t"
    )
    source.execute(f"create publication {PUBLICATION} for table t")


def order(number: int, **changes: Any) -> dict[str, Any]:
    row = {"region": f"r{number % 3}", "id": number, "note": f"note {number}", "paid": Decimal(number * 3) / 2}
    return row | changes


def test_a_copy_equals_its_source(source: Source, place: Place) -> None:
    make_orders(source)
    rows = source.prepare(settings=SMALL)
    assert len(rows.ranges) > 3
    place.copy(rows)
    report = place.compare(rows)
    assert report.counts == Counts(equal=COUNT)
    assert report.differences == ()
    assert exit_code(report) == 0


def test_single_faults_are_found_and_named(source: Source, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    make_orders(source)
    rows = source.prepare(settings=SMALL)
    place.copy(rows)
    schema = rows.schema
    place.plant(rows, lambda plant: plant.update(schema, order(17, note="note 18")))
    place.plant(rows, lambda plant: plant.delete(schema, {"region": "r0", "id": 300}))
    place.plant(rows, lambda plant: plant.insert(schema, order(COUNT + 1)))
    report = place.compare(rows)
    assert report.counts == Counts(equal=COUNT - 2, missing=1, extra=1, changed=1)
    assert sorted(report.differences, key=lambda each: each.kind) == [
        Difference(Kind.CHANGED, {"region": "r2", "id": 17}, ("note",)),
        Difference(Kind.EXTRA, {"region": f"r{(COUNT + 1) % 3}", "id": COUNT + 1}),
        Difference(Kind.MISSING, {"region": "r0", "id": 300}),
    ]
    assert exit_code(report) == 1
    shown = {each.kind: each for each in place.compare(rows, show_values=True).differences}
    assert shown[Kind.CHANGED].source == {"note": "note 17"}
    assert shown[Kind.CHANGED].destination == {"note": "note 18"}
    assert shown[Kind.MISSING].source == {"region": "r0", "id": 300, "note": "note 300", "paid": "450.00"}
    assert shown[Kind.MISSING].destination is None
    assert shown[Kind.EXTRA].source is None
    # Those that were not written down with their rows are looked at once more.
    monkeypatch.setattr("penstock.comparison.compare._DETAILED_ROWS", 1)
    assert place.compare(rows).differences == report.differences


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_cells_that_are_null_empty_or_in_another_column_differ(source: Source, place: Place) -> None:
    source.execute("create table t (id int primary key, a text, b text, d date)")
    source.execute("insert into t select i, 'x', null, 'infinity' from generate_series(1, 9) i")
    source.execute(f"create publication {PUBLICATION} for table t")
    rows = source.prepare()
    place.copy(rows)
    never = Unrepresentable("infinity")

    def faults(plant: Any) -> None:
        plant.update(rows.schema, {"id": 1, "a": None, "b": "x", "d": never})
        plant.update(rows.schema, {"id": 2, "a": "x", "b": "", "d": never})
        plant.update(rows.schema, {"id": 3, "a": "x", "b": None, "d": None})
        plant.update(rows.schema, {"id": 4, "a": "x", "b": None, "d": Unrepresentable("-infinity")})
        plant.update(rows.schema, {"id": 5, "a": "x", "b": None, "d": never})
        plant.update(rows.schema, {"id": 6, "a": Unchanged, "b": Unchanged, "d": never})

    place.plant(rows, faults)
    report = place.compare(rows, show_values=True)
    assert report.counts == Counts(equal=5, changed=4)
    columns = {each.key["id"]: each.columns for each in report.differences}
    assert columns == {1: ("a", "b"), 2: ("b",), 3: ("d",), 4: ("d",)}
    values = {each.key["id"]: (each.source, each.destination) for each in report.differences}
    assert values[3] == ({"d": "infinity"}, {"d": None})
    assert values[4] == ({"d": "infinity"}, {"d": "-infinity"})


@pytest.mark.trap(31)
@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_every_type_survives_the_way_to_the_destination(source: Source, place: Place) -> None:
    with connect(source.settings, Role.CHECK) as connection:
        connection.execute("set search_path = public")
        fill(connection)
        connection.execute(f"create publication {PUBLICATION} for table t")
    rows = source.prepare(settings=CopySettings(range_bytes=8 << 13, chunk_bytes=3000))
    place.copy(rows)
    assert place.compare(rows).counts == Counts(equal=ROWS)


@pytest.mark.trap(29)
@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_without_a_key_rows_are_counted(source: Source, place: Place) -> None:
    source.execute("create table t (a int, b text); alter table t replica identity full")
    source.execute("insert into t select i % 5, null from generate_series(1, 50) i")
    source.execute(f"create publication {PUBLICATION} for table t")
    rows = source.prepare()
    place.copy(rows)
    assert place.compare(rows).counts == Counts(equal=50)
    place.plant(rows, lambda plant: plant.delete(rows.schema, {"a": 1, "b": None}))
    place.plant(rows, lambda plant: plant.insert(rows.schema, {"a": 2, "b": None}))
    report = place.compare(rows)
    assert report.counts == Counts(equal=49, missing=1, extra=1)
    assert sorted(report.differences, key=lambda each: each.kind) == [
        Difference(Kind.EXTRA, {}),
        Difference(Kind.MISSING, {}),
    ]


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_when_all_differs_counts_are_right_and_some_rows_are_shown(source: Source, place: Place) -> None:
    make_orders(source)
    place.copy(source.prepare(settings=SMALL))
    source.execute("update t set note = note || '!' where id > 100; delete from t where id <= 50")
    rows = source.prepare(settings=SMALL)
    report = place.compare(rows, shown=7)
    assert report.counts == Counts(equal=50, extra=50, changed=COUNT - 100)
    assert len(report.differences) == 7
    assert all(each.columns == ("note",) for each in report.differences if each.kind is Kind.CHANGED)


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_a_sample_looks_at_the_same_rows_on_both_sides(source: Source, place: Place) -> None:
    make_orders(source)
    rows = source.prepare(settings=SMALL)
    place.copy(rows)
    counts = place.compare(rows, sample=0.1).counts
    assert counts.different == 0
    assert 0.05 * COUNT < counts.equal < 0.15 * COUNT


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_an_empty_table_equals_an_empty_table(source: Source, place: Place) -> None:
    source.execute(f"create table t (id int primary key); create publication {PUBLICATION} for table t")
    rows = source.prepare()
    place.copy(rows)
    assert place.compare(rows).counts == Counts()
    place.plant(rows, lambda plant: plant.insert(rows.schema, {"id": 1}))
    report = place.compare(rows)
    assert report.counts == Counts(extra=1)
    assert report.differences == (Difference(Kind.EXTRA, {"id": 1}),)


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_columns_of_one_side_only_are_named_once_and_not_in_every_row(any_source: Source, place: Place) -> None:
    source = any_source
    source.execute("create table t (id int primary key, a text, b int); insert into t values (1, 'x', 1), (2, 'y', 2)")
    source.execute(f"create publication {PUBLICATION} for table t")
    place.copy(source.prepare())
    source.execute("alter table t rename a to renamed; alter table t drop b; alter table t add c int default 7")
    report = place.compare(source.prepare())
    assert report.columns == (
        ColumnDifference(ColumnKind.RENAMED, "renamed", "renamed", "a"),
        ColumnDifference(ColumnKind.MISSING, "c", "int4", None),
        ColumnDifference(ColumnKind.EXTRA, "b", None, "int4"),
    )
    assert (report.counts, report.differences, exit_code(report)) == (Counts(equal=2), (), 1)
    # The other columns are compared all the same.
    source.execute("update t set renamed = 'z' where id = 2")
    report = place.compare(source.prepare())
    assert report.counts == Counts(equal=1, changed=1)
    assert report.differences == (Difference(Kind.CHANGED, {"id": 2}, ("renamed",)),)


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
@pytest.mark.parametrize(
    ("before", "value", "after", "using", "types"),
    [
        ("text", "007", "int", "a::int", ("int32", "string")),
        ("int", "7", "text", "a::text", ("string", "int32")),
        ("int", "7", "bigint", "a", ("int64", "int32")),
        ("float8", "0.1", "float4", "a", None),
        ("float4", "0.5", "float8", "a", ("double", "float")),
        ("numeric(10, 2)", "1.50", "numeric(12, 4)", "a", ("decimal128(12, 4)", "decimal128(10, 2)")),
        ("numeric(10, 2)", "1.50", "float8", "a", ("double", "decimal128(10, 2)")),
        ("timestamp", "2024-01-01", "timestamptz", "a", ("timestamp[us, tz=UTC]", "timestamp[us]")),
        ("text[]", "{007}", "int[]", "a::int[]", ("list<element: int32>", "list<element: string>")),
        ("boolean", "true", "int", "a::int", ("int32", "bool")),
    ],
)
def test_another_type_is_a_difference_of_its_column(
    any_source: Source, place: Place, before: str, value: str, after: str, using: str, types: tuple[str, str] | None
) -> None:
    source = any_source
    source.execute(f"create table t (id int primary key, a {before}, b text)")
    source.execute(f"insert into t values (1, '{value}', 'x'), (2, null, 'y')")
    source.execute(f"create publication {PUBLICATION} for table t")
    place.copy(source.prepare())
    source.execute(f"alter table t alter a type {after} using {using}")
    report = place.compare(source.prepare())
    found = [(each.kind, each.column, (each.source, each.destination)) for each in report.columns]
    assert [(kind, column, _without_names(names)) for kind, column, names in found] == (
        [] if types is None else [(ColumnKind.TYPE, "a", _without_names(types))]
    )
    # A value that was rounded at the source differs; columns of another type are not compared row by row.
    assert report.counts == (Counts(equal=2) if types is not None else Counts(equal=1, changed=1))
    assert exit_code(report) == 1


def _without_names(types: tuple[str | None, str | None]) -> tuple[str, str]:
    """What elements of lists are called does not matter."""
    first, second = (re.sub(r"<\w+: ", "<", each or "") for each in types)
    return first, second


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
@pytest.mark.parametrize(
    ("before", "after"),
    [("bigint", "int"), ("int", "smallint"), ("numeric(12, 2)", "numeric(10, 2)"), ("text", "varchar(10)")],
)
def test_a_wider_type_at_the_destination_is_compared_by_its_values(
    source: Source, place: Place, before: str, after: str
) -> None:
    source.execute(f"create table t (id int primary key, a {before}); insert into t values (1, '7'), (2, null)")
    source.execute(f"create publication {PUBLICATION} for table t")
    place.copy(source.prepare())
    source.execute(f"alter table t alter a type {after}")
    rows = source.prepare()
    report = place.compare(rows)
    assert (report.counts, report.columns, exit_code(report)) == (Counts(equal=2), (), 0)
    source.execute("update t set a = '8' where id = 1")
    assert place.compare(source.prepare()).counts == Counts(equal=1, changed=1)


def test_columns_that_another_program_changed_in_a_delta_table_are_named(source: Source, tmp_path: Path) -> None:
    source.execute("create table t (id int primary key, a int, b text, at time)")
    source.execute("insert into t values (1, 7, 'x', '12:00'), (2, 8, 'y', null)")
    source.execute(f"create publication {PUBLICATION} for table t")
    place = Place("delta", tmp_path)
    place.copy(source.prepare())
    (log,) = tmp_path.glob("lake/**/_delta_log")
    last = max(log.glob("*.json"))
    lines = [json.loads(line) for path in sorted(log.glob("*.json")) for line in path.read_text().splitlines()]
    metadata = [line for line in lines if "metaData" in line][-1]
    schema = json.loads(metadata["metaData"]["schemaString"])
    schema["fields"] = [
        field | ({"type": "string"} if field["name"] == "a" else {})
        for field in schema["fields"]
        if field["name"] not in ("b", "at")
    ]
    metadata["metaData"]["schemaString"] = json.dumps(schema)
    (log / f"{int(last.stem) + 1:020}.json").write_text(json.dumps(metadata) + "\n")
    report = place.compare(source.prepare())
    assert report.columns == (
        ColumnDifference(ColumnKind.TYPE, "a", "int32", "string"),
        ColumnDifference(ColumnKind.MISSING, "b", "text", None),
        ColumnDifference(ColumnKind.MISSING, "at", "time", None),
    )
    assert report.counts == Counts(equal=2)


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_rows_are_not_compared_where_the_key_has_another_type(source: Source, place: Place) -> None:
    source.execute("create table t (id text primary key, a text); insert into t values ('007', 'x')")
    source.execute(f"create publication {PUBLICATION} for table t")
    place.copy(source.prepare())
    source.execute("alter table t alter id type int using id::int")
    report = place.compare(source.prepare())
    assert report.columns == (ColumnDifference(ColumnKind.TYPE, "id", "int32", "string"),)
    assert (report.counts, exit_code(report)) == (Counts(), 1)
    assert report.not_compared == ("rows, because id in the key differs between the sides",)


@pytest.mark.parametrize("place", ["parquet", "delta"], indirect=True)
def test_what_was_not_compared_is_said(source: Source, place: Place) -> None:
    source.execute("create table t (id int primary key, a date, hidden text, g int generated always as (id) stored)")
    source.execute("insert into t values (1, 'infinity', 'h'), (-1, '2024-01-01', 'h')")
    source.execute(f"create publication {PUBLICATION} for table t (id, a) where (id > 0)")
    rows = source.prepare(types=TypeSettings(out_of_range=OutOfRange.CLAMP))
    place.copy(rows)
    report = place.compare(rows)
    assert report.not_compared == (
        "columns that are not published: hidden, g",
        "rows that the publication's row filter excludes",
        'values that out_of_range = "clamp" changes, in a',
    )
    assert (report.counts, exit_code(report)) == (Counts(equal=1), 0)


def test_a_table_that_keeps_every_change_is_not_compared(source: Source, tmp_path: Path) -> None:
    source.execute(f"create table t (id int primary key); create publication {PUBLICATION} for table t")
    place = Place("delta", tmp_path, mode="history")
    rows = source.prepare()
    place.copy(rows)
    with pytest.raises(NotComparable, match="every change"):
        place.compare(rows)
