"""Postgres as the oracle for values: what it sends is decoded as psycopg reads it, and returns as the same text."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from penstock.source.catalog import load_types
from penstock.testing.postgres import DatabaseServer
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes, apply_policy, codec_for

Connection = psycopg.Connection[tuple[Any, ...]]

TYPES: LiteralString = """
    create type mood as enum ('happy', 'so so', 'NULL', 'a"b\\c,{d}');
    create type pair as (a int, b text);
    create domain money_amount as numeric(12, 2);
    create domain amounts as numeric(12, 2)[];
    create domain small_amounts as amounts check (cardinality(value) < 10);
    create type span as range (subtype = int4);
"""


@pytest.fixture(scope="module")
def shared_dsn(server: DatabaseServer) -> Iterator[str]:
    """One database for the whole file: each test replaces its only table."""
    name = server.create_database()
    with server.connect(name) as connection:
        connection.execute(TYPES)
    yield server.dsn(name)
    server.drop_database(name)


@pytest.fixture
def connection(shared_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(shared_dsn, autocommit=True, options="-c timezone=UTC") as opened:
        yield opened


@dataclass(frozen=True)
class Sent:
    """A column as the server sends it, and its decoding."""

    text: list[str | None]
    array: pa.Array
    kept: list[str | None]
    oracle: list[Any]
    """psycopg's reading of the binary format; the exception where Python has no such value."""


def send(
    connection: Connection, declaration: LiteralString, source: sql.Composable, settings: TypeSettings | None = None
) -> Sent:
    """Store what `source` selects in a column of the declared type, read its text back and decode it."""
    settings = settings or TypeSettings()
    connection.execute("drop table if exists cells")
    create = "create table cells (position int generated always as identity, value {})"
    connection.execute(sql.SQL(create).format(sql.SQL(declaration)))
    connection.execute(sql.SQL("insert into cells (value) {}").format(source))
    column = connection.execute(
        "select atttypid, atttypmod from pg_attribute where attrelid = 'cells'::regclass and attname = 'value'"
    ).fetchone()
    assert column is not None
    codec = codec_for(load_types(connection, [column[0]])[column[0]], column[1], settings)
    # COPY writes what replication sends: the type's own output, where a cast would strip the padding of bpchar.
    with (
        connection.cursor() as cursor,
        cursor.copy("copy (select value from cells order by position) to stdout") as copy,
    ):
        copy.set_types(["text"])
        text = [row[0] for row in copy.rows()]
    column_text = pa.array(text, pa.large_string())
    decoded = codec.decode(column_text)
    settled = apply_policy(decoded, column_text, OutOfRange.KEEP, table="cells", column="value")
    settled.array.validate(full=True)
    kept = [None] * len(text) if settled.kept is None else settled.kept.to_pylist()
    return Sent(text, settled.array, kept, list(_read_binary(connection)))


def _read_binary(connection: Connection) -> Iterator[Any]:
    with connection.cursor(binary=True) as cursor:
        try:
            yield from [row[0] for row in cursor.execute("select value from cells order by position")]
            return
        except (psycopg.DataError, NotImplementedError):
            pass
        positions = cursor.execute("select position from cells order by position").fetchall()
        for (position,) in positions:
            try:
                cursor.execute("select value from cells where position = %s", [position])
                yield cursor.fetchall()[0][0]
            except (psycopg.DataError, NotImplementedError) as error:
                yield error


def literals(values: list[str | None], declaration: LiteralString) -> sql.Composable:
    rows = sql.SQL(", ").join(
        sql.SQL("({}, {}::{})").format(sql.Literal(number), sql.Literal(value), sql.SQL(declaration))
        for number, value in enumerate(values)
    )
    return sql.SQL("select value from (values {}) as given (number, value) order by number").format(rows)


