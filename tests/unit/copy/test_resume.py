"""Resumed copies: the ranges of earlier snapshots, and changed rows of the last one, are the table of the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.copy.plan import Leaf, plan_ranges
from penstock.copy.resume import Blocks, FinishedRanges, blocks_by_heap, finds_rows_again, key_ranges, usable
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from tests.support.examples import examples

HEAP, SLOTS = 7, 2
"""A block has room for two rows."""
Row = tuple[int, int]
"""A key and a value."""


class Heap:
    """A heap in which updates move rows, and the changes that the stream brings, without values."""

    def __init__(self) -> None:
        self.blocks: list[list[Row | None]] = []
        self.touched: list[int] = []
        self.time = 0

    def rows(self) -> dict[int, Row]:
        return {row[0]: row for block in self.blocks for row in block if row is not None}

    def read(self, first: int, end: int | None) -> list[Row]:
        return [row for block in self.blocks[first:end] for row in block if row is not None]

    def change(self, action: int, key: int, other: int, place: int) -> None:
        """Insert, update, delete, or change a key; ignored if the key does not allow it. New versions go anywhere."""
        self.time += 1
        known = self.rows()
        if action == 0 and key not in known:
            self._put((key, self.time), place)
        elif action == 1 and key in known:
            self._remove(key)
            self._put((key, self.time), place)
        elif action == 2 and key in known:
            self._remove(key)
        elif action == 3 and key in known and other not in known:
            self._remove(key)
            self._put((other, known[key][1]), place)
            self.touched.append(other)
        else:
            return
        self.touched.append(key)

    def _remove(self, key: int) -> None:
        for block in self.blocks:
            for slot, row in enumerate(block):
                if row is not None and row[0] == key:
                    block[slot] = None

    def _put(self, row: Row, place: int) -> None:
        """Use the free place with this number, or a new block."""
        free = [(block, slot) for block in self.blocks for slot, there in enumerate(block) if there is None]
        if not free or place % (len(free) + 1) == len(free):
            self.blocks.append([None] * SLOTS)
            free, place = [(self.blocks[-1], 0)], 0
        block, slot = free[place % (len(free) + 1)]
        block[slot] = row


KEYS = st.integers(0, 12)
CHANGE = st.tuples(st.integers(0, 3), KEYS, KEYS, st.integers(0, 30))
CHANGES = st.lists(CHANGE, max_size=12)


@settings(max_examples=examples(100), deadline=None)
@given(CHANGES, st.lists(st.tuples(CHANGES, CHANGES, st.integers(0, 4)), min_size=1, max_size=4), CHANGES)
def test_a_resumed_copy_is_the_table_in_its_last_snapshot(before: Any, attempts: Any, during: Any) -> None:
    heap = Heap()
    for change in before:
        heap.change(*change)
    heap.touched.clear()  # the copy begins here: progress is held
    finished: list[FinishedRanges] = []
    files: dict[int, list[Row]] = {}
    last = len(attempts) - 1
    for number, (earlier, later, count) in enumerate(attempts):
        for change in earlier:
            heap.change(*change)
        taken = usable(finished, "same")
        # The snapshot: what changes from here on is not in it.
        snapshot = Heap()
        snapshot.blocks = [list(block) for block in heap.blocks]
        changed = set(heap.touched)
        leaf = Leaf(HEAP, 1, len(heap.blocks), len(heap.blocks) * 10, ())
        ranges = plan_ranges(1, [leaf], range_bytes=20, finished=blocks_by_heap(taken))
        for part in ranges if number == last else ranges[:count]:
            files[len(finished)] = snapshot.read(part.first_block, part.end_block)
            finished.append(FinishedRanges("same", (Blocks(*part.blocks),), 0, 0, len(finished)))
        for change in later if number < last else during:
            heap.change(*change)
    copied = [row for each in usable(finished, "same") for row in files[each.files] if row[0] not in changed]
    again = [row for key, row in snapshot.rows().items() if key in changed]
    assert Counter([*copied, *again]) == Counter(snapshot.rows().values())


def done(first: int, end: int | None, fingerprint: str = "same", heap: int = HEAP) -> FinishedRanges:
    return FinishedRanges(fingerprint, (Blocks(heap, first, end, 0),), 0, 0)


def test_ranges_of_a_changed_table_do_not_count_and_none_counts_twice():
    kept = [done(0, 4), done(6, None), done(4, 6, heap=8)]
    late = [done(3, 5), done(9, None), done(20, 30), done(4, 6, "other")]
    assert usable([*kept, *late], "same") == tuple(kept)


def test_what_is_not_done_is_planned_again():
    leaf = Leaf(HEAP, 1, 100, 1_000, ())
    plan = plan_ranges(1, [leaf], range_bytes=100, finished={HEAP: [(50, 60), (0, 30)]})
    found = [(part.first_block, part.end_block) for part in plan]
    assert found[0] == (30, 40)
    assert found[-1] == (90, None)
    assert [first for first, _ in found[1:]] == [40, 60, 70, 80, 90]
    assert plan_ranges(1, [leaf], finished={HEAP: [(0, 30), (30, None)]}) == ()
    grown = plan_ranges(1, [leaf], finished={HEAP: [(0, 120)]})
    assert [(part.first_block, part.end_block, part.estimated_bytes) for part in grown] == [(120, None, 0)]


def table(*types: str, identity: ReplicaIdentity = ReplicaIdentity.DEFAULT) -> TableSchema:
    columns = tuple(
        Column(f"k{number}", number + 1, PostgresType(20, name), identity=True) for number, name in enumerate(types)
    )
    return TableSchema(1, "public", "t", columns, identity)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (table("int8", "text"), True),
        (table("int8", "float8"), False),
        (replace(table("text"), columns=(Column("k", 1, PostgresType(20, "text", "shop"), identity=True),)), False),
        (table(), False),
        (table("int8", identity=ReplicaIdentity.NOTHING), False),
    ],
)
def test_rows_are_found_again_by_keys_of_common_types(schema: TableSchema, expected: bool):
    assert finds_rows_again(schema) is expected


def test_keys_are_quoted_in_conditions():
    leaf = Leaf(HEAP, 1, 1, 1, ())
    (part,) = key_ranges([leaf], table("int8", "text").columns, [["1"], ["o'x\\"]])
    assert part.leaf is leaf
    assert "o''x" in part.condition
    assert part.condition.count("unnest") == 2
