"""Deletion vectors: what is written is read, what is broken is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.delta import files
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.delta.vectors import (
    Vector,
    decode_z85,
    encode_z85,
    read_vector,
    vector_file,
    write_vectors,
)
from penstock.errors import TableRejected

ROWS = st.one_of(
    st.sets(st.integers(0, 200)),
    st.sets(st.integers(0, 1 << 33)),
    st.builds(lambda first, count: set(range(first, first + count)), st.integers(0, 1 << 34), st.integers(0, 70_000)),
)


@given(ROWS)
def test_a_vector_comes_back_as_it_was(rows: set[int]) -> None:
    vector = Vector.of(rows)
    again = Vector.from_bytes(vector.to_bytes())
    assert again == vector
    assert again.rows().tolist() == sorted(rows)
    assert again.rows().dtype == np.uint64
    assert len(again) == len(rows)


@given(ROWS, ROWS)
def test_union_and_difference_are_those_of_sets(one: set[int], other: set[int]) -> None:
    assert Vector.of(one).union(Vector.of(other)).rows().tolist() == sorted(one | other)
    assert Vector.of(one).difference(Vector.of(other)).rows().tolist() == sorted(one - other)
    assert Vector.of(one).isdisjoint(Vector.of(other)) is one.isdisjoint(other)


def test_a_vector_pickles_and_never_changes() -> None:
    vector = Vector.of([3, 1, 2, 3])
    vector.union(Vector.of([9]))
    assert pickle.loads(pickle.dumps(vector)) == vector
    assert vector.rows().tolist() == [1, 2, 3]
    assert vector.alive(5).tolist() == [True, False, False, False, True]


def test_the_serialised_form_is_the_one_of_the_specification() -> None:
    # Magic number, one 32-bit bitmap with key 0, then that bitmap: two containers would have another cookie.
    data = Vector.of([3, 4, 7, 11, 18, 29]).to_bytes()
    assert data[:4].hex() == "d1d33964"
    assert data[4:16].hex() == "0100000000000000" + "00000000"
    assert data[16:20].hex() == "3a300000"


@given(st.lists(ROWS, min_size=1, max_size=5), st.sampled_from([0, 64, 1 << 20]))
def test_vectors_are_read_from_the_file_or_from_the_log(
    tmp_path_factory: pytest.TempPathFactory, rows: list[set[int]], inline_bytes: int
) -> None:
    storage = LocalStorage(tmp_path_factory.mktemp("vectors"))
    vectors = [Vector.of(each) for each in rows]
    descriptors = write_vectors(storage, vectors, inline_bytes=inline_bytes)
    assert [read_vector(storage, each) for each in descriptors] == vectors
    assert [each.cardinality for each in descriptors] == [len(each) for each in rows]
    files = {vector_file(each) for each in descriptors} - {None}
    assert files == {file.path for file in storage.list()}
    assert len(files) <= 1


@given(st.binary(max_size=64))
def test_z85_comes_back(data: bytes) -> None:
    padded = data + bytes(-len(data) % 4)
    assert decode_z85(encode_z85(padded)) == padded


@pytest.mark.parametrize("text", ["abcd", "abcd~", "#####", "ab cd"])
def test_what_is_not_z85_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_z85(text)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_vector_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Vector.from_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut", "incomplete"),
        ("flipped", "checksum"),
        ("missing", "missing"),
        ("size", "whose size differs"),
        ("cardinality", "number of rows"),
    ],
)
def test_a_damaged_vector_file_is_refused(tmp_path: Path, damage: str, said: str) -> None:
    storage = LocalStorage(tmp_path)
    [descriptor] = write_vectors(storage, [Vector.of(range(0, 1000, 3))])
    name = vector_file(descriptor)
    assert name is not None
    path = tmp_path / name
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-3])
        case "flipped":
            path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "missing":
            path.unlink()
        case "size":
            descriptor = replace(descriptor, size=descriptor.size - 4)
        case _:
            descriptor = replace(descriptor, cardinality=5)
    with pytest.raises(TableRejected, match=said) as caught:
        read_vector(storage, descriptor)
    assert caught.value.hint


def test_vectors_outside_of_the_table_are_refused(tmp_path: Path) -> None:
    [descriptor] = write_vectors(LocalStorage(tmp_path), [Vector.of([1])])
    with pytest.raises(TableRejected, match="outside"):
        vector_file(replace(descriptor, storage_type="p"))


def test_a_vector_that_is_cached_again_takes_no_more_room() -> None:
    cache = files.RecentlyUsed[Vector](10, len)
    for _ in range(20):
        cache.put(("lake", "one"), Vector.of([1]))
        cache.put(("lake", "other"), Vector.of([1, 2]))
    assert cache.get(("lake", "one")) is not None
    cache.put(("lake", "other"), Vector.of(range(10)))
    assert cache.get(("lake", "one")) is None
