"""The oracle: compares what a spool says happened with what the server says.

`check_spool` replays a spool over the first rows of a workload and compares every checkpoint with the server's text,
cell by cell. `check_same` compares two captures of the same WAL. Both raise `Discrepancy` with the place.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import psycopg

from penstock.capture import Capture, CaptureSettings
from penstock.changes.segment import segment_layout
from penstock.lsn import Lsn, is_in, reaches
from penstock.schema import TableSchema
from penstock.spool import SpoolReader
from tests.support.planned_tables import PlannedTable
from tests.support.replay import Cell, Discrepancy, Replayable, Row, Table, element_delimiter, from_text, read_spool
from tests.support.workload import Checkpoint, Rows, Truth

HANG_SECONDS = 120.0
"""A guard, far longer than anything here takes."""


def capture_until(settings: CaptureSettings, position: Lsn, *, timeout: float = HANG_SECONDS) -> Lsn:
    """Run capture in this process until the spool reaches a boundary; return where the spool ends."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            Capture(settings, stop).run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="capture")
    thread.start()
    reader = SpoolReader(settings.spool.path)
    deadline = time.monotonic() + timeout
    try:
        while thread.is_alive():
            captured = reader.captured
            if captured is not None and reaches(captured, position):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"capture has not reached {position} in {timeout:g} s, it is at {captured}")
            time.sleep(0.005)
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    return SpoolReader(settings.spool.path).captured or Lsn(0)


def current_position(connection: psycopg.Connection) -> Lsn:
    """Return a boundary after every transaction whose commit has returned."""
    found = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert found is not None
    return Lsn.parse(found[0])


def check_spool(path: Path, truth: Truth) -> Replayable:
    """Replay a spool over the first rows, compare all checkpoints, and check the transactions."""
    spool = read_spool(path)
    for table in truth.tables:
        _check_schema(table, spool)
    check_transactions(spool, [(each.xid, each.changes) for each in truth.transactions])
    tables = {table.name: _start(table, spool, truth.initial) for table in truth.tables}
    pending = iter(spool.changes)
    change = next(pending, None)
    for checkpoint in truth.checkpoints:
        while change is not None and is_in(change.key.commit_lsn, checkpoint.boundary):
            name = change.table.partition(".")[2]
            if name in tables:
                tables[name].apply(change)
            change = next(pending, None)
        for table in truth.tables:
            _check_rows(table, spool, tables[table.name], checkpoint)
    return spool


def check_transactions(spool: Replayable, expected: list[tuple[int, int]]) -> None:
    """Check that each transaction appears exactly once, in commit order, with its number of changes."""
    found = spool.transactions()
    if found == expected:
        return
    lost = Counter(expected) - Counter(found)
    extra = Counter(found) - Counter(expected)
    if lost or extra:
        raise Discrepancy(f"transactions (xid, changes) lost: {sorted(lost)[:10]}, not expected: {sorted(extra)[:10]}")
    at = next(index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    raise Discrepancy(f"transactions in another order: {found[at : at + 3]} instead of {expected[at : at + 3]}")


def check_same(first: Replayable, second: Replayable, what: str) -> None:
    """Check that two captures of the same WAL contain the same changes under the same keys."""
    one, other = first.comparable(), second.comparable()
    for left, right in zip(one, other, strict=False):
        if left != right:
            raise Discrepancy(f"{what}: {_brief(left)} in one, {_brief(right)} in the other")
    if len(one) != len(other):
        raise Discrepancy(f"{what}: {len(one)} changes in one, {len(other)} in the other")


def _check_schema(table: PlannedTable, spool: Replayable) -> None:
    schema = _schema(table, spool)
    if schema is None:
        return
    versions = spool.schemas[schema.table_id]
    if len(versions) != 1:
        raise Discrepancy(f"{table.name} has {len(versions)} schema versions, although it never changed")
    names = tuple(column.name for column in schema.columns)
    if names != table.published:
        raise Discrepancy(f"{table.name} has columns {names}, not {table.published}")
    key = {column.name for column in schema.key}
    expected = set() if table.identity == "nothing" else set(table.key)
    if key != expected:
        raise Discrepancy(f"{table.name} has the key {key}, not {expected}")


def _schema(table: PlannedTable, spool: Replayable) -> TableSchema | None:
    found = [versions[-1] for versions in spool.schemas.values() if versions[-1].name == table.name]
    return found[0] if found else None


def _start(table: PlannedTable, spool: Replayable, initial: Checkpoint) -> Table:
    schema = _schema(table, spool)
    rows = initial.rows[table.name]
    if schema is None:
        # No row of it changed, so compare text with text.
        schema = TableSchema(0, "public", table.name, ())
    return Table(table.name, schema, normalised(rows, schema))


def _check_rows(table: PlannedTable, spool: Replayable, replayed: Table, checkpoint: Checkpoint) -> None:
    schema = _schema(table, spool) or TableSchema(0, "public", table.name, ())
    expected = Counter(normalised(checkpoint.rows[table.name], schema))
    found = replayed.rows()
    if found == expected:
        return
    names = [column.name for column in schema.columns]
    raise Discrepancy(
        f"{table.name} before {checkpoint.boundary}: {(found - expected).total()} rows too many, "
        f"{(expected - found).total()} missing\n"
        f"  found:    {_brief(next(iter(found - expected), ()))}\n"
        f"  expected: {_brief(next(iter(expected - found), ()))}\n"
        f"  columns:  {names}"
    )


def normalised(rows: Rows, schema: TableSchema) -> list[Row]:
    """Convert the server's texts to the form of replayed rows."""
    columns = segment_layout(schema).columns
    if not columns:
        return [tuple(row) for row in rows]
    kinds = [(column.codec.arrow_type, element_delimiter(column.column)) for column in columns]
    return [
        tuple(from_text(text, type_, delimiter) for text, (type_, delimiter) in zip(row, kinds, strict=True))
        for row in rows
    ]


def _brief(cells: tuple[Cell, ...]) -> str:
    return repr([repr(cell) if len(repr(cell)) < 80 else repr(cell)[:80] + "…" for cell in cells])
