"""`bytea`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.values.columns import decode, fits, values


@given(st.lists(st.none() | st.binary(max_size=40), max_size=20))
def test_bytes_come_back(cells: list[bytes | None]) -> None:
    assert values("bytea", [None if cell is None else "\\x" + cell.hex() for cell in cells]) == cells


def test_capital_digits_are_read_too() -> None:
    assert values("bytea", ["\\xDEADbeef"]) == [b"\xde\xad\xbe\xef"]


def test_other_formats_are_rejected_and_the_rest_stays() -> None:
    cells = ["\\x61", "a", None, "\\x6", "abc\\000", "\\xzz", "", "\\x", "x\\61", "é", "\\x6\\x6"]
    decoded = decode("bytea", cells)
    assert decoded.array.to_pylist() == [b"a", None, None, None, None, None, None, b"", None, None, None]
    assert fits("bytea", cells) == [1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
