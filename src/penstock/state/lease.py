"""The lease: one process runs a pipeline, and an epoch fences off all others.

The lease is a row that expires, by the database's clock, unless its holder renews it. Each process that acquires it
raises the epoch. Every write carries the epoch of its lease and is refused when a newer one exists, so a process that
was stopped, disconnected or asleep while another took over can change nothing. The holder itself counts from *before*
each renewal, with a clock that keeps running while the machine sleeps, and stops when the lease has expired.

A process that was killed cannot release its lease. On the same machine its successor need not wait until it expires:
the process table shows whether the holder still runs. That is trusted only if everything is comparable: the same boot,
the same process namespace (two containers can have the same host name and pid) and the start time of the process (pids
are reused).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from penstock.errors import LeaseHeld, LeaseLost, PenstockError
from penstock.state.records import Database, PipelineRecord, Transaction

DEFAULT_TTL = 30.0
_POLL_SECONDS = 0.2
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lease."""

    host: str
    pid: int
    machine: str
    """The boot and the process namespace; empty if unknown."""
    started: str
    """The start time of the process in kernel ticks; empty if unknown."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """Who holds the lease, for display."""

    epoch: int
    host: str
    pid: int
    since: datetime
    expires: datetime
    gone: bool
    """The lease has expired or its process has ended: any process can acquire it."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since:%Y-%m-%d %H:%M:%S %Z}"


class Lease:
    """A lease that this process holds; its own thread renews it until `release`."""

    def __init__(
        self,
        database: Database,
        holder: Holder,
        *,
        ttl: float,
        take_over: bool = False,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> None:
        self.holder = holder
        self.ttl = ttl
        self._take_over = take_over
        self._database = database
        self._token = uuid.uuid4().hex
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._reason: str | None = None
        asked_at = _now()
        self.epoch = database.run(self._take)
        self._deadline = asked_at + ttl
        self._thread = threading.Thread(target=self._keep, name="penstock-lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True if this lease no longer permits writing."""
        return self._reason is not None

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is held now. Cheap: call it before every write."""
        if self._reason is None and _now() < self._deadline:
            return
        # Perhaps the machine only slept: the renewal decides.
        with self._changed:
            self._wanted.set()
            self._changed.wait_for(lambda: self._reason is not None or _now() < self._deadline, self.ttl / 3)
        if self._reason is None and _now() >= self._deadline:
            self.mark_lost("it could not be renewed in time")
        if self._reason is not None:
            raise self._error()

    def mark_lost(self, reason: str) -> None:
        """Refuse all writes from now on; the lease's thread calls `on_lost`."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
                logger.error(
                    "lease lost pipeline=%s epoch=%d reason=%s", self._database.pipeline_id, self.epoch, reason
                )
            self._changed.notify_all()
            self._wanted.set()

    def release(self) -> None:
        """Release the lease, so that the next process does not have to wait. May be called again."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wanted.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            if not self.lost:
                self._database.run(self._give_back)
        except PenstockError as error:
            logger.warning("lease not released, it will expire: %s", error)
        finally:
            if self._reason is None:
                self._reason = "it was released"
            self._database.close()

    def verify(self, transaction: Transaction) -> None:
        """Raise `LeaseLost`, within a transaction, if there is a newer epoch."""
        record = _read(transaction)
        if record is None or record.epoch != self.epoch or record.holder != self._token:
            newer = describe(record, transaction.now())
            raise LeaseLost(
                f"the lease with epoch {self.epoch} has ended: "
                + (f"{newer} runs the pipeline" if newer else "it was released"),
                epoch=self.epoch,
            )

    def _take(self, transaction: Transaction) -> int:
        now = transaction.now()
        record = _read(transaction)
        if record is not None and record.holder == self._token:
            return record.epoch  # the answer to an earlier attempt was lost
        current = describe(record, now)
        if current is not None and not current.gone and not self._take_over:
            raise LeaseHeld(
                f"{current} runs the pipeline",
                host=current.host,
                pid=current.pid,
                since=current.since,
                expires=current.expires,
            )
        epoch = 1 if record is None else record.epoch + 1
        transaction.put([self._record(epoch, now, now)])
        return epoch

    def _renew(self, transaction: Transaction) -> None:
        self.verify(transaction)
        record = _read(transaction)
        assert record is not None
        transaction.put([replace(record, expires=transaction.now() + timedelta(seconds=self.ttl))])

    def _give_back(self, transaction: Transaction) -> None:
        record = _read(transaction)
        if record is not None and record.holder == self._token:
            transaction.put([PipelineRecord(record.epoch, None, None, None, None, None, None, None)])

    def _record(self, epoch: int, since: datetime, now: datetime) -> PipelineRecord:
        holder, expires = self.holder, now + timedelta(seconds=self.ttl)
        return PipelineRecord(
            epoch, self._token, holder.host, holder.pid, holder.machine, holder.started, since, expires
        )

    def _keep(self) -> None:
        pause = self.ttl / 3
        while not self._ended.is_set() and not self.lost:
            self._wanted.wait(pause)
            self._wanted.clear()
            if self._ended.is_set() or self.lost:
                break
            asked_at = _now()
            try:
                self._database.run(self._renew)
            except LeaseLost as error:
                self.mark_lost(error.message)
            except PenstockError as error:
                logger.warning("lease not renewed, trying again: %s", error)
                pause = self.ttl / 20
                if _now() >= self._deadline:
                    self.mark_lost("it could not be renewed in time")
            else:
                pause = self.ttl / 3
                with self._changed:
                    self._deadline = asked_at + self.ttl
                    self._changed.notify_all()
        if self.lost and self._on_lost is not None and not self._ended.is_set():
            self._on_lost(self._error())

    def _error(self) -> LeaseLost:
        return LeaseLost(f"the lease is lost: {self._reason}", epoch=self.epoch)


def take_lease(
    database: Database,
    *,
    ttl: float,
    wait: float,
    take_over: bool = False,
    on_lost: Callable[[LeaseLost], None] | None = None,
) -> Lease:
    """Acquire the lease, waiting up to `wait` seconds for another holder; the lease then owns `database`."""
    deadline = _now() + wait
    while True:
        try:
            return Lease(database, this_process(), ttl=ttl, take_over=take_over, on_lost=on_lost)
        except LeaseHeld:
            if _now() >= deadline:
                database.close()
                raise
        except BaseException:
            database.close()
            raise
        time.sleep(_POLL_SECONDS)


def read_lease(transaction: Transaction) -> LeaseInfo | None:
    """Return who holds the lease, or None."""
    return describe(_read(transaction), transaction.now())


def describe(record: PipelineRecord | None, now: datetime) -> LeaseInfo | None:
    """Return who holds a lease, from its record, or None."""
    if record is None or record.holder is None or record.since is None or record.expires is None:
        return None
    holder = Holder(record.host or "", record.pid or 0, record.machine or "", record.started or "")
    over = record.expires <= now or is_gone(holder)
    return LeaseInfo(record.epoch, holder.host, holder.pid, record.since, record.expires, over)


def this_process() -> Holder:
    """Return this process."""
    return Holder(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()) or "")


def is_gone(holder: Holder) -> bool:
    """Return True if the process has certainly ended, False if that is unknown."""
    if not holder.machine or not holder.started or holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's process: /proc decides
    started = _started(holder.pid)
    return started is not None and started != holder.started


def _read(transaction: Transaction) -> PipelineRecord | None:
    return next(iter(transaction.rows(PipelineRecord)), None)


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return the start time of a process; `ended` for a zombie, None without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]
