"""Arrays."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schema import PostgresType, TypeKind
from penstock.values import OutOfRange
from tests.unit.values.columns import array_of, decode, domain_over, fits, numeric_modifier, values

MOOD = PostgresType(1, "mood", "public", TypeKind.ENUM)


def array_text(elements: list[str | None]) -> str:
    """An array as `array_out` writes it."""
    return "{" + ",".join(_element_text(element) for element in elements) + "}"


def _element_text(element: str | None) -> str:
    if element is None:
        return "NULL"
    if element == "" or element.upper() == "NULL" or any(each in '{},"\\ \t\n\r\v\f' for each in element):
        return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return element


@given(st.lists(st.none() | st.lists(st.none() | st.text(st.sampled_from('aé",\\{}N UL'), max_size=5), max_size=5)))
def test_any_list_of_texts_comes_back(cells: list[list[str | None] | None]) -> None:
    assert values(array_of("text"), [None if cell is None else array_text(cell) for cell in cells]) == cells


def test_elements_are_decoded_by_their_own_type() -> None:
    assert values(array_of("int4"), ["{1,NULL,-3}", None, "{}"]) == [[1, None, -3], None, []]
    assert values(array_of("bool"), ["{t,f,NULL}"]) == [[True, False, None]]
    assert values(array_of("date"), ["{2024-02-29}"]) == [[dt.date(2024, 2, 29)]]
    assert values(array_of("timestamp"), ['{"2024-02-29 00:00:00"}']) == [[dt.datetime(2024, 2, 29)]]
    assert values(array_of("bytea"), [r'{"\\x6162",NULL,"\\x"}']) == [[b"ab", None, b""]]
    assert values(array_of("float8"), ["{1.5,-Infinity}"]) == [[1.5, float("-inf")]]


def test_the_columns_modifier_is_the_elements() -> None:
    assert values(array_of("numeric"), ["{1.50,2.25}"], numeric_modifier(5, 2)) == [[Decimal("1.50"), Decimal("2.25")]]
    assert values(array_of("numeric"), ["{1.5,NaN}"]) == [["1.5", "NaN"]]


def test_null_in_quotes_is_a_word() -> None:
    assert values(array_of("text"), ['{NULL,"NULL","null",NULLS}']) == [[None, "NULL", "null", "NULLS"]]


def test_boxes_are_separated_by_semicolons() -> None:
    assert values(array_of("box"), ["{(1,1),(0,0);(2,2),(1,1)}"]) == [["(1,1),(0,0)", "(2,2),(1,1)"]]


@pytest.mark.trap(31)
def test_arrays_of_enums_and_of_domains_are_lists() -> None:
    assert values(array_of(MOOD), ['{happy,"so so",NULL}']) == [["happy", "so so", None]]
    assert values(array_of(domain_over("int8")), ["{1,2}"]) == [[1, 2]]


@pytest.mark.trap(31)
def test_domains_over_arrays_are_lists_also_inside_arrays() -> None:
    over_array = domain_over(array_of("numeric"), numeric_modifier(5, 2))
    assert values(over_array, ["{1.50}", "{}"]) == [[Decimal("1.50")], []]
    assert values(array_of(domain_over(array_of("int4"))), ['{"{1,2}","{}",NULL}']) == [[[1, 2], [], None]]


@pytest.mark.trap(31)
def test_more_dimensions_and_lower_bounds_are_rejected() -> None:
    cells = ["{1}", "{{1,2},{3,4}}", "[2:3]={1,2}", None, "[0:0]={5}", "{}", "{{1}}", "[1:1][-2:-1]={{1,2}}"]
    assert fits(array_of("int4"), cells) == [1, 0, 0, 1, 0, 1, 0, 0]


@pytest.mark.trap(31)
def test_an_element_that_does_not_fit_rejects_its_cell_only() -> None:
    decoded = decode(array_of("date"), ["{2024-01-01}", "{2024-01-01,infinity}", None, "{}"])
    assert decoded.array.to_pylist() == [[dt.date(2024, 1, 1)], None, None, []]
    assert len(decoded.array.values) == 1  # nothing remains under the NULL


@pytest.mark.parametrize(
    "cell",
    ["", "{", "}", "x", "{a", '{"a}', '{"}', '{a"b"}', '{"a"b}', "{a,,b}", "{,}", "{a,}", "{\\}", '{"a"\\}', "{}}"],
)
def test_malformed_text_is_rejected_and_its_neighbours_stay(cell: str) -> None:
    decoded = decode(array_of("text"), ['{"a,b"}', cell, None, "{c}"])
    assert decoded.array.to_pylist() == [["a,b"], None, None, ["c"]]


def test_text_policy_keeps_whole_arrays_as_text() -> None:
    cells = ["{{1,2},{3,4}}", "{1}", None]
    decoded = decode(array_of("int4"), cells, out_of_range=OutOfRange.TEXT)
    assert decoded.array.type == pa.string()
    assert decoded.array.to_pylist() == cells
