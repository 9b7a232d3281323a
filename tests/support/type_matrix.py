"""Every Postgres type with its edge values, as tables in which they are copied, inserted, updated, and used as keys.

| table | its columns |
|---|---|
| `plain` | one of each type |
| `arrays` | one of each type's array type |
| `domains` | a domain over each type, and one over its array type |
| `key_<n>` | a primary key of one type, or of some that are all text in a lake |
| `whole` | types that the server allows no key of; rows are found by all their cells |

Rows with an even number are there before the copy. Rows with an odd number are inserted afterwards, with the same
values. Rows from `UPDATED` on are copied as NULLs and get the same values by an update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from tests.support.samples import SAMPLES, available_samples

WIDE = ("plain", "arrays", "domains")
UPDATED = 1000
"""The number of the first row that is updated."""
_LONGEST_KEY = 300
_KEY_COLUMNS = 6
_OWN_KEY = re.compile(r"bool|int[248]|oid|float[48]|numeric.*|date|time.*|bytea|text|uuid")
"""Types with a key table of their own."""
_PLANES = "".join(chr(plane << 16 | 0x41) for plane in range(17)) + "\ufffd\ufffe\uffff\u200f\ufeffa\u0301\u1f468\u200d"
_EVERY_CHARACTER = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x110000)]))
_LONG = "0123456789abcdef" * 65_536
_HEX = "".join(f"{number:08x}" for number in range(0, 131_072 * 7, 7))

IMPOSSIBLE = frozenset(
    {
        "gtsvector",
        "pg_brin_bloom_summary",
        "pg_brin_minmax_multi_summary",
        "pg_dependencies",
        "pg_mcv_list",
        "pg_ndistinct",
        "pg_node_tree",
    }
)
"""Internal types of the server, which refuses to store values of them."""

_LONG_ARRAYS = ("int4", "text", "timestamptz")
_EXTENSIONS = ("citext", "cube", "hstore", "intarray", "isn", "lo", "ltree", "seg", "vector")

_MORE: dict[LiteralString, tuple[str, ...]] = {
    "bool": (),
    "oid": ("2147483648",),
    "xid": ("0", "3", "4294967295"),
    "cid": ("0", "4294967295", "7"),
    "tid": ("(0,1)", "(4294967295,65535)", "(7,3)"),
    "float4": ("-1e-45", "1.17549435e-38"),
    "float8": ("2.2250738585072014e-308", "9007199254740993"),
    "numeric": ("9" * 131_072 + "." + "9" * 16_383, "-1e131071", "1e-16383", "1.10", "1.1", "-0.00"),
    "numeric(38, 38)": ("0." + "9" * 38, "-0." + "0" * 37 + "1", "0", "NaN"),
    "numeric(1000, 500)": ("9" * 500 + "." + "9" * 500, "0", "NaN", "-Infinity"),
    "money": ("-0.01",),
    "text": (_PLANES, _EVERY_CHARACTER, "'", "a\u0301", "á"),
    "varchar": (_PLANES, _LONG, ""),
    "bpchar": ("", "a ", " a", _PLANES),
    "char(6)": ("\U0001f6b0\U0010ffff",),
    '"char"': ("\\200", "\\377", " "),
    "name": ("Ü" * 31, "null"),
    "bytea": ("\\x" + _HEX, "\\xff", "\\x5c78"),
    "json": ('{"blob": "' + _LONG + '"}', f'"{chr(0x10FFFF)}\\ud83d\\ude42"', "-0.0", "1e999", "[]"),
    "jsonb": ('{"blob": "' + _LONG + '"}', f'"{chr(0x10FFFF)}"', "-0.0", '{"": {"": []}}', "1" * 400),
    "jsonpath": ('strict $."a b" like_regex "^x"', "$.**{2 to 3}"),
    "xml": (f"<a>{_LONG}</a>", '<?xml version="1.0"?><ü/>', f"<b>{chr(0x10FFFF)}</b>"),
    "tsvector": (" ".join(f"w{number}" for number in range(60_000)), "'ü':1,16383"),
    "tsquery": ("'a' <-> 'b'", "'a' <2> ( 'b' | !!'c' )"),
    "uuid": ("ffffffff-ffff-ffff-ffff-ffffffffffff", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"),
    "date": ("4713-11-24 BC", "0001-12-31 BC", "1582-10-10", "1900-02-28", "1969-12-31"),
    "time": ("00:00:00.000001", "12:00:00.1"),
    "time(0)": ("23:59:59.6",),
    "timetz": ("00:00:00.000001-15:59:59",),
    "timestamp": ("4713-11-24 00:00:00 BC", "0001-12-31 23:59:59.999999 BC", "1969-12-31 23:59:59.999999"),
    "timestamp(0)": ("9999-12-31 23:59:59.6",),
    "timestamptz": ("4713-11-24 00:00:00+00 BC", "9999-12-31 23:59:59.999999-14", "1890-01-01 00:00:00+00:19:32"),
    "timestamptz(3)": ("2024-02-29 23:59:59.9999+00",),
    "interval": ("178000000 years", "-178956970 years -8 months -2147483648 days -2562047788:00:54.775807"),
    "interval day to second": ("1 day 02:03:04.5", "-1 day", "0"),
    "inet": ("0.0.0.0/0", "::ffff:1.2.3.4/128", "255.255.255.255"),
    "cidr": ("10.0.0.0/32", "::ffff:0:0/96"),
    "macaddr": ("ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"),
    "macaddr8": ("ff:ff:ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00:00:00"),
    "bit(5)": ("11111",),
    "bit(65)": ("1" * 65, "0" * 65, "01" * 32 + "0"),
    "varbit": ("10" * 524_288, "0" * 65),
    "point": ("(-0,5e-324)",),
    "line": ("{-1,0,3}", "{NaN,1,0}"),
    "lseg": ("[(-0,0),(Infinity,1)]", "[(1e300,1),(2,2)]"),
    "box": ("(Infinity,1),(0,-0)", "(0.1,0.2),(0.1,0.2)"),
    "path": ("[(" + "),(".join(f"{number},{number / 8}" for number in range(60_000)) + ")]",),
    "polygon": ("((0,0))", "((" + "),(".join(f"{number},0.1" for number in range(60_000)) + "))"),
    "circle": ("<(0,0),0>", "<(-1,NaN),Infinity>"),
    "pg_lsn": ("0/1",),
    "xid8": ("9223372036854775808",),
    "pg_snapshot": ("10:20:10,14,15", "1:1:", "18446744073709551614:18446744073709551615:"),
    "txid_snapshot": ("10:20:10,14,15", "1:1:", "3:9:5"),
    "aclitem": ("=r/postgres", "postgres=arwdDxt*/postgres", "postgres=U/postgres"),
    "refcursor": ("", "a cursor", _PLANES),
    "regclass": ("pg_class", "0", "pg_catalog.pg_type", "4294967295"),
    "regcollation": ('"C"', "-", '"default"'),
    "regconfig": ("english", "simple", "-"),
    "regdictionary": ("simple", "english_stem", "-"),
    "regnamespace": ("pg_catalog", "-", "public"),
    "regoper": ("pg_catalog.||/", "0", "!~~"),
    "regoperator": ("+(integer,integer)", "-(NONE,integer)", "0"),
    "regproc": ("now", "-", "pg_catalog.sin"),
    "regprocedure": ("sum(integer)", "abs(double precision)", "-"),
    "regrole": ("pg_monitor", "-", "pg_read_all_data"),
    "regtype": ("integer", "timestamp with time zone", "integer[]", "-"),
    "int2vector": ("", "1 2 -3", "32767"),
    "oidvector": ("", "1 4294967295", "7"),
    "int4range": ("[2147483646,2147483647)",),
    "int8range": ("empty", "(,)", "[-9223372036854775808,9223372036854775807)"),
    "tsrange": ("empty", "[-infinity,infinity]", '["0044-03-15 00:00:00 BC","294276-12-31 00:00:00")'),
    "int8multirange": ("{}", "{(,)}", "{[1,3),[5,)}"),
    "nummultirange": ("{}", "{[1.50,2.5],(7,NaN]}", "{(,)}"),
    "datemultirange": ("{}", "{[2024-01-01,infinity)}", "{(,0044-03-15 BC)}"),
    "tsmultirange": ("{}", '{["0044-03-15 00:00:00 BC",infinity]}', "{(,)}"),
    "tstzmultirange": ("{}", '{[-infinity,"2024-01-01 00:00:00+00")}', "{(,)}"),
    "oracle.pair": ("(1,\U0010ffff,0044-03-15 12:00:00+00 BC)",),
    "oracle.nested": ('("(1,""a b"",)","{1,NULL}")', '("(,,)",{})', "(,)"),
    "oracle.cube": ("(1, 2),(-0, Infinity)", "(0)", "()"),
    "oracle.hstore": (f'"big"=>"{_LONG}"', '"\U0010ffff"=>""'),
    "oracle.isbn": ("978-0-393-04002-9", "0-11-000222-2", "1-4028-9462-7"),
    "oracle.lo": ("0", "4294967295", "7"),
    "oracle.ltree": ("", "Top.Science.Astronomy", "a" * 255),
    "oracle.lquery": ("*.Astronomy.*{1,}|b", "a"),
    "oracle.ltxtquery": ("Europe & !Transportation@", "a"),
    "oracle.query_int": ("1&(2|3)", "!7"),
    "oracle.seg": ("1.5 .. 2", "~3", "<4"),
    "oracle.vector": ("[1,-0,3e38]", "[0]", "[" + ",".join(["0.1"] * 16_000) + "]"),
    "oracle.halfvec": ("[1,-0,65504]", "[0]"),
    "oracle.sparsevec": ("{1:0.5,1000000000:-2}/1000000000", "{}/3"),
}
"""Values besides those of the samples."""

_LABELS = {
    "oracle.mood": "enums",
    "oracle.pair": "composite types",
    "oracle.nested": "composite types with composites and arrays",
    "oracle.spread": "range types of `float8`",
}
_SKIPPED = frozenset({"oracle.positive", "oracle.price", "oracle.price_again", "oracle.words"})
"""Domains: each type has its own here."""


@dataclass(frozen=True, slots=True)
class Case:
    """A type, and the values that are tried."""

    number: int
    type: LiteralString
    values: tuple[str, ...]
    has_array: bool
    has_domain: bool
    has_key: bool
    """True if columns of the type can be a primary key."""

    @property
    def label(self) -> str:
        """Return what the page calls the type."""
        return _LABELS.get(self.type) or f"`{self.type.removeprefix('oracle.')}`"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(value for value in self.values if len(value) <= _LONGEST_KEY)

    @property
    def arrays(self) -> list[str | None]:
        """Return arrays of the values, and of other shapes."""
        short = [value for value in self.values if len(value) < 10_000]
        first, second = _quoted(short[0]), _quoted(short[-1])
        comma = ";" if self.type == "box" else ","
        return [
            *("{" + _quoted(value) + comma + "NULL}" for value in short),
            "{" + comma.join(map(_quoted, short)) + "}",
            *("{}", "{NULL}", None),
            "{" + comma.join([first, "NULL", second] * (1000 if self.type in _LONG_ARRAYS else 2)) + "}",
            f"[2:3]={{{first}{comma}{second}}}",
            f"[0:0]={{{second}}}",
            f"{{{{{first}{comma}NULL}}{comma}{{NULL{comma}{second}}}}}",
            f"[1:1][-2:-1][3:3]={{{{{{{first}}}{comma}{{{second}}}}}}}",
        ]


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A table in which types identify rows."""

    name: str
    cases: tuple[Case, ...]
    is_key: bool

    def rows(self) -> list[list[str]]:
        """Return rows with all values; types with fewer values than others repeat them."""
        count = max(len(case.keys) for case in self.cases)
        return [[case.keys[number % len(case.keys)] for case in self.cases] for number in range(count)]


