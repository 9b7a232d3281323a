"""Actions and their JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.delta.actions import (
    Action,
    Add,
    CommitInfo,
    Metadata,
    Protocol,
    Remove,
    Txn,
    VectorDescriptor,
    parse_commit,
    serialize_commit,
    to_json,
)

_NUMBER = st.integers(0, (1 << 63) - 1)
_TEXT = st.text(max_size=20)
_MAP = st.dictionaries(_TEXT, _TEXT, max_size=3)
_VECTOR = st.none() | st.builds(VectorDescriptor, st.sampled_from("ui"), _TEXT, _NUMBER, _NUMBER, st.none() | _NUMBER)
_ACTIONS = st.one_of(
    st.builds(Add, _TEXT, _NUMBER, _NUMBER, st.booleans(), st.none() | _TEXT, _VECTOR, _MAP, _MAP),
    st.builds(Remove, _TEXT, st.none() | _NUMBER, st.booleans(), _VECTOR, _NUMBER, _MAP),
    st.builds(Txn, _TEXT, _NUMBER, st.none() | _NUMBER),
    st.builds(CommitInfo, _NUMBER, _TEXT, _TEXT, _TEXT, _MAP, _MAP),
    st.builds(Protocol, st.just(3), st.just(7), st.frozensets(_TEXT), st.frozensets(_TEXT)),
    st.builds(Metadata, _TEXT, _TEXT, _MAP, st.tuples(_TEXT), st.none() | _NUMBER, st.none() | _TEXT),
)


@given(st.lists(_ACTIONS, max_size=6))
def test_a_commit_comes_back_as_it_was(actions: list[Action]) -> None:
    assert parse_commit(serialize_commit(actions)) == actions


def test_actions_that_are_not_ours_are_passed_over() -> None:
    assert parse_commit(b'{"domainMetadata":{"domain":"d"}}\n{"txn":{"appId":"a","version":1}}\n') == [Txn("a", 1)]


@pytest.mark.parametrize("end", [1, 5, 20])
def test_a_commit_that_is_cut_off_is_no_commit(end: int) -> None:
    content = serialize_commit([Txn("a", 1), Txn("b", 2)])
    with pytest.raises(ValueError):
        parse_commit(content[: -end - 1])


def test_a_protocol_without_features_has_no_lists() -> None:
    assert to_json(Protocol(1, 2)) == {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}


@pytest.mark.trap(39)
def test_a_removed_file_names_the_vector_that_it_had() -> None:
    vector = VectorDescriptor("u", "x" * 20, 30, 2, 1)
    add = Add("f.parquet", 5, 1, True, '{"numRecords":3}', vector)
    record = to_json(add.removed(9))["remove"]
    assert record["deletionVector"] == to_json(add)["add"]["deletionVector"]
    assert record["extendedFileMetadata"] is True
    assert record["size"] == 5


@pytest.mark.trap(39)
@pytest.mark.parametrize(
    "stats",
    [
        '{"numRecords":3,"minValues":{"a":12345678901234567890.12},"tightBounds":true}',
        '{"numRecords":3,"minValues":{"a":12345678901234567890.12}}',
        '{"numRecords":3,"minValues":{"a":12345678901234567890.12}, "tightBounds" : false }',
    ],
)
def test_with_a_vector_statistics_are_no_longer_exact_and_keep_their_digits(stats: str) -> None:
    changed = Add("f", 5, 1, True, stats).with_vector(VectorDescriptor("u", "x", 30, 2, 1)).stats
    assert changed is not None
    assert json.loads(changed)["tightBounds"] is False
    assert json.loads(changed)["numRecords"] == 3
    assert "12345678901234567890.12" in changed


def test_a_path_is_decoded_once() -> None:
    assert Add("a%20b%25.parquet", 1, 1).file == "a b%.parquet"
