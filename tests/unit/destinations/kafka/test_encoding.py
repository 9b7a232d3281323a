"""Cells and rows in JSON and Avro, compared with implementations that work value by value."""

from __future__ import annotations

import base64
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("confluent_kafka")

import fastavro
import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.kafka.avro_cells import avro_cells, numbers, union_type
from penstock.destinations.kafka.json_cells import base64_text, json_cells, quoted
from penstock.destinations.postgres.encoding import Cells
from penstock.schema import PostgresType

BYTEA = PostgresType(17, "bytea")
TEXTS = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])))


@given(TEXTS)
def test_text_is_quoted_as_json_wants_it(values: list[str | None]) -> None:
    found = quoted(pa.array(values, pa.large_string())).to_pylist()
    assert [None if each is None else json.loads(each) for each in found] == values


@given(st.lists(st.none() | st.binary()), st.integers(0, 3))
def test_bytes_are_base64(values: list[bytes | None], start: int) -> None:
    found = base64_text(pa.array(values, pa.large_binary()).slice(start)).to_pylist()
    assert found == [None if each is None else base64.b64encode(each).decode() for each in values[start:]]


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numbers_are_those_of_avro(values: list[int]) -> None:
    found = numbers(np.array(values, np.int64)).to_pylist()
    assert [fastavro.schemaless_reader(io.BytesIO(each), "long", None) for each in found] == values


COLUMNS: list[tuple[list[Any], pa.DataType, PostgresType | None, list[Any]]] = [
    ([1, None, -5], pa.int32(), None, [1, None, -5]),
    ([2**62, None], pa.int64(), None, [2**62, None]),
    ([True, None, False], pa.bool_(), None, [True, None, False]),
    ([1.5, None, -0.0, 1e300], pa.float64(), None, [1.5, None, -0.0, 1e300]),
    (["a\"'\n", None, ""], pa.string(), None, ["a\"'\n", None, ""]),
    ([Decimal("0.0000001"), None], pa.decimal128(20, 7), None, ["0.0000001", None]),
    ([date(2026, 1, 1), None], pa.date32(), None, [20454, None]),
    ([datetime(2026, 1, 1), None], pa.timestamp("us"), None, [1767225600000000, None]),
    ([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"), None, ["2026-01-01T00:00:00.000000Z"]),
    ([[1, None, 3], None, []], pa.list_(pa.int64()), None, [[1, None, 3], None, []]),
    ([["a,", None], [""]], pa.list_(pa.string()), None, [["a,", None], [""]]),
]


@pytest.mark.parametrize(("values", "kind", "type_", "expected"), COLUMNS)
def test_columns_have_the_same_values_in_both_formats(values: Any, kind: Any, type_: Any, expected: Any) -> None:
    for array in (pa.array(values, kind), pa.array([None, *values, None], kind).slice(1, len(values))):
        cells = Cells(array, type_)
        assert [None if each is None else json.loads(each) for each in json_cells(cells).to_pylist()] == expected
        schema = fastavro.parse_schema(union_type(kind, type_))
        read = [fastavro.schemaless_reader(io.BytesIO(each), schema, None) for each in avro_cells(cells).to_pylist()]
        assert read == expected


def test_texts_and_placeholders_stand_for_values() -> None:
    array = pa.array([date(2026, 1, 1), None, None, None], pa.date32())
    cells = Cells(array, None, pa.array([None, "infinity", None, None], pa.string()))
    assert json_cells(cells).to_pylist() == ["20454", '"infinity"', None, None]
    found = avro_cells(cells, (np.array([False, False, False, True]), "?")).to_pylist()
    schema = fastavro.parse_schema(union_type(array.type, None))
    read = [fastavro.schemaless_reader(io.BytesIO(each), schema, None) for each in found]
    assert read == [20454, "infinity", None, "?"]


def test_bytes_are_bytes_in_avro_and_base64_in_json() -> None:
    cells = Cells(pa.array([b"\x00\xff", None], pa.binary()), BYTEA)
    assert json_cells(cells).to_pylist() == ['"AP8="', None]
    schema = fastavro.parse_schema(union_type(pa.binary(), BYTEA))
    read = [fastavro.schemaless_reader(io.BytesIO(each), schema, None) for each in avro_cells(cells).to_pylist()]
    assert read == [b"\x00\xff", None]