def key_tables(cases: Sequence[Case]) -> list[KeyTable]:
    """Return the tables in which types are tried as keys: a table for each would take long."""
    own = [case for case in cases if case.has_key and _OWN_KEY.fullmatch(case.type)]
    others = [case for case in cases if case.has_key and case not in own]
    groups = [[case] for case in own]
    groups += [others[first : first + _KEY_COLUMNS] for first in range(0, len(others), _KEY_COLUMNS)]
    keyed = [KeyTable(f"key_{number}", tuple(group), True) for number, group in enumerate(groups)]
    return [*keyed, KeyTable("whole", tuple(case for case in cases if not case.has_key), False)]


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def create(connection: psycopg.Connection[Any]) -> list[Case]:
    """Create the types and tables, with the rows that are copied; return the cases that the server supports."""
    # Creates what the samples need.
    available_samples(connection)
    connection.execute("create type oracle.nested as (one oracle.pair, many int4[])")
    for extension in _EXTENSIONS:
        if connection.execute("select from pg_available_extensions where name = %s", [extension]).rowcount:
            connection.execute(f"create extension if not exists {extension} schema oracle".encode())
    cases = list(_cases(connection))
    columns: dict[str, list[sql.Composable]] = {name: [] for name in WIDE}
    for case in cases:
        column, type_ = sql.Identifier(f"c{case.number}"), sql.SQL(case.type)
        columns["plain"].append(sql.SQL("{} {}").format(column, type_))
        if case.has_array:
            columns["arrays"].append(sql.SQL("{} {}[]").format(column, type_))
        if case.has_domain:
            domain = sql.Identifier("oracle", f"d{case.number}")
            connection.execute(sql.SQL("create domain {} as {}").format(domain, type_))
            columns["domains"].append(sql.SQL("{} {}").format(column, domain))
        if case.has_array and case.has_domain:
            domain, column = sql.Identifier("oracle", f"da{case.number}"), sql.Identifier(f"a{case.number}")
            connection.execute(sql.SQL("create domain {} as {}[]").format(domain, type_))
            columns["domains"].append(sql.SQL("{} {}").format(column, domain))
    for keyed in key_tables(cases):
        table, names = sql.Identifier(keyed.name), [sql.Identifier(f"c{case.number}") for case in keyed.cases]
        pairs = zip(names, keyed.cases, strict=True)
        parts = [sql.SQL("{} {}").format(name, sql.SQL(case.type)) for name, case in pairs]
        if keyed.is_key:
            parts.append(sql.SQL("primary key ({})").format(sql.SQL(", ").join(names)))
        connection.execute(sql.SQL("create table {} (n int, {})").format(table, sql.SQL(", ").join(parts)))
        if not keyed.is_key:
            connection.execute(sql.SQL("alter table {} replica identity full").format(table))
    for name in WIDE:
        statement = sql.SQL("create table {} (id int primary key, touched bool, {})")
        connection.execute(statement.format(sql.Identifier(name), sql.SQL(", ").join(columns[name])))
    with connection.transaction():
        for name in WIDE:
            for number, row in enumerate(_rows(cases, name)):
                _insert(connection, name, 2 * number, row)
                _insert(connection, name, UPDATED + number, {})
        for keyed in key_tables(cases):
            _insert_keys(connection, keyed, 0)
    return cases


