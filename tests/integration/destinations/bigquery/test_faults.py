"""What makes the bigquery destination exactly once: broken connections, killed processes, late writers, tasks that run
twice. On the emulator, with the fake for change types and offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.batch import EventBatch
from penstock.changes.events import Unchanged
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE
from penstock.destinations.base import Destination, DroppingDestination
from penstock.destinations.bigquery import BigQueryDestination, append, tasks
from penstock.destinations.bigquery import destination as bigquery_destination
from penstock.errors import DestinationUnavailable, PenstockError
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.source.lineage import Ancestry, TimelineSwitch
from penstock.testing.bigquery import EmulatedBigQuery
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS
from penstock.testing.destinations.script import ANCESTRY
from tests.integration.destinations.bigquery.test_contract import BigQueryHarness, HistoryHarness

CONTROL = "penstock_tables"
LINE = {"level": 1, "line": "same"}
MANY = 1_000

Step = tuple[BigQueryHarness, ScriptedSource, Destination]


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


@pytest.fixture(params=["mirror", "history"])
def harness(request: pytest.FixtureRequest, server: EmulatedBigQuery, dataset: str) -> BigQueryHarness:
    if request.param == "history":
        return HistoryHarness(server, dataset, mode="history")
    return BigQueryHarness(server, dataset, max_staleness="0s")


@pytest.fixture
def begun(harness: BigQueryHarness, tmp_path: Path) -> Step:
    """A table with a key and one without, copied, and a destination that follows them."""
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context())
    for schema, rows in ((ORDERS, [order(1), order(2)]), (LINES, [LINE] * 2)):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows))
    return harness, source, destination


def change(source: ScriptedSource, number: int) -> EventBatch:
    """A batch that shows it if a change is lost or there twice."""
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(10 + number))
        transaction.update(ORDERS, order(1, f"update {number}"))
        transaction.insert(LINES, LINE)
        transaction.insert(LINES, {"level": number, "line": "other"})
        transaction.delete(LINES, {"level": number, "line": "other"})
    return source.batch()


def expect(harness: BigQueryHarness, count: int) -> None:
    orders = [order(1, f"update {count - 1}"), order(2), *(order(10 + number) for number in range(count))]
    for schema, wanted in ((ORDERS, orders), (LINES, [LINE] * (2 + count))):
        assert sorted(harness.rows(schema) or [], key=repr) == sorted(wanted, key=repr)


def restart(harness: BigQueryHarness, destination: Destination) -> Destination:
    destination.shutdown()
    successor = harness.open()
    successor.startup(make_context())
    return successor


def write(destination: Destination, batch: EventBatch) -> None:
    result = destination.write_events(batch).result(30)
    assert [each.error for each in result.tables.values() if each.error is not None] == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("table", [CONTROL, "public__orders", "audit__lines"])
@pytest.mark.usefixtures("patient")
def test_a_broken_connection_loses_and_repeats_nothing(begun: Step, server: EmulatedBigQuery, table, after):
    """Whether BigQuery had the chunk when the connection broke is unknown."""
    harness, source, destination = begun
    cut = server.cut(table, after=after)
    write(destination, change(source, 0))
    write(destination, change(source, 1))
    assert cut.seen > 0
    expect(harness, 2)


@pytest.mark.trap(28)
def test_a_kill_between_rows_and_position_changes_nothing(begun: Step, server: EmulatedBigQuery) -> None:
    """The position never arrives; the next process gets the same changes, with the same and with other boundaries."""
    harness, source, destination = begun
    first = change(source, 0)
    write(destination, first)
    server.cut(CONTROL, after=False, times=MANY, skip=1)  # what comes first is how far the batch goes
    second = change(source, 1)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(second)
    server.heal()
    third = change(source, 2)
    destination = restart(harness, destination)
    assert destination.position(ORDERS.table_id) == first.end
    write(destination, source.batch(first.begin, second.end))
    expect(harness, 2)
    destination = restart(harness, destination)
    write(destination, source.batch(first.begin, third.end))
    expect(harness, 3)


def test_a_kill_before_the_last_answer_changes_nothing(begun: Step, server: EmulatedBigQuery) -> None:
    """BigQuery has the rows of one table, and the process never learned it; the replay is larger than the batch."""
    harness, source, destination = begun
    batch = change(source, 0)
    server.cut("audit__lines", after=True, times=MANY)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch)
    server.heal()
    later = change(source, 1)
    destination = restart(harness, destination)
    write(destination, source.batch(batch.begin, later.end))
    expect(harness, 2)


def test_the_same_process_repeats_a_failed_batch(begun: Step, server: EmulatedBigQuery) -> None:
    harness, source, destination = begun
    batch = change(source, 0)
    server.cut("audit__lines", after=True, times=MANY)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch)
    server.heal()
    write(destination, batch)
    write(destination, change(source, 1))
    expect(harness, 2)


def test_a_process_that_was_replaced_changes_nothing(begun: Step) -> None:
    harness, source, late = begun
    write(late, change(source, 0))
    successor = harness.open()
    successor.startup(make_context())
    batch = change(source, 1)
    write(successor, batch)
    with suppress(PenstockError):
        late.write_events(batch).result(30)
    expect(harness, 2)
    write(successor, change(source, 2))
    expect(harness, 3)
    assert restart(harness, successor).position(LINES.table_id) == source.position


class TwiceTasks(LocalTasks):
    """Runs every task twice, as Spark may do."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        LocalTasks.run(self, items, function, description=description)
        return LocalTasks.run(self, items, function, description=description)


def test_tasks_may_run_twice(harness: BigQueryHarness, tmp_path: Path) -> None:
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context(tasks=TwiceTasks()))
    for schema, rows in ((ORDERS, [order(1), order(2)]), (LINES, [LINE] * 2)):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows, ranges=2))
    write(destination, change(source, 0))
    write(destination, change(source, 1))
    expect(harness, 2)


