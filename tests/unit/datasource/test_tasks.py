"""How many tasks read a table, or a batch of changes."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from penstock.datasource.changes import deal_out
from penstock.datasource.source import task_count

MB = 1 << 20


@pytest.mark.parametrize(
    ("size", "cores", "tasks"),
    [
        (0, 2, 1),
        (20 * MB, 2, 1),
        (40 * MB, 8, 2),
        (280 * MB, 2, 2),
        (600 * MB, 2, 4),
        (600 * MB, 8, 8),
        (10_000 * MB, 8, 40),
        (10_000 * MB, 64, 64),
        (10_000 * MB, 1, 40),
    ],
)
def test_all_cores_get_the_same_share_unless_the_table_is_small(size: int, cores: int, tasks: int) -> None:
    assert task_count(size, cores) == tasks


@pytest.mark.parametrize(
    ("sizes", "cores", "shares"),
    [
        ([], 2, []),
        ([0], 2, [(0, 1)]),
        ([1 * MB] * 3, 2, [(0, 3)]),
        ([5 * MB] * 6, 2, [(0, 3), (3, 6)]),
        ([5 * MB] * 6, 1, [(0, 6)]),
        ([5 * MB] * 6, 64, [(0, 2), (2, 4), (4, 6)]),
        ([20 * MB] * 8, 2, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ([100 * MB, 1 * MB], 2, [(0, 1), (1, 2)]),
    ],
)
def test_every_core_gets_a_share_of_a_batch_unless_it_is_small(
    sizes: list[int], cores: int, shares: list[tuple[int, int]]
) -> None:
    assert list(deal_out(sizes, cores)) == shares
