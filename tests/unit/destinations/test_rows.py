"""Row by row: the base for people's own destinations, lines of JSON, and standard output."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import (
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    Relation,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
)
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.rows import RowDestination
from penstock.destinations.stdout import StdoutDestination
from penstock.errors import PenstockError
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import ITEMS, LINES, ORDERS


class Recorder(RowDestination):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Event] = []
        self.flushed: list[Mapping[int, Lsn]] = []
        self.discarded = 0
        self.poison: Any = None

    def clear(self, table: TableSchema, attempt: str) -> None:
        self.written = []

    def write(self, event: Event) -> None:
        if isinstance(event, Insert) and event.row.get("note") == self.poison:
            raise ValueError("poison is in the text of this error")
        self.written.append(event)

    def flush(self, positions: Mapping[int, Lsn]) -> None:
        self.flushed.append(positions)

    def discard(self) -> None:
        self.discarded += 1
        self.written = []


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def test_events_of_all_tables_come_in_the_order_of_their_commits(source: ScriptedSource) -> None:
    destination = Recorder()
    destination.startup(make_context())
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(1))
        transaction.insert(ITEMS, order(1))
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 1})
        transaction.truncate(ORDERS, ITEMS)
    with source.transaction() as transaction:
        transaction.delete(ITEMS, {"id": 1})
    batch = source.batch()
    assert destination.write_events(batch).result().tables == {}
    kinds = [type(event) for event in destination.written if not isinstance(event, Relation)]
    assert kinds == [Begin, Insert, Insert, Update, Truncate, Commit, Begin, Delete, Commit]
    truncate = next(event for event in destination.written if isinstance(event, Truncate))
    assert truncate.tables == ("public.orders", "public.Order items")
    assert destination.flushed == [{ORDERS.table_id: batch.end, ITEMS.table_id: batch.end}]


@pytest.mark.trap(33)
def test_a_poison_row_stops_its_table_and_the_others_are_written_once(source: ScriptedSource) -> None:
    destination = Recorder()
    destination.startup(make_context())
    destination.poison = "poison"
    with source.transaction() as transaction:
        transaction.insert(ITEMS, order(1))
        transaction.insert(ORDERS, order(1, "poison"))
        transaction.insert(ITEMS, order(2))
    batch = source.batch()
    error = destination.write_events(batch).result().of(ORDERS.table_id).error
    assert isinstance(error, PenstockError)
    assert "poison" not in f"{error.message}{error.hint}"
    assert destination.discarded == 1
    assert [event.row["id"] for event in destination.written if isinstance(event, Insert)] == [1, 2]
    assert destination.flushed == [{ITEMS.table_id: batch.end}]


def test_an_error_of_flush_concerns_all(source: ScriptedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(positions: Mapping[int, Lsn]) -> None:
        raise ConnectionError("gone")

    destination = Recorder()
    destination.startup(make_context())
    monkeypatch.setattr(destination, "flush", fail)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(1))
    with pytest.raises(ConnectionError):
        destination.write_events(source.batch())
    assert destination.discarded == 1


def test_stdout_gets_copied_rows_and_then_changes(source: ScriptedSource) -> None:
    stream = io.StringIO()
    destination = StdoutDestination(stream)
    destination.startup(make_context())
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(1)]))
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, Unchanged) | {"due": Unrepresentable("infinity")})
    destination.write_events(source.batch())
    destination.shutdown()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["op"] for line in lines] == ["copy", "begin", "update", "commit"]
    assert lines[0]["row"] == {"id": 1, "note": "a note", "due": None}
    assert lines[2]["row"] == {"id": 1, "due": "infinity"}
    assert lines[2]["unchanged"] == ["note"]
    assert lines[2]["unrepresentable"] == ["due"]


@pytest.mark.trap(25)
def test_a_new_row_without_all_cells_and_without_an_old_one_is_an_error_and_never_null() -> None:
    mirror = MirrorTable(ORDERS)
    with pytest.raises(PenstockError, match="omitted values"):
        mirror.insert(order(1, Unchanged))
    with pytest.raises(PenstockError, match="row does not exist"):
        mirror.apply(Delete(OrderKey(Lsn(1), 0), datetime.now(UTC), 1, ORDERS, {"id": 1}))
    assert mirror.rows() == []


@pytest.mark.trap(29)
def test_without_a_key_rows_are_told_apart_exactly() -> None:
    floats = replace(LINES, columns=(Column("value", 1, PostgresType(701, "float8"), identity=True),))
    rows = [{"value": value} for value in (float("nan"), float("nan"), 0.0, -0.0, None)]
    mirror = MirrorTable(floats, rows)
    for value in (float("nan"), -0.0, None):
        mirror.apply(Delete(OrderKey(Lsn(1), 0), datetime.now(UTC), 1, floats, {"value": value}))
    assert sorted(repr(row["value"]) for row in mirror.rows()) == ["0.0", "nan"]


def test_a_changed_type_is_an_error_because_the_source_sends_no_converted_values() -> None:
    mirror = MirrorTable(ORDERS, [order(1)])
    key, *others = ORDERS.columns
    changed = replace(ORDERS, columns=(replace(key, type=PostgresType(1700, "numeric")), *others))
    with pytest.raises(PenstockError, match="type of column id changed"):
        mirror.change_schema(changed)


def test_a_mirror_is_an_arrow_table_with_the_texts_that_do_not_fit() -> None:
    rows = [order(1) | {"due": date(2026, 1, 2)}, order(2) | {"due": Unrepresentable("infinity")}]
    table = MirrorTable(ORDERS, rows).arrow()
    assert table.column("due").to_pylist() == [date(2026, 1, 2), None]
    assert table.column("_unrepresentable").to_pylist() == [None, [("due", "infinity")]]
