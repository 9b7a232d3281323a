"""Key indexes against a dictionary."""

from __future__ import annotations

import tracemalloc
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.keys import fingerprints, row_keys
from penstock.destinations.delta.index import IndexFolder, KeyQuery, build_index
from penstock.destinations.delta.storage import LocalStorage
from tests.support.examples import examples

_INTS = st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)
_TEXTS = st.text(max_size=3) | st.text("ab", max_size=30)
_DATES = st.none() | st.dates(date(1, 1, 1), date(9999, 12, 31))
_FLOATS = st.none() | st.floats()
_LISTS = st.none() | st.lists(st.none() | st.text("ab", max_size=2), max_size=3)


def keys_of(rows: list[tuple[Any, ...]], kind: str) -> pa.Array:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 3
    match kind:
        case "number":
            return row_keys([pa.array(columns[0], pa.int64())])
        case "text":
            return row_keys([pa.array(columns[1], pa.string())])
        case _:
            types = [pa.int64(), pa.string(), pa.date32(), pa.float64(), pa.list_(pa.string())]
            return row_keys([pa.array(column, type_) for column, type_ in zip(columns, types, strict=False)])


def exact(row: tuple[Any, ...], kind: str) -> Any:
    match kind:
        case "number":
            return row[0]
        case "text":
            return row[1]
        case _:
            cells = (float.hex(cell) if isinstance(cell, float) else cell for cell in row)
            return repr(tuple(cells))


ROWS = st.lists(st.tuples(_INTS, _TEXTS, _DATES, _FLOATS, _LISTS), max_size=40)


@pytest.mark.parametrize("kind", ["number", "text", "all"])
@settings(max_examples=examples(30), deadline=None)
@given(there=ROWS, asked=ROWS)
def test_all_rows_of_a_key_are_found(tmp_path_factory: Any, kind: str, there: list[Any], asked: list[Any]) -> None:
    folder = IndexFolder(LocalStorage(tmp_path_factory.mktemp("table")), "digest")
    folder.write("file", build_index(keys_of(there, kind)))
    index = folder.open("file", lambda: pytest.fail("it is there"))
    unique = list({exact(row, kind): row for row in [*asked, *there[:3]]}.values())
    found, rows = index.find(KeyQuery.of(keys_of(unique, kind)))
    pairs = sorted(zip(found.tolist(), rows.tolist(), strict=True))
    expected = sorted(
        (number, row)
        for number, key in enumerate(unique)
        for row, cells in enumerate(there)
        if exact(cells, kind) == exact(key, kind)
    )
    assert pairs == expected


def test_keys_with_the_same_fingerprint_are_told_apart(tmp_path: Path) -> None:
    """Long keys are looked at in places only, so these two have the same."""
    base = bytearray(b"x" * 4_000)
    other = bytearray(base)
    other[2_004] = ord("y")
    keys = row_keys([pa.array([bytes(base), bytes(other), b"z"], pa.binary())])
    numbers = fingerprints(keys)
    if numbers[0] != numbers[1]:
        other = next(
            candidate
            for place in range(0, 4_000, 8)
            if fingerprints(row_keys([pa.array([candidate := _changed(base, place)], pa.binary())]))[0] == numbers[0]
        )
        keys = row_keys([pa.array([bytes(base), other, b"z"], pa.binary())])
    assert fingerprints(keys)[0] == fingerprints(keys)[1]
    folder = IndexFolder(LocalStorage(tmp_path), "digest")
    index = folder.open("file", lambda: build_index(keys))
    found, rows = index.find(KeyQuery.of(keys.slice(1, 1)))
    assert (found.tolist(), rows.tolist()) == ([0], [1])


def _changed(base: bytearray, place: int) -> bytes:
    changed = bytearray(base)
    changed[place] = ord("y")
    return bytes(changed)


def test_an_index_without_keys_gives_candidates(tmp_path: Path) -> None:
    keys = row_keys([pa.array(["a", "b", "a"])])
    index = IndexFolder(LocalStorage(tmp_path), "d").open("file", lambda: build_index(keys, keep_keys=False))
    assert index.keys is None
    found, rows = index.find(KeyQuery.of(keys.slice(0, 1)))
    assert sorted(rows.tolist()) == [0, 2]
    assert np.array_equal(found, [0, 0])


def test_only_an_index_from_before_the_machine_started_is_read_through(tmp_path: Path) -> None:
    """Opening one must not cost as much as the table is large."""
    content = bytearray(build_index(pa.array([1, 2, 3])))
    content[24:32] = bytes(8)
    folder = IndexFolder(LocalStorage(tmp_path), "d")
    folder.write("now", bytes(content))
    assert folder.open("now", lambda: pytest.fail("it is there")).row_count == 3
    content[32:48] = b"an earlier start"
    folder.write("before", bytes(content))
    rebuilt = folder.open("before", lambda: build_index(pa.array([4])))
    assert rebuilt.numbers.tolist() == [4]


def test_building_an_index_takes_little_more_memory_than_the_index() -> None:
    keys = pa.array(np.random.default_rng(1).permutation(500_000).astype(np.int64))
    tracemalloc.start()
    try:
        size = len(build_index(keys))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * size
