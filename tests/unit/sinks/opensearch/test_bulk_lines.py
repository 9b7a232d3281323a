"""Lines of a bulk request, as the server would read them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.documents.base import DOCUMENT_SCHEMA
from penstock.sinks.opensearch.bulk import (
    LONGEST_ID,
    BulkSender,
    Target,
    bulk_lines,
    documents_size,
    split,
    unusable_ids,
)
from penstock.sinks.opensearch.client import OpenSearchSettings, RetryLimit

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
BODY = st.none() | st.dictionaries(TEXT, TEXT | st.integers() | st.none(), max_size=3)


def batch_of(rows: list[tuple[str, int, str | None]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [[], [], []]
    return pa.table([["one"] * len(rows), *map(list, columns)], schema=DOCUMENT_SCHEMA)


def read_lines(content: memoryview) -> list[tuple[str, str, Any, int, Any]]:
    """(action, id, version type, version, body or None) of each document, by the rules of the server."""
    lines = bytes(content).decode().split("\n")
    assert lines.pop() == "", "the last line ends too"
    found = []
    rest = iter(lines)
    for line in rest:
        [(action, about)] = json.loads(line).items()
        body = json.loads(next(rest)) if action == "index" else None
        found.append((action, about["_id"], about["version_type"], about["version"], body))
    return found


@given(st.lists(st.tuples(TEXT, st.integers(0, 2**62), BODY, st.booleans()), max_size=8))
def test_every_id_and_every_body_arrives_as_it_is(rows: list[tuple[str, int, dict[str, Any] | None, bool]]) -> None:
    batch = batch_of(
        [
            (id_, version, None if body is None else json.dumps(body, indent=1 if wide else None))
            for id_, version, body, wide in rows
        ]
    )
    assert read_lines(bulk_lines(batch)) == [
        ("delete" if body is None else "index", id_, "external_gte", version, body) for id_, version, body, _ in rows
    ]


def test_a_document_and_its_removal_are_routed_by_the_same_part_of_the_id() -> None:
    batch = batch_of([('acme%3A"x:7', 1, "{}"), ("50%25:8", 2, None)])
    lines = [json.loads(line) for line in bytes(bulk_lines(batch, (0, 2))).decode().splitlines()]
    assert [lines[0]["index"]["routing"], lines[2]["delete"]["routing"]] == ['acme:"x', "50%"]
    assert json.loads(bytes(bulk_lines(batch, (1, 2))).split(b"\n")[0])["index"]["routing"] == "7"


@given(st.data())
def test_lines_of_a_slice_are_those_of_its_rows(data: st.DataObject) -> None:
    rows = [(f'"{number}\\', number, None if number % 3 else f'{{"n": {number}}}') for number in range(20)]
    chunked = pa.concat_tables([batch_of(rows[:7]), batch_of(rows[7:])])
    start = data.draw(st.integers(0, 20))
    length = data.draw(st.integers(0, 20 - start))
    assert bytes(bulk_lines(chunked.slice(start, length))) == bytes(bulk_lines(batch_of(rows[start : start + length])))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 1500))
def test_pieces_hold_at_most_so_much(sizes: list[int], most_documents: int, most_bytes: int) -> None:
    batch = batch_of([(str(number), 1, "x" * size) for number, size in enumerate(sizes)])
    pieces = list(split(batch, most_documents, most_bytes))
    assert pa.concat_tables(pieces).equals(batch), "nothing is lost, and the order stays"
    for piece in pieces:
        assert 1 <= piece.num_rows <= most_documents
        assert piece.num_rows == 1 or documents_size(piece).sum() <= most_bytes
        assert len(bulk_lines(piece)) <= documents_size(piece).sum(), "what is reckoned is not less than what is sent"


@pytest.mark.parametrize(
    ("id_", "unusable"), [("", True), ("a", False), ("é" * 256, False), ("é" * 256 + "x", True)], ids=repr
)
def test_ids_that_would_spoil_a_request_are_known_before(id_: str, unusable: bool) -> None:
    assert LONGEST_ID == 512
    assert unusable_ids(batch_of([(id_, 1, "{}")])).to_pylist() == [unusable]


def test_removing_a_document_that_no_index_can_have_is_not_rejected() -> None:
    nothing: Any = None
    sender = BulkSender(nothing, OpenSearchSettings("http://localhost"))
    target = Target("one", "one_f_1", "one_f_1_WRITE")
    long = "x" * (LONGEST_ID + 1)
    assert sender.send(target, batch_of([(long, 1, None), ("", 1, None)]), RetryLimit(1)) == []
    [rejection] = sender.send(target, batch_of([(long, 2, "{}")]), RetryLimit(1))
    assert rejection.id == long
