"""Which differences between two looks at the catalog mean that rows changed without a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.source.shapes import ColumnVersion, Heap, TableShape, shape_from_json, shape_to_json, silent_changes

PLAIN = TableShape(
    {7: Heap(70, "", "public.t", counted=True, born=True)},
    {1: ColumnVersion("id", "500"), 2: ColumnVersion("note", "500")},
    {"mood 9 label 90": "sad", "point 8 attributes": "1 23,2 23"},
)
PARTED = replace(
    PLAIN,
    heaps={7: Heap(70, " 5", "public.low", True, True), 8: Heap(80, " 5", "public.high", True, True)},
    is_partitioned=True,
)


def texts(before: TableShape, now: TableShape) -> list[str]:
    return [each.text for each in silent_changes(before, now)]


def rewritten(shape: TableShape, *, counted: bool = True) -> TableShape:
    return replace(shape, heaps={**shape.heaps, 7: shape.heaps[7]._replace(filenode=71, counted=counted)})


@pytest.mark.parametrize("shape", [PLAIN, PARTED])
def test_nothing_and_what_rewrites_rows_as_they_are_is_no_change(shape: TableShape) -> None:
    assert texts(shape, shape) == []
    assert texts(shape, rewritten(shape)) == []


def test_a_truncate_is_in_the_stream_except_of_a_partition() -> None:
    assert texts(PLAIN, rewritten(PLAIN, counted=False)) == []
    assert texts(PARTED, rewritten(PARTED, counted=False)) == ["partition public.low was truncated"]


def test_partitions_that_come_with_rows_or_go() -> None:
    born = Heap(9, " 6", "public.new", False, True)
    assert texts(PARTED, replace(PARTED, heaps={**PARTED.heaps, 9: born})) == []
    attached = replace(PARTED, heaps={**PARTED.heaps, 9: born._replace(born=False)})
    assert texts(PARTED, attached) == ["partition public.new was attached"]
    assert texts(attached, PARTED) == ["partition public.new was detached or dropped"]
    again = replace(PARTED, heaps={**PARTED.heaps, 7: PARTED.heaps[7]._replace(links=" 7")})
    assert texts(PARTED, again) == ["partition public.low was attached"]
    truncated = replace(PARTED, heaps={**PARTED.heaps, 9: born._replace(filenode=91)})
    assert texts(PARTED, truncated) == ["partition public.new was truncated"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (ColumnVersion("note", "501"), ["column 'note' was altered and all rows were rewritten"]),
        (ColumnVersion("remark", "501"), ["column 'remark' was altered and all rows were rewritten"]),
    ],
)
def test_a_column_that_was_altered_matters_only_with_its_rows(column: ColumnVersion, expected: list[str]) -> None:
    altered = replace(PLAIN, columns={**PLAIN.columns, 2: column})
    assert texts(PLAIN, altered) == []
    assert texts(PLAIN, rewritten(altered)) == expected


def test_a_column_that_came_with_a_rewrite_may_have_values_that_were_not_sent() -> None:
    added = replace(PLAIN, columns={**PLAIN.columns, 3: ColumnVersion("c", "501")})
    assert texts(PLAIN, added) == []
    assert texts(PLAIN, rewritten(added)) == ["column 'c' was added and all rows were rewritten"]


def test_types_that_the_database_defines() -> None:
    more = replace(PLAIN, types={**PLAIN.types, "mood 9 label 91": "calm"})
    assert texts(PLAIN, more) == []
    assert texts(PLAIN, replace(PLAIN, types={**PLAIN.types, "mood 9 label 90": "low"})) == ["type 'mood' was altered"]
    changed = replace(PLAIN, types={**PLAIN.types, "point 8 attributes": "1 23,3 25"})
    assert texts(PLAIN, changed) == ["type 'point' was altered"]


@pytest.mark.parametrize("shape", [PLAIN, PARTED])
def test_a_stored_shape_is_the_same(shape: TableShape) -> None:
    assert shape_from_json(shape_to_json(shape)) == shape
