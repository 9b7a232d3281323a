"""The contract of destinations, as tests: subclass `DestinationContract` and add a fixture called `harness`.

A test of something that the destination's `Capabilities` exclude passes without checking anything. Each test starts
empty and makes the calls that a pipeline makes, in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from penstock.changes.batch import EventBatch, Rows
from penstock.changes.events import Row, Unchanged, Unrepresentable
from penstock.changes.segment import field_names
from penstock.destinations.base import CopyRows, Destination, RangeReader, ReadableDestination, TableResult
from penstock.destinations.batch_events import copied_rows
from penstock.errors import NotComparable, PenstockError
from penstock.lsn import Lsn
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.source.lineage import Ancestry, TimelineSwitch
from penstock.testing.destinations.script import ANCESTRY, LocalTasks, ScriptedReader, ScriptedSource, make_context

INT8 = PostgresType(20, "int8")
TEXT = PostgresType(25, "text")
DATE = PostgresType(1082, "date")

ORDERS = TableSchema(
    16_384,
    "public",
    "orders",
    (
        Column("id", 1, INT8, identity=True, primary_key_position=1),
        Column("note", 2, TEXT),
        Column("due", 3, DATE),
    ),
)
ITEMS = replace(ORDERS, table_id=16_390, name="Order items")
LINES = TableSchema(
    16_400,
    "audit",
    "lines",
    (Column("level", 1, INT8, identity=True), Column("line", 2, TEXT, identity=True)),
    ReplicaIdentity.FULL,
)
"""A table without a key."""

_SECONDS = 30.0


class DestinationHarness(Protocol):
    """What the suite needs besides the destination itself."""

    def open(self) -> Destination:
        """Return a new destination over the same storage, as a restarted process would open it."""
        ...

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        """Return the rows a reader sees now, by column name; None if the table does not exist.

        Cells that their type cannot hold are `Unrepresentable`. A destination that keeps changes returns the rows that
        result from them.
        """
        ...


class DestinationContract:
    """The tests; see the module's docstring."""

    def test_a_copy_is_there_as_a_whole(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        rows = [_order(number) for number in range(10)]
        _copy(destination, source.copy(ORDERS, rows, ranges=3))
        _expect(harness, ORDERS, rows)
        if destination.capabilities.records_position:
            assert destination.position(ORDERS.table_id) == source.position

    def test_an_empty_table_is_created(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 22."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, []))
        _copy(destination, source.copy(ITEMS, [], ranges=2))
        _expect(harness, ORDERS, [])
        _expect(harness, ITEMS, [])

    def test_changes_are_applied_in_order(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1), _order(2)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(3))
            transaction.update(ORDERS, _order(1, "once"))
            transaction.update(ORDERS, _order(1, "twice"))
        with source.transaction() as transaction:
            transaction.delete(ORDERS, {"id": 2})
            transaction.insert(ORDERS, _order(2, "again"))
            transaction.delete(ORDERS, {"id": 3})
        _write(destination, source.batch())
        _expect(harness, ORDERS, [_order(1, "twice"), _order(2, "again")])

    def test_back_to_back_commits_are_all_there(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 2: a commit that starts exactly at a position is not covered by it."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, []))
        for number in range(4):
            with source.transaction() as transaction:
                transaction.insert(ORDERS, _order(number))
            _write(destination, source.batch())
        _expect(harness, ORDERS, [_order(number) for number in range(4)])

    def test_cells_that_were_not_sent_stay(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Traps 25 and 27: along a chain of changed keys, in one batch and across several."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1, "large"), _order(7, "other"), _order(8, None)]))
        with source.transaction() as transaction:
            transaction.update(ORDERS, _order(2, Unchanged), old={"id": 1})
            transaction.update(ORDERS, _order(3, Unchanged), old={"id": 2})
            transaction.insert(ORDERS, _order(1, "new"))
            transaction.update(ORDERS, _order(8, Unchanged))
        _write(destination, source.batch())
        with source.transaction() as transaction:
            transaction.update(ORDERS, _order(4, Unchanged), old={"id": 3})
        _write(destination, source.batch())
        expected = [_order(4, "large"), _order(1, "new"), _order(7, "other"), _order(8, None)]
        _expect(harness, ORDERS, expected)

    def test_truncates_stand_between_the_rows_around_them(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 32."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1)]))
        _copy(destination, source.copy(ITEMS, [_order(1)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(2))
            transaction.truncate(ORDERS, ITEMS)
            transaction.insert(ORDERS, _order(1, "after"))
        _write(destination, source.batch())
        _expect(harness, ORDERS, [_order(1, "after")])
        _expect(harness, ITEMS, [])

    def test_without_a_key_one_row_goes(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Traps 20 and 29: equal rows count separately, also in equal ranges of a copy."""
        source, destination = _begin(harness, tmp_path)
        row = {"level": 1, "line": "same"}
        _copy(destination, source.copy(LINES, [row] * 6, ranges=3))
        with source.transaction() as transaction:
            transaction.delete(LINES, row)
            transaction.update(LINES, {"level": 2, "line": Unchanged}, old=row)
            transaction.insert(LINES, {"level": None, "line": None})
            transaction.insert(LINES, {"level": None, "line": None})
            transaction.delete(LINES, {"level": None, "line": None})
        _write(destination, source.batch())
        _expect(harness, LINES, [row] * 4 + [{"level": 2, "line": "same"}, {"level": None, "line": None}])

    def test_texts_that_do_not_fit_are_kept(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 31."""
        source, destination = _begin(harness, tmp_path)
        never = Unrepresentable("infinity")
        _copy(destination, source.copy(ORDERS, [_order(1, due=never), _order(2), _order(3, due=never)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(4, due=Unrepresentable("0044-03-15 BC")))
            transaction.update(ORDERS, _order(2, due=never))
            transaction.update(ORDERS, _order(3))
        _write(destination, source.batch())
        expected = [_order(1, due=never), _order(2, due=never), _order(3)]
        _expect(harness, ORDERS, [*expected, _order(4, due=Unrepresentable("0044-03-15 BC"))])

    def test_columns_are_added_renamed_and_dropped(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 15: a column is identified by its number, not its name."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1, "kept"), _order(2)]))
        key, note, _ = ORDERS.columns
        added = replace(ORDERS, columns=(*ORDERS.columns, Column("amount", 4, INT8)))
        changed = replace(ORDERS, columns=(key, replace(note, name="remark"), Column("amount", 4, INT8)))
        with source.transaction() as transaction:
            transaction.update(ORDERS, _order(2, "before"))
        with source.transaction() as transaction:
            transaction.insert(added, _order(3) | {"amount": 30})
        with source.transaction() as transaction:
            transaction.insert(changed, {"id": 4, "remark": "new", "amount": 40})
        expected = [
            {"id": 1, "remark": "kept", "amount": None},
            {"id": 2, "remark": "before", "amount": None},
            {"id": 3, "remark": _order(3)["note"], "amount": 30},
            {"id": 4, "remark": "new", "amount": 40},
        ]
        batch = source.batch()
        _write(destination, batch)
        _expect(harness, changed, expected)
        if destination.capabilities.records_position:
            destination = _restart(harness, destination)
            _write(destination, batch)
            _expect(harness, changed, expected)

    def test_replayed_batch_changes_nothing(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 28, in the same process and in the next one."""
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        batches, expected = _busy(source, destination)
        for again in (batches[1:], batches[2:], batches):
            destination = _restart(harness, destination)
            for batch in again:
                _write(destination, batch)
                _write(destination, batch)
            for schema, rows in expected.items():
                _expect(harness, schema, rows)
        assert destination.position(ORDERS.table_id) == source.position

    def test_replays_with_other_boundaries_change_nothing(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 28: a repeated batch may have other boundaries, and be partly written already."""
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        batches, expected = _busy(source, destination)
        cuts = [batches[0].begin, *(batch.end for batch in batches)]
        destination = _restart(harness, destination)
        for begin, end in ((0, 3), (1, 3), (0, 2), (2, 3)):
            _write(destination, source.batch(cuts[begin], cuts[end]))
        with source.transaction() as transaction:
            transaction.insert(LINES, {"level": 9, "line": "last"})
        destination = _restart(harness, destination)
        _write(destination, source.batch(cuts[0], source.position))
        expected[LINES].append({"level": 9, "line": "last"})
        for schema, rows in expected.items():
            _expect(harness, schema, rows)

    def test_changes_that_the_copy_has_are_left_out(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """A copy sets the position like a batch does."""
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        begin = source.position
        with source.transaction() as transaction:
            transaction.insert(LINES, {"level": 1, "line": "in the copy"})
        _copy(destination, source.copy(LINES, [{"level": 1, "line": "in the copy"}]))
        with source.transaction() as transaction:
            transaction.insert(LINES, {"level": 2, "line": "after"})
        _write(destination, source.batch(begin))
        _expect(harness, LINES, [{"level": 1, "line": "in the copy"}, {"level": 2, "line": "after"}])

    def test_one_bad_table_does_not_stop_the_others(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 33: an unreadable file stands for any failure of one table."""
        source, destination = _begin(harness, tmp_path)
        for schema in (ORDERS, ITEMS):
            _copy(destination, source.copy(schema, [_order(1)]))
        with source.transaction() as transaction:
            transaction.insert(ITEMS, _order(2))
            transaction.insert(ORDERS, _order(2))
            transaction.insert(ITEMS, _order(3))
        batch = source.batch()
        result = destination.write_events(_poisoned(batch, ITEMS)).result(_SECONDS)
        error = result.of(ITEMS.table_id).error
        assert isinstance(error, PenstockError)
        assert result.of(ORDERS.table_id) == TableResult()
        _expect(harness, ORDERS, [_order(1), _order(2)])
        _expect(harness, ITEMS, [_order(1)])
        if destination.capabilities.records_position:
            assert destination.position(ITEMS.table_id) == batch.begin
            assert destination.position(ORDERS.table_id) == batch.end
        _write(destination, _only(batch, ITEMS))
        _expect(harness, ITEMS, [_order(1), _order(2), _order(3)])

    def test_changes_of_a_table_without_a_copy_are_refused(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        _copy(destination, source.copy(ORDERS, []))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(1))
            transaction.insert(ITEMS, _order(1))
        result = destination.write_events(source.batch()).result(_SECONDS)
        assert result.of(ITEMS.table_id).error is not None
        assert result.of(ORDERS.table_id) == TableResult()

    def test_a_new_copy_replaces_all_rows(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 19: rows deleted between two attempts do not survive."""
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1), _order(2)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(3))
        _write(destination, source.batch())
        destination = _restart(harness, destination)
        rows = [_order(2, "newer")]
        destination.drop_table_for_copy(ORDERS, "attempt-2")
        destination.drop_table_for_copy(ORDERS, "attempt-2")
        if destination.capabilities.keeps_old_rows_while_copying:
            _expect(harness, ORDERS, [_order(1), _order(2), _order(3)])
        destination.write_table_rows(ORDERS, source.copy(ORDERS, rows, attempt="attempt-2"))
        _expect(harness, ORDERS, rows)
        with source.transaction() as transaction:
            transaction.update(ORDERS, _order(2, "newest"))
        _write(destination, source.batch())
        _expect(harness, ORDERS, [_order(2, "newest")])

    def test_an_earlier_attempt_lands_nowhere(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 19: neither before the new copy is complete nor after."""
        source, destination = _begin(harness, tmp_path)
        late = source.copy(ORDERS, [_order(99)], attempt="attempt-1")
        destination.drop_table_for_copy(ORDERS, "attempt-1")
        destination.drop_table_for_copy(ORDERS, "attempt-2")
        _refused(lambda: destination.write_table_rows(ORDERS, late))
        assert not any(row["id"] == 99 for row in harness.rows(ORDERS) or [])
        destination.write_table_rows(ORDERS, source.copy(ORDERS, [_order(1)], attempt="attempt-2"))
        _refused(lambda: destination.write_table_rows(ORDERS, late))
        _expect(harness, ORDERS, [_order(1)])

    def test_a_failed_copy_is_not_seen(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        _copy(destination, source.copy(ORDERS, [_order(1)]))
        destination.drop_table_for_copy(ORDERS, "attempt-2")
        copy = source.copy(ORDERS, [_order(2), _order(3)], attempt="attempt-2", ranges=2)
        broken = replace(copy, reader=ScriptedReader(broken=1))
        _refused(lambda: destination.write_table_rows(ORDERS, broken), required=True)
        assert not any(row["id"] == 2 for row in harness.rows(ORDERS) or [])
        _copy(destination, source.copy(ORDERS, [_order(4)], attempt="attempt-3"))
        _expect(harness, ORDERS, [_order(4)])

    def test_several_tables_are_copied_at_the_same_time(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        schemas = [replace(ORDERS, table_id=20_000 + number, name=f"t{number}") for number in range(4)]
        copies = [source.copy(schema, [_order(number)]) for number, schema in enumerate(schemas)]
        failures: list[BaseException] = []

        def work(copy: CopyRows) -> None:
            try:
                _copy(destination, copy)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_SECONDS)
        assert failures == []
        for number, schema in enumerate(schemas):
            _expect(harness, schema, [_order(number)])

    def test_a_batch_is_one_job(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 51: for any number of tables."""
        source = ScriptedSource(tmp_path / "segments")
        destination, tasks = harness.open(), LocalTasks()
        destination.startup(make_context(tasks=tasks))
        for schema in (ORDERS, ITEMS):
            _copy(destination, source.copy(schema, []))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(1))
            transaction.insert(ITEMS, _order(1))
        before = len(tasks.jobs)
        _write(destination, source.batch())
        assert len(tasks.jobs) - before <= 1

    def test_a_table_of_another_pipeline_is_refused(self, harness: DestinationHarness, tmp_path: Path) -> None:
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        _copy(destination, source.copy(ORDERS, [_order(1)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(2))
        other = harness.open()
        other.startup(make_context("another"))
        foreign = replace(ORDERS, table_id=99_999)
        _refused(lambda: other.drop_table_for_copy(foreign, "attempt-9"), required=True)
        assert other.position(ORDERS.table_id) is None
        assert other.write_events(source.batch()).result(_SECONDS).of(ORDERS.table_id).error is not None
        _expect(harness, ORDERS, [_order(1)])

    def test_positions_of_another_lineage_do_not_count(self, harness: DestinationHarness, tmp_path: Path) -> None:
        """Trap 28: an old, higher position must not hide the rows of a new server. After a failover it stays valid if
        the server has it; if one happens meanwhile, later positions belong to the server that took over."""
        source, destination = _begin(harness, tmp_path)
        if not destination.capabilities.records_position:
            return
        _copy(destination, source.copy(ORDERS, [_order(1)]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, _order(2))
        batch = source.batch()
        destination.shutdown()
        other = harness.open()
        other.startup(make_context(ancestry=Ancestry(replace(ANCESTRY.current, system_identifier="server-2"))))
        assert other.position(ORDERS.table_id) is None
        assert other.write_events(batch).result(_SECONDS).of(ORDERS.table_id).error is not None
        other.shutdown()

        def promoted(timeline: int, *left_at: int) -> Ancestry:
            switches = tuple(TimelineSwitch(number, Lsn(each)) for number, each in enumerate(left_at, 1))
            return Ancestry(replace(ANCESTRY.current, timeline=timeline), switches)

        early = harness.open()
        early.startup(make_context(ancestry=promoted(2, batch.begin - 1)))
        assert early.position(ORDERS.table_id) is None
        assert early.write_events(batch).result(_SECONDS).of(ORDERS.table_id).error is not None
        early.shutdown()
        running = harness.open()
        context = make_context(ancestry=promoted(3, batch.begin, batch.begin))
        running.startup(context)
        assert running.position(ORDERS.table_id) == batch.begin
        context.store.use_lineage(promoted(4, batch.begin, batch.begin, batch.begin))
        _write(running, batch)
        _expect(harness, ORDERS, [_order(1), _order(2)])
        running.shutdown()
        third, fourth = harness.open(), harness.open()
        third.startup(make_context(ancestry=promoted(3, batch.begin, batch.begin)))
        assert third.position(ORDERS.table_id) is None
        third.shutdown()
        fourth.startup(make_context(ancestry=promoted(4, batch.begin, batch.begin, batch.begin)))
        assert fourth.position(ORDERS.table_id) == batch.end


def _order(number: int, note: Any = "a note", due: Any = None) -> dict[str, Any]:
    return {"id": number, "note": note, "due": due}


def _begin(harness: DestinationHarness, folder: Path) -> tuple[ScriptedSource, Destination]:
    destination = harness.open()
    destination.startup(make_context())
    return ScriptedSource(folder / "segments"), destination


def _restart(harness: DestinationHarness, destination: Destination) -> Destination:
    destination.shutdown()
    successor = harness.open()
    successor.startup(make_context())
    return successor


def _copy(destination: Destination, copy: CopyRows) -> None:
    destination.drop_table_for_copy(copy.schema, copy.attempt)
    destination.write_table_rows(copy.schema, copy)


def _write(destination: Destination, batch: EventBatch) -> None:
    result = destination.write_events(batch).result(_SECONDS)
    errors = [each.error for each in result.tables.values() if each.error is not None]
    if errors:
        raise errors[0]


def _busy(source: ScriptedSource, destination: Destination) -> tuple[list[EventBatch], dict[TableSchema, list[Row]]]:
    """Return three batches that reveal any lost or repeated change, and the rows they result in."""
    line: Row = {"level": 1, "line": "same"}
    _copy(destination, source.copy(ORDERS, [_order(1)]))
    _copy(destination, source.copy(LINES, [line] * 3))
    batches: list[EventBatch] = []
    for number in range(3):
        with source.transaction() as transaction:
            transaction.insert(LINES, line)
            transaction.insert(ORDERS, _order(10 + number))
            transaction.update(ORDERS, _order(number + 2, Unchanged), old={"id": number + 1})
        with source.transaction() as transaction:
            transaction.delete(LINES, line)
            transaction.insert(LINES, {"level": 2, "line": f"batch {number}"})
            if number == 1:
                transaction.truncate(ORDERS)
                transaction.insert(ORDERS, _order(number + 2, "after the truncate"))
        batches.append(source.batch())
        _write(destination, batches[-1])
    lines: list[Row] = [line] * 3
    lines += [{"level": 2, "line": f"batch {number}"} for number in range(3)]
    return batches, {ORDERS: [_order(4, "after the truncate"), _order(12)], LINES: lines}


def _only(batch: EventBatch, schema: TableSchema) -> EventBatch:
    return replace(batch, tables=tuple(table for table in batch.tables if table.table_id == schema.table_id))


def _poisoned(batch: EventBatch, schema: TableSchema) -> EventBatch:
    """Return the batch with one table's file missing."""
    tables = tuple(
        replace(table, steps=tuple(_unreadable(step) if isinstance(step, Rows) else step for step in table.steps))
        if table.table_id == schema.table_id
        else table
        for table in batch.tables
    )
    return replace(batch, tables=tables)


def _unreadable(rows: Rows) -> Rows:
    return replace(rows, segments=tuple(replace(each, path=f"{each.path}.gone") for each in rows.segments))


def _refused(call: Callable[[], object], *, required: bool = False) -> None:
    """Check that the call raises a `PenstockError`; unless required, it may also do nothing."""
    try:
        call()
    except PenstockError:
        return
    assert not required, "this should have been refused"


def _expect(harness: DestinationHarness, schema: TableSchema, expected: list[Any]) -> None:
    rows = harness.rows(schema)
    assert rows is not None, f"{schema} does not exist at the destination"
    wanted = sorted((dict(row) for row in expected), key=repr)
    assert sorted(rows, key=repr) == wanted
    reading = harness.open()
    if isinstance(reading, ReadableDestination):
        try:
            pinned = _pinned_rows(reading, schema)
        except NotComparable:
            return  # it keeps something else than the source's rows, and says so
        assert sorted(pinned, key=repr) == wanted


def _pinned_rows(destination: ReadableDestination, schema: TableSchema) -> list[dict[str, Any]]:
    """Return the rows that `penstock verify` would compare, read in tasks as it does."""
    pinned = destination.pin(schema)
    assert pinned is not None
    try:
        assert [column.attnum for column in pinned.schema.columns] == [column.attnum for column in schema.columns]
        parts = LocalTasks().run(list(pinned.parts), partial(_read_part, pinned.reader), description="read")
        names = set(field_names(pinned.schema))
        assert names <= set(pinned.arrow_schema.names)
        for batch in (batch for part in parts for batch in part):
            assert all(batch.schema.field(name).type == pinned.arrow_schema.field(name).type for name in names)
        return [dict(row) for part in parts for batch in part for row in copied_rows(batch, pinned.schema)]
    finally:
        pinned.close()


def _read_part(reader: RangeReader, part: Any) -> list[Any]:
    return list(reader.read(part))
