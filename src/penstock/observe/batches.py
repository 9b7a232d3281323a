"""What happened to a batch: its changes and the duration of each stage, for people and for traces.

A record is made once per batch. `current_batch` is the record of the batch that a thread works on, so that code that
runs jobs or commits can add its part without being told.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

BATCHES = 200
"""Records that an output keeps."""
TABLE_BATCHES, TABLES = 10, 1000
"""Records that it keeps of each table, and of how many tables: those that changed last."""
SPANS = 100
"""Most spans of a batch; a batch that is written in many parts has more."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a batch."""

    name: str
    begun: float
    """Unix time."""
    seconds: float


@dataclass(slots=True)
class BatchRecord:
    """One batch. Only the thread that works on it changes it."""

    worker: str
    """`apply`, or `copy` for changes that complete a copy."""
    begun: float
    """Unix time."""
    trace_id: str | None = None
    """32 hexadecimal digits; None unless traces are sent."""
    position: str = ""
    """The boundary after it."""
    transactions: int = 0
    rows: int = 0
    bytes: int = 0
    """Of files of the spool."""
    first_commit: float = 0.0
    last_commit: float = 0.0
    """Unix time by the source's clock; 0 without transactions."""
    operations: Counter[str] = field(default_factory=Counter[str])
    """Number of changes by operation."""
    tables: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    """The same by table, until it is kept."""
    table_count: int = 0
    spans: list[Span] = field(default_factory=list[Span])
    seconds: float = 0.0
    error: str | None = None
    """The class of the error that ended it."""

    def add_table(self, table: str, operations: Counter[str]) -> None:
        """Add the changes of a table that were written."""
        self.tables[table] = self.tables.get(table, Counter()) + operations
        self.operations += operations

    def add_span(self, name: str, begun: float, seconds: float) -> None:
        """Add a part that has ended."""
        if len(self.spans) < SPANS:
            self.spans.append(Span(name, begun, seconds))

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        found: Counter[str] = Counter()
        for span in self.spans:
            found[span.name] += span.seconds  # pyright: ignore[reportArgumentType] (seconds, not a count)
        return dict(found)


Listener = Callable[[BatchRecord], None]

_current: ContextVar[BatchRecord | None] = ContextVar("penstock_batch", default=None)


def current_batch() -> BatchRecord | None:
    """The record of the batch that this thread works on."""
    return _current.get()


@contextmanager
def spanned(name: str) -> Generator[None]:
    """Add the block to the batch that this thread works on, if there is one."""
    record = _current.get()
    if record is None:
        yield
        return
    begun, clock = time.time(), time.perf_counter()
    try:
        yield
    finally:
        record.add_span(name, begun, time.perf_counter() - clock)


class RecentBatches:
    """The last batches of an output, and of each of its tables; thread-safe and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: deque[BatchRecord] = deque(maxlen=BATCHES)
        self._tables: OrderedDict[str, deque[tuple[BatchRecord, Mapping[str, int]]]] = OrderedDict()
        self.new_trace: Callable[[], str | None] = lambda: None
        """Makes the id of a trace."""
        self.listener: Listener | None = None
        """Called for each batch; must not block."""

    @contextmanager
    def recorded(self, worker: str) -> Generator[BatchRecord]:
        """Record the block as a batch, or as a part of the one that this thread works on; nothing if it is empty."""
        known = _current.get()
        if known is not None:
            yield known
            return
        record = BatchRecord(worker, time.time(), self.new_trace())
        clock = time.perf_counter()
        token = _current.set(record)
        try:
            yield record
        except BaseException as error:
            record.error = type(error).__name__
            raise
        finally:
            _current.reset(token)
            record.seconds = time.perf_counter() - clock
            if record.position:
                self._keep(record)

    def all(self) -> list[BatchRecord]:
        """The last batches, newest first."""
        with self._lock:
            return list(reversed(self._all))

    def of(self, table: str) -> list[tuple[BatchRecord, Mapping[str, int]]]:
        """The last batches with changes of a table, newest first, with their number by operation."""
        with self._lock:
            return list(reversed(self._tables.get(table, ())))

    def _keep(self, record: BatchRecord) -> None:
        tables, record.tables = record.tables, {}
        record.table_count = len(tables)
        with self._lock:
            self._all.append(record)
            for table, operations in tables.items():
                self._tables.setdefault(table, deque(maxlen=TABLE_BATCHES)).append((record, operations))
                self._tables.move_to_end(table)
            while len(self._tables) > TABLES:
                self._tables.popitem(last=False)
        if self.listener is not None:
            self.listener(record)
