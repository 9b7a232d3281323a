"""Streaming queries of `format("penstock")` that collect their batches, for tests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

SECONDS = 180.0
"""A guard against hangs."""
_LATE_PROCESS = "Python worker failed to connect back"


class Collected:
    """A running query whose rows are collected; use it as a context manager."""

    def __init__(self, spark: Any, folder: Path, dsn: str, *, available_now: bool = False, **options: str) -> None:
        options = {"slot": "stream", "spoolLocation": str(folder / "spool")} | options
        self.slot = options["slot"]
        frame = spark.readStream.format("penstock").option("url", dsn).options(**options).load()
        self.columns = frame.columns
        self.batches: list[list[Any]] = []
        self._arrived = threading.Condition()
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(folder / "checkpoint"))
        self._writer = writer.trigger(availableNow=True) if available_now else writer
        self.query = self._writer.start()
        self._starts = 1

    def _take(self, frame: Any, number: int) -> None:
        rows = frame.collect()
        with self._arrived:
            self.batches.append(rows)
            self._arrived.notify_all()

    @property
    def rows(self) -> list[Any]:
        """All rows, in the order of the changes."""
        rows = [row for batch in list(self.batches) for row in batch]
        return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_ordinal"]))

    def wait_slot(self, database: Any) -> None:
        """Wait until the query has a slot: changes from here on are in the stream."""
        statement = "select 1 from pg_replication_slots where slot_name = %s and active"
        self._wait(lambda: database.execute(statement, [self.slot]))

    def wait_rows(self, count: int) -> list[Any]:
        """Wait until so many rows have arrived; raise what ended the query."""
        return self._wait(lambda: len(self.rows) >= count)

    def wait_batches(self, count: int) -> list[Any]:
        """Wait until so many batches have been processed, empty ones included."""
        return self._wait(lambda: len(self.batches) >= count)

    def _wait(self, is_reached: Any) -> list[Any]:
        deadline = time.monotonic() + SECONDS
        with self._arrived:
            while not is_reached():
                if (error := self.query.exception()) is not None:
                    self._start_again(error)
                assert time.monotonic() < deadline, f"{len(self.rows)} rows in {len(self.batches)} batches"
                self._arrived.wait(0.1)
        return self.rows

    def _start_again(self, error: Exception) -> None:
        """Start the query again if its Python process did not start in time; raise any other error.

        Spark waits 10 s for that process, whatever the machine does beside it, and no setting changes this.
        """
        if _LATE_PROCESS not in str(error) or self._starts == 3:
            raise error
        self._starts += 1
        self.query = self._writer.start()

    def wait_error(self) -> str:
        """Wait until the query fails; return the message."""
        deadline = time.monotonic() + SECONDS
        while (error := self.query.exception()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return str(error)

    def stop(self) -> None:
        self.query.stop()

    def __enter__(self) -> Collected:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
