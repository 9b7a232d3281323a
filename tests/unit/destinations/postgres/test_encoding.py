"""Columns as the text of COPY."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pytest

from penstock.destinations.postgres import encoding
from penstock.destinations.postgres.encoding import Cells, copy_text
from penstock.schema import PostgresType, TypeKind

TEXT, BYTEA, INT4 = PostgresType(25, "text"), PostgresType(17, "bytea"), PostgresType(23, "int4")


def array_of(element: PostgresType, delimiter: str = ",") -> PostgresType:
    return PostgresType(1, f"_{element.name}", kind=TypeKind.ARRAY, element=replace(element, delimiter=delimiter))


def encoded(*columns: Cells) -> list[str]:
    pieces = copy_text(columns, len(columns[0].array))
    return b"".join(map(bytes, pieces)).decode().removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    ("array", "type_", "expected"),
    [
        (pa.array([1, None, -3]), INT4, ["1", "\\N", "-3"]),
        (pa.array(["a\tb", "\\N", "", "c\r\n"]), TEXT, ["a\\tb", "\\\\N", "", "c\\r\\n"]),
        (pa.array([b"\x00\xff", b"", None]), BYTEA, ["\\\\x00ff", "\\\\x", "\\N"]),
        (pa.array([b"text"]), PostgresType(50_000, "odd", "app"), ["text"]),
        (pa.array([1.5, float("nan"), -0.0, float("-inf")]), None, ["1.5", "nan", "-0", "-inf"]),
        (pa.array([0.1, 1e20], pa.float32()), None, ["0.1", "1e+20"]),
        (pa.array([Decimal("1.50"), None], pa.decimal128(12, 2)), None, ["1.50", "\\N"]),
        (pa.array([True, False, None]), None, ["true", "false", "\\N"]),
        (pa.array([date(1, 1, 1), date(9999, 12, 31)]), None, ["0001-01-01", "9999-12-31"]),
        (pa.array([time(1, 2, 3, 4)], pa.time64("us")), None, ["01:02:03.000004"]),
        (pa.array([datetime(2024, 1, 2, 3, 4, 5, 6)], pa.timestamp("us", "UTC")), None, ["2024-01-02 03:04:05.000006"]),
        (pa.array([[1, None], [], None], pa.list_(pa.int32())), array_of(INT4), ["{1,NULL}", "{}", "\\N"]),
        (pa.array([['a"\\', "NULL", "", None]]), array_of(TEXT), ['{"a\\\\"\\\\\\\\","NULL","",NULL}']),
        (pa.array([[b"a"]], pa.list_(pa.binary())), array_of(BYTEA), ['{"\\\\\\\\x61"}']),
        (pa.array([["(1,1)", "(0,0)"]]), array_of(PostgresType(603, "box"), ";"), ['{"(1,1)";"(0,0)"}']),
        (pa.nulls(2), TEXT, ["\\N", "\\N"]),
    ],
)
def test_values_are_what_the_server_reads(array, type_, expected):
    assert encoded(Cells(array, type_)) == expected
    # Slices have offsets of their own.
    twice = pa.concat_arrays([array, array]).slice(len(array))
    assert encoded(Cells(twice, type_)) == expected


def test_texts_of_cells_replace_them():
    texts = pa.array([None, "infinity", "0044-03-15 BC"])
    assert encoded(Cells(pa.array([date(2024, 1, 1), None, None]), None, texts)) == [
        *("2024-01-01", "infinity", "0044-03-15 BC")
    ]


def test_rows_are_joined_and_split_into_pieces(monkeypatch):
    monkeypatch.setattr(encoding, "PIECE_BYTES", 40)
    columns = [Cells(pa.array(range(100))), Cells(pa.array(["x"] * 99 + [None]), TEXT)]
    pieces = list(copy_text(columns, 100))
    assert len(pieces) > 5
    lines = b"".join(map(bytes, pieces)).decode().splitlines()
    assert lines == [*(f"{number}\tx" for number in range(99)), "99\t\\N"]


def test_rows_without_columns_are_lines():
    assert b"".join(map(bytes, copy_text([], 3))) == b"\n\n\n"