@pytest.mark.trap(28)
def test_changes_that_a_new_server_never_had_demand_a_copy(begun: Step, server: EmulatedBigQuery) -> None:
    """A process dies with rows but no position; then the standby that takes over lacks their transaction."""
    harness, source, destination = begun
    write(destination, change(source, 0))
    begin = source.position
    server.cut(CONTROL, after=False, times=MANY, skip=1)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(change(source, 1))
    server.heal()
    promoted = Ancestry(replace(ANCESTRY.current, timeline=2), (TimelineSwitch(1, Lsn(begin)),))
    successor = harness.open()
    successor.startup(make_context(ancestry=promoted))
    assert successor.position(ORDERS.table_id) is None
    assert successor.position(LINES.table_id) is None


def test_a_stream_that_expired_is_counted_by_a_query(begun: Step, server: EmulatedBigQuery) -> None:
    """And the position of its last rows was never recorded."""
    harness, source, destination = begun
    write(destination, change(source, 0))
    batch = change(source, 1)
    server.cut(CONTROL, after=False, times=MANY, skip=1)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch)
    server.heal()
    server.expire_streams()
    destination = restart(harness, destination)
    write(destination, batch)
    expect(harness, 2)


def test_a_late_truncate_does_not_hide_the_rows_of_the_successor(begun: Step) -> None:
    harness, source, late = begun
    write(late, change(source, 0))
    with source.transaction() as transaction:
        transaction.truncate(ORDERS, LINES)
    truncate = source.batch()
    successor = harness.open()
    successor.startup(make_context())
    write(successor, truncate)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(1))
        transaction.insert(LINES, LINE)
    write(successor, source.batch())
    with suppress(PenstockError):
        late.write_events(truncate).result(30)
    assert harness.rows(ORDERS) == [order(1)]
    assert harness.rows(LINES) == [LINE]
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    write(successor, source.batch())
    assert sorted(harness.rows(ORDERS) or [], key=repr) == [order(1), order(2)]


def test_a_dropped_table_leaves_nothing_behind(begun: Step, server: EmulatedBigQuery) -> None:
    harness, _, destination = begun
    assert isinstance(destination, DroppingDestination)
    assert destination.drop_table(ORDERS.table_id)
    assert not destination.drop_table(ORDERS.table_id)
    assert harness.rows(ORDERS) is None
    tables = server.rows(f"select table_name from `{server.project}.{harness.dataset}`.INFORMATION_SCHEMA.TABLES")
    assert [row for row in tables if row["table_name"].startswith("public__orders")] == []
    successor = restart(harness, destination)
    assert successor.position(ORDERS.table_id) is None
    assert successor.position(LINES.table_id) is not None


def test_an_emulator_that_is_away_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigquery_destination, "_START_SECONDS", 0.1)
    away = BigQueryDestination("p", "d", endpoint="http://127.0.0.1:9", storage_endpoint="127.0.0.1:9")
    with pytest.raises(DestinationUnavailable):
        away.probe()


def test_a_large_transaction_is_written_in_slices_and_chunks(
    harness: BigQueryHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later slice finds the rows of an earlier one, and a repeat with other slices changes nothing."""
    monkeypatch.setattr(tasks, "SLICE_BYTES", 0)
    monkeypatch.setattr(append, "CHUNK_BYTES", 1)
    source, destination = ScriptedSource(tmp_path / "segments", segment_rows=1), harness.open()
    destination.startup(make_context())
    for schema, rows in ((ORDERS, [order(1, "large"), order(2)]), (LINES, [LINE] * 2)):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows))
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(5))
        transaction.update(ORDERS, order(3, Unchanged), old={"id": 1})
        transaction.update(ORDERS, order(4, Unchanged), old={"id": 3})
        transaction.delete(ORDERS, {"id": 2})
        transaction.insert(LINES, LINE)
        transaction.update(LINES, {"level": 2, "line": "same"}, old=LINE)
        transaction.delete(LINES, LINE)
    batch = source.batch()
    write(destination, batch)
    monkeypatch.undo()
    for again in (destination, restart(harness, destination)):
        write(again, batch)
        assert sorted(harness.rows(ORDERS) or [], key=repr) == [order(4, "large"), order(5)]
        assert sorted(harness.rows(LINES) or [], key=repr) == [LINE, {"level": 2, "line": "same"}]


class Source:
    """The source's current rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def fetch(self, schema: TableSchema, keys: pa.Table) -> pa.Table:
        wanted = set(keys.column("id").to_pylist())
        found = [row for row in self.rows if row["id"] in wanted]
        types = pa.schema([("id", pa.int64()), ("note", pa.string()), ("due", pa.date32())])
        table = pa.Table.from_pylist(found, types)
        return table.append_column(UNREPRESENTABLE, pa.nulls(table.num_rows, UNREPRESENTABLE_TYPE))


def test_stale_tables_take_omitted_values_from_the_source(server: EmulatedBigQuery, dataset: str, tmp_path: Path):
    """A query may return old rows, so what it says must not be written back."""
    harness = BigQueryHarness(server, dataset, max_staleness="15m")
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    rows = Source([order(1, "large"), order(3, "third")])
    destination.startup(replace(make_context(), source_rows=rows))
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(1, "large"), order(2, "gone soon"), order(5)]))
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, Unchanged))
        transaction.update(ORDERS, order(2, Unchanged))
        transaction.update(ORDERS, order(3, Unchanged), old={"id": 5})
    write(destination, source.batch())
    assert sorted(harness.rows(ORDERS) or [], key=repr) == [order(1, "large"), order(2, "gone soon"), order(3, "third")]