def python_values(array: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(array.type) and array.type.tz is not None:
        naive = array.cast(pa.timestamp("us")).to_pylist()
        return [moment and moment.replace(tzinfo=dt.UTC) for moment in naive]
    if pa.types.is_list(array.type) and pa.types.is_timestamp(array.type.value_type):
        elements = python_values(array.flatten())
        lengths = array.value_lengths().to_pylist()
        lists = iter(elements)
        return [None if length is None else [next(lists) for _ in range(length)] for length in lengths]
    return array.to_pylist()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or repr(left) == repr(right)
    return type(left) is type(right) and left == right


def assert_returns(connection: Connection, declaration: LiteralString, value: Any, text: str) -> None:
    """The value, given to the server as the declared type, has the same text again."""
    # format() uses the type's own output, as replication does; a cast would say "true", or strip padding.
    statement = sql.SQL("select format('%%s', cast(%s as {}))").format(sql.SQL(declaration))
    assert connection.execute(statement, [value]).fetchone() == (text,)


TYPED: dict[LiteralString, list[str | None]] = {
    "int2": ["0", "-32768", "32767", None],
    "int4": ["0", "-2147483648", "2147483647", None],
    "int8": ["0", "-9223372036854775808", "9223372036854775807", None],
    "oid": ["0", "4294967295"],
    "bool": ["t", "f", None],
    "float4": [
        "0.1",
        "-0",
        "NaN",
        "Infinity",
        "-Infinity",
        "3.4028235e38",
        "1e-45",
        "16777217",
        "1.17549435e-38",
        None,
    ],
    "float8": [
        "0.1",
        "-0",
        "NaN",
        "Infinity",
        "-Infinity",
        "1.7976931348623157e308",
        "5e-324",
        "1e23",
        "123456.789",
        None,
    ],
    "numeric(12,2)": ["0", "-0.01", "9999999999.99", "-9999999999.99", "1.005", None],
    "numeric(38,18)": ["0", "99999999999999999999.999999999999999999", "-0.000000000000000001", None],
    "numeric(38,0)": ["99999999999999999999999999999999999999", "-99999999999999999999999999999999999999"],
    "numeric(38,38)": ["0.99999999999999999999999999999999999999", "-0.00000000000000000000000000000000000001"],
    "numeric(3,5)": ["0.00999", "-0.00001", "0"],
    "numeric(3,-2)": ["99900", "-149", "0"],
    "money_amount": ["1.5", None],
    "date": ["1970-01-01", "0001-01-01", "9999-12-31", "2024-02-29", "1582-10-10", None],
    "timestamp": [
        *("1970-01-01", "0001-01-01", "9999-12-31 23:59:59.999999", "2024-02-29 12:00:00.1", "1969-12-31 23:59:59.5"),
        *("2026-11-15 09:25:00.000001", "2016-12-31 23:59:60", None),
    ],
    "timestamp(0)": ["2024-02-29 12:00:00.6"],
    "timestamptz": [
        *("1970-01-01+00", "0001-01-01+00", "9999-12-31 23:59:59.999999+00", "2024-02-29 12:00:00.12+05:30"),
        *("2024-10-27 01:30:00+00", "1890-01-01 00:00:00+00:19:32", None),
    ],
    "time": ["00:00:00", "23:59:59.999999", "12:34:56.7", None],
    "bytea": ["\\x", "\\x00ff10", "\\xdeadbeef", None],
    "int4[]": ["{}", "{1,NULL,-3}", "{7}", None],
    "bool[]": ["{t,f,NULL}"],
    "float8[]": ["{NaN,-Infinity,0.1,-0}"],
    "float4[]": ["{0.1,3.4028235e38}"],
    "text[]": [
        "{}",
        '{a,"b c","",NULL,"NULL","null"}',
        r'{"a\"b","c\\d","{e}","f,g","\\\\\"","ü 🚰"," "}',
        '{"a\nb"}',
        None,
    ],
    "varchar(3)[]": ["{abc,NULL}"],
    "numeric(12,2)[]": ["{1.5,NULL,-0.01}", "{}"],
    "date[]": ["{2024-02-29,NULL}"],
    "timestamp[]": ['{"2024-02-29 12:00:00.5",NULL}'],
    "timestamptz[]": ['{"2024-02-29 12:00:00.5+00",NULL}'],
    "time[]": ["{12:00:00}"],
    "bytea[]": [r'{"\\x00ff","\\x",NULL}'],
    "amounts": ["{1.5,NULL}", "{}", None],
    "small_amounts": ["{1.5,NULL}"],
    "money_amount[]": ["{1.5,NULL}"],
}


@pytest.mark.parametrize("declaration", TYPED)
def test_values_are_what_psycopg_reads_and_return_as_the_same_text(
    connection: Connection, declaration: LiteralString
) -> None:
    sent = send(connection, declaration, literals(TYPED[declaration], declaration))
    decoded = python_values(sent.array)
    assert not any(sent.kept)
    assert not pa.types.is_string(sent.array.type)
    for text, value, oracle in zip(sent.text, decoded, sent.oracle, strict=True):
        if "_amount" in declaration and declaration.endswith("[]"):
            oracle = value  # psycopg does not know arrays of domains
        assert same(value, oracle), f"{declaration} {text}"
        if text is not None:
            assert_returns(connection, declaration, value, text)


AS_TEXT: dict[LiteralString, list[str | None]] = {
    "text": ["", " a ", "ü 🚰", "\\x", "NULL", "a\tb\nc\\", None],
    "varchar(5)": ["abc"],
    "char(5)": ["abc"],
    "name": ["abc"],
    '"char"': ["a", ""],
    "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
    "json": ['{"b":1,  "a":[]}'],
    "jsonb": ['{"b":1,  "a":[], "c":1e2}'],
    "numeric": ["NaN", "Infinity", "1.10", "1e130", "-1e-20"],
    "numeric(50,2)": ["123456789012345678901234567890123456789012345678.25"],
    "numeric(2,60)": ["1e-59"],
    "interval": ["1 year 2 mons -3 days +04:05:06.7", "0"],
    "timetz": ["24:00:00+00", "12:00:00.5-15:59"],
    "money": ["-12.34"],
    "inet": ["10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "int4range": ["empty", "[1,5)", "(,)"],
    "int4multirange": ["{}", "{[1,5),[7,9)}"],
    "span": ["empty", "[1,5)"],
    "point": ["(1,2)"],
    "box": ["(1,1),(0,0)"],
    "polygon": ["((0,0),(1,1))"],
    "tsvector": ["a fat cat"],
    "tsquery": ["fat & cat"],
    "bit(3)": ["101"],
    "varbit": ["10101"],
    "mood": ["so so", "NULL", 'a"b\\c,{d}'],
    "pair": ['(1,"a b")', "(,)"],
    "pg_lsn": ["16/B374D848"],
    "xid8": ["18446744073709551615"],
    "int2vector": ["1 2 3"],
    "oidvector": ["1 2"],
    "regclass": ["pg_class"],
    "tid": ["(0,1)"],
}


@pytest.mark.trap(31)
@pytest.mark.parametrize("declaration", AS_TEXT)
def test_other_types_are_exactly_the_servers_text(connection: Connection, declaration: LiteralString) -> None:
    sent = send(connection, declaration, literals(AS_TEXT[declaration], declaration))
    assert sent.array.type == pa.string()
    assert sent.array.to_pylist() == sent.text
    for text in filter(None, sent.text):
        assert_returns(connection, declaration, text, text)


UNREPRESENTABLE: dict[LiteralString, list[str]] = {
    "date": ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31"],
    "timestamp": ["infinity", "-infinity", "0044-03-15 12:00:00.5 BC", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["infinity", "-infinity", "0044-03-15 12:00:00 BC", "10000-01-01 00:00:00+00"],
    "time": ["24:00:00"],
    "numeric(12,2)": ["NaN"],
    "money_amount": ["NaN"],
    "int4[]": ["{{1,2},{3,4}}", "[2:3]={1,2}", "[0:0]={NULL}", "{{{1}}}", "[1:1][-1:0]={{1,2}}"],
    "text[]": ['{{"a b",c}}', "[2:2]={x}"],
    "date[]": ["{2024-01-01,infinity}"],
    "timestamptz[]": ['{"0044-03-15 12:00:00+00 BC"}'],
    "amounts": ["{NaN}", "{{1}}"],
}


@pytest.mark.trap(31)
@pytest.mark.parametrize("declaration", UNREPRESENTABLE)
def test_values_that_break_lakes_are_kept_as_the_servers_text(
    connection: Connection, declaration: LiteralString
) -> None:
    sent = send(connection, declaration, literals([*UNREPRESENTABLE[declaration], None], declaration))
    assert sent.array.null_count == len(sent.text)
    assert sent.kept == sent.text
    for text in filter(None, sent.kept):
        assert_returns(connection, declaration, text, text)


ENUMS_AND_BOXES: dict[LiteralString, list[str]] = {
    "mood[]": [r'{happy,"so so","NULL",NULL,"a\"b\\c,{d}"}', "{}"],
    "box[]": ["{(1,1),(0,0);(2,2),(1,1)}", "{}"],
    "pair[]": [r'{"(1,\"a b\")",NULL}'],
    "jsonb[]": [r'{"{\"a\": [1, 2]}",null}'],
    "int4range[]": ['{empty,"[1,5)"}'],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "interval[]": ['{"1 day","-01:00:00"}'],
}


@pytest.mark.trap(31)
@pytest.mark.parametrize("declaration", ENUMS_AND_BOXES)
def test_arrays_of_text_like_types_hold_the_text_of_each_element(
    connection: Connection, declaration: LiteralString
) -> None:
    sent = send(connection, declaration, literals([*ENUMS_AND_BOXES[declaration]], declaration))
    unnested = connection.execute(
        "select array(select case when value[n] is distinct from null then format('%s', value[n]) end"
        " from generate_subscripts(value, 1) as n order by n) from cells order by position"
    )
    assert sent.array.to_pylist() == [row[0] for row in unnested]


@pytest.mark.trap(31)
def test_domains_over_arrays_inside_arrays_are_lists_of_lists(connection: Connection) -> None:
    sent = send(connection, "amounts[]", literals(['{"{1.5,NULL}","{}",NULL}', '{"{{1}}"}'], "amounts[]"))
    assert str(sent.array.to_pylist()) == "[[[Decimal('1.50'), None], [], None], None]"
    assert sent.kept == [None, '{"{{1.00}}"}']


ROWS = 3000
MANY: dict[LiteralString, LiteralString] = {
    "int2": "(random() * 65535 - 32768)::int::int2",
    "int8": "((random() - 0.5) * power(10::float8, random() * 18))::int8",
    "float8": "(random() - 0.5) * power(10::float8, random() * 600 - 300)",
    "float4": "((random() - 0.5) * power(10::float8, random() * 70 - 35))::float4",
    "numeric(30,10)": "(random() - 0.5)::numeric * power(10, random() * 19)::numeric",
    "date": "date '0001-01-01' + (random() * 3652058)::int",
    "timestamp": "timestamp '0001-01-01' + random() * 315537897599 * interval '1 s'",
    "timestamptz": "timestamptz '0001-01-01+0' + random() * 315537897599 * interval '1 s'",
    "time": "(random() * 86399.9 * interval '1 s')::time",
    "bytea": "substr(sha512(n::text::bytea), 1, n % 65)",
    "text[]": (
        "array(select case when random() < 0.2 then null else"
        " translate(substr(md5(n::text || m::text), 1, (random() * 6)::int), '01234567', E'{}\",\\\\ \\nü') end"
        " from generate_series(1, n % 5) as m)"
    ),
}


@pytest.mark.parametrize("declaration", MANY)
def test_many_random_values_are_what_psycopg_reads(connection: Connection, declaration: LiteralString) -> None:
    source = sql.SQL("select {} from generate_series(1, {}) as n").format(sql.SQL(MANY[declaration]), sql.Literal(ROWS))
    sent = send(connection, declaration, source)
    assert len(sent.text) == ROWS
    assert not any(sent.kept)
    assert all(map(same, python_values(sent.array), sent.oracle))


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/St_Johns", "Europe/Amsterdam", "Pacific/Apia"])
def test_a_session_in_another_zone_sends_the_same_moments(shared_dsn: str, zone: str) -> None:
    # Before standard time offsets had seconds: +00:19:32 in Amsterdam.
    moments = ["1850-06-01 00:00:00+00", "1890-01-01 12:00:00.25+00", "2024-07-01 00:00:00+00", "infinity", None]
    decoded = []
    for each in ("UTC", zone):
        with psycopg.connect(shared_dsn, autocommit=True, options=f"-c timezone={each}") as connection:
            decoded.append(send(connection, "timestamptz", literals([*moments], "timestamptz")))
    assert decoded[1].text != decoded[0].text
    assert decoded[1].array.equals(decoded[0].array)
    assert decoded[1].kept == decoded[0].kept == [None, None, None, "infinity", None]


def test_wide_numerics_follow_the_policy(connection: Connection) -> None:
    values = ["1.25", "NaN", "123456789012345678901234567890", "0.1234567890123456789", None]
    as_decimal = send(
        connection, "numeric", literals([*values], "numeric"), TypeSettings(numeric=NumericPolicy.DECIMAL)
    )
    assert [cell is None for cell in as_decimal.array.to_pylist()] == [False, True, True, True, True]
    assert as_decimal.kept == [None, *values[1:4], None]
    as_double = send(connection, "numeric", literals([*values], "numeric"), TypeSettings(numeric=NumericPolicy.DOUBLE))
    assert not any(as_double.kept)
    doubles = connection.execute("select value::float8 from cells order by position").fetchall()
    assert all(same(mine, theirs[0]) for mine, theirs in zip(as_double.array.to_pylist(), doubles, strict=True))


def test_types_of_extensions_are_text_or_bytes(connection: Connection) -> None:
    connection.execute("create extension if not exists hstore; create extension if not exists citext")
    source = literals(['"a"=>"ü"', None], "hstore")
    assert send(connection, "hstore", source).array.to_pylist() == ['"a"=>"ü"', None]
    as_bytes = TypeSettings(unknown_types=UnknownTypes.BYTES)
    assert send(connection, "hstore", source, as_bytes).array.to_pylist() == ['"a"=>"ü"'.encode(), None]
    assert send(connection, "citext", literals(["Abc"], "citext"), as_bytes).array.to_pylist() == ["Abc"]
    assert send(connection, "citext[]", literals(["{Abc}"], "citext[]"), as_bytes).array.to_pylist() == [["Abc"]]
