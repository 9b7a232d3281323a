"""The row-by-row view of entries: order over tables, borders of transactions, and cells that are not plain values."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes import steps
from penstock.changes.events import (
    SLICE_ROWS,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
    iterate_events,
)
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, segment_layout
from penstock.changes.steps import Segment, Step, Truncation
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema

INT8 = PostgresType(20, "int8")
TEXT = PostgresType(25, "text")
INSERT, UPDATE, DELETE = 1, 2, 3


def make_schema(table_id: int, name: str, identity: ReplicaIdentity = ReplicaIdentity.DEFAULT) -> TableSchema:
    full = identity is ReplicaIdentity.FULL
    columns = (
        Column("id", 1, INT8, identity=True, primary_key_position=1),
        Column("note", 2, TEXT, identity=full),
        Column("_op", 3, TEXT, identity=full),
    )
    return TableSchema(table_id, "public", name, columns, identity)


ORDERS = make_schema(1, "orders")
ITEMS = make_schema(2, "items")
FULL = make_schema(3, "full", ReplicaIdentity.FULL)


@dataclass
class Entry:
    steps: tuple[Step, ...]


@dataclass
class FakeReader:
    """Segments in memory; knows which were opened, in order."""

    tables: dict[str, pa.Table] = field(default_factory=dict)
    schemas: dict[str, TableSchema] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)

    def read(self, segment: Segment) -> pa.Table:
        self.opened.append(segment.path)
        return self.tables[segment.path]

    def schema(self, segment: Segment) -> TableSchema:
        return self.schemas[segment.path]

    def add(self, schema: TableSchema, changes: list[dict[str, Any]], version: str = "v1") -> Segment:
        """A segment with these changes; `_op` of the table is called `_op#3` here."""
        rows = [
            {
                "_op": INSERT,
                "_commit_time": datetime.fromtimestamp(change["_commit_lsn"], UTC),
                "_xid": change["_commit_lsn"] // 10,
            }
            | change
            for change in changes
        ]
        arrow_schema = segment_layout(schema).arrow_schema
        if any(UNREPRESENTABLE in row for row in rows):
            arrow_schema = arrow_schema.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
        file = f"{schema.name}-{len(self.tables)}"
        self.tables[file] = pa.Table.from_pylist(rows, arrow_schema)
        self.schemas[file] = schema
        first, last = (OrderKey(Lsn(row["_commit_lsn"]), row["_ordinal"]) for row in (rows[0], rows[-1]))
        return Segment(schema.table_id, str(schema), version, file, len(rows), 1, first, last)


def change(commit_lsn: int, ordinal: int, **values: Any) -> dict[str, Any]:
    return {"_commit_lsn": commit_lsn, "_ordinal": ordinal} | values


def truncation(schema: TableSchema, commit_lsn: int, ordinal: int) -> Truncation:
    key = OrderKey(Lsn(commit_lsn), ordinal)
    return Truncation(schema.table_id, str(schema), key, commit_lsn * 1_000_000, commit_lsn // 10, True, False)


def changes_of(events: list[Any]) -> list[Any]:
    return [event for event in events if not isinstance(event, Begin | Commit | Relation)]


def keys_of(events: list[Any]) -> list[tuple[int, int]]:
    return [tuple(event.key) for event in changes_of(events)]


@pytest.mark.trap(1)
def test_changes_of_all_tables_come_in_order_whatever_the_order_of_segments():
    shuffled = random.Random(3)
    reader = FakeReader()
    keys = [(100 + 10 * transaction, ordinal) for transaction in range(30) for ordinal in range(40)]
    owner = {key: shuffled.choice((ORDERS, ITEMS, FULL)) for key in keys}
    segments: list[Step] = []
    for schema in (ORDERS, ITEMS, FULL):
        own = [key for key in keys if owner[key] is schema]
        cuts = sorted(shuffled.sample(range(1, len(own)), 4))
        for first, last in zip([0, *cuts], [*cuts, len(own)], strict=True):
            segments.append(reader.add(schema, [change(*key, id=key[1]) for key in own[first:last]]))
    shuffled.shuffle(segments)
    events = list(iterate_events(reader, [Entry(tuple(segments))]))
    assert keys_of(events) == keys
    assert [event.table for event in changes_of(events)] == [owner[key] for key in keys]


def test_begin_and_commit_frame_every_transaction():
    reader = FakeReader()
    entry = Entry(
        (
            reader.add(ORDERS, [change(100, 0, id=1), change(110, 1, id=2)]),
            reader.add(ITEMS, [change(110, 0, id=3)]),
        )
    )
    following = Entry((reader.add(ITEMS, [change(120, 0, id=4)]),))
    events = [event for event in iterate_events(reader, [entry, following]) if not isinstance(event, Relation)]
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Begin", "Insert", "Commit", "Begin", "Insert", "Insert", "Commit", "Begin", "Insert", "Commit"]
    assert events[3] == Begin(Lsn(110), datetime.fromtimestamp(110, UTC), 11)
    assert events[6] == Commit(Lsn(110), datetime.fromtimestamp(110, UTC), 11)


def test_a_relation_comes_before_the_first_row_and_when_the_version_changes():
    reader = FakeReader()
    wider = make_schema(1, "orders", ReplicaIdentity.FULL)
    entries = [
        Entry((reader.add(ORDERS, [change(100, 0, id=1)]),)),
        Entry((reader.add(ORDERS, [change(110, 0, id=1)]), reader.add(wider, [change(110, 1, id=2)], "v2"))),
    ]
    events = [event for event in iterate_events(reader, entries) if isinstance(event, Relation)]
    assert [(tuple(event.key), event.table) for event in events] == [((100, 0), ORDERS), ((110, 1), wider)]


@pytest.mark.trap(2)
def test_after_is_a_boundary_and_equality_means_not_in():
    reader = FakeReader()
    entry = Entry(
        (
            reader.add(ORDERS, [change(100, 0, id=1)]),
            reader.add(ITEMS, [change(100, 1, id=1), change(110, 0, id=2), change(120, 0, id=3)]),
            truncation(ORDERS, 100, 2),
            truncation(ORDERS, 110, 1),
        )
    )
    assert keys_of(list(iterate_events(reader, [entry], after=Lsn(110)))) == [(110, 0), (110, 1), (120, 0)]
    assert reader.opened == ["items-1"], "a segment that is wholly in is not read"
    assert keys_of(list(iterate_events(reader, [entry], after=Lsn(101))))[0] == (110, 0)
    assert keys_of(list(iterate_events(reader, [entry], after=Lsn(100))))[0] == (100, 0)
    assert list(iterate_events(reader, [entry], after=Lsn(121))) == []


@pytest.mark.trap(32)
def test_a_truncate_names_all_its_tables_and_stands_between_the_rows_around_it():
    reader = FakeReader()
    entry = Entry(
        (
            truncation(ORDERS, 100, 1),
            truncation(ITEMS, 100, 1),
            reader.add(ORDERS, [change(100, 0, id=1)]),
            reader.add(ORDERS, [change(100, 2, id=2)]),
            reader.add(ITEMS, [change(100, 3, id=2)]),
        )
    )
    found = changes_of(list(iterate_events(reader, [entry])))
    assert [type(event).__name__ for event in found] == ["Insert", "Truncate", "Insert", "Insert"]
    assert found[1] == Truncate(
        OrderKey(Lsn(100), 1),
        datetime.fromtimestamp(100, UTC),
        10,
        (1, 2),
        ("public.orders", "public.items"),
        cascade=True,
        restart_identity=False,
    )


def test_a_message_stands_before_the_change_with_its_key():
    reader = FakeReader()
    message = steps.Message(OrderKey(Lsn(100), 1), 100_000_000, 10, "app", b"\x00hello")
    entry = Entry((reader.add(ORDERS, [change(100, 0, id=1), change(100, 1, id=2)]), message))
    found = changes_of(list(iterate_events(reader, [entry])))
    assert [type(event).__name__ for event in found] == ["Insert", "Message", "Insert"]
    assert found[1] == Message(OrderKey(Lsn(100), 1), datetime.fromtimestamp(100, UTC), 10, "app", b"\x00hello")


def test_only_the_tables_asked_for_appear():
    reader = FakeReader()
    entry = Entry(
        (
            reader.add(ORDERS, [change(100, 0, id=1)]),
            reader.add(ITEMS, [change(110, 0, id=1)]),
            truncation(ORDERS, 120, 0),
            truncation(ITEMS, 120, 0),
        )
    )
    events = list(iterate_events(reader, [entry], tables=lambda step: step.table_id == ITEMS.table_id))
    assert reader.opened == ["items-1"]
    assert [type(event).__name__ for event in events] == [
        *("Begin", "Relation", "Insert", "Commit"),
        *("Begin", "Truncate", "Commit"),
    ]
    assert events[-2].tables == ("public.items",)


def test_rows_have_the_columns_names_of_the_source():
    reader = FakeReader()
    entry = Entry((reader.add(ORDERS, [change(100, 0, id=1, note=None) | {"_op#3": "mine"}]),))
    (insert,) = changes_of(list(iterate_events(reader, [entry])))
    assert insert == Insert(
        OrderKey(Lsn(100), 0),
        datetime.fromtimestamp(100, UTC),
        10,
        ORDERS,
        {"id": 1, "note": None, "_op": "mine"},
    )
    assert isinstance(insert.key.commit_lsn, Lsn)


@pytest.mark.trap(25)
def test_an_unchanged_cell_is_neither_null_nor_a_value():
    reader = FakeReader()
    rows = [change(100, 0, id=1, _op=UPDATE, _unchanged=b"\x02"), change(100, 1, id=1, _op=UPDATE)]
    first, second = changes_of(list(iterate_events(reader, [Entry((reader.add(ORDERS, rows),))])))
    assert first.row == {"id": 1, "note": Unchanged, "_op": None}
    assert second.row == {"id": 1, "note": None, "_op": None}
    assert first.old is None


def test_the_sentinel_stays_itself_through_pickle_and_copies():
    assert pickle.loads(pickle.dumps(Unchanged)) is Unchanged
    assert copy.deepcopy({"cell": Unchanged})["cell"] is Unchanged
    assert repr(Unchanged) == "Unchanged"
    reader = FakeReader()
    entry = Entry((reader.add(ORDERS, [change(100, 0, id=1, _op=UPDATE, _unchanged=b"\x02")]),))
    events = list(iterate_events(reader, [entry]))
    assert pickle.loads(pickle.dumps(events)) == events


@pytest.mark.trap(26)
def test_a_delete_by_key_shows_only_the_key():
    reader = FakeReader()
    entry = Entry((reader.add(ORDERS, [change(100, 0, id=7, _op=DELETE, _unchanged=b"\x06")]),))
    (delete,) = changes_of(list(iterate_events(reader, [entry])))
    assert isinstance(delete, Delete)
    assert delete.old == {"id": 7}


def test_a_delete_with_the_whole_row_shows_it_with_its_nulls():
    reader = FakeReader()
    entry = Entry((reader.add(FULL, [change(100, 0, id=7, note=None, _op=DELETE) | {"_op#3": "x"}]),))
    (delete,) = changes_of(list(iterate_events(reader, [entry])))
    assert delete.old == {"id": 7, "note": None, "_op": "x"}


def test_an_update_has_the_old_identity_when_it_was_sent():
    reader = FakeReader()
    moved = change(100, 0, id=2, _op=UPDATE, _old={"id": 1})
    whole = change(100, 1, id=2, note="b", _op=UPDATE, _old={"id": 2, "note": "a", "_op#3": None})
    entry = Entry((reader.add(ORDERS, [moved]), reader.add(FULL, [whole])))
    first, second = changes_of(list(iterate_events(reader, [entry])))
    assert isinstance(first, Update)
    assert (first.old, first.row["id"]) == ({"id": 1}, 2)
    assert second.old == {"id": 2, "note": "a", "_op": None}


@pytest.mark.trap(31)
def test_a_cell_that_its_type_cannot_hold_shows_its_exact_text():
    reader = FakeReader()
    texts = [("note", "infinity"), ("_old.id", "24:00:00"), ("_op#3", "NaN")]
    rows = [change(100, 0, id=1, _op=UPDATE, _old={"id": None}, _unrepresentable=texts), change(100, 1, id=2)]
    first, second = changes_of(list(iterate_events(reader, [Entry((reader.add(ORDERS, rows),))])))
    assert first.row == {"id": 1, "note": Unrepresentable("infinity"), "_op": Unrepresentable("NaN")}
    assert first.old == {"id": Unrepresentable("24:00:00")}
    assert second.row == {"id": 2, "note": None, "_op": None}


def test_rows_beyond_a_slice_come_too():
    reader = FakeReader()
    count = 2 * SLICE_ROWS + 17
    entry = Entry((reader.add(ORDERS, [change(100, number, id=number) for number in range(count)]),))
    found = changes_of(list(iterate_events(reader, [entry])))
    assert [event.row["id"] for event in found] == list(range(count))


def test_a_segment_is_opened_only_when_its_first_change_is_due():
    reader = FakeReader()
    segments = [reader.add(ORDERS, [change(100 + number, 0, id=number)]) for number in range(5)]
    events = iterate_events(reader, [Entry(tuple(segments))])
    for event in events:
        if isinstance(event, Insert) and event.row["id"] == 1:
            break
    assert reader.opened == ["orders-0", "orders-1"]
    assert len(list(events)) == 10
    assert len(reader.opened) == 5


def test_entries_may_come_from_a_generator_and_empty_ones_give_nothing():
    reader = FakeReader()
    taken: list[int] = []

    def entries():
        for number in (1, 2):
            taken.append(number)
            yield Entry((reader.add(ORDERS, [change(100 * number, 0, id=number)]),)) if number == 2 else Entry(())

    events = iterate_events(reader, entries())
    assert isinstance(next(events), Begin)
    assert taken == [1, 2]
