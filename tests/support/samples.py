"""Sample values of every Postgres type, awkward ones first, for the tables of the oracle.

Values are Postgres literals. The first ones of each type are the likely troublemakers; `make` returns more, `unique`
returns the n-th of a series without repeats (for keys), `large` returns one that is stored out of line (TOAST).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import LiteralString

import psycopg

SCHEMA = "oracle"
"""The schema of the types that the samples need."""

SETUP: tuple[LiteralString, ...] = (
    "create schema if not exists oracle",
    "create type oracle.mood as enum ('sad', 'ok', 'very \"happy\", {really}', 'NULL')",
    "create type oracle.pair as (number int4, word text, at timestamptz)",
    "create domain oracle.positive as int4 check (value > 0)",
    "create domain oracle.price as numeric(10, 2)",
    "create domain oracle.price_again as oracle.price",
    "create domain oracle.words as text[]",
    "create type oracle.spread as range (subtype = float8)",
)

_WORDS = (
    *(
        "",
        "NULL",
        "null",
        "a'b\"c\\d",
        "line\nbreak\ttab",
        "ünï-中文-🙂",
        "{x,y}",
        "\\x41",
        " spaced ",
        "\\N",
        "[1:2]={}",
    ),
    *("(a,b)", "t", "infinity", "\r\n", "\x01\x7f", "a;b", "%s $1", "x" * 300),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A type with sample values."""

    type: LiteralString
    values: tuple[str, ...]
    make: Callable[[Random], str] | None = None
    unique: Callable[[int], str] | None = None
    large: Callable[[Random], str] | None = None
    needs: LiteralString = ""
    """A statement that succeeds if the type exists; empty if it always does."""

    def value(self, random: Random) -> str:
        """Return one of the values, or a similar one."""
        if self.make is not None and random.random() < 0.6:
            return self.make(random)
        return random.choice(self.values)


def available_samples(connection: psycopg.Connection) -> list[Sample]:
    """Create what the samples need in a database; return the samples that the server supports."""
    for statement in SETUP:
        connection.execute(statement)
    for extension in ("citext", "hstore"):
        if connection.execute("select from pg_available_extensions where name = %s", [extension]).rowcount:
            connection.execute(f"create extension if not exists {extension} schema oracle".encode())
    return [sample for sample in SAMPLES if _works(connection, sample.needs)]


def _works(connection: psycopg.Connection, statement: LiteralString) -> bool:
    if not statement:
        return True
    try:
        connection.execute(statement)
    except psycopg.Error:
        return False
    return True


def _word(random: Random) -> str:
    return random.choice(_WORDS) if random.random() < 0.4 else f"w{random.randrange(10**6)}"


def _hex(random: Random, low: int = 1100, high: int = 4000) -> str:
    """Return text that does not compress, so that it is stored out of line."""
    return random.randbytes(random.randint(low, high)).hex()


def _day(random: Random) -> str:
    year = random.randint(1, 9999)
    return f"{year:04d}-{random.randint(1, 12):02d}-{random.randint(1, 28):02d}"


def _clock(random: Random) -> str:
    fraction = random.choice(["", ".5", ".000001", ".123456", ".120000"])
    return f"{random.randrange(24):02d}:{random.randrange(60):02d}:{random.randrange(60):02d}{fraction}"