def change(connection: psycopg.Connection[Any], cases: Sequence[Case]) -> None:
    """Insert, update and delete the rows that arrive as changes."""
    with connection.transaction():
        for name in WIDE:
            for number, row in enumerate(_rows(cases, name)):
                _insert(connection, name, 2 * number + 1, row)
                _update(connection, name, UPDATED + number, row)
        for keyed in key_tables(cases):
            _insert_keys(connection, keyed, 1)
    with connection.transaction():
        # Long values are not sent again.
        for name in WIDE:
            table = sql.Identifier(name)
            connection.execute(sql.SQL("update {} set touched = true where id >= {}").format(table, UPDATED))
        for keyed in key_tables(cases):
            table = sql.Identifier(keyed.name)
            names = [sql.Identifier(f"c{case.number}") for case in keyed.cases]
            cells = sql.SQL(", ").join(sql.SQL("{0} = gone.{0}").format(name) for name in names)
            connection.execute(sql.SQL("update {} set n = n + 1000").format(table))
            for first in (0, 1):
                # A row takes the place of one that is deleted.
                last = sql.SQL("(select max(n) from {})").format(table)
                gone = sql.SQL("delete from {} where n = {} returning *").format(table, last)
                move = sql.SQL("with gone as ({}) update {} t set {} from gone where t.n = {}")
                connection.execute(move.format(gone, table, cells, 1000 + first))


