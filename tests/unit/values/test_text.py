"""Types that stay text, and types that nobody knows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.schema import PostgresType, TypeKind
from penstock.values import CompositePolicy, TypeSettings, UnknownTypes, codec_for
from tests.unit.values.columns import array_of, builtin, domain_over, values

AS_TEXT = (
    *("text", "varchar", "bpchar", "name", "char", "json", "jsonb", "uuid", "interval", "timetz", "money", "inet"),
    *("cidr", "macaddr", "point", "box", "tsvector", "xml", "bit", "varbit", "pg_lsn", "xid8", "int2vector"),
)


@pytest.mark.parametrize("name", AS_TEXT)
def test_text_is_kept_to_the_byte(name: str) -> None:
    cells = ["", " padded ", None, "Straße 🚰", "\\x", "NULL", "{}"]
    assert values(name, cells) == cells
    assert values(name, cells, unknown_types=UnknownTypes.BYTES) == cells


@pytest.mark.trap(31)
@pytest.mark.parametrize("kind", [TypeKind.RANGE, TypeKind.MULTIRANGE, TypeKind.ENUM, TypeKind.COMPOSITE])
def test_ranges_enums_and_composites_are_text(kind: TypeKind) -> None:
    cells = ["empty", "[1,5)", None, '(1,"a b")']
    assert values(PostgresType(1, "mine", "public", kind), cells) == cells


def test_types_of_extensions_are_text_or_bytes() -> None:
    hstore = PostgresType(1, "hstore", "public")
    assert values(hstore, ['"a"=>"ü"', None]) == ['"a"=>"ü"', None]
    assert values(hstore, ['"a"=>"ü"', None], unknown_types=UnknownTypes.BYTES) == ['"a"=>"ü"'.encode(), None]
    assert values(PostgresType(1, "citext", "app"), ["A"], unknown_types=UnknownTypes.BYTES) == ["A"]


def test_a_foreign_type_with_a_familiar_name_is_not_taken_for_the_built_in_one() -> None:
    assert values(PostgresType(1, "int4", "public"), ["not a number"]) == ["not a number"]


def test_domains_are_what_is_under_them() -> None:
    assert values(domain_over(domain_over("int4")), ["7", None]) == [7, None]


def test_structs_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='composites = "struct"'):
        TypeSettings(composites=CompositePolicy.STRUCT)


def far_inside_a_big_buffer() -> pa.LargeStringArray:
    """Two cells that lie beyond the first 2 GiB of their buffer; the pages before them are never touched."""
    start = 2**31 + 10
    data = np.zeros(start + 5, np.uint8)
    data[start:] = np.frombuffer(b"abcde", np.uint8)
    offsets = np.array([start, start + 2, start + 5], np.int64)
    return pa.Array.from_buffers(pa.large_string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def test_cells_from_far_inside_a_big_buffer_still_fit() -> None:
    codec = codec_for(PostgresType(0, "text"), -1)
    assert codec.decode(far_inside_a_big_buffer()).array.to_pylist() == ["ab", "cde"]


def test_too_much_text_for_one_call_is_said_clearly() -> None:
    data = np.zeros(2**31 + 1, np.uint8)
    offsets = np.array([0, 2**30, 2**31 + 1], np.int64)
    text = pa.Array.from_buffers(pa.large_string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    for type_ in (builtin("text"), builtin("bytea"), array_of("int4")):
        with pytest.raises(OverflowError, match="split the column"):
            codec_for(type_, -1).decode(text)
