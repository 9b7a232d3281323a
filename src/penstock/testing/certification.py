"""Checks that the owner of an account runs: they show whether a warehouse keeps the rules that a destination relies on.

`scripts/certify-bigquery.py` and `scripts/certify-snowflake.py` add what is special about theirs.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.changes.batch import EventBatch
from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.base import Destination
from penstock.destinations.batch_events import copied_rows
from penstock.errors import PenstockError
from penstock.schema import Column, PostgresType, TableSchema
from penstock.schema.types import TypeKind
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import ORDERS

INT4, TEXT = PostgresType(23, "int4"), PostgresType(25, "text")
KINDS: Sequence[tuple[PostgresType, int, Any]] = (
    (PostgresType(16, "bool"), -1, True),
    (PostgresType(21, "int2"), -1, -32_768),
    (PostgresType(20, "int8"), -1, 2**63 - 1),
    (PostgresType(700, "float4"), -1, 0.5),
    (PostgresType(701, "float8"), -1, -1.25e300),
    (PostgresType(1700, "numeric"), (10 << 16 | 2) + 4, Decimal("-12345678.90")),
    (TEXT, -1, "größer\n'\"\\ 🐘"),
    (PostgresType(17, "bytea"), -1, b"\0\xff"),
    (PostgresType(1082, "date"), -1, datetime.date(1, 1, 1)),
    (PostgresType(1083, "time"), -1, datetime.time(23, 59, 59, 999_999)),
    (PostgresType(1114, "timestamp"), -1, datetime.datetime(9999, 12, 31, 23, 59, 59, 999_999)),
    (PostgresType(1184, "timestamptz"), -1, datetime.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=datetime.UTC)),
    (PostgresType(1007, "_int4", kind=TypeKind.ARRAY, element=INT4), -1, [1, None, -3]),
    (PostgresType(1009, "_text", kind=TypeKind.ARRAY, element=TEXT), -1, []),
)
WIDE = (PostgresType(1700, "numeric"), (38 << 16 | 20) + 4, Decimal("123456789012345678.00000000000000000001"))


class Certification:
    """The checks that all warehouses share; each has a table and a pipeline of its own."""

    kinds: Sequence[tuple[PostgresType, int, Any]] = KINDS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.failures = 0

    def open(self, mode: str = "mirror") -> Any:
        """Return a new destination, as a restarted process has it."""
        raise NotImplementedError

    def check(self, what: str, test: Callable[[], None]) -> None:
        """Run a check and report it; the text of an error may contain values of this script, and nothing else."""
        began = time.monotonic()
        try:
            test()
        except Exception as error:
            self.failures += 1
            print(f"FAILED  {what}: {type(error).__name__}: {error}")
        else:
            print(f"ok      {what} ({time.monotonic() - began:.1f} s)")

    @contextmanager
    def begun(
        self, name: str, rows: Sequence[dict[str, Any]], schema: TableSchema = ORDERS, mode: str = "mirror", **how: Any
    ) -> Iterator[tuple[TableSchema, ScriptedSource, Any]]:
        """Copy a table."""
        schema = replace(schema, name=name)
        source = ScriptedSource(self._folder / name)
        destination = self.open(mode)
        destination.startup(make_context(name, **how))
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows, ranges=2))
        yield schema, source, destination
        destination.shutdown()

    def expect(self, schema: TableSchema, wanted: Sequence[dict[str, Any]]) -> None:
        """Raise unless the warehouse has exactly these rows, read back as `penstock verify` does."""
        pinned = self.open().pin(schema)
        require(pinned is not None, "the table does not exist")
        assert pinned is not None
        batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
        found = [dict(row) for batch in batches for row in copied_rows(batch, pinned.schema)]
        pinned.close()
        require(sorted(found, key=repr) == sorted(wanted, key=repr), f"found {found}, wanted {list(wanted)}")

    def types(self) -> None:
        """Copy and insert values of every type."""
        kinds = self.kinds
        columns = [Column("id", 1, PostgresType(20, "int8"), identity=True, primary_key_position=1)]
        columns += [
            Column(f"c_{number}", number, type_, type_modifier=modifier)
            for number, (type_, modifier, _) in enumerate(kinds, 2)
        ]
        schema = replace(ORDERS, columns=tuple(columns))
        full = {f"c_{number}": value for number, (*_, value) in enumerate(kinds, 2)}
        empty = dict.fromkeys(full)
        never = {**empty, "c_10": Unrepresentable("infinity")}
        rows = [{"id": 1, **full}, {"id": 2, **empty}, {"id": 3, **never}]
        with self.begun("types", rows, schema) as (schema, source, destination):
            self.expect(schema, rows)
            with source.transaction() as transaction:
                for number, row in enumerate((full, empty, never), 4):
                    transaction.insert(schema, {"id": number, **row})
            write(destination, source.batch())
            self.expect(schema, [*rows, *({**row, "id": number} for number, row in enumerate(rows, 4))])

    def tasks_twice(self) -> None:
        """Run every task of a copy twice."""
        with self.begun("twice", [order(1), order(2)], tasks=Twice()) as (schema, _, _):
            self.expect(schema, [order(1), order(2)])

    def changes(self) -> None:
        """Omit a value in an update of the key, and replace a deleted row."""
        with self.begun("changes", [order(1, "large"), order(2)]) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.update(schema, order(3, Unchanged), old={"id": 1})
                transaction.delete(schema, {"id": 2})
                transaction.insert(schema, order(2, "again"))
            write(destination, source.batch())
            self.expect(schema, [order(3, "large"), order(2, "again")])

    def late(self) -> None:
        """Let a process write that was replaced."""
        with self.begun("late", [order(1), order(2)]) as (schema, source, late):
            with source.transaction() as transaction:
                transaction.insert(schema, order(3))
            write(late, source.batch())  # it writes the table now
            with source.transaction() as transaction:
                transaction.update(schema, order(1, "first"))
                transaction.update(schema, order(2, "first"))
            first = source.batch()
            with source.transaction() as transaction:
                transaction.update(schema, order(1, "second"))
                transaction.delete(schema, {"id": 2})
            successor = self.open()
            successor.startup(make_context("late"))
            write(successor, source.batch(first.begin))
            with suppress(PenstockError):
                write(late, first)
            self.expect(schema, [order(1, "second"), order(3)])

    def replays(self) -> None:
        """Write batches again, with other boundaries."""
        with self.begun("replays", [order(1)]) as (schema, source, destination):
            batches: list[EventBatch] = []
            for number in range(3):
                with source.transaction() as transaction:
                    transaction.update(schema, order(1, f"update {number}"))
                    transaction.insert(schema, order(10 + number))
                batches.append(source.batch())
                write(destination, batches[-1])
            again = self.open()
            again.startup(make_context("replays"))
            write(again, source.batch(batches[0].begin, batches[2].end))
            self.expect(schema, [order(1, "update 2"), *(order(10 + number) for number in range(3))])

    def truncate(self) -> None:
        """Truncate between rows."""
        with self.begun("truncate", [order(1)]) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.insert(schema, order(2))
                transaction.truncate(schema)
                transaction.insert(schema, order(3))
            write(destination, source.batch())
            self.expect(schema, [order(3)])

    def columns(self) -> None:
        """Add and rename columns."""
        with self.begun("columns", [order(1)]) as (schema, source, destination):
            key, note, due = schema.columns
            more = Column("amount", 4, PostgresType(20, "int8"))
            changed = replace(schema, columns=(key, replace(note, name="remark"), due, more))
            with source.transaction() as transaction:
                transaction.insert(changed, {"id": 2, "remark": "new", "due": None, "amount": 5})
            write(destination, source.batch())
            kept = {"id": 1, "remark": "a note", "due": None, "amount": None}
            self.expect(changed, [kept, {"id": 2, "remark": "new", "due": None, "amount": 5}])


class Twice(LocalTasks):
    """Runs every task twice, as Spark may do."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        LocalTasks.run(self, items, function, description=description)
        return LocalTasks.run(self, items, function, description=description)


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    """Return a row of `ORDERS`."""
    return {"id": number, "note": note, "due": None}


def write(destination: Destination, batch: EventBatch) -> None:
    """Write a batch; raise the error of a table."""
    for result in destination.write_events(batch).result().tables.values():
        if result.error is not None:
            raise result.error


def require(holds: bool, what: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise AssertionError(what)
