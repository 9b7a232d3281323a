"""Limits how many tables are copied at once, and shares snapshots between them.

- Large tables: as many at a time as there are table sync workers (`max_table_sync_workers`). Each keeps a snapshot open
  on the source, and holds back the spool.
- Small tables: eight times as many. Copying a small table is mostly waiting.
- Tables that are about to be copied share a snapshot. Each snapshot costs connections, a slot, and a wait for writers.
- The coordinator starts the smallest tables first (`penstock.source.sizes.sort_by_size`).

`penstock.spark.copies` decides in which order the tasks of these copies run.

A table uses the next snapshot, never one that is already being taken: its changes must be held before its snapshot
exists. While a snapshot is taken, other tables gather for the next one. So a single table gets its snapshot at once,
and hundreds share a few. A snapshot is closed when its last table has left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.source.slots import Blocker
from penstock.source.snapshots import Snapshot
from penstock.spool import Stopping

if TYPE_CHECKING:
    from penstock.workers.table_sync import TableSync

logger = logging.getLogger(__name__)

SMALL_TABLE_BYTES = 8 << 20
"""Size on the source's disk that is read in less than a second."""
SMALL_TABLES_PER_WORKER = 8

OnWait = Callable[[Sequence[Blocker]], None]
Take = Callable[[OnWait], Snapshot]

_CHECK_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Departure:
    """A snapshot that will be taken, and the copies that wait for it."""

    aboard: list[OnWait] = field(default_factory=list[OnWait])
    snapshot: Snapshot | None = None
    error: BaseException | None = None
    """Why it could not be taken; `Stopping` if only the copy that was taking it is no longer wanted."""

    def tell(self, blockers: Sequence[Blocker]) -> None:
        for on_wait in list(self.aboard):
            on_wait(blockers)


class SharedSnapshots:
    """Shares snapshots between copies. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gathering: _Departure | None = None
        self._taking = False

    @contextmanager
    def enter(self, take: Take, *, on_wait: OnWait, check: Callable[[], None]) -> Iterator[Snapshot]:
        """Use a snapshot inside the block that is taken after this call, by this `take` or by that of another waiting
        copy.

        `on_wait` receives the transactions that the snapshot waits for. `check` is called repeatedly, and raises when
        the copy is no longer wanted.
        """
        departure = self._board(take, on_wait, check)
        assert departure.snapshot is not None
        try:
            yield departure.snapshot
        finally:
            self._leave(departure, on_wait)

    def _board(self, take: Take, on_wait: OnWait, check: Callable[[], None]) -> _Departure:
        while True:
            with self._changed:
                departure = self._gathering = self._gathering or _Departure()
                departure.aboard.append(on_wait)
            try:
                if self._wait(departure, check):
                    self._take(departure, take)
                if departure.snapshot is not None:
                    return departure
                if departure.error is not None and not isinstance(departure.error, Stopping):
                    raise departure.error
                # The copy that was to take the snapshot has ended.
                check()
            except BaseException:
                self._leave(departure, on_wait)
                raise

    def _wait(self, departure: _Departure, check: Callable[[], None]) -> bool:
        """Wait until the snapshot is taken; return True if the caller must take it."""
        with self._changed:
            while departure.snapshot is None and departure.error is None:
                if not self._taking and self._gathering is departure:
                    self._taking = True
                    self._gathering = None
                    return True
                self._changed.wait(_CHECK_SECONDS)
                check()
        return False

    def _take(self, departure: _Departure, take: Take) -> None:
        try:
            departure.snapshot = take(departure.tell)
        except BaseException as error:
            departure.error = error
            raise
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()

    def _leave(self, departure: _Departure, on_wait: OnWait) -> None:
        with self._changed:
            departure.aboard.remove(on_wait)
            if departure.aboard:
                return
            if self._gathering is departure:
                self._gathering = None
        if departure.snapshot is not None:
            departure.snapshot.close()


class SyncPool:
    """Runs table sync workers: `max_workers` for large tables, and as many groups of small ones."""

    def __init__(self, max_workers: int) -> None:
        self._max_threads = max_workers * SMALL_TABLES_PER_WORKER
        self._large_tables = threading.BoundedSemaphore(max_workers)
        self.snapshots = SharedSnapshots()
        self._lock = threading.Lock()
        self._running: dict[int, threading.Thread] = {}

    @property
    def free(self) -> int:
        """How many more workers may start."""
        with self._lock:
            self._forget_ended()
            return self._max_threads - len(self._running)

    @contextmanager
    def place(self, size: int | None, check: Callable[[], None]) -> Iterator[None]:
        """Copy a table of this size inside the block, after waiting if it is large; an unknown size counts as large.

        `check` is called while it waits, and raises when the copy is no longer wanted.
        """
        if size is not None and size <= SMALL_TABLE_BYTES:
            yield
            return
        while not self._large_tables.acquire(timeout=_CHECK_SECONDS):
            check()
        try:
            yield
        finally:
            self._large_tables.release()

    def is_running(self, table_id: int) -> bool:
        with self._lock:
            self._forget_ended()
            return table_id in self._running

    def start(self, table_id: int, work: TableSync, failed: Callable[[int, Exception], None]) -> bool:
        """Start a worker unless its table has one or the pool is full."""

        def run() -> None:
            try:
                work.run(self)
            except Stopping:
                pass
            except Exception as error:
                self._tell(table_id, error, failed)
            finally:
                work.leave()

        with self._lock:
            self._forget_ended()
            if table_id in self._running or len(self._running) >= self._max_threads:
                return False
            thread = threading.Thread(target=run, name=f"table-sync-{table_id}", daemon=True)
            self._running[table_id] = thread
            thread.start()
            return True

    @staticmethod
    def _tell(table_id: int, error: Exception, failed: Callable[[int, Exception], None]) -> None:
        try:
            failed(table_id, error)
        except Stopping:
            logger.info("copy stopped: it is no longer wanted table_id=%d", table_id)
        except PenstockError as another:
            # Probably the store failed. The table keeps its stored phase and is retried.
            logger.error("cannot record that a copy ended table_id=%d error=%s", table_id, another)

    def join(self, timeout: float) -> bool:
        """Wait for all workers; False if one has not ended in time."""
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = list(self._running.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _forget_ended(self) -> None:
        self._running = {table_id: thread for table_id, thread in self._running.items() if thread.is_alive()}
