"""How changes look as lines and as JSON."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pytest
from rich.cells import cell_len

from penstock.changes.events import (
    Begin,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
)
from penstock.cli.event_lines import VALUE_CELLS, Lines
from penstock.destinations.json_lines import event_to_json as to_json
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema, TypeKind

KEY = OrderKey(Lsn.parse("16/B374D848"), 3)
WHEN = datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)
REAL = PostgresType(700, "float4")
TEXT = PostgresType(25, "text")
TABLE = TableSchema(
    1,
    "public",
    "t",
    (
        Column("note", 1, TEXT),
        Column("id", 2, PostgresType(20, "int8"), identity=True, primary_key_position=1),
        Column("ratio", 3, REAL),
        Column("ratios", 4, PostgresType(1021, "_float4", kind=TypeKind.ARRAY, element=REAL)),
    ),
)
FULL = TableSchema(2, "public", "full", TABLE.columns, ReplicaIdentity.FULL)
KEYLESS = TableSchema(3, "public", "keyless", (Column("a", 1, TEXT), Column("b", 2, TEXT)), ReplicaIdentity.FULL)


def insert(**row: Any) -> Insert:
    return Insert(KEY, WHEN, 7, TABLE, row)


def line(event: Any, **options: Any) -> str:
    """A line without its time."""
    text = Lines(**options).format(event)
    assert text is not None
    return text.partition("  ")[2]


def test_the_key_comes_first_and_values_look_like_sql():
    row = {"note": "it", "id": 5, "a": None, "b": True, "c": Decimal("1.10"), "d": b"\x00\xff", "e": ["x", None, 2]}
    expected = r"insert   public.t  id=5  note='it'  a=null  b=true  c=1.10  d=\x00ff  e=['x', null, 2]"
    assert line(insert(**row)) == expected


def test_what_is_not_a_value_stands_in_angle_brackets():
    event = Update(KEY, WHEN, 7, TABLE, {"note": Unchanged, "id": 5, "at": Unrepresentable("infinity")}, None)
    assert line(event) == "update   public.t  id=5  note=<unchanged>  at=<infinity>"


def test_nothing_in_a_value_can_move_the_cursor_or_break_the_line():
    text = line(insert(id=1, note="a\nb\x1b[31mc\u202ed", odd=Unrepresentable("x\r\x07")))
    assert text.isprintable()
    assert r"note='a\nb\u001b[31mc\u202ed'" in text


@pytest.mark.parametrize(
    "value", ["x" * 5000, "漢" * 5000, ["y" * 30] * 50, b"\x00" * 5000, Unrepresentable("9" * 999)]
)
def test_long_values_are_cut(value):
    assert cell_len(line(insert(id=1, note=value)).partition("note=")[2]) <= VALUE_CELLS + 2


def test_a_terminal_gets_lines_of_its_width():
    event = insert(id=1, note="漢字" * 20, more="z" * 40)
    for width in range(1, 120):
        text = Lines(width=lambda width=width: width).format(event)
        assert text is not None
        assert cell_len(text) <= width


def test_with_the_whole_old_row_only_what_changed_is_shown():
    row = {"note": "b", "id": 1, "ratio": Unchanged}
    event = Update(KEY, WHEN, 7, FULL, row, {"note": "a", "id": 1, "ratio": 0.5})
    assert line(event) == "update   public.full  id=1  note='a' → 'b'"
    same = Update(KEY, WHEN, 7, FULL, {"note": "a", "id": 1}, {"note": "a", "id": 1})
    assert line(same) == "update   public.full  id=1  (no column changed)"
    keyless = Update(KEY, WHEN, 7, KEYLESS, {"a": "1", "b": "3"}, {"a": "1", "b": "2"})
    assert line(keyless) == "update   public.keyless  a='1'  b='2' → '3'"


def test_other_events_have_lines_of_their_own():
    truncate = Truncate(KEY, WHEN, 7, (1, 2), ("public.a", "public.b"), cascade=True, restart_identity=True)
    assert line(truncate) == "truncate public.a, public.b (cascade) (restart identity)"
    assert line(Message(KEY, WHEN, 7, "app", b"\x00\xffhi")) == r"message  prefix='app'  content='\u0000\xffhi'"
    assert line(Begin(KEY.commit_lsn, WHEN, 7)) == "begin    transaction 7, commit at 16/B374D848"
    assert Lines().format(Relation(KEY, TABLE)) is None
    assert to_json(Relation(KEY, TABLE)) is None


def test_colours_change_nothing_else():
    event = insert(id=1, note="x", gone=Unchanged)
    coloured = Lines(colour=True).format(event)
    assert coloured is not None
    assert "\x1b[32m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == Lines().format(event)


def test_json_is_on_one_line_and_valid_whatever_the_values():
    values = {
        "decimal": (Decimal("1E+3"), "1000"),
        "small": (Decimal("1E-10"), "0.0000000001"),
        "nan": (float("nan"), "NaN"),
        "infinite": (float("-inf"), "-Infinity"),
        "bytes": (b"\x00\xff", "\\x00ff"),
        "at": (WHEN, "2024-01-02T03:04:05.678901+00:00"),
        "local": (datetime(1, 1, 1), "0001-01-01T00:00:00"),
        "day": (date(9999, 12, 31), "9999-12-31"),
        "clock": (time(1, 2, 3), "01:02:03"),
        "list": ([Decimal("1.0"), None, float("inf")], ["1.0", None, "Infinity"]),
        "text": ("line\nbreak \u2028 ü", "line\nbreak \u2028 ü"),
        "odd": (Unrepresentable("24:00:00"), "24:00:00"),
        "big": (2**63 - 1, 2**63 - 1),
    }
    text = to_json(insert(**{name: value for name, (value, _) in values.items()}))
    assert text is not None
    assert "\n" not in text
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["row"] == {name: expected for name, (_, expected) in values.items()}
    assert record["unrepresentable"] == ["odd"]
    assert (record["commit_lsn"], record["ordinal"], record["xid"]) == ("16/B374D848", 3, 7)


def test_json_names_what_was_not_sent_and_has_the_old_identity():
    update = json.loads(
        to_json(Update(KEY, WHEN, 7, TABLE, {"note": Unchanged, "id": 2}, {"id": Unrepresentable("x")})) or ""
    )
    assert (update["row"], update["unchanged"]) == ({"id": 2}, ["note"])
    assert (update["old"], update["old_unrepresentable"]) == ({"id": "x"}, ["id"])
    delete = json.loads(to_json(Delete(KEY, WHEN, 7, TABLE, {"id": 2})) or "")
    assert delete["old"] == {"id": 2}
    assert "row" not in delete


def test_real_numbers_have_their_shortest_digits():
    near = 0.10000000149011612
    event = insert(id=1, ratio=near, ratios=[near, None], other=near)
    assert line(event).endswith("id=1  ratio=0.1  ratios=[0.1, null]  other=0.10000000149011612")
    assert json.loads(to_json(event) or "")["row"]["ratios"] == [0.1, None]
