"""One driver per pipeline: a lease that is renewed while its holder lives, and an epoch that fences off everybody else.

The lease is a row with a time at which it runs out, by the database's clock. Whoever takes it raises the epoch; every
write carries the epoch of its lease and is refused when a newer one exists. So a process that was stopped, cut off or
asleep while another took over changes nothing any more, whatever it still believes. On its own side the holder counts
from *before* each renewal, with a clock that goes on while the machine sleeps, and stops when the time is over.
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
    """A process, as it is named in a lease."""

    host: str
    pid: int
    machine: str
    """The boot and the process namespace; empty where the system does not say."""
    started: str
    """When the process began, in the kernel's own measure; empty where the system does not say."""


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """Who drives the pipeline, for people who ask."""

    epoch: int
    host: str
    pid: int
    since: datetime
    expires: datetime
    gone: bool
    """It has run out, or its process has ended: the next to ask gets it."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since:%Y-%m-%d %H:%M:%S %Z}"


class Lease:
    """A lease that is held, and renewed by a thread of its own until `release`."""

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
        """Whether nothing may be written under this lease any more."""
        return self._reason is not None

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is held now. Cheap; for whoever writes anything anywhere."""
        if self._reason is None and _now() < self._deadline:
            return
        # Late, perhaps only because the machine slept: the renewal decides.
        with self._changed:
            self._wanted.set()
            self._changed.wait_for(lambda: self._reason is not None or _now() < self._deadline, self.ttl / 3)
        if self._reason is None and _now() >= self._deadline:
            self.mark_lost("it could not be renewed in time")
        if self._reason is not None:
            raise self._error()

    def mark_lost(self, reason: str) -> None:
        """Nothing is written from now on; `on_lost` is called by the lease's thread."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
                logger.error(
                    "lease lost pipeline=%s epoch=%d reason=%s", self._database.pipeline_id, self.epoch, reason
                )
            self._changed.notify_all()
            self._wanted.set()

    def release(self) -> None:
        """Give the lease back, so that the next process need not wait. May be called twice."""
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
            logger.warning("lease not given back, it will run out: %s", error)
        finally:
            if self._reason is None:
                self._reason = "it was given back"
            self._database.close()

    def verify(self, transaction: Transaction) -> None:
        """Inside a transaction: refuse to go on if there is a newer epoch."""
        record = _read(transaction)
        if record is None or record.epoch != self.epoch or record.holder != self._token:
            newer = describe(record, transaction.now())
            raise LeaseLost(
                f"the lease of epoch {self.epoch} is over: "
                + (f"the pipeline is driven by {newer}" if newer else "it was given back"),
                epoch=self.epoch,
            )

    def _take(self, transaction: Transaction) -> int:
        now = transaction.now()
        record = _read(transaction)
        if record is not None and record.holder == self._token:
            return record.epoch  # the answer to an earlier attempt got lost
        current = describe(record, now)
        if current is not None and not current.gone and not self._take_over:
            raise LeaseHeld(
                f"the pipeline is driven by {current}",
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
    """Take the lease, waiting up to `wait` seconds for another holder; the lease owns `database` from then on."""
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
    """Who drives the pipeline now; None if nobody does."""
    return describe(_read(transaction), transaction.now())


def describe(record: PipelineRecord | None, now: datetime) -> LeaseInfo | None:
    """A lease's row in words; None if nobody holds it."""
    if record is None or record.holder is None or record.since is None or record.expires is None:
        return None
    holder = Holder(record.host or "", record.pid or 0, record.machine or "", record.started or "")
    over = record.expires <= now or is_gone(holder)
    return LeaseInfo(record.epoch, holder.host, holder.pid, record.since, record.expires, over)


def this_process() -> Holder:
    """The process that asks."""
    return Holder(socket.gethostname(), os.getpid(), _machine(), _started(os.getpid()) or "")


def is_gone(holder: Holder) -> bool:
    """Whether the process has certainly ended; false when one cannot know."""
    if not holder.machine or not holder.started or holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to somebody else; what /proc says decides, if it says anything
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
    """The start time of a process; `ended` for one that only waits to be collected, None where /proc is silent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]
