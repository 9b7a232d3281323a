"""Rows of binary COPY: what is malformed is an error with its offset, never a crash nor a silent value."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.changes.segment import UNREPRESENTABLE
from penstock.changes.wire import PADDING
from penstock.copy.binary import SIGNATURE, decode_tuples, strip_header, tuple_layout
from penstock.errors import DecodeError
from penstock.schema import Column, PostgresType, TableSchema
from penstock.values import TypeSettings

SCHEMA = TableSchema(
    1,
    "public",
    "t",
    (
        Column("id", 1, PostgresType(23, "int4")),
        Column("word", 2, PostgresType(25, "text")),
        Column("at", 3, PostgresType(1082, "date")),
    ),
)
LAYOUT = tuple_layout(SCHEMA, TypeSettings())


def row(*fields: bytes | None) -> bytes:
    parts = [struct.pack(">h", len(fields))]
    parts += [struct.pack(">i", -1) if each is None else struct.pack(">i", len(each)) + each for each in fields]
    return b"".join(parts)


def decode(*rows: bytes) -> pa.RecordBatch:
    return decode_tuples(b"".join((*rows, PADDING)), np.array([len(each) for each in rows], np.int64), LAYOUT)


def date(days: int) -> bytes:
    return struct.pack(">i", days)


def test_rows_become_columns() -> None:
    batch = decode(
        row(b"\0\0\0\7", "ä".encode(), date(0)), row(None, b"", None), row(b"\xff\xff\xff\xff", None, date(-1))
    )
    batch.validate(full=True)
    assert batch.to_pydict() == {
        "id": [7, None, -1],
        "word": ["ä", "", None],
        "at": [np.datetime64("2000-01-01").item(), None, np.datetime64("1999-12-31").item()],
        UNREPRESENTABLE: [None, None, None],
    }


@pytest.mark.trap(31)
def test_what_a_date_cannot_hold_is_kept_as_text() -> None:
    batch = decode(*(row(None, None, date(days)) for days in (2**31 - 1, -(2**31), -746_384, 2_921_940, 0)))
    assert batch.column("at").null_count == 4
    assert batch.column(UNREPRESENTABLE).to_pylist() == [
        [("at", "infinity")],
        [("at", "-infinity")],
        [("at", "0045-06-21 BC")],
        [("at", "10000-01-01")],
        None,
    ]


@pytest.mark.parametrize(
    "bad",
    [
        row(b"\0\0\0\7", b"x"),
        row(b"\0\0\7", b"x", None),
        row(b"\0\0\0\7", b"x", None) + b"x",
        row(b"\0\0\0\7", b"x", None)[:-1],
        struct.pack(">hi", 3, 1_000_000),
        struct.pack(">hi", 3, -2) + bytes(12),
        b"\0\3",
        row(None, b"\xff\xfe", None),
    ],
    ids=["fields", "width", "longer", "shorter", "beyond", "negative", "empty", "utf-8"],
)
def test_malformed_rows_are_refused(bad: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(row(b"\0\0\0\7", b"x", date(1)), bad)


@given(st.binary(min_size=2, max_size=60))
def test_any_bytes_are_rows_or_refused(raw: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(raw).validate(full=True)


def test_the_header_is_looked_at() -> None:
    header = SIGNATURE + struct.pack(">ii", 0, 3) + b"abc"
    assert bytes(strip_header(memoryview(header + b"row"))) == b"row"
    with pytest.raises(DecodeError):
        strip_header(memoryview(b"PGCOPY something else"))
