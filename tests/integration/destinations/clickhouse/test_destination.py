"""The clickhouse destination on the real engine: unknown outcomes, fences, omitted values, schemas, history."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.clickhouse import ClickHouseDestination
from penstock.destinations.clickhouse import destination as module
from penstock.destinations.clickhouse.apply import Work
from penstock.destinations.clickhouse.control import Control
from penstock.destinations.clickhouse.server import Server
from penstock.errors import (
    ConfigError,
    DestinationUnavailable,
    LineageChanged,
    NotComparable,
    PenstockError,
    SchemaNotFollowed,
    TableRejected,
    ValuesNotSent,
)
from penstock.schema import Column, PostgresType, TableSchema, TypeKind
from penstock.source.lineage import Ancestry, TimelineSwitch
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import DATE, INT8, LINES, ORDERS, TEXT
from penstock.testing.destinations.script import ANCESTRY, LocalTasks, make_context
from tests.integration.destinations.clickhouse.writing import SECONDS, copy, write
from tests.support.clickhouse import ClickHouse


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def order(number: int, note: Any = "a note", due: Any = None) -> dict[str, Any]:
    return {"id": number, "note": note, "due": due}


class SameProcess(LocalTasks):
    """Runs tasks as they are, without pickling them."""

    def run(self, items: Any, function: Any, *, description: str) -> list[Any]:
        return [function(item) for item in items]


class Killed(BaseException):
    """Ends a call as a kill would, if nothing catches it."""


def rows_of(clickhouse: ClickHouse, schema: TableSchema) -> list[dict[str, Any]]:
    return sorted(clickhouse.rows(schema) or [], key=repr)


@pytest.mark.trap(25, 27, 28)
def test_a_kill_between_data_and_position_changes_nothing(clickhouse, source, monkeypatch):
    """The batch comes again, whole, and with other boundaries. A key moves and is taken by a new row: a value that was
    omitted must not be read from the new one."""
    destination = clickhouse.started()
    line = {"level": 1, "line": "same"}
    copy(destination, source, ORDERS, [order(1, "large"), order(5, "five"), order(6, "six")])
    copy(destination, source, LINES, [line] * 3)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(2, Unchanged, date(2020, 1, 1)), old={"id": 1})
        transaction.insert(ORDERS, order(1, "new"))
        transaction.insert(LINES, line)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(5, Unchanged, date(2021, 1, 1)))
        transaction.delete(ORDERS, {"id": 6})
        transaction.delete(LINES, line)
        transaction.delete(LINES, line)
    batch = source.batch()
    middle = type(batch.begin)(batch.begin + 0x30)
    expected = [order(1, "new"), order(2, "large", date(2020, 1, 1)), order(5, "five", date(2021, 1, 1))]
    parts = (batch, source.batch(batch.begin, middle), source.batch(middle, batch.end), batch)
    for number, part in enumerate(parts):
        with monkeypatch.context() as patch:
            if number < 2:
                patch.setattr(Control, "save", _killed)
                with pytest.raises(Killed):
                    destination.write_events(part)
                destination = clickhouse.started()
                assert destination.position(ORDERS.table_id) == batch.begin
            else:
                write(destination, part)
        assert rows_of(clickhouse, ORDERS) == sorted(expected, key=repr)
        assert rows_of(clickhouse, LINES) == [line] * 2
    assert destination.position(ORDERS.table_id) == batch.end


def _killed(*_: object) -> None:
    raise Killed


@pytest.mark.trap(28)
@pytest.mark.parametrize("size", [1, 64 << 20], ids=["small inserts", "one insert"])
def test_a_kill_in_the_middle_of_a_batch_changes_nothing(clickhouse, source, monkeypatch, size):
    """After any number of inserts, before the next: rows with older values, other rows, tombstones, other tables."""
    monkeypatch.setattr("penstock.destinations.clickhouse.apply.SLICE_BYTES", size)
    monkeypatch.setattr("penstock.destinations.clickhouse.fill.FILL_BYTES", 1)
    insert = Server.insert
    destination = clickhouse.started()
    items = replace(ORDERS, table_id=20_000, name="items")
    for schema in (ORDERS, items, LINES):
        rows = [{"level": 1, "line": "same"}] * 2 if schema is LINES else [order(n, f"text {n}") for n in range(6)]
        copy(destination, source, schema, rows)
    with source.transaction() as transaction:
        for schema in (ORDERS, items):
            transaction.update(schema, order(11, Unchanged), old={"id": 1})
            transaction.update(schema, order(1, Unchanged), old={"id": 2})
            transaction.update(schema, order(3, Unchanged, date(2020, 2, 2)))
            transaction.delete(schema, {"id": 4})
            transaction.insert(schema, order(12))
        transaction.delete(LINES, {"level": 1, "line": "same"})
    batch = source.batch()
    expected = [order(0, "text 0"), order(11, "text 1"), order(1, "text 2"), order(3, "text 3", date(2020, 2, 2))]
    expected += [order(5, "text 5"), order(12)]
    for allowed in range(16):
        left = [allowed]

        def interrupted(self: Server, into: str, rows: Any, *others: Any, left: list[int] = left) -> None:
            if rows.num_rows and not left[0]:
                raise Killed
            left[0] -= bool(rows.num_rows)
            insert(self, into, rows, *others)

        monkeypatch.setattr(Server, "insert", interrupted)
        try:
            destination.write_events(batch).result(SECONDS)
        except Killed:
            destination = clickhouse.started()
            continue
        break
    else:
        pytest.fail("the batch has more inserts than expected")
    assert allowed > (2 if size > 1 else 5)
    for schema in (ORDERS, items):
        assert rows_of(clickhouse, schema) == sorted(expected, key=repr)
    assert rows_of(clickhouse, LINES) == [{"level": 1, "line": "same"}]


@pytest.mark.trap(28)
def test_two_runs_of_a_task_write_every_change_once(clickhouse, source, monkeypatch):
    """Also in the tables under the views: the second insert has the token of the first."""
    apply_work = module.apply_work

    def twice(work: Work) -> Any:
        apply_work(work)
        return apply_work(work)

    history = replace(clickhouse, options={"mode": "history"}, database=f"{clickhouse.database}_history")
    for place in (clickhouse, history):
        destination = place.started()
        copy(destination, source, ORDERS, [order(1)])
        copy(destination, source, LINES, [{"level": 1, "line": "same"}] * 2)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
        transaction.update(ORDERS, order(1, "changed"))
        transaction.insert(LINES, {"level": 1, "line": "same"})
    batch = source.batch()
    monkeypatch.setattr(module, "apply_work", twice)
    for place, count in ((clickhouse, 3), (history, 3)):
        write(place.started(make_context(tasks=SameProcess())), batch)
        (lines,) = [name for name in place.data_tables() if str(LINES.table_id) in name]
        assert place.query(f"select count() from {{database}}.{lines}") == [(count,)]
    assert len(rows_of(clickhouse, LINES)) == 3
    history.drop()


def test_a_late_writer_of_an_earlier_attempt_cannot_write(clickhouse, source):
    destination, zombie = clickhouse.started(), clickhouse.started(make_context(tasks=SameProcess()))
    copy(destination, source, ORDERS, [order(1)])
    zombie.drop_table_for_copy(ORDERS, "attempt-2")
    late = source.copy(ORDERS, [order(99)], attempt="attempt-2", ranges=2)

    class Overtaken:
        """Reads a range; meanwhile another process begins a new copy."""

        def read(self, part: Any) -> Any:
            if part.index == 0:
                destination.drop_table_for_copy(ORDERS, "attempt-3")
            return iter(part.batches)

    with pytest.raises(PenstockError):
        zombie.write_table_rows(ORDERS, replace(late, reader=Overtaken()))
    assert rows_of(clickhouse, ORDERS) == [order(1)]
    copy(destination, source, ORDERS, [order(3)], attempt="attempt-3")
    assert rows_of(clickhouse, ORDERS) == [order(3)]
    assert len(clickhouse.data_tables()) == 1


def test_a_process_that_lost_its_lease_changes_no_record(clickhouse, source):
    old = clickhouse.started(replace(make_context(), epoch=1))
    copy(old, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    successor = clickhouse.started(replace(make_context(), epoch=2))
    write(successor, batch)
    assert old.write_events(batch).result(SECONDS).of(ORDERS.table_id).error is not None
    with pytest.raises(PenstockError):
        old.drop_table_for_copy(ORDERS, "attempt-2")
    assert successor.position(ORDERS.table_id) == batch.end


@pytest.mark.trap(25)
def test_omitted_values_that_nobody_has_are_not_null(clickhouse, source):
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(1, Unchanged))
    with pytest.raises(ValuesNotSent):
        write(destination, source.batch())
    assert rows_of(clickhouse, ORDERS) == []


def test_old_values_are_read_in_parts(clickhouse, source, monkeypatch):
    monkeypatch.setattr("penstock.destinations.clickhouse.fill.FILL_BYTES", 5_000)
    monkeypatch.setattr("penstock.destinations.clickhouse.fill._ASKED_KEYS", 7)
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(number, f"{number}" * 500) for number in range(60)])
    with source.transaction() as transaction:
        for number in range(40):
            transaction.update(ORDERS, order(number, Unchanged, date(2020, 1, 1)))
        transaction.update(ORDERS, order(100, Unchanged), old={"id": 50})
        transaction.update(ORDERS, order(50, Unchanged), old={"id": 51})
    write(destination, source.batch())
    expected = [order(number, f"{number}" * 500, date(2020, 1, 1)) for number in range(40)]
    expected += [order(number, f"{number}" * 500) for number in (*range(40, 50), *range(52, 60))]
    expected += [order(100, "50" * 500), order(50, "51" * 500)]
    assert rows_of(clickhouse, ORDERS) == sorted(expected, key=repr)


def test_dates_of_any_year_arrive_and_identify_rows(clickhouse, source):
    """ClickHouse holds the years 1900 to 2299; other dates are text beside NULL, also in a key."""
    schema = TableSchema(
        30_000,
        "public",
        "days",
        (Column("day", 1, DATE, identity=True, primary_key_position=1), Column("note", 2, TEXT)),
    )
    days = [date(1899, 12, 31), date(1900, 1, 1), date(2299, 12, 31), date(2300, 1, 1), date(1, 1, 1)]
    far = [Unrepresentable("infinity"), Unrepresentable("0044-03-15 BC")]
    destination = clickhouse.started()
    copy(destination, source, schema, [{"day": day, "note": str(day)} for day in (*days, *far)])
    with source.transaction() as transaction:
        transaction.update(schema, {"day": date(2300, 1, 1), "note": Unchanged})
        transaction.update(schema, {"day": Unrepresentable("-infinity"), "note": Unchanged}, old={"day": far[0]})
        transaction.delete(schema, {"day": date(1899, 12, 31)})
    write(destination, source.batch())
    pinned = destination.pin(schema)
    found = [row for part in pinned.parts for rows in pinned.reader.read(part) for row in rows.to_pylist()]
    values = {row["day"] or dict(row["_unrepresentable"])["day"]: row["note"] for row in found}
    expected = {day: str(day) for day in days[1:]} | {"0044-03-15 BC": str(far[1]), "-infinity": str(far[0])}
    assert values == expected
    texts = "select _unrepresentable['day'] from {database}.public__days where _unrepresentable['day'] != '' order by 1"
    assert clickhouse.query(texts) == [("-infinity",), ("0001-01-01",), ("0044-03-15 BC",), ("2300-01-01",)]


def test_added_columns_have_their_defaults(clickhouse, source):
    types = {
        "flag": (PostgresType(16, "bool"), "t", True),
        "day": (DATE, "2020-02-29", date(2020, 2, 29)),
        "text": (TEXT, "it's \\ here", "it's \\ here"),
        "real": (PostgresType(701, "float8"), "1.5", 1.5),
        "clock": (PostgresType(1083, "time"), "12:30:00", "12:30:00"),
    }
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1)])
    added = [
        Column(name, number, type_, missing=text, backfilled=True)
        for number, (name, (type_, text, _)) in enumerate(types.items(), 4)
    ]
    after = replace(ORDERS, columns=(*ORDERS.columns, *added))
    with source.transaction() as transaction:
        transaction.insert(after, order(2) | dict.fromkeys(types))
    write(destination, source.batch())
    expected = {name: value for name, (_, _, value) in types.items()}
    assert rows_of(clickhouse, after) == [order(1) | expected, order(2) | dict.fromkeys(types)]
    unknown = replace(after, columns=(*after.columns, Column("random", 12, TEXT, backfilled=True)))
    with source.transaction() as transaction:
        transaction.insert(unknown, order(3) | dict.fromkeys(types) | {"random": "x"})
    with pytest.raises(ValuesNotSent):
        write(destination, source.batch())


def test_dropped_columns_can_stay(clickhouse, source):
    destination = clickhouse.started(replace(make_context(), keeps_dropped_columns=lambda _: True))
    copy(destination, source, ORDERS, [order(1, "kept")])
    key, _, due = ORDERS.columns
    after = replace(ORDERS, columns=(key, due))
    with source.transaction() as transaction:
        transaction.insert(after, {"id": 2, "due": None})
    write(destination, source.batch())
    assert rows_of(clickhouse, ORDERS) == [order(1, "kept"), order(2, None)]
    added = replace(after, columns=(key, due, Column("flag", 4, TEXT, missing="old", backfilled=True)))
    for schema, number in ((added, 3), (after, 4)):
        with source.transaction() as transaction:
            transaction.insert(schema, {"id": number, "due": None} | ({"flag": "new"} if schema is added else {}))
        write(destination, source.batch())
    flags = "select id, flag from {database}.public__orders order by id"
    assert clickhouse.query(flags) == [(1, "old"), (2, "old"), (3, "new"), (4, None)]


def test_a_column_that_comes_back_does_not_have_its_old_values(clickhouse, source):
    """As when a publication leaves it out for a while."""
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1, "old")])
    key, _, due = ORDERS.columns
    without = replace(ORDERS, columns=(key, due))
    for number, schema in enumerate((without, ORDERS, without, ORDERS), 2):
        with source.transaction() as transaction:
            row = order(number, f"note {number}")
            transaction.insert(schema, row if schema is ORDERS else {"id": number, "due": None})
        write(destination, source.batch())
    notes = [None, None, None, None, "note 5"]
    assert rows_of(clickhouse, ORDERS) == [order(number, note) for number, note in enumerate(notes, 1)]


def test_changes_of_keys_and_types_need_a_copy(clickhouse, source):
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1)])
    key, note, due = ORDERS.columns
    for columns in (
        (key, replace(note, type=INT8), due),
        (replace(key, identity=False), replace(note, identity=True), due),
    ):
        after = replace(ORDERS, columns=columns)
        with source.transaction() as transaction:
            transaction.insert(after, {"id": 2, "note": None if columns[1].type is INT8 else "x", "due": None})
        with pytest.raises(SchemaNotFollowed):
            write(destination, source.batch())


def test_a_table_that_penstock_did_not_create_stays(clickhouse, source):
    destination = clickhouse.started()
    clickhouse.server.run(f"create table {clickhouse.server.name('public__orders')} (id Int8) engine = Memory")
    with pytest.raises(TableRejected, match="did not create"):
        destination.drop_table_for_copy(ORDERS, "attempt-1")


def test_a_renamed_table_leaves_its_view_when_its_copy_is_complete(clickhouse, source):
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1)])
    renamed = replace(ORDERS, name="purchases")
    destination.drop_table_for_copy(renamed, "attempt-2")
    assert clickhouse.views() == ["public__orders"]
    assert destination.folder_of(ORDERS.table_id) == "public/orders"
    destination.write_table_rows(renamed, source.copy(renamed, [order(1)], attempt="attempt-2"))
    assert clickhouse.views() == ["public__purchases"]
    assert destination.locations("contract") == {ORDERS.table_id: f"chdb/{clickhouse.database} public__purchases"}
    assert destination.drop_table(ORDERS.table_id)
    assert not destination.drop_table(ORDERS.table_id)
    assert (clickhouse.views(), clickhouse.data_tables()) == ([], [])


@pytest.mark.trap(28)
def test_history_has_every_change_once(clickhouse, source, monkeypatch):
    clickhouse = replace(clickhouse, options={"mode": "history"})
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1, "large"), order(2)], ranges=2)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
        transaction.update(ORDERS, order(4, Unchanged), old={"id": 1})
        transaction.delete(ORDERS, {"id": 2})
        transaction.truncate(ORDERS)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(5))
    batch = source.batch()
    with monkeypatch.context() as patch:
        patch.setattr(Control, "save", _killed)
        with pytest.raises(Killed):
            destination.write_events(batch)
    destination = clickhouse.started()
    write(destination, source.batch(batch.begin, type(batch.begin)(batch.begin + 0x30)))
    write(destination, batch)
    view = "{database}.public__orders"
    query = f"select _op, id, note, _unchanged, _old, _ordinal from {view} order by _commit_lsn, _ordinal, id"
    changes = [
        ("copy", 1, "large", [], {}, -1),
        ("copy", 2, "a note", [], {}, -1),
        ("insert", 3, "a note", [], {}, 0),
        ("update", 4, None, ["note"], {"id": "1"}, 1),
        ("delete", 2, None, ["note", "due"], {}, 2),
        ("truncate", None, None, [], {}, 3),
        ("insert", 5, "a note", [], {}, 0),
    ]
    assert clickhouse.query(query) == changes
    key, note, due = ORDERS.columns
    after = replace(ORDERS, columns=(key, replace(note, name="remark"), replace(due, type=TEXT)))
    with source.transaction() as transaction:
        transaction.insert(after, {"id": 6, "remark": "six", "due": "soon"})
    write(destination, source.batch())
    last = f"select id, note, due, remark, due_2, _schema_version from {view} where id in (5, 6) order by id"
    assert clickhouse.query(last) == [(5, "a note", None, None, None, 1), (6, None, None, "six", "soon", 2)]
    copy(destination, source, after, [{"id": 6, "remark": "six", "due": "soon"}], attempt="attempt-2")
    ops = f"select _op, id from {view} order by _commit_lsn, _ordinal, id"
    assert [op for op, _ in clickhouse.query(ops)][-3:] == ["insert", "resync", "copy"]
    assert len(clickhouse.query(ops)) == len(changes) + 3
    assert len(clickhouse.data_tables()) == 1
    with pytest.raises(NotComparable):
        destination.pin(after)


def test_a_table_keeps_the_mode_of_its_copy(clickhouse, source):
    copy(clickhouse.started(), source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    with pytest.raises(TableRejected, match="mode mirror"):
        write(clickhouse.started(mode="history"), source.batch())


def test_the_probe_leaves_nothing_but_the_table_of_records(clickhouse):
    clickhouse.open().probe()
    assert (clickhouse.views(), clickhouse.data_tables()) == ([], [])


def test_a_server_that_is_away_is_waited_for():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    destination = ClickHouseDestination(f"http://user:secret@127.0.0.1:{port}/shop")
    with pytest.raises(DestinationUnavailable) as caught:
        destination.probe()
    assert "secret" not in f"{caught.value} {destination._server!r}"


@pytest.mark.parametrize(
    "options", [{"url": "nowhere"}, {"url": "http://host"}, {"url": "http://h/d", "mode": "x"}], ids=str
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        ClickHouseDestination(**options)


@pytest.mark.trap(28)
def test_changes_of_a_server_that_was_replaced_are_noticed(clickhouse, source, monkeypatch):
    """They were written, but not recorded, and the standby that was promoted may not have them."""
    destination = clickhouse.started()
    copy(destination, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    with monkeypatch.context() as patch:
        patch.setattr(Control, "save", _killed)
        with pytest.raises(Killed):
            destination.write_events(batch)
    promoted = Ancestry(replace(ANCESTRY.current, timeline=2), (TimelineSwitch(1, batch.begin),))
    with pytest.raises(LineageChanged):
        write(clickhouse.started(make_context(ancestry=promoted)), batch)


def test_any_name_of_a_column_works(clickhouse, source):
    """Also names of columns of the table under the view, and of Penstock's own."""
    names = ["c2", "c1", "a`b", "a\\b", "it's", "{x:Int8}", "%s", "?", "_version", "_op", "t", "Größe", 'a"b', " "]
    columns = [Column(name, number, TEXT) for number, name in enumerate(names, 2)]
    schema = TableSchema(
        30_001, "public", "names", (Column("id", 1, INT8, identity=True, primary_key_position=1), *columns)
    )
    destination = clickhouse.started()
    rows = [{"id": number, **{name: f"{number} {name}" for name in names}} for number in range(3)]
    copy(destination, source, schema, rows)
    with source.transaction() as transaction:
        transaction.update(schema, rows[1] | {"c1": "changed", "c2": Unchanged})
    write(destination, source.batch())
    rows[1]["c1"] = "changed"
    view = clickhouse.server.read(f"select * from {clickhouse.server.name('public__names')} order by id").to_pylist()
    assert [list(row) for row in view] == [["id", *("_op_11" if name == "_op" else name for name in names)]] * 3
    assert [[cell.decode() for cell in list(row.values())[1:]] for row in view] == [
        list(row.values())[1:] for row in rows
    ]


