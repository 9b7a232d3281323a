"""Ranges: open at both ends, without gaps, about equal in bytes."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.copy.plan import CopyRange, Leaf, plan_ranges


def leaf(blocks: int, size: int | None = None, oid: int = 1) -> Leaf:
    return Leaf(oid, 100 + oid, blocks, blocks * 8192 if size is None else size, (1, 2))


def test_an_empty_table_is_one_open_range() -> None:
    (only,) = plan_ranges(1, [leaf(0)])
    assert (only.first_block, only.end_block, only.condition, only.estimated_bytes) == (0, None, "", 0)


def test_no_heap_has_no_range() -> None:
    assert plan_ranges(1, []) == ()


@pytest.mark.trap(21)
def test_ranges_are_open_at_both_ends_and_meet() -> None:
    ranges = plan_ranges(1, [leaf(100)], range_bytes=30 * 8192)
    assert [part.condition for part in ranges] == [
        "ctid < '(25,0)'::pg_catalog.tid",
        "ctid >= '(25,0)'::pg_catalog.tid and ctid < '(50,0)'::pg_catalog.tid",
        "ctid >= '(50,0)'::pg_catalog.tid and ctid < '(75,0)'::pg_catalog.tid",
        "ctid >= '(75,0)'::pg_catalog.tid",
    ]


@pytest.mark.trap(17, 20)
def test_partitions_are_apart_and_numbered_through() -> None:
    ranges = plan_ranges(1, [leaf(10, oid=1), leaf(0, oid=2), leaf(20, oid=3)], range_bytes=10 * 8192)
    assert [(part.index, part.leaf.oid, part.first_block, part.end_block) for part in ranges] == [
        (0, 1, 0, None),
        (1, 2, 0, None),
        (2, 3, 0, 10),
        (3, 3, 10, None),
    ]


def test_values_stored_out_of_line_count() -> None:
    assert len(plan_ranges(1, [leaf(8, size=80 << 20)], range_bytes=10 << 20)) == 8
    assert len(plan_ranges(1, [leaf(8, size=800 << 20)], range_bytes=10 << 20)) == 8


def test_old_servers_read_a_heap_at_once() -> None:
    ranges = plan_ranges(1, [leaf(1_000_000), leaf(5, oid=2)], can_seek=False)
    assert [part.condition for part in ranges] == ["", ""]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1 << 30)), max_size=5), st.integers(1, 64 << 20))
def test_ranges_cover_every_block_once(heaps: list[tuple[int, int]], range_bytes: int) -> None:
    leaves = [leaf(blocks, blocks * 8192 + toast, oid) for oid, (blocks, toast) in enumerate(heaps)]
    ranges = plan_ranges(7, leaves, range_bytes=range_bytes)
    assert [part.index for part in ranges] == list(range(len(ranges)))
    for each in leaves:
        own = [part for part in ranges if part.leaf == each]
        assert own[0].first_block == 0
        assert own[-1].end_block is None
        assert [part.end_block for part in own[:-1]] == [part.first_block for part in own[1:]]
        assert all(part.end_block is None or part.first_block < part.end_block for part in own)
        if each.blocks:
            assert abs(sum(part.estimated_bytes for part in own) - each.bytes) <= len(own)


@pytest.mark.trap(50)
def test_ranges_pickle() -> None:
    part = plan_ranges(1, [leaf(100)])[0]
    again = pickle.loads(pickle.dumps(part))
    assert isinstance(again, CopyRange)
    assert again == part
