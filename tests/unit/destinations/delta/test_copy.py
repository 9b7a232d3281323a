"""How the ranges of a copy become files."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.destinations.delta.copy import FILE_RANGES, group_ranges


@dataclass(frozen=True)
class Range:
    index: int
    estimated_bytes: int


@dataclass(frozen=True)
class RangeOfUnknownSize:
    index: int


def test_consecutive_ranges_make_files_of_a_good_size_and_know_theirs() -> None:
    ranges = [Range(index, size) for index, size in enumerate((40, 40, 40, 90, 20, 150, 10))]
    groups = group_ranges(ranges, file_bytes=100)
    assert [[part.index for part in group.ranges] for group in groups] == [[0, 1], [2], [3], [4], [5], [6]]
    assert [group.estimated_bytes for group in groups] == [80, 40, 90, 20, 150, 10]


def test_partitions_that_are_nearly_empty_share_a_file_but_not_all_of_them() -> None:
    groups = group_ranges([Range(index, 0) for index in range(2 * FILE_RANGES + 1)])
    assert [len(group.ranges) for group in groups] == [FILE_RANGES, FILE_RANGES, 1]


def test_ranges_that_do_not_know_their_size_count_as_large() -> None:
    groups = group_ranges([RangeOfUnknownSize(index) for index in range(6)])
    assert [len(group.ranges) for group in groups] == [4, 2]


def test_a_table_without_partitions_has_no_file() -> None:
    assert group_ranges([]) == []
