"""The base of a store's parts: one lock, one lease, and a cache that is updated after the database.

Reads come from the cache and never wait for a write: a cache is a mapping that is replaced, not changed. A cache that
was never filled fills itself, so that "not loaded" is never taken for "not there". After a write whose outcome is
unknown all caches are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import IllegalTransition, LeaseLost, LineageChanged
from penstock.state.lease import DEFAULT_TTL, Lease, LeaseInfo, read_lease, take_lease
from penstock.state.records import Database, ResultT, Transaction

ValueT = TypeVar("ValueT")

# Raised by our own rules, before anything was committed.
_REFUSALS = (IllegalTransition, LineageChanged, ValueError)


class Cached(Generic[ValueT]):
    """A value that is read from the database once, and replaced after each write."""

    def __init__(self, core: StoreCore, load: Callable[[Transaction], ValueT]) -> None:
        self._core = core
        self._load = load
        self._value: ValueT | None = None

    def get(self) -> ValueT:
        """Return the cached value; the first call reads it from the database."""
        value = self._value
        return self.load() if value is None else value

    def load(self) -> ValueT:
        """Read the value from the database again."""
        with self._core.lock:
            value = self._value = self._core.read(self._load)
            return value

    def publish(self, change: Callable[[ValueT], ValueT]) -> None:
        """Replace the value after a write, unless it was never read."""
        with self._core.lock:
            if self._value is not None:
                self._value = change(self._value)

    def forget(self) -> None:
        """Drop the value: the next `get` reads the database."""
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
        ttl: float = DEFAULT_TTL,
        wait: float = 0.0,
        take_over: bool = False,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """Acquire the lease for this store object, and renew it in the background until `release_lease` or `close`.

        Raises `LeaseHeld`, with host, pid and since, if another process still holds it after `wait` seconds. The lease
        of a process that has ended on this machine is free at once, any other after its `ttl`. With `take_over` the
        lease is taken from its holder, which is fenced off and notices within a third of its `ttl`. `on_lost` is called
        at most once, from the lease's own thread. All caches are dropped, since another process may have written.
        """
        lease = take_lease(self.database.another(), ttl=ttl, wait=wait, take_over=take_over, on_lost=on_lost)
        with self.lock:
            self._lease = lease
            self.forget()
        return lease

    def release_lease(self) -> None:
        """Release the lease; this store writes nothing more. May be called again."""
        with self.lock:
            lease = self._lease
        if lease is not None:
            lease.release()

    def get_lease(self) -> LeaseInfo | None:
        """Return who holds the lease, or None. Reads the database."""
        return self.read(read_lease)

    def close(self) -> None:
        """Release the lease and close the database; may be called again."""
        self.release_lease()
        self.database.close()

    def forget(self) -> None:
        """Drop all caches."""
        for each in self._caches:
            each.forget()

    def cached(self, load: Callable[[Transaction], ValueT]) -> Cached[ValueT]:
        """Return a new cache of this store."""
        result = Cached(self, load)
        self._caches.append(result)  # pyright: ignore[reportArgumentType]
        return result

    def read(self, work: Callable[[Transaction], ResultT]) -> ResultT:
        """Run `work` in a transaction that only reads."""
        return self.database.run(work, writing=False)

    def write(
        self, work: Callable[[Transaction], ResultT], publish: Callable[[ResultT], None] = lambda _: None
    ) -> ResultT:
        """Run `work` under the lease; after the commit, `publish` updates the caches."""
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
        """Return the lease under which this store writes; raise `LeaseLost` if there is none."""
        lease = self._lease
        if lease is None:
            raise LeaseLost(
                "this process does not hold the lease of the pipeline",
                hint="Only the process that holds the lease may change the state; other processes send it commands.",
            )
        lease.check()
        return lease
