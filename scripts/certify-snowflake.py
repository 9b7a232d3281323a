"""Check that Snowflake keeps the rules that the destination `snowflake` relies on; run it with an account of yours.

    python scripts/certify-snowflake.py --account myorg-myaccount --user me --database SHOP --warehouse SMALL

The password is read from SNOWFLAKE_PASSWORD, or name a key with `--private-key-file`, or a connection of the
connector's connections.toml with `--connection-name`. The script creates a schema of its own, writes some kilobytes,
and drops the schema at the end. It needs no Postgres. Each line says what was tried and whether it held; the exit code
is 1 if something did not. With `--emulator` it runs against the emulator of `penstock.testing.snowflake`, which shows
that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.destinations.naming import IDENTIFIERS
from penstock.destinations.snowflake import SnowflakeDestination
from penstock.destinations.snowflake.control import Control
from penstock.schema import PostgresType
from penstock.testing.certification import WIDE, Certification, Twice, order, require, write
from penstock.testing.destinations import make_context
from penstock.testing.destinations.contract import LINES, ORDERS


class SnowflakeCertification(Certification):
    """The checks, over one schema."""

    kinds = (
        *Certification.kinds,
        WIDE,
        (PostgresType(25, "text"), -1, "\\N"),
        (PostgresType(25, "text"), -1, ""),
    )

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        super().__init__(folder)
        self._options = options
        if "endpoint" not in options:
            # The emulator's numbers without decimal places have 64 bits.
            self.kinds = (*self.kinds, (PostgresType(1700, "numeric"), (38 << 16) + 4, Decimal(10) ** 37 + 1))

    def run(self) -> None:
        """Run all checks, one after the other."""
        self.check("the role may create tables, views and a stage, and put and copy files", lambda: self.open().probe())
        self.check("values of every type arrive by copy and by merge, and are read back", self.types)
        self.check("a range that is staged twice is copied once", self.tasks_twice)
        self.check("changes replace copied rows, and an omitted value stays", self.changes)
        self.check("a process that was replaced changes nothing", self.late)
        self.check("a repeated batch changes nothing, with any boundaries", self.replays)
        self.check("a truncate leaves only what came after it", self.truncate)
        self.check("an added column can be written, and a renamed one keeps its values", self.columns)
        self.check("keys that differ by case, or by a space at the end, are different keys", self.cases)
        self.check("rows without a key are removed one by one", self.bag)
        self.check("a deleted row stays, with the time, also in a new copy", self.soft)
        self.check("every change is in a history once, after a repeat too", self.history)
        self.check("an aborted transaction leaves no row and no position", self.aborted)

    def open(self, mode: str = "mirror") -> SnowflakeDestination:
        """Return a new destination, as a restarted process has it."""
        return SnowflakeDestination(**self._options, mode=mode)

    def cases(self) -> None:
        """A collation of the account or the schema would make them equal."""
        schema = replace(ORDERS, columns=(replace(ORDERS.columns[0], type=PostgresType(25, "text")),))
        keys = [{"id": text} for text in ("a", "A", "a ", "ä")]
        with self.begun("cases", keys, schema) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.delete(schema, {"id": "A"})
                transaction.insert(schema, {"id": "Ä"})
            write(destination, source.batch())
            self.expect(schema, [{"id": text} for text in ("a", "a ", "ä", "Ä")])

    def bag(self) -> None:
        line = {"level": 1, "line": "same"}
        with self.begun("bag", [line] * 3, LINES, tasks=Twice()) as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.delete(schema, line)
                transaction.insert(schema, {"level": 2, "line": "other"})
            write(destination, source.batch())
            self.expect(schema, [line, line, {"level": 2, "line": "other"}])

    def soft(self) -> None:
        with self.begun("soft", [order(1), order(2)], mode="soft_delete") as (schema, source, destination):
            with source.transaction() as transaction:
                transaction.delete(schema, {"id": 1})
            write(destination, source.batch())
            destination.drop_table_for_copy(schema, "attempt-2")
            destination.write_table_rows(schema, source.copy(schema, [order(2)], attempt="attempt-2"))
            found = self.query(schema, "select ID, _DELETED_AT is null from {} order by ID")
            require(found == [(1, False), (2, True)], f"found {found}")

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
            found = [row[0] for row in self.query(schema, "select _OP from {} order by _COMMIT_LSN, _ORDINAL")]
            require(found == ["copy", "update", "delete"], f"found {found}")

    def aborted(self) -> None:
        """Abort a transaction from another session: what follows in it must not be committed without the rest."""
        with self.begun("aborted", [order(1)]) as (schema, _, destination):
            connection = destination._connection
            control = Control(connection, "aborted")
            with connection.session() as session:
                record = control.load(session)[ORDERS.table_id]
                assert record.layout is not None
                assert record.generation is not None
                assert record.position is not None
                removal = f"delete from {connection.name(record.generation)}"  # noqa: S608
                session.run(f"begin transaction name {control.transaction}")
                number = str(session.rows("select current_transaction()")[0][0])
                session.run(removal)
                with connection.session() as other:
                    control.end_others(other)
                try:
                    session.run(removal)
                    moved = control.move(
                        session,
                        record,
                        0,
                        transaction=number,
                        lineage=record.lineage,
                        position=record.position,
                        layout=record.layout,
                        generation=record.generation,
                    )
                finally:
                    session.run("rollback")
                require(not moved, "the position moved in a transaction that was aborted")
            self.expect(schema, [order(1)])

    def query(self, schema: Any, sql: str) -> list[Any]:
        """Query the view of a table."""
        connection = self.open()._connection
        with connection.session() as session:
            return session.rows(sql.format(connection.name(IDENTIFIERS.table(schema).upper())))


def certify(options: dict[str, Any]) -> int:
    """Run all checks in a new schema and drop it; return how many failed."""
    options = {**options, "schema": f"PENSTOCK_CERTIFY_{time.time_ns():X}"}
    with tempfile.TemporaryDirectory(prefix="penstock-certify-") as folder:
        certification = SnowflakeCertification(options, Path(folder))
        try:
            certification.run()
        finally:
            connection = SnowflakeDestination(**options)._connection
            with connection.session() as session:
                session.run(f"drop schema if exists {connection.place} cascade")
            connection.close()
    return certification.failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the rules of Snowflake that Penstock relies on.")
    for name in ("account", "user", "database", "warehouse", "role", "private-key-file", "connection-name"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--emulator", action="store_true", help="try the script itself, without an account")
    arguments = parser.parse_args()
    if arguments.emulator:
        from penstock.testing.snowflake import EmulatedSnowflake

        with EmulatedSnowflake() as server:
            failures = certify(server.options(""))
    elif arguments.database is None:
        parser.error("name a database with --database, or use --emulator")
    else:
        wanted = {name: value for name, value in vars(arguments).items() if name != "emulator" and value is not None}
        failures = certify({**wanted, "password": os.environ.get("SNOWFLAKE_PASSWORD")})
    print("everything held" if not failures else f"{failures} checks failed: do not use this destination")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
