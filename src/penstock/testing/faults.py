"""Faults on demand: a wrapper that makes any destination fail, hang or lose answers.

    faulty = FaultyDestination(destination)
    faulty.reject("public.orders")              # this table fails, the others do not
    faulty.fail_after("write_events")           # the write succeeds, and its answer is lost
    with faulty.hold("write_events") as hold:   # the next call waits
        hold.wait_until_reached()
        …

Give the pipeline the wrapper instead of the destination. All methods may be called from any thread at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from penstock.changes.batch import EventBatch
from penstock.copy.resume import FinishedRanges
from penstock.destinations.base import (
    Capabilities,
    CopyRows,
    Destination,
    DestinationContext,
    ResumingDestination,
    TableResult,
    WriteHandle,
    WriteResult,
    completed,
)
from penstock.errors import PenstockError
from penstock.lsn import Lsn
from penstock.schema import TableSchema

Method = Literal["startup", "drop_table_for_copy", "write_table_rows", "write_events", "shutdown"]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a destination method."""

    method: Method
    tables: tuple[str, ...]
    batch: EventBatch | None = None


@dataclass(slots=True)
class Hold:
    """Calls that wait until they are released."""

    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait_until_reached(self, timeout: float = 30.0) -> None:
        """Wait until a call is held; raise TimeoutError if none arrives."""
        if not self.reached.wait(timeout):
            raise TimeoutError("no call arrived")

    def release(self) -> None:
        """Let the held calls continue."""
        self.released.set()


@dataclass(slots=True)
class _Failure:
    error: BaseException
    left: int | None
    """How many more times to fail; None for always."""

    def take(self) -> BaseException | None:
        if self.left is None:
            return self.error
        if self.left <= 0:
            return None
        self.left -= 1
        return self.error


class FaultyDestination:
    """Behaves like the destination inside it, unless told otherwise."""

    def __init__(self, inner: Destination) -> None:
        self.inner = inner
        self.calls: list[Call] = []
        self._condition = threading.Condition()
        self._rejected: dict[str, _Failure] = {}
        self._before: dict[Method, _Failure] = {}
        self._after: dict[Method, _Failure] = {}
        self._holds: dict[Method, Hold] = {}
        self._delays: dict[Method, float] = {}

    # Faults

    def reject(self, table: str, error: PenstockError | None = None, *, times: int | None = None) -> None:
        """Refuse the rows and changes of one table (`"public.orders"`), always or the next few times."""
        failure = _Failure(error or PenstockError(f"a test rejects {table}", table=table), times)
        with self._condition:
            self._rejected[table] = failure

    def accept(self, table: str) -> None:
        """Stop rejecting a table."""
        with self._condition:
            self._rejected.pop(table, None)

    def fail_before(self, method: Method, error: BaseException | None = None, *, times: int | None = 1) -> None:
        """Raise without doing anything, as if the destination were unreachable."""
        with self._condition:
            self._before[method] = _Failure(error or PenstockError(f"a test makes {method} fail"), times)

    def fail_after(self, method: Method, error: BaseException | None = None, *, times: int | None = 1) -> None:
        """Do the work and then raise: the write took effect, and its answer is lost."""
        with self._condition:
            self._after[method] = _Failure(error or PenstockError(f"a test loses the answer to {method}"), times)

    @contextmanager
    def hold(self, method: Method) -> Iterator[Hold]:
        """Hold calls of a method until the block ends or they are released."""
        hold = Hold()
        with self._condition:
            self._holds[method] = hold
        try:
            yield hold
        finally:
            with self._condition:
                self._holds.pop(method, None)
            hold.release()

    def slow(self, method: Method, seconds: float) -> None:
        """Delay every call of a method; 0 removes the delay."""
        with self._condition:
            self._delays[method] = seconds

    def wait_for(self, wanted: Callable[[list[Call]], bool], timeout: float = 30.0) -> None:
        """Wait until the calls so far satisfy a condition; raise TimeoutError if they never do."""
        with self._condition:
            if not self._condition.wait_for(lambda: wanted(self.calls), timeout):
                raise TimeoutError(f"expected calls did not arrive; so far: {[call.method for call in self.calls]}")

    # The destination

    @property
    def name(self) -> str:
        """See `Destination`."""
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        return self.inner.capabilities

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._around(Call("startup", ()), lambda: self.inner.startup(context))

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        call = Call("drop_table_for_copy", (str(schema),))
        self._around(call, lambda: self.inner.drop_table_for_copy(schema, attempt))

    def finished_ranges(self, schema: TableSchema, copy: str) -> Sequence[FinishedRanges]:
        """See `ResumingDestination`."""
        inner = self.inner
        return inner.finished_ranges(schema, copy) if isinstance(inner, ResumingDestination) else ()

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""

        def work() -> None:
            error = self._rejection(str(schema))
            if error is not None:
                raise error
            self.inner.write_table_rows(schema, rows)

        self._around(Call("write_table_rows", (str(schema),)), work)

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""

        def work() -> WriteHandle:
            errors: dict[int, TableResult] = {}
            for table in batch.tables:
                error = self._rejection(table.table)
                if isinstance(error, PenstockError):
                    errors[table.table_id] = TableResult(durable=False, error=error)
            kept = tuple(table for table in batch.tables if table.table_id not in errors)
            result = self.inner.write_events(replace(batch, tables=kept)).result()
            return completed(WriteResult({**result.tables, **errors}))

        call = Call("write_events", tuple(table.table for table in batch.tables), batch)
        return self._around(call, work)

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        return self.inner.position(table_id)

    def shutdown(self) -> None:
        """See `Destination`."""
        self._around(Call("shutdown", ()), self.inner.shutdown)

    def __getattr__(self, name: str) -> Any:
        """Attributes that only the inner destination has, such as `rows` of the memory destination."""
        return getattr(self.inner, name)

    def _around(self, call: Call, work: Callable[[], _Result]) -> _Result:
        with self._condition:
            self.calls.append(call)
            self._condition.notify_all()
            hold, delay = self._holds.get(call.method), self._delays.get(call.method, 0.0)
        if hold is not None:
            hold.reached.set()
            hold.released.wait()
        if delay:
            threading.Event().wait(delay)
        self._fail(self._before, call.method)
        result = work()
        self._fail(self._after, call.method)
        return result

    def _fail(self, failures: dict[Method, _Failure], method: Method) -> None:
        with self._condition:
            failure = failures.get(method)
            error = None if failure is None else failure.take()
        if error is not None:
            raise error

    def _rejection(self, table: str) -> BaseException | None:
        with self._condition:
            failure = self._rejected.get(table)
            return None if failure is None else failure.take()
