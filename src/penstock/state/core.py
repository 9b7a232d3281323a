"""What all parts of a store share: one lock, one lease, and "the database first, then the cache".

Reads take what the cache has and never wait for a write: a cache is a mapping that is replaced, not changed. A cache
that was never filled fills itself, so that "not loaded" is never taken for "not there". When a write fails in a way
that leaves open whether it happened, all caches are forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import IllegalTransition, LeaseLost, LineageChanged
from penstock.state.lease import DEFAULT_TTL as DEFAULT_LEASE_TTL
from penstock.state.lease import Lease, LeaseInfo, read_lease, take_lease
from penstock.state.records import Database, ResultT, Transaction

ValueT = TypeVar("ValueT")

# Raised by our own rules, before anything was committed.
_REFUSALS = (IllegalTransition, LineageChanged, ValueError)


class Cached(Generic[ValueT]):
    """A value that is read from the database once, and published after each write."""

    def __init__(self, core: StoreCore, load: Callable[[Transaction], ValueT]) -> None:
        self._core = core
        self._load = load
        self._value: ValueT | None = None

    def get(self) -> ValueT:
        """The value as it is known; the first time it is read from the database."""
        value = self._value
        return self.load() if value is None else value

    def load(self) -> ValueT:
        """Read it from the database again."""
        with self._core.lock:
            value = self._core.database.run(self._load, writing=False)
            self._value = value
            return value

    def publish(self, change: Callable[[ValueT], ValueT]) -> None:
        """After a write: what readers see from now on. Nothing, if nobody has asked yet."""
        with self._core.lock:
            if self._value is not None:
                self._value = change(self._value)

    def forget(self) -> None:
        """The next reader asks the database."""
        self._value = None


class StoreCore:
    """The base of the parts that make up a store."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.lock = threading.RLock()
        self._lease: Lease | None = None
        self._caches: list[Cached[object]] = []

    @property
    def pipeline_id(self) -> str:
        """The pipeline whose state this is; one database can hold many."""
        return self.database.pipeline_id

    def acquire_lease(
        self,
        *,
        ttl: float = DEFAULT_LEASE_TTL,
        wait: float = 0.0,
        take_over: bool = False,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """See `stores.LeaseStore`."""
        lease = take_lease(self.database.another(), ttl=ttl, wait=wait, take_over=take_over, on_lost=on_lost)
        with self.lock:
            self._lease = lease
            self.forget()  # another process may have written since
        return lease

    def release_lease(self) -> None:
        """See `stores.LeaseStore`."""
        with self.lock:
            lease = self._lease
        if lease is not None:
            lease.release()

    def get_lease(self) -> LeaseInfo | None:
        """See `stores.LeaseStore`."""
        return self.database.run(read_lease, writing=False)

    def close(self) -> None:
        """Give the lease back and close the database; may be called twice."""
        self.release_lease()
        self.database.close()

    def forget(self) -> None:
        """Fill all caches anew when they are next read."""
        for each in self._caches:
            each.forget()

    def cached(self, load: Callable[[Transaction], ValueT]) -> Cached[ValueT]:
        """A cache of this store."""
        result = Cached(self, load)
        self._caches.append(result)  # pyright: ignore[reportArgumentType]
        return result

    def write(self, work: Callable[[Transaction], ResultT], publish: Callable[[ResultT], None]) -> ResultT:
        """Run `work` under the lease; when it is committed, `publish` brings the caches up to date."""
        with self.lock:
            lease = self.held_lease()

            def fenced(transaction: Transaction) -> ResultT:
                lease.verify(transaction)
                return work(transaction)

            try:
                result = self.database.run(fenced)
            except LeaseLost as error:
                lease.mark_lost(error.message)
                raise
            except _REFUSALS:
                raise
            except BaseException:
                self.forget()
                raise
            publish(result)
            return result

    def held_lease(self) -> Lease:
        """The lease under which this store writes; `LeaseLost` if there is none."""
        lease = self._lease
        if lease is None:
            raise LeaseLost(
                "this process does not drive the pipeline: it holds no lease",
                hint="Only the holder of the lease changes state; others add commands for it.",
            )
        lease.check()
        return lease