def _cases(connection: psycopg.Connection[Any]) -> Iterator[Case]:
    values: dict[LiteralString, list[str]] = {}
    for sample in SAMPLES:
        if not sample.type.endswith("[]") and sample.type not in _SKIPPED:
            values.setdefault(sample.type, []).extend(sample.values)
    for type_, more in _MORE.items():
        values.setdefault(type_, []).extend(more)
    number = 0
    for type_, found in values.items():
        usable = tuple(value for value in dict.fromkeys(found) if _works(connection, type_, value))
        if usable:
            number += 1
            array = _works(connection, f"{type_}[]", "{}")
            domain = _try(connection, f"create domain pg_temp.d as {type_}")
            key = _try(connection, f"create temporary table k (k {type_} primary key) on commit drop")
            yield Case(number, type_, usable, array, domain, key)


def _works(connection: psycopg.Connection[Any], type_: str, value: str) -> bool:
    literal = sql.Literal(value).as_string(connection)
    return _try(connection, f"select {literal}::{type_}")


def _try(connection: psycopg.Connection[Any], statement: str) -> bool:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement.encode())
    except psycopg.Error:
        return False
    return True


def _rows(cases: Sequence[Case], table: str) -> Iterator[dict[str, str | None]]:
    """Yield the values of each row by column; types with fewer values than others are NULL in the rest."""
    columns: dict[str, Sequence[str | None]] = {}
    for case in cases:
        if table == "plain":
            columns[f"c{case.number}"] = case.values
        elif table == "arrays" and case.has_array:
            columns[f"c{case.number}"] = case.arrays
        elif table == "domains" and case.has_domain:
            columns[f"c{case.number}"] = [value for value in case.values if len(value) < 10_000]
            columns |= {f"a{case.number}": case.arrays} if case.has_array else {}
    for number in range(max(map(len, columns.values()))):
        yield {name: found[number] for name, found in columns.items() if number < len(found)}


def _insert(connection: psycopg.Connection[Any], table: str, number: int, row: dict[str, str | None]) -> None:
    statement = sql.SQL("insert into {} ({}) values ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, ["id", *row])),
        sql.SQL(", ").join([sql.Literal(number), *map(sql.Literal, row.values())]),
    )
    connection.execute(statement)


def _update(connection: psycopg.Connection[Any], table: str, number: int, row: dict[str, str | None]) -> None:
    cells = [sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in row.items()]
    statement = sql.SQL("update {} set {} where id = {}")
    connection.execute(statement.format(sql.Identifier(table), sql.SQL(", ").join(cells), number))


def _insert_keys(connection: psycopg.Connection[Any], keyed: KeyTable, first: int) -> None:
    for number, row in list(enumerate(keyed.rows()))[first::2]:
        # Different texts may be the same key: 0 and -0.
        statement = sql.SQL("insert into {} values ({}, {}) on conflict do nothing")
        values = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(value, sql.SQL(case.type)) for value, case in zip(row, keyed.cases, strict=True)
        )
        connection.execute(statement.format(sql.Identifier(keyed.name), number, values))
