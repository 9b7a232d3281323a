"""How the ranges of a copy are dealt out."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.tasks import COPY_TASK_BYTES, COPY_TASK_ITEMS, group_for_turns


@given(st.integers(1, 200), st.integers(1, 9))
def test_groups_keep_the_order_and_end_even(count: int, turns: int) -> None:
    groups = group_for_turns(list(range(count)), turns)
    assert [item for group in groups for item in group] == list(range(count))
    assert all(1 <= len(group) <= COPY_TASK_ITEMS for group in groups)
    sizes = {len(group) for group in groups}
    assert max(sizes) - min(sizes) <= 1


def test_few_ranges_are_shared_by_all_turns() -> None:
    assert [len(group) for group in group_for_turns(list(range(8)), 2)] == [4, 4]
    assert [len(group) for group in group_for_turns(list(range(5)), 2)] == [2, 3]
    assert [len(group) for group in group_for_turns(list(range(11)), 2)] == [2, 3, 3, 3]


@dataclass(frozen=True)
class Part:
    estimated_bytes: int


def test_items_that_are_large_already_are_a_task_each() -> None:
    large = [Part(COPY_TASK_BYTES - 1)] * 5
    assert [len(group) for group in group_for_turns(large, 1)] == [1, 1, 1, 1, 1]
    assert [len(group) for group in group_for_turns([Part(COPY_TASK_BYTES // 2)] * 5, 1)] == [1, 2, 2]
    assert [len(group) for group in group_for_turns([Part(0)] * 5, 1)] == [2, 3]
