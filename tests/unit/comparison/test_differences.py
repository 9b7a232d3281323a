"""Rows compared by their digests, against the obvious way; and buckets whose sums are equal exactly if rows are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.comparison.differences import compare_around, compare_digests
from penstock.comparison.digest import DigestedRows, digest_rows
from penstock.comparison.report import Counts
from penstock.comparison.scan import (
    BucketSums,
    Piece,
    Scan,
    Side,
    SideRows,
    are_recent,
    find_buckets,
    fit_type,
    sum_piece,
)
from penstock.comparison.schemas import common_type
from penstock.errors import NotComparable

Row = tuple[int, int]
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=12)


def digests(rows: list[Row], *, keyed: bool = True) -> DigestedRows:
    columns = [pa.array([row[place] for row in rows], pa.int64()) for place in (0, 1)]
    return digest_rows(columns, {}, [0] if keyed else [])


def obvious(source: list[Row], destination: list[Row], *, keyed: bool) -> Counts:
    here, there = Counter(source), Counter(destination)
    missing, extra = here - there, there - here
    changed = 0
    if keyed:
        keys_missing = Counter(row[0] for row in missing.elements())
        keys_extra = Counter(row[0] for row in extra.elements())
        changed = (keys_missing & keys_extra).total()
    return Counts((here & there).total(), missing.total() - changed, extra.total() - changed, changed)


@given(ROWS, ROWS, st.booleans())
def test_multisets_are_compared_as_the_obvious_way_does(source: list[Row], destination: list[Row], keyed: bool) -> None:
    found = compare_digests(digests(source, keyed=keyed), digests(destination, keyed=keyed), limit=100)
    assert found.counts == obvious(source, destination, keyed=keyed)
    assert bool(found.keys) == bool(found.counts.different)
    assert len(compare_digests(digests(source), digests(destination), limit=1).keys) <= 1


STATE = st.dictionaries(st.integers(0, 6), st.integers(0, 2), max_size=6)
EDITS = st.dictionaries(st.integers(0, 6), st.none() | st.integers(0, 2), max_size=4)


def edited(state: dict[int, int], edits: dict[int, int | None]) -> dict[int, int]:
    return {key: value for key, value in (state | edits).items() if value is not None}


@given(STATE, EDITS, EDITS, st.none() | st.tuples(st.integers(0, 6), st.none() | st.integers(3, 4)))
def test_around_a_snapshot_only_what_did_not_change_is_judged(
    state: dict[int, int],
    meanwhile: dict[int, int | None],
    after: dict[int, int | None],
    fault: tuple[int, int | None] | None,
) -> None:
    at_snapshot = edited(state, meanwhile)
    before, later = dict(state), edited(at_snapshot, after)
    touched = {*meanwhile, *after}
    if fault is not None and fault[0] not in touched:
        # The destination is wrong about one row, before and later.
        for each in (before, later):
            each.pop(fault[0], None)
            if fault[1] is not None:
                each[fault[0]] = fault[1]
    # A row that went away and came back as it was shows no trace: that is not tried here.
    vanished = [key for key in before if key not in at_snapshot and later.get(key) == before[key]]
    for key in vanished:
        if key in touched:
            del later[key]
    found = compare_around(
        digests(list(at_snapshot.items())),
        np.array([meanwhile.get(key) is not None for key in at_snapshot], np.bool_),
        digests(list(before.items())),
        digests(list(later.items())),
        limit=100,
    )
    wrong = int(before.get(fault[0]) != state.get(fault[0])) if fault is not None else 0
    assert found.counts.different == wrong
    assert found.counts.unsettled <= len(touched)


@given(ROWS, ROWS, st.integers(1, 7))
@example([(0, 0), (1, 1)], [(0, 1), (1, 0)], 1).via("two rows that have exchanged a value")
def test_sums_of_buckets_differ_exactly_if_rows_do(source: list[Row], destination: list[Row], buckets: int) -> None:
    sums: list[BucketSums] = []
    for rows in (source, destination):
        digested = digests(rows)
        each = BucketSums.nothing(buckets)
        each.add(find_buckets(digested.keys, buckets), digested.rows)
        sums.append(each)
    assert sums[0].differing(sums[1]).any() == (Counter(source) != Counter(destination))


@given(st.lists(st.integers(), min_size=1), st.integers(1, 8192))
def test_buckets_follow_the_order_of_keys(values: list[int], count: int) -> None:
    keys = digest_rows([pa.array([hash(value) for value in values])], {}, [0]).keys
    order = np.argsort(keys[0])
    buckets = find_buckets(keys, count)
    assert (np.diff(buckets[order]) >= 0).all()
    assert 0 <= buckets.min() <= buckets.max() < count


class FewRows:
    """Reads a part that is a table."""

    def read(self, part: pa.Table, /):
        yield from part.to_batches()


def scan_of(names: tuple[str | None, ...], *, sample: float = 1.0) -> Scan:
    columns = pa.schema([("id", pa.int32()), ("at", pa.time64("us"))])
    side = SideRows(FewRows(), names)
    return Scan("public.t", columns, (0,), {Side.SOURCE: side, Side.DESTINATION: side}, 4, sample)


def test_a_side_may_hold_the_same_values_in_other_types_and_names() -> None:
    seconds = [0, 1_500_000, None]
    plain = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "at": pa.array(seconds, pa.time64("us"))})
    other = pa.table({"a": pa.array(["00:00:00", "00:00:01.5", None]), "key": pa.array([1, 2, 3], pa.int64())})
    one = sum_piece(scan_of(("id", "at")), Piece(0, Side.SOURCE, (plain.slice(0, 1), plain.slice(1))))
    two = sum_piece(scan_of(("key", "a")), Piece(0, Side.DESTINATION, (other,)))
    assert not one.differing(two).any()
    assert one.counts.sum() == 3


@pytest.mark.parametrize("text", ["secret", "007"])
def test_a_column_that_cannot_be_the_same_is_said_without_its_values(text: str) -> None:
    # "007" could be cast to the number that it spells.
    wrong = pa.table({"id": [text], "at": pa.nulls(1, pa.time64("us"))})
    with pytest.raises(NotComparable) as caught:
        sum_piece(scan_of(("id", "at")), Piece(0, Side.DESTINATION, (wrong,)))
    assert text not in str(caught.value)
    assert "'id'" in str(caught.value)


@given(st.lists(st.none() | st.lists(st.none() | st.integers(0, 86_399_999_999), max_size=3)), st.integers(0, 3))
def test_lists_of_times_come_back_from_texts(values: list[list[int | None] | None], skipped: int) -> None:
    wanted = pa.array(values, pa.list_(pa.time64("us")))
    clocks = [None if each is None else [_clock(time) for time in each] for each in values]
    texts = pa.array(clocks, pa.list_(pa.string()))
    assert fit_type(texts.slice(skipped), wanted.type).equals(wanted.slice(skipped))


def _clock(microseconds: int | None) -> str | None:
    if microseconds is None:
        return None
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{fraction:06d}"


def test_recent_is_what_is_between_two_transactions_however_often_numbers_went_round() -> None:
    transactions = np.array([2, 500_000_000, 2_999_999_999, 3_000_000_000, 3_000_009_999, 3_000_010_000], np.int64)
    assert are_recent(transactions, 3_000_000_000, 3_000_010_000).tolist() == [False, False, False, True, True, False]
    around = np.array([4_294_967_290, 2, 3, 100, 101], np.int64)
    assert are_recent(around, 4_294_967_000, 101).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("source", "destination", "common"),
    [
        (pa.int32(), pa.int32(), pa.int32()),
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.int32(), None),
        (pa.int32(), pa.string(), None),
        (pa.string(), pa.int32(), None),
        (pa.int32(), pa.bool_(), None),
        (pa.int32(), pa.float64(), None),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.float64(), pa.float32(), None),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(10, 2), pa.decimal128(10, 4), None),
        (pa.decimal128(10, 2), pa.decimal128(12, 0), None),
        (pa.string(), pa.large_string(), pa.string()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.string(), pa.binary(), None),
        (pa.time64("us"), pa.string(), pa.time64("us")),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.timestamp("us"), pa.timestamp("ms"), None),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.int32()), pa.list_(pa.string()), None),
        (pa.int32(), pa.null(), pa.int32()),
    ],
    ids=str,
)
def test_only_wider_types_are_comparable(
    source: pa.DataType, destination: pa.DataType, common: pa.DataType | None
) -> None:
    assert common_type(source, destination) == common
