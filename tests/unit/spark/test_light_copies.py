"""Small tables are read together, each group by one task."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.spark.light_copies import MAX_TOGETHER, CopyGroup, LightCopies


@dataclass(frozen=True)
class Range:
    estimated_bytes: int


def group(*sizes: int) -> CopyGroup:
    return CopyGroup([Range(size) for size in sizes], str, "copy")


def test_whoever_has_a_turn_takes_small_ones_along_up_to_a_size():
    copies = LightCopies(max_bytes=100)
    first, second, third, large = group(40), group(10, 20), group(50), group(100)
    for each in (first, second, third, large):
        copies.offer(each)
    assert copies.take(first) == [first, second]
    assert copies.take(second) == []
    assert copies.take(third) == [third]
    assert copies.take(large) == [large]


def test_what_was_withdrawn_or_never_offered_is_not_taken_along():
    copies = LightCopies(max_bytes=100)
    first, gone, alone = group(1), group(1), group(1)
    copies.offer(first)
    copies.offer(gone)
    copies.withdraw(gone)
    assert copies.take(first) == [first]
    # One part of a larger copy: nobody else runs it.
    assert copies.take(alone) == [alone]


def test_a_task_takes_only_so_many():
    copies = LightCopies(max_bytes=1_000)
    groups = [group(0) for _ in range(MAX_TOGETHER + 3)]
    for each in groups:
        copies.offer(each)
    assert copies.take(groups[0]) == groups[:MAX_TOGETHER]


def test_items_that_do_not_know_their_size_count_as_large():
    copies = LightCopies()
    unknown, other = CopyGroup([1], str, "copy"), group(1)
    copies.offer(unknown)
    copies.offer(other)
    assert copies.take(other) == [other]