def test_a_float_that_changes_its_sign_of_zero_stays(clickhouse, source):
    """0 and -0 are one key to ClickHouse."""
    schema = replace(
        ORDERS, columns=(replace(ORDERS.columns[0], type=PostgresType(701, "float8")), *ORDERS.columns[1:])
    )
    destination = clickhouse.started()
    copy(destination, source, schema, [order(0.0, "large")])
    with source.transaction() as transaction:
        transaction.update(schema, order(-0.0, Unchanged), old={"id": 0.0})
    write(destination, source.batch())
    assert repr(rows_of(clickhouse, schema)) == repr([order(-0.0, "large")])


def test_tables_that_exchange_their_names_while_they_are_copied_do_not_stop_each_other(clickhouse, source):
    destination = clickhouse.started()
    other = replace(ORDERS, table_id=30_002, name="others")
    copy(destination, source, ORDERS, [order(1)])
    destination.drop_table_for_copy(other, "attempt-1")
    began = source.copy(other, [order(2)])
    now = replace(ORDERS, name="others"), replace(other, name="orders")
    destination.drop_table_for_copy(now[0], "attempt-2")
    destination.write_table_rows(other, began)
    destination.write_table_rows(now[0], source.copy(now[0], [order(1)], attempt="attempt-2"))
    copy(destination, source, now[1], [order(2)], attempt="attempt-2")
    assert (rows_of(clickhouse, now[0]), rows_of(clickhouse, now[1])) == ([order(1)], [order(2)])
    assert clickhouse.views() == ["public__orders", "public__others"]
    assert len(clickhouse.data_tables()) == 2


def test_an_array_can_be_a_key(clickhouse, source):
    array = PostgresType(1016, "_int8", kind=TypeKind.ARRAY, element=INT8)
    schema = replace(ORDERS, columns=(replace(ORDERS.columns[0], type=array), *ORDERS.columns[1:]))
    destination = clickhouse.started()
    deep = [Unrepresentable("{{1,2},{3,4}}"), Unrepresentable("{{1,2},{5,6}}")]
    copy(destination, source, schema, [order([1, None]), order([]), order([3]), *(order(each) for each in deep)])
    with source.transaction() as transaction:
        transaction.delete(schema, {"id": []})
        transaction.update(schema, order([1, 2]), old={"id": [1, None]})
        transaction.delete(schema, {"id": deep[0]})
    write(destination, source.batch())
    assert rows_of(clickhouse, schema) == sorted([order([1, 2]), order([3]), order(deep[1])], key=repr)
