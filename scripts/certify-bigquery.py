"""Check that BigQuery keeps the rules that the destination `bigquery` relies on; run it with an account of yours.

    python scripts/certify-bigquery.py --project my-project --location EU

It creates a dataset of its own, writes some kilobytes, and deletes the dataset at the end. It needs no Postgres. Each
line says what was tried and whether it held; the exit code is 1 if something did not. With `--emulator` it runs
against the emulator and the fake of `penstock.testing.bigquery`, which shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.changes.batch import EventBatch
from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.batch_events import copied_rows
from penstock.destinations.bigquery import BigQueryDestination
from penstock.destinations.bigquery.append import create_stream, finalize_stream
from penstock.destinations.naming import IDENTIFIERS
from penstock.errors import PenstockError
from penstock.schema import Column, PostgresType, TableSchema
from penstock.schema.types import TypeKind
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS

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
"""BIGNUMERIC, which the emulator does not have."""


class Certification:
    """The checks, over one dataset."""

    def __init__(self, options: dict[str, Any], folder: Path, *, is_emulated: bool) -> None:
        self._options = options
        self._folder = folder
        self._is_emulated = is_emulated
        self.failures = 0

    def run(self) -> None:
        """Run all checks, one after the other."""
        self.check("the account may create, query and delete tables", lambda: self.open().probe())
        self.check("values of every type arrive by a load job and by an append", self.types)
        self.check("a load job with a name that was used loads nothing", self.tasks_twice)
        self.check("changes replace loaded rows, and an omitted value stays", self.changes)
        self.check("changes with a lower sequence number change nothing", self.late)
        self.check("a repeated batch changes nothing, with any boundaries", self.replays)
        self.check("a truncate leaves only what came after it", self.truncate)
        self.check("an added column can be written, and a renamed one keeps its values", self.columns)
        self.check("a stream takes each offset once, and nothing after it was finalized", self.offsets)
        self.check("every change is in a history once, after a repeat too", self.history)

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

    def open(self, mode: str = "mirror", staleness: str = "0s") -> BigQueryDestination:
        """Return a new destination, as a restarted process has it."""
        return BigQueryDestination(**self._options, mode=mode, max_staleness=staleness)

    @contextmanager
    def begun(
        self, name: str, rows: Sequence[dict[str, Any]], schema: TableSchema = ORDERS, mode: str = "mirror", **how: Any
    ) -> Iterator[tuple[TableSchema, ScriptedSource, BigQueryDestination]]:
        """Copy a table; each check has one of its own, and a pipeline of its own."""
        schema = replace(schema, name=name)
        source = ScriptedSource(self._folder / name)
        destination = self.open(mode)
        destination.startup(make_context(name, **how))
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows, ranges=2))
        yield schema, source, destination
        destination.shutdown()

    def expect(self, schema: TableSchema, wanted: Sequence[dict[str, Any]]) -> None:
        """Raise unless BigQuery has exactly these rows, read back as `penstock verify` does."""
        pinned = self.open().pin(schema)
        require(pinned is not None, "the table does not exist")
        assert pinned is not None
        batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
        found = [dict(row) for batch in batches for row in copied_rows(batch, pinned.schema)]
        pinned.close()
        require(sorted(found, key=repr) == sorted(wanted, key=repr), f"found {found}, wanted {list(wanted)}")

    def types(self) -> None:
        kinds = KINDS if self._is_emulated else (*KINDS, WIDE)
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
        with self.begun("twice", [order(1), order(2)], tasks=Twice()) as (schema, _, _):
            self.expect(schema, [order(1), order(2)])

    def changes(self) -> None:
        with self.begun("changes", [order(1, "large"), order(2)]) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.update(schema, order(3, Unchanged), old={"id": 1})
                transaction.delete(schema, {"id": 2})
                transaction.insert(schema, order(2, "again"))
            write(destination, source.batch())
            self.expect(schema, [order(3, "large"), order(2, "again")])

    def late(self) -> None:
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
            write(late, first)
            self.expect(schema, [order(1, "second"), order(3)])

    def replays(self) -> None:
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
        with self.begun("truncate", [order(1)]) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.insert(schema, order(2))
                transaction.truncate(schema)
                transaction.insert(schema, order(3))
            write(destination, source.batch())
            self.expect(schema, [order(3)])

    def columns(self) -> None:
        with self.begun("columns", [order(1)]) as (schema, source, destination):
            key, note, due = schema.columns
            more = Column("amount", 4, PostgresType(20, "int8"))
            changed = replace(schema, columns=(key, replace(note, name="remark"), due, more))
            with source.transaction() as transaction:
                transaction.insert(changed, {"id": 2, "remark": "new", "due": None, "amount": 5})
            write(destination, source.batch())
            kept = {"id": 1, "remark": "a note", "due": None, "amount": None}
            self.expect(changed, [kept, {"id": 2, "remark": "new", "due": None, "amount": 5}])

    def offsets(self) -> None:
        line = {"level": 1, "line": "same"}
        with self.begun("offsets", [line] * 2, LINES, tasks=Twice()) as (schema, source, late):
            for _ in range(2):
                with source.transaction() as transaction:
                    transaction.insert(schema, line)
                write(late, source.batch())
            self.expect(schema, [line] * 4)
            successor = self.open()
            successor.startup(make_context("offsets"))
            with source.transaction() as transaction:
                transaction.delete(schema, line)
            batch = source.batch()
            write(successor, batch)
            with suppress(PenstockError):
                late.write_events(batch).result()
            self.expect(schema, [line] * 3)
            record = successor._records[schema.table_id]
            assert record.generation is not None
            stream = create_stream(successor._connection, record.generation)
            counts = [finalize_stream(successor._connection, stream) for _ in range(2)]
            require(counts == [0, 0], f"a stream that was finalized twice has {counts} rows")

    def history(self) -> None:
        with self.begun("history", [order(1)], mode="history") as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.update(schema, order(1, "new"))
                transaction.delete(schema, {"id": 1})
            batch = source.batch()
            write(destination, batch)
            again = self.open("history")
            again.startup(make_context("history"))
            write(again, batch)
            table = again._connection.quoted(IDENTIFIERS.table(schema))
            rows = again._connection.run(f"select _op from {table} order by _commit_lsn, _ordinal")  # noqa: S608
            found = [row["_op"] for row in rows]
            require(found == ["copy", "update", "delete"], f"found {found}")


class Twice(LocalTasks):
    """Runs every task twice, as Spark may do."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        LocalTasks.run(self, items, function, description=description)
        return LocalTasks.run(self, items, function, description=description)


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def write(destination: BigQueryDestination, batch: EventBatch) -> None:
    for result in destination.write_events(batch).result().tables.values():
        if result.error is not None:
            raise result.error


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def certify(options: dict[str, Any], *, is_emulated: bool) -> int:
    """Run all checks in a new dataset and delete it; return how many failed."""
    options = {**options, "dataset": f"penstock_certify_{time.time_ns():x}"}
    with tempfile.TemporaryDirectory(prefix="penstock-certify-") as folder:
        certification = Certification(options, Path(folder), is_emulated=is_emulated)
        try:
            certification.run()
        finally:
            connection = BigQueryDestination(**options)._connection
            dataset = f"{connection.project}.{connection.dataset}"
            connection.client.delete_dataset(dataset, delete_contents=True, not_found_ok=True)
    return certification.failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the rules of BigQuery that Penstock relies on.")
    parser.add_argument("--project")
    parser.add_argument("--location")
    parser.add_argument("--credentials-file", help="the JSON key of a service account; default: default credentials")
    parser.add_argument("--emulator", action="store_true", help="try the script itself, without an account")
    arguments = parser.parse_args()
    if arguments.emulator:
        from penstock.testing.bigquery import EmulatedBigQuery

        with EmulatedBigQuery() as server:
            addresses = {"endpoint": server.endpoint, "storage_endpoint": server.storage_endpoint}
            failures = certify({"project": server.project, **addresses}, is_emulated=True)
    elif arguments.project is None:
        parser.error("name your project with --project, or use --emulator")
    else:
        wanted = {"location": arguments.location, "credentials_file": arguments.credentials_file}
        failures = certify({"project": arguments.project, **wanted}, is_emulated=False)
    print("everything held" if not failures else f"{failures} checks failed: do not use this destination")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
