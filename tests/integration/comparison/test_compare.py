"""Equal tables are found equal; a changed cell, a missing row and an extra row are found, and named."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.comparison.report import Counts, Difference, Kind
from penstock.copy import CopySettings
from penstock.errors import NotComparable
from penstock.source import Role, connect
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


@pytest.fixture(params=DESTINATIONS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


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
def test_a_column_that_the_destination_has_not_heard_of_is_null_there(source: Source, place: Place) -> None:
    source.execute("create table t (id int primary key, a text); insert into t values (1, 'x'), (2, 'y')")
    source.execute(f"create publication {PUBLICATION} for table t")
    place.copy(source.prepare())
    source.execute("alter table t rename a to renamed; alter table t add b int")
    assert place.compare(source.prepare()).counts == Counts(equal=2)
    source.execute("alter table t add c int default 7")
    report = place.compare(source.prepare())
    assert report.counts == Counts(changed=2)
    assert report.differences[0].columns == ("c",)


def test_a_table_that_keeps_every_change_is_not_compared(source: Source, tmp_path: Path) -> None:
    source.execute(f"create table t (id int primary key); create publication {PUBLICATION} for table t")
    place = Place("delta", tmp_path, mode="history")
    rows = source.prepare()
    place.copy(rows)
    with pytest.raises(NotComparable, match="every change"):
        place.compare(rows)
