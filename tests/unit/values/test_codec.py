"""What holds for every codec."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.schema import PostgresType, TypeKind
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes, apply_policy, codec_for
from penstock.values.cells import cast_matching
from tests.support.examples import examples
from tests.unit.values.columns import (
    array_of,
    builtin,
    check_promises,
    domain_over,
    numeric_modifier,
    printed,
    text_column,
)

COLUMNS: dict[str, tuple[PostgresType, int, TypeSettings]] = {
    **{
        name: (builtin(name), -1, TypeSettings())
        for name in (
            *("int2", "int4", "int8", "oid", "bool", "float4", "float8", "numeric", "date", "time", "timestamp"),
            *("timestamptz", "text", "uuid", "bytea"),
        )
    },
    "numeric(5,2)": (builtin("numeric"), numeric_modifier(5, 2), TypeSettings()),
    "numeric(38,18)": (builtin("numeric"), numeric_modifier(38, 18), TypeSettings()),
    "numeric(3,5)": (builtin("numeric"), numeric_modifier(3, 5), TypeSettings()),
    "numeric as decimal": (builtin("numeric"), -1, TypeSettings(numeric=NumericPolicy.DECIMAL)),
    "numeric as double": (builtin("numeric"), -1, TypeSettings(numeric=NumericPolicy.DOUBLE)),
    "unknown as bytes": (PostgresType(9, "mine", "public"), -1, TypeSettings(unknown_types=UnknownTypes.BYTES)),
    "int4[]": (array_of("int4"), -1, TypeSettings()),
    "text[]": (array_of("text"), -1, TypeSettings()),
    "box[]": (array_of("box"), -1, TypeSettings()),
    "bytea[]": (array_of("bytea"), -1, TypeSettings()),
    "timestamptz[]": (array_of("timestamptz"), -1, TypeSettings()),
    "domain over int4[]": (array_of(domain_over(array_of("int4"))), -1, TypeSettings()),
}

# Pieces of what the types are made of make nearly right text likely.
PIECES = st.sampled_from(
    [
        *"0123456789+-.eE:, {}\"\\;xTZ[]=\n\x00'",
        *("NULL", "NaN", "Infinity", "infinity", "nan", "inf", " BC", "+00", "\\x", "0x", "2024-02-30", "24:00:00"),
        *("2024-02-29", "23:59:59.999999", "999999999999999999999999999999999999999", "é", "🚰", "٣", "t", "f", "{}"),
    ]
)
CELLS = st.lists(st.none() | st.lists(PIECES, max_size=7).map("".join) | st.text(max_size=12), max_size=12)


@pytest.mark.parametrize("column", COLUMNS)
@settings(max_examples=examples(20))
@given(cells=CELLS)
@example(cells=[])
@example(cells=[None, None])
@example(cells=["", None, ""])
def test_no_text_ever_raises(column: str, cells: list[str | None]) -> None:
    type_, modifier, choices = COLUMNS[column]
    codec = codec_for(type_, modifier, choices)
    text = text_column(cells)
    decoded = codec.decode(text)
    check_promises(decoded, text, codec.arrow_type)
    for policy in (OutOfRange.KEEP, OutOfRange.NULL, OutOfRange.CLAMP):
        settled = apply_policy(decoded, text, policy, table="t", column="c")
        settled.array.validate(full=True)
        if policy is OutOfRange.KEEP and settled.kept is not None:
            lost = [cell if gone else None for cell, gone in zip(cells, decoded.rejected, strict=True)]
            assert settled.kept.to_pylist() == lost


@pytest.mark.parametrize("column", COLUMNS)
@settings(max_examples=examples(10))
@given(cells=CELLS, near=CELLS)
def test_a_cell_does_not_depend_on_its_neighbours(column: str, cells: list[str | None], near: list[str | None]) -> None:
    type_, modifier, choices = COLUMNS[column]
    codec = codec_for(type_, modifier, choices)
    alone = codec.decode(text_column(cells))
    together = codec.decode(text_column([*near, *cells]))
    assert printed(alone.array) == printed(together.array.slice(len(near)))


@pytest.mark.parametrize("column", COLUMNS)
def test_codecs_travel_to_tasks(column: str) -> None:
    type_, modifier, choices = COLUMNS[column]
    codec = codec_for(type_, modifier, choices)
    assert codec_for(type_, modifier, choices) is codec
    copy = pickle.loads(pickle.dumps(codec))
    assert copy == codec
    assert hash(copy) == hash(codec)
    assert copy.arrow_type == codec.arrow_type


@pytest.mark.parametrize("column", COLUMNS)
def test_bytes_under_a_null_mean_nothing(column: str) -> None:
    type_, modifier, choices = COLUMNS[column]
    buffers = [pa.py_buffer(b"\x00"), pa.py_buffer(np.array([0, 3, 7], np.int64)), pa.py_buffer(b"x{\\1e99")]
    text = pa.Array.from_buffers(pa.large_string(), 2, buffers)
    decoded = codec_for(type_, modifier, choices).decode(text)
    assert decoded.array.to_pylist() == [None, None]
    assert decoded.rejected is None


@pytest.mark.parametrize("column", COLUMNS)
def test_an_empty_column_gives_an_empty_array(column: str) -> None:
    type_, modifier, choices = COLUMNS[column]
    codec = codec_for(type_, modifier, choices)
    for text in (text_column([]), text_column(["1"]).slice(1), pa.nulls(0, pa.large_string())):
        check_promises(codec.decode(text), text, codec.arrow_type)


def test_incomplete_catalog_entries_are_text() -> None:
    for kind in TypeKind:
        assert codec_for(PostgresType(9, "mine", "public", kind), -1).arrow_type == pa.string()


def test_cells_that_arrow_refuses_are_found_even_if_a_pattern_let_them_through() -> None:
    cells = ["1", None, "x", "2", "", "3"]
    decoded = cast_matching(text_column(cells), pa.int32(), "")
    assert decoded.array.to_pylist() == [1, None, None, 2, None, 3]
    assert decoded.rejected is not None
    assert np.flatnonzero(decoded.rejected).tolist() == [2, 4]
