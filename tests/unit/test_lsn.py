"""Positions are compared by `penstock.lsn` and nowhere else."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import numpy as np
import pytest

from penstock.lsn import Lsn, OrderKey, are_in, distance, earliest, furthest, is_in, reaches

ORDER = [operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.trap(2)
@pytest.mark.parametrize("compare", ORDER)
@pytest.mark.parametrize("other", [Lsn(2), 2, np.int64(2), np.array([1, 2])], ids=["lsn", "int", "number", "column"])
def test_positions_cannot_be_compared_by_operators(compare: Callable[[object, object], object], other: object) -> None:
    for one, two in ((Lsn(1), other), (other, Lsn(1))):
        with pytest.raises(TypeError, match=r"penstock\.lsn"):
            compare(one, two)


@pytest.mark.parametrize("choose", [max, min, sorted])
def test_positions_cannot_be_sorted(choose: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"penstock\.lsn"):
        choose([Lsn(1), Lsn(2)])


@pytest.mark.trap(2)
def test_a_transaction_that_starts_at_a_boundary_comes_after_it() -> None:
    assert is_in(Lsn(1), Lsn(2))
    assert not is_in(Lsn(2), Lsn(2))
    assert are_in(np.array([1, 2, 3]), Lsn(2)).tolist() == [True, False, False]


def test_boundaries_cover_each_other() -> None:
    assert reaches(Lsn(2), Lsn(2))
    assert not reaches(Lsn(1), Lsn(2))
    assert (earliest(Lsn(2), Lsn(1), Lsn(3)), furthest(Lsn(2), Lsn(1), Lsn(3))) == (1, 3)
    assert (earliest(Lsn(2)), furthest(Lsn(2))) == (2, 2)
    assert (distance(Lsn(1), Lsn(4)), distance(Lsn(4), Lsn(1))) == (3, 0)


def test_order_keys_sort_by_commit_then_ordinal_and_so_do_their_names() -> None:
    keys = [OrderKey(Lsn(commit), ordinal) for commit in (1, 9, 10, 1 << 40) for ordinal in (0, 9, 10)]
    assert sorted(random.sample(keys, len(keys))) == keys
    assert sorted(map(str, random.sample(keys, len(keys)))) == [str(key) for key in keys]
    assert [OrderKey.parse(str(key)) for key in keys] == keys
    assert keys[0] <= keys[0] < keys[1]
    assert keys[1] >= keys[1] > keys[0]
