"""Check that BigQuery keeps the rules that the destination `bigquery` relies on; run it with an account of yours.

    python scripts/certify-bigquery.py --project my-project --location EU

It creates a dataset of its own, writes some kilobytes, and deletes the dataset at the end. It needs no Postgres. Each
line says what was tried and whether it held; the exit code is 1 if something did not. With `--emulator` it runs
against the emulator and the fake of `penstock.testing.bigquery`, which shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.destinations.bigquery import BigQueryDestination
from penstock.destinations.bigquery.append import create_stream, finalize_stream
from penstock.destinations.naming import IDENTIFIERS
from penstock.errors import PenstockError
from penstock.testing.certification import WIDE, Certification, Twice, order, require, write
from penstock.testing.destinations import make_context
from penstock.testing.destinations.contract import LINES


class BigQueryCertification(Certification):
    """The checks, over one dataset."""

    def __init__(self, options: dict[str, Any], folder: Path, *, is_emulated: bool) -> None:
        super().__init__(folder)
        self._options = options
        if not is_emulated:
            self.kinds = (*self.kinds, WIDE)  # BIGNUMERIC, which the emulator does not have

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

    def open(self, mode: str = "mirror") -> BigQueryDestination:
        """Return a new destination, as a restarted process has it."""
        return BigQueryDestination(**self._options, mode=mode, max_staleness="0s")

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


def certify(options: dict[str, Any], *, is_emulated: bool) -> int:
    """Run all checks in a new dataset and delete it; return how many failed."""
    options = {**options, "dataset": f"penstock_certify_{time.time_ns():x}"}
    with tempfile.TemporaryDirectory(prefix="penstock-certify-") as folder:
        certification = BigQueryCertification(options, Path(folder), is_emulated=is_emulated)
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
