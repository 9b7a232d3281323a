"""Keeps snapshots of the source open while data frames read in them.

Spark plans a data frame in a process that ends before the tasks begin, and a snapshot ends with the session that
exported it. So the process that calls `register` keeps them: a thread answers requests of planning processes on a
socket that only this user can open. A snapshot holds back the vacuum horizon of the server, so each one ends: when its
block ends, when no session has read in it for a while, or with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

from penstock.errors import PenstockError, SourceError
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.snapshots import export_snapshot

IDLE_SECONDS = 300.0
"""The snapshot of a data frame ends after this long without a reader: tasks may have to wait for executors."""
LONGEST_SECONDS = 3600.0
"""How long a snapshot of `penstock.snapshot` lasts, unless its caller says otherwise."""
_LOOK_SECONDS = 5.0
# A session that has entered the snapshot has its xmin. While another session has this xmin for whatever reason, keeping
# the snapshot costs the server nothing.
_READERS = """
    select 1 from pg_catalog.pg_stat_activity keeper
    join pg_catalog.pg_stat_activity other on other.backend_xmin = keeper.backend_xmin and other.pid <> keeper.pid
    where keeper.pid = pg_catalog.pg_backend_pid()
    limit 1
"""

logger = logging.getLogger(__name__)


class KeptSnapshot:
    """A snapshot of the whole database; `penstock.snapshot` returns one, and its `with` block ends it.

    `name` is for `option("snapshot", …)`.
    """

    def __init__(self, settings: SourceSettings) -> None:
        self._session = connect(settings, Role.SNAPSHOT, parameters=NO_TIMEOUTS)
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._used_at = time.monotonic()
        try:
            with translated(self._session, "export a snapshot"):
                self._session.execute("begin transaction isolation level repeatable read, read only")
            self.name = export_snapshot(self._session)
        except BaseException:
            self._session.close()
            raise

    def last(self, seconds: float) -> None:
        """End it after this time."""
        self._timer = threading.Timer(seconds, self._expire, [seconds])
        self._timer.daemon = True
        self._timer.start()

    def _expire(self, seconds: float) -> None:
        if not self._session.closed:
            logger.warning("a snapshot ended after %g s, so that the server can vacuum snapshot=%s", seconds, self.name)
        self.close()

    def is_idle(self) -> bool:
        """Return True if no session has read in it for `IDLE_SECONDS`, or if it is gone."""
        now = time.monotonic()
        with self._lock:
            try:
                if self._session.execute(_READERS).fetchone():
                    self._used_at = now
            except psycopg.Error:
                return True
        return now - self._used_at > IDLE_SECONDS

    def close(self) -> None:
        """End the snapshot; sessions that have entered it keep theirs."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._session.close()

    def __enter__(self) -> KeptSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def snapshot(url: str, *, seconds: float = LONGEST_SECONDS) -> KeptSnapshot:
    """Open a snapshot in which several data frames read, so that a join of two tables is consistent.

    It lasts as long as the `with` block, and at most for `seconds`: the server cannot remove dead rows meanwhile.

    Arguments:
        url: of the database, as for `option("url", …)`.
        seconds: the longest time for which it lasts.

    Returns:
        The snapshot; pass its `name` as `option("snapshot", …)`.

    Raises:
        SourceError: the database cannot be reached, or refuses.

    Example:
        import penstock

        penstock.register(spark)
        with penstock.snapshot(url) as snapshot:
            tables = spark.read.format("penstock").option("url", url).option("snapshot", snapshot.name)
            orders = tables.option("table", "public.orders").load()
            customers = tables.option("table", "public.customers").load()
            orders.join(customers, orders.customer_id == customers.id).groupBy("country").count().show()
    """
    kept = KeptSnapshot(SourceSettings(url))
    kept.last(seconds)
    return kept


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where a planning process finds the keeper. Pickles."""

    path: str
    key: bytes

    def open_snapshot(self, url: str) -> str:
        """Ask for a new snapshot of a database; return its name."""
        try:
            with Client(self.path, family="AF_UNIX", authkey=self.key) as channel:
                channel.send_bytes(url.encode())
                answer: dict[str, Any] = json.loads(channel.recv_bytes())
        except (OSError, EOFError):
            raise PenstockError(
                'format("penstock") cannot reach the process that registered it',
                hint="Call penstock.register(spark) in the process of the driver, and keep that process running.",
            ) from None
        if "error" in answer:
            raise SourceError(answer["error"], hint=answer["hint"])
        return answer["snapshot"]


class Keeper:
    """Opens snapshots for planning processes, and ends those that have no readers left."""

    def __init__(self) -> None:
        # Only its owner can enter this folder.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-keeper-"))
        self.address = KeeperAddress(str(self._folder / "socket"), secrets.token_bytes(32))
        self._listener = Listener(self.address.path, family="AF_UNIX", authkey=self.address.key)
        self._kept: list[KeptSnapshot] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        atexit.register(self.close)
        for work in (self._answer, self._end_idle):
            threading.Thread(target=work, name="penstock-keeper", daemon=True).start()

    @property
    def kept(self) -> int:
        """How many snapshots are open."""
        with self._lock:
            return len(self._kept)

    def close(self) -> None:
        """End all snapshots, and stop answering."""
        self._closed.set()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            for each in self._kept:
                each.close()
            self._kept.clear()

    def _answer(self) -> None:
        while not self._closed.is_set():
            # A client that ends early, or is none of ours, must not end this thread.
            with contextlib.suppress(Exception), self._listener.accept() as channel:
                channel.send_bytes(json.dumps(self._open(channel.recv_bytes().decode())).encode())

    def _open(self, url: str) -> dict[str, str]:
        try:
            kept = KeptSnapshot(SourceSettings(url))
        except PenstockError as error:
            return {"error": error.message, "hint": error.hint}
        with self._lock:
            self._kept.append(kept)
        return {"snapshot": kept.name}

    def _end_idle(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                kept = list(self._kept)
            for each in kept:
                if each.is_idle():
                    each.close()
                    with self._lock, contextlib.suppress(ValueError):
                        self._kept.remove(each)


_keepers: dict[int, Keeper] = {}
_keepers_lock = threading.Lock()


def keeper_of_process() -> Keeper:
    """Return the keeper of this process; its threads do not live on in forked ones."""
    with _keepers_lock:
        pid = os.getpid()
        if pid not in _keepers:
            _keepers[pid] = Keeper()
        return _keepers[pid]
