"""Which differences between two readings of the catalog mean that rows changed without a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lsn import Lsn
from penstock.source.shapes import (
    HeapShape,
    TableShape,
    TypePart,
    shape_from_json,
    shape_to_json,
    silent_changes,
    vanished,
)

OWN = HeapShape("70", "p", "", True, "1:500 2:500", "public.t")
LOW = HeapShape("70", "p", " 5", True, "1:500 2:500", "public.low")
HIGH = HeapShape("80", "p", " 5", True, "1:500 2:500", "public.high")
PLAIN = TableShape({7: OWN}, {1: "id", 2: "note"}, {90: TypePart("mood", "sad"), 8: TypePart("point", "1 23,2 23")})
PARTED = replace(PLAIN, heaps={7: LOW, 8: HIGH}, is_partitioned=True)


def texts(before: TableShape, now: TableShape) -> list[str]:
    return [each.text for each in silent_changes(before, now, {})]


def with_heap(shape: TableShape, oid: int, heap: HeapShape) -> TableShape:
    return replace(shape, heaps={**shape.heaps, oid: heap})


def rewritten(shape: TableShape, **changes: str) -> TableShape:
    return with_heap(shape, 7, shape.heaps[7]._replace(filenode="72", **changes))


def test_nothing_and_what_rewrites_rows_as_they_are_is_no_change() -> None:
    assert texts(PLAIN, PLAIN) == texts(PARTED, PARTED) == []
    assert texts(PLAIN, rewritten(PLAIN)) == []
    # A column that was dropped before the rewrite is no change either.
    assert texts(PLAIN, rewritten(PLAIN, columns="1:500")) == []


def test_a_truncate_is_in_the_stream_except_of_a_partition() -> None:
    """The catalog does not tell it from VACUUM FULL."""
    assert texts(PARTED, rewritten(PARTED)) == ["partition public.low was truncated or rewritten"]


def test_partitions_that_come_with_rows_or_go() -> None:
    born = HeapShape("9", "p", " 6", True, "1:600 2:600", "public.new")
    assert texts(PARTED, with_heap(PARTED, 9, born)) == []
    attached = with_heap(PARTED, 9, born._replace(born=False))
    assert texts(PARTED, with_heap(PARTED, 9, born._replace(born=False, filenode="92"))) == [
        "partition public.new was attached",
        "partition public.new was truncated or rewritten",
    ]
    assert [(each.text, each.attached) for each in silent_changes(PARTED, attached, {})] == [
        ("partition public.new was attached", 9)
    ]
    assert texts(attached, PARTED) == ["partition public.new was detached or dropped"]
    assert texts(PARTED, with_heap(PARTED, 7, LOW._replace(links=" 7"))) == [
        "partition public.low was detached and attached again"
    ]
    assert texts(PARTED, with_heap(PARTED, 9, born._replace(filenode="92"))) == [
        "partition public.new was truncated or rewritten"
    ]
    assert texts(PARTED, with_heap(PARTED, 7, LOW._replace(persistence="u"))) == [
        "partition public.low was set logged or unlogged"
    ]


def test_a_leaf_that_only_the_stream_has_seen() -> None:
    copied = replace(PARTED, copied_at=Lsn(100), former=frozenset({9}))
    assert vanished(copied, PARTED, {7: Lsn(200), 9: Lsn(200), 10: Lsn(99)}) == set()
    assert vanished(copied, PARTED, {10: Lsn(100)}) == {10}
    assert vanished(PLAIN, PLAIN, {10: Lsn(100)}) == set()
    (change,) = silent_changes(copied, PARTED, {10: Lsn(100)})
    assert change.text == "a partition was created, filled, and detached or dropped"
    assert change.leaves
    assert change.of_partition
    # Each is dealt with once.
    without_low = replace(PARTED, heaps={8: HIGH})
    later = without_low.following(copied, {10: Lsn(100)})
    assert (later.copied_at, later.former) == (Lsn(100), {7, 9, 10})
    assert vanished(later, without_low, {7: Lsn(200), 10: Lsn(100)}) == set()
    stored = shape_from_json(shape_to_json(later))
    assert (stored, stored.copied_at, stored.former) == (later, later.copied_at, later.former)


def test_a_column_that_was_altered_or_added_matters_only_with_its_rows() -> None:
    for columns in ("1:500 2:501", "1:500 2:500 3:501"):
        assert texts(PLAIN, with_heap(PLAIN, 7, OWN._replace(columns=columns))) == []
    altered = ["column 'note' was altered and all its rows were rewritten"]
    assert texts(PLAIN, rewritten(PLAIN, columns="1:500 2:501")) == altered
    assert texts(PARTED, rewritten(PARTED, columns="1:500 2:501")) == [
        "partition public.low was truncated or rewritten",
        "partition public.low was altered and all its rows were rewritten",
    ]
    added = replace(rewritten(PLAIN, columns="1:500 2:500 3:501"), columns={**PLAIN.columns, 3: "c"})
    assert texts(PLAIN, added) == ["column 'c' was added and all its rows were rewritten"]
    both = replace(rewritten(PLAIN, columns="1:500 2:501 3:501"), columns={**PLAIN.columns, 3: "c"})
    assert texts(PLAIN, both) == ["column 'c' was added and column 'note' was altered and all its rows were rewritten"]


def test_names_that_the_stream_carries_with_the_next_row() -> None:
    renamed = replace(PLAIN, columns={1: "id", 2: "remark"})
    again = replace(PLAIN, columns={1: "id", 3: "note"})
    for now, text in (
        (renamed, "column 'note' was renamed to 'remark'"),
        (again, "column 'note' was dropped and added again"),
    ):
        assert [(each.text, each.in_stream) for each in silent_changes(PLAIN, now, {})] == [(text, True)]
    assert texts(PLAIN, replace(PLAIN, columns={1: "id"})) == []
    assert texts(PLAIN, replace(PLAIN, columns={**PLAIN.columns, 3: "c"})) == []


def test_types_that_the_database_defines() -> None:
    assert texts(PLAIN, replace(PLAIN, types={**PLAIN.types, 91: TypePart("mood", "calm")})) == []
    renamed = replace(PLAIN, types={**PLAIN.types, 90: TypePart("feeling", "low")})
    assert texts(PLAIN, renamed) == ["type 'feeling' was altered"]
    changed = replace(PLAIN, types={**PLAIN.types, 8: TypePart("point", "1 23,3 25")})
    assert texts(PLAIN, changed) == ["type 'point' was altered"]
    # Changed and changed back. A shape that an earlier version has stored does not say.
    sad, again = (replace(PLAIN, types={90: TypePart("mood", "sad", version)}) for version in ("700", "702"))
    assert texts(sad, again) == ["type 'mood' was altered"]
    assert texts(PLAIN, again) == texts(sad, sad) == []


def test_values_of_a_generated_column_were_never_sent() -> None:
    generated = replace(PLAIN, generated=frozenset({2}))
    assert texts(generated, PLAIN) == ["column 'note' is no longer generated"]
    assert texts(generated, replace(PLAIN, columns={1: "id"})) == texts(generated, generated) == []


def test_a_column_that_came_and_went_may_be_taken_for_a_later_one() -> None:
    before = replace(PLAIN, attributes=3)
    for columns, attributes, expected in (
        ({4: "c"}, 4, []),
        ({}, 4, []),  # nothing can be taken for it
        ({5: "c"}, 5, ["a column was added, dropped, and another one added"]),
    ):
        now = replace(PLAIN, columns={**PLAIN.columns, **columns}, attributes=attributes)
        assert texts(before, now) == expected
        assert texts(PLAIN, now) == []


@pytest.mark.parametrize("shape", [PLAIN, PARTED, replace(PLAIN, attributes=5, generated=frozenset({2}))])
def test_a_stored_shape_is_the_same(shape: TableShape) -> None:
    assert shape_from_json(shape_to_json(shape)) == shape