def _unique_day(number: int) -> str:
    special = ("infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "4713-11-25 BC")
    if number < len(special):
        return special[number]
    return str(date(1, 1, 1) + timedelta(days=number * 7))


def _unique_moment(number: int) -> str:
    special = ("infinity", "-infinity", "0044-03-15 12:00:00 BC", "12345-01-01 00:00:00.5", "0001-01-01 00:00:00")
    if number < len(special):
        return special[number]
    return f"2024-01-01 00:00:00.{number:06d}"


def _elements(make: Callable[[Random], str], *, null: bool = True) -> Callable[[Random], str]:
    """Return the text of an array with up to five such elements."""

    def array(random: Random) -> str:
        parts = [
            "NULL" if null and random.random() < 0.2 else _quoted(make(random)) for _ in range(random.randrange(6))
        ]
        return "{" + ",".join(parts) + "}"

    return array


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _number(random: Random) -> str:
    return str(random.randint(-(10**6), 10**6))


def _decimal(random: Random) -> str:
    return f"{random.randint(-(10**7), 10**7)}.{random.randrange(100):02d}"


def _float(random: Random) -> str:
    return repr(random.choice([random.uniform(-1e6, 1e6), random.random() * 10 ** random.randint(-300, 300)]))


_MOODS = ("sad", "ok", 'very "happy", {really}', "NULL")
_ODD_ARRAYS = ("{}", "{NULL}", "[0:1]={1,2}", "{{1,2},{3,4}}", "[2:2][-1:0]={{1,NULL}}", "{1,NULL,3}")
_FLOATS = ("NaN", "Infinity", "-Infinity", "-0", "0", "1e23", "0.1", "1e15", "123456789012345.6")
_DAYS = (
    "infinity",
    "-infinity",
    "0044-03-15 BC",
    "0001-01-01",
    "9999-12-31",
    "10000-01-01",
    "5874897-12-31",
    "2024-02-29",
)
_MOMENTS = (
    *("infinity", "-infinity", "0044-03-15 12:00:00 BC", "294276-12-31 23:59:59.999999", "2024-02-29 23:59:59.999999"),
    *("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "1970-01-01 00:00:00", "10000-01-01 00:00:00"),
)

SAMPLES: tuple[Sample, ...] = (
    # Numbers
    Sample("int2", ("-32768", "32767", "0"), lambda r: str(r.randint(-32768, 32767))),
    Sample("int4", ("-2147483648", "2147483647", "0"), _number, unique=str),
    Sample("int8", (str(-(2**63)), str(2**63 - 1), "0"), _number, unique=lambda n: str(n * 10**12 - 5)),
    Sample("bool", ("true", "false")),
    Sample("float4", (*_FLOATS[:7], "3.4028235e38", "1e-45", "16777216"), lambda r: str(r.uniform(-1e5, 1e5))),
    Sample(
        "float8",
        (*_FLOATS, "1.7976931348623157e308", "5e-324"),
        _float,
        unique=lambda n: ("NaN", "Infinity", "-Infinity", "5e-324")[n] if n < 4 else repr(n / 8),
    ),
    Sample(
        "numeric",
        ("NaN", "0", "0.000", "-0.0000001", "9" * 60 + "." + "9" * 40, "1e500", "-1e-300", "12345678901234567890.5"),
        _decimal,
        unique=lambda n: "NaN" if n == 0 else f"{n}.{'0' * (n % 4)}",
        large=lambda r: "".join(r.choices("123456789", k=6000)) + ".50",
    ),
    Sample("numeric", ("Infinity", "-Infinity"), needs="select 'Infinity'::numeric"),
    Sample("numeric(10, 2)", ("NaN", "99999999.99", "-99999999.99", "0", "0.1"), _decimal, unique=lambda n: f"{n}.10"),
    Sample("numeric(38, 10)", ("9" * 28 + "." + "9" * 10, "-" + "9" * 28, "NaN", "0.0000000001"), _decimal),
    Sample("numeric(38)", ("9" * 38, "-" + "9" * 38, "NaN"), _number),
    Sample("numeric(50, 20)", ("9" * 30 + "." + "9" * 20, "NaN", "-1"), _decimal),
    Sample("numeric(3, -2)", ("12300", "-99900", "NaN"), needs="select 1::numeric(3, -2)"),
    Sample("numeric(3, 5)", ("0.00123", "-0.00999", "NaN", "0"), needs="select 0::numeric(3, 5)"),
    Sample("money", ("-92233720368547758.08", "92233720368547758.07", "0.01"), _decimal, unique=lambda n: f"{n}.50"),
    Sample("oid", ("0", "4294967295"), lambda r: str(r.getrandbits(32))),
    # Text and bytes
    Sample("text", _WORDS, _word, unique=lambda n: f"k{n} \"'\\", large=_hex),
    Sample("varchar(40)", tuple(word[:40] for word in _WORDS), lambda r: _word(r)[:40], unique=lambda n: f"v,{n}"),
    Sample("char(6)", ("", "a", "abcdef", "ü 中"), lambda r: f"{r.randrange(999)}", unique=lambda n: f"{n:x}"),
    Sample('"char"', ("", "a", "\\", "{")),
    Sample("name", ("", "a name", "x" * 63), lambda r: _word(r)[:20].strip("\x00"), unique=lambda n: f"n{n}"),
    Sample(
        "bytea",
        ("\\x", "\\x00", "\\xdeadbeef", "\\x" + "00ff" * 50),
        lambda r: "\\x" + r.randbytes(r.randrange(30)).hex(),
        unique=lambda n: f"\\x{n:08x}00",
        large=lambda r: "\\x" + _hex(r, 2200),
    ),
    Sample(
        "json",
        ('{"a" :  1, "a": 2}', "null", '"\\u00e9"', "[1, {}]", ' {"k":"v"} '),
        lambda r: f'{{"n":{r.random()}}}',
        large=lambda r: f'{{"blob":"{_hex(r)}"}}',
    ),
    Sample(
        "jsonb",
        ('{"b": 1, "a": [null, 1.50, "x\\n"]}', "null", "[]", "1e400", '"\\ud83d\\ude42"'),
        lambda r: f'{{"n":{r.random()}}}',
        unique=lambda n: f'{{"k": [{n}]}}',
        large=lambda r: f'{{"blob":"{_hex(r)}","n":1}}',
    ),
    Sample("jsonpath", ("$.a[*] ? (@ > 1)", "$")),
    Sample("uuid", ("00000000-0000-0000-0000-000000000000",), unique=lambda n: str(uuid.UUID(int=n << 70 | 1))),
    Sample("xml", ("<a>1</a>", "text &amp; more"), needs="select '<a/>'::xml"),
    Sample("oracle.citext", ("MiXed", ""), _word, unique=lambda n: f"Ci{n}", needs="select 'a'::oracle.citext"),
    Sample(
        "oracle.hstore",
        ("", "a=>1", '"odd key"=>NULL', '"q\\"uote"=>"b\\\\s"'),
        lambda r: f"k=>{r.randrange(100)}",
        large=lambda r: f"k=>{_hex(r)}",
        needs="select ''::oracle.hstore",
    ),
    Sample(
        "tsvector",
        ("", "'a':1A 'fat':2,4C 'cat''s'"),
        lambda r: f"w{r.randrange(99)}:3 b",
        large=lambda r: " ".join(f"w{r.getrandbits(40):x}" for _ in range(400)),
    ),
    Sample("tsquery", ("'a' & !'b' | 'c':*", "")),
    # Time
    Sample("date", _DAYS, _day, unique=_unique_day),
    Sample(
        "time",
        ("24:00:00", "00:00:00", "23:59:59.999999"),
        _clock,
        unique=lambda n: "24:00:00" if n == 0 else f"01:00:00.{n:06d}",
    ),
    Sample("time(0)", ("24:00:00", "12:00:00"), _clock),
    Sample("timetz", ("24:00:00-15:59", "00:00:00+15:59", "12:00:00.5+00"), lambda r: _clock(r) + "+02"),
    Sample("timestamp", _MOMENTS, lambda r: f"{_day(r)} {_clock(r)}", unique=_unique_moment),
    Sample("timestamp(0)", _MOMENTS[:3], lambda r: f"{_day(r)} {_clock(r)}"),
    Sample(
        "timestamptz",
        (*_MOMENTS, "0001-01-01 00:00:00+14"),
        lambda r: f"{_day(r)} {_clock(r)}+05:30",
        unique=_unique_moment,
    ),
    Sample("timestamptz(3)", _MOMENTS[:3], lambda r: f"{_day(r)} {_clock(r)}-08"),
    Sample(
        "interval",
        ("-178000000 years", "1 mon -1 day 00:00:00.000001", "0", "-00:00:01.5", "3 years 4 days"),
        lambda r: f"{r.randint(-999, 999)} days {r.randint(-9999, 9999)} seconds",
        unique=lambda n: f"{n} seconds",
    ),
    Sample("interval", ("infinity", "-infinity"), needs="select 'infinity'::interval"),
    # Network, bits, shapes
    Sample(
        "inet",
        ("10.0.0.1", "10.1.2.3/8", "::1", "fe80::1/64"),
        unique=lambda n: f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}",
    ),
    Sample("cidr", ("10.0.0.0/8", "::/0")),
    Sample(
        "macaddr",
        ("08:00:2b:01:02:03",),
        unique=lambda n: f"08:00:2b:{n >> 16 & 255:02x}:{n >> 8 & 255:02x}:{n & 255:02x}",
    ),
    Sample("macaddr8", ("08:00:2b:01:02:03:04:05",)),
    Sample("bit(5)", ("10101", "00000")),
    Sample(
        "varbit", ("", "1", "0110"), lambda r: f"{r.getrandbits(20):b}", large=lambda r: f"{r.getrandbits(30_000):b}"
    ),
    Sample("point", ("(0,-0)", "(NaN,Infinity)", "(1e-300,0.1)")),
    Sample("line", ("{1,-1,0.5}",)),
    Sample("lseg", ("[(0,0),(1,1)]",)),
    Sample("box", ("(1,1),(0,0)",)),
    Sample(
        "path",
        ("[(0,0),(1,2)]", "((0,0),(1,2))"),
        large=lambda r: "[" + ",".join(f"({r.random()},{r.random()})" for _ in range(200)) + "]",
    ),
    Sample("polygon", ("((0,0),(1,2),(3,3))",)),
    Sample("circle", ("<(0,0),1.5>",)),
    Sample("pg_lsn", ("0/0", "FFFFFFFF/FFFFFFFF", "16/B374D848")),
    Sample("xid8", ("0", "18446744073709551615")),
    # Enums, domains, composites
    Sample("oracle.mood", _MOODS),
    Sample("oracle.positive", ("1", "2147483647"), unique=lambda n: str(n + 1)),
    Sample("oracle.price", ("NaN", "1.5"), _decimal, unique=lambda n: f"{n}.25"),
    Sample("oracle.price_again", ("NaN", "-0.01"), _decimal),
    Sample("oracle.words", ("{}", "{{a,b},{c,d}}", "[5:5]={x}", '{NULL,"NULL"}'), _elements(_word)),
    Sample(
        "oracle.pair",
        ("(1,,)", '(,"a ""b"" \\\\c, (d)",infinity)', "(5,x,2024-01-01 00:00:00+00)", "(,,)"),
        lambda r: f"({r.randrange(99)},w,)",
        large=lambda r: f"(1,{_hex(r)},)",
    ),
    # Ranges
    Sample("int4range", ("empty", "(,)", "[1,5]", "[,10)"), unique=lambda n: f"[{n},{n + 1})"),
    Sample("numrange", ("empty", "(1.50,2.5]", "[,NaN]")),
    Sample("daterange", ("empty", "[2024-01-01,infinity)", "[0044-03-15 BC,)")),
    Sample("tstzrange", ("empty", "[2024-01-01 00:00:00+00,infinity]", "(-infinity,)")),
    Sample("oracle.spread", ("[0.1,1e300)", "empty")),
    Sample("int4multirange", ("{}", "{[1,3),[5,)}"), needs="select '{}'::int4multirange"),
    # Arrays
    Sample(
        "int4[]", _ODD_ARRAYS, _elements(_number), unique=lambda n: f"{{{{{n}}}}}" if n % 3 == 0 else f"{{{n},NULL}}"
    ),
    Sample("int8[]", _ODD_ARRAYS, _elements(_number)),
    Sample("float8[]", ("{NaN,Infinity,-0,1e23}", "{{NaN}}"), _elements(_float)),
    Sample("float4[]", ("{0.1,NULL,-Infinity}",), _elements(_number)),
    Sample("bool[]", ("{t,f,NULL}", "{}")),
    Sample(
        "text[]",
        ('{"",NULL,"NULL","a b","\\"\\\\"}', "{{a},{b}}", "[3:4]={x,y}"),
        _elements(_word),
        large=lambda r: "{" + ",".join(_hex(r, 200, 900) for _ in range(6)) + ",NULL}",
    ),
    Sample("numeric(10, 2)[]", ("{NaN,1.10}", "{1.5,NULL}", "{{1},{2}}"), _elements(_decimal)),
    Sample("numeric[]", ("{NaN,1e100,0.10}", "{}"), _elements(_decimal)),
    Sample("date[]", ("{infinity,2024-01-01}", '{"0044-03-15 BC"}', "{}"), _elements(_day)),
    Sample("time[]", ("{24:00:00}", "{00:00:00.5,NULL}"), _elements(_clock)),
    Sample("timestamptz[]", ('{infinity,"2024-01-01 00:00:00+00"}',), _elements(lambda r: f"{_day(r)} {_clock(r)}+00")),
    Sample("timestamp[]", ('{"0001-01-01 00:00:00"}', "{{-infinity}}"), _elements(lambda r: f"{_day(r)} {_clock(r)}")),
    Sample(
        "oracle.mood[]", ('{sad,"very \\"happy\\", {really}",NULL,"NULL"}', "{}"), _elements(lambda r: r.choice(_MOODS))
    ),
    Sample("oracle.pair[]", ('{"(1,\\"a \\"\\"b\\"\\"\\",)",NULL}', "{}")),
    Sample("oracle.price[]", ("{NaN}", "{1.5,NULL}")),
    Sample("box[]", ("{(1,1),(0,0);(2,2),(1,1)}", "{NULL;(1,1),(0,0)}", "{}")),
    Sample("bytea[]", ('{"\\\\x00","\\\\x",NULL}', "{}"), large=lambda r: '{"\\\\x' + _hex(r, 2200) + '"}'),
    Sample("jsonb[]", ('{"{\\"a\\": 1}",NULL,"null"}',)),
    Sample("uuid[]", ("{00000000-0000-0000-0000-000000000000,NULL}",)),
    Sample("inet[]", ("{10.0.0.1,::1}",)),
    Sample("interval[]", ('{"1 day","-00:00:01"}',)),
    Sample("int4range[]", ('{"[1,2)",empty}',)),
)
