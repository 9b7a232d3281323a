"""Builds documents and writes them to the sink, in tasks.

`DocumentWriter` turns keys into documents in waves, so memory does not grow with their number. A wave is one job,
whatever the number of indexes. A few documents are built in this process instead: a Spark job costs more than they do.

Jobs pickle: a query, the source settings, and a sink. Their results are small: counts, rejections, and the keys of
removed documents if they are wanted.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import pq

from penstock.destinations.base import Tasks
from penstock.documents.base import DOCUMENT_SCHEMA, BatchPolicy, FailurePolicies, Rejection, Sink
from penstock.documents.build import BuildQuery, build_documents, build_range
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.statements import run_statement
from penstock.errors import ServerUnavailable, TableRewritten
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.workers.process_tasks import ProcessTasks

SESSION: Mapping[str, str] = {**NO_TIMEOUTS, "lock_timeout": "200"}
"""No timeout for rows, a short one for locks: in a deadlock with a session that truncates or alters several tables,
this session gives way and retries long before the server chooses a victim."""

_KEPT = 4
"""Idle connections to keep; a Python worker of Spark needs one."""
# Both read the current state, whatever snapshot the transaction has.
_CURRENT = """
    select pg_catalog.format('%I.%I', t.object_names[1], t.object_names[2]),
           pg_catalog.pg_relation_filenode($1::oid)::int8
    from pg_catalog.pg_identify_object_as_address(1259::oid, $1::oid, 0) t
"""


@dataclass(frozen=True, slots=True)
class DocumentsSettings:
    """How changes are grouped, and how much work is done at once."""

    batch: BatchPolicy = field(default_factory=lambda: BatchPolicy(max_changes=10_000))
    failure_policies: FailurePolicies = field(default_factory=FailurePolicies)
    skip_backfill: bool = False
    """Fill no index, whatever the sink says: only follow changes."""
    piece_changes: int = 20_000
    """A larger transaction is resolved in pieces and confirmed as a whole."""
    chunk_documents: int = 1_000
    """Documents per statement and per write to the sink."""
    wave_chunks: int = 32
    """Chunks per job; bounds the number of keys in memory."""
    local_documents: int = 2_000
    """Up to this many documents are built without a job. They take 0.1 s; a Spark job takes as long to start on an idle
    machine, and over a second on a busy one."""
    fan_out_documents: int = 20_000
    """If a piece of changes affects more documents of one index, they are built beside the stream, so that other
    changes do not wait."""
    range_bytes: int = 8 << 20
    """Size of a backfill range of the root table, TOAST included: a second or two of work."""


class ConnectionPool:
    """Connections that tasks of this process reuse; a fork does not use those that it inherited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, SourceSettings], list[psycopg.Connection[Any]]] = {}

    @contextmanager
    def borrow(self, source: SourceSettings) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection in autocommit to this thread; it is closed after an error."""
        key = (os.getpid(), source)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            connection = idle.pop() if idle else None
        connection = connection or connect(source, Role.DOCUMENTS, parameters=SESSION)
        try:
            yield connection
        except BaseException as error:
            connection.close()
            if isinstance(error, ServerUnavailable):
                self.clear()  # the others are broken as well
            raise
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            connection.close()
            return
        with self._lock:
            if len(idle) < _KEPT:
                idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close idle connections."""
        with self._lock:
            waiting = [each for (process, _), idle in self._idle.items() if process == os.getpid() for each in idle]
            self._idle.clear()
        for each in waiting:
            each.close()


POOL = ConnectionPool()
"""The pool of this process."""


class Generations:
    """Lets many threads write documents, or one begin or end a generation. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = 0
        self._changing = 0
        self._alone = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep generations from changing meanwhile."""
        with self._changed:
            # A waiting change goes first, or writers could keep it waiting forever.
            self._changed.wait_for(lambda: not self._changing)
            self._writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep others from writing meanwhile."""
        with self._changed:
            self._changing += 1
            self._changed.wait_for(lambda: not self._writing and not self._alone)
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._changing -= 1
                self._alone = False
                self._changed.notify_all()


class SharedSink:
    """A sink and the lock that serializes its users. A pickled copy has its own lock."""

    def __init__(self, sink: Sink, lock: threading.RLock | None = None) -> None:
        self.sink = sink
        self.lock = lock or threading.RLock()

    def __getstate__(self) -> Sink:
        return self.sink

    def __setstate__(self, sink: Sink) -> None:
        self.sink = sink
        self.lock = threading.RLock()

    def write(self, index: str, built: pa.Table) -> tuple[Rejection, ...]:
        """Write documents (`penstock.documents.build.BUILT`), durably; returns the rejections."""
        name = pa.repeat(pa.scalar(index, pa.string()), built.num_rows)
        with self.lock:
            self.sink.write(pa.Table.from_arrays([name, *built.columns], schema=DOCUMENT_SCHEMA))
            return self.sink.flush(False).rejections


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a chunk of documents, or of a range."""

    index: str
    documents: int
    """The number of bodies and removals."""
    bodies: int
    rejections: tuple[Rejection, ...] = ()
    removed: tuple[list[str], ...] = ()
    """The keys of removed documents, one list per key column; only for indexes in `BuildJob.recorded`."""
    taken: tuple[str, ...] = ()
    """Quarantined documents that the sink has now accepted."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Builds the documents of some keys from the current rows, and writes them."""

    source: SourceSettings
    queries: Mapping[str, BuildQuery]
    sink: SharedSink
    recorded: frozenset[str] = frozenset()
    """Indexes whose removals are reported."""
    quarantined: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Ids of quarantined documents by index."""

    def __call__(self, keys: ResolvedKeys) -> Outcome:
        with POOL.borrow(self.source) as connection:
            built = build_documents(connection, self.queries[keys.index], keys.keys)
        gone = pc.is_null(built.column("body"))
        removed: tuple[list[str], ...] = ()
        count = int(pc.sum(gone).as_py() or 0)
        if count and keys.index in self.recorded:
            removed = tuple(pa.array(each, pa.string()).filter(gone.combine_chunks()).to_pylist() for each in keys.keys)
        rejections = self.sink.write(keys.index, built)
        taken = _taken(built, self.quarantined.get(keys.index), rejections)
        return Outcome(keys.index, len(keys), len(keys) - count, rejections, removed, taken)


@dataclass(frozen=True, slots=True)
class HeapRange:
    """A range of a root table."""

    part: int
    oid: int
    filenode: int
    """The heap's file when the ranges were planned."""
    condition: str


@dataclass(frozen=True, slots=True)
class RangeJob:
    """Builds the documents of a range of the root table, and writes them to the generation being filled."""

    source: SourceSettings
    query: BuildQuery
    sink: SharedSink
    chunk: int
    quarantined: frozenset[str] = frozenset()

    def __call__(self, part: HeapRange) -> Outcome:
        with POOL.borrow(self.source) as connection, connection.transaction():
            heap = lock_heap(connection, part)
            return self._write(build_range(connection, self.query, heap, part.condition, chunk=self.chunk))

    def _write(self, pieces: Iterable[pa.Table]) -> Outcome:
        documents = bodies = 0
        rejections: list[Rejection] = []
        taken: list[str] = []
        for built, refused in self._overlapped(pieces):
            documents += built.num_rows
            bodies += built.num_rows - built.column("body").null_count
            rejections += refused
            taken += _taken(built, self.quarantined, refused)
        return Outcome(self.query.index, documents, bodies, tuple(rejections), (), tuple(taken))

    def _overlapped(self, pieces: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, tuple[Rejection, ...]]]:
        """Write each piece while the server builds the next one; yields pieces with their rejections."""
        with ThreadPoolExecutor(1, thread_name_prefix="documents-range") as writer:
            before: tuple[pa.Table, Future[tuple[Rejection, ...]]] | None = None
            for built in pieces:
                if before is not None:
                    yield before[0], before[1].result()
                before = built, writer.submit(self.sink.write, self.query.index, built)
            if before is not None:
                yield before[0], before[1].result()


def _taken(built: pa.Table, quarantined: frozenset[str] | None, refused: Sequence[Rejection]) -> tuple[str, ...]:
    if not quarantined:
        return ()
    ids = built.column("id")
    known = ids.filter(pc.is_in(ids, value_set=pa.array(sorted(quarantined), pa.string()))).to_pylist()
    return tuple(set(known).difference(each.id for each in refused))


def lock_heap(connection: psycopg.Connection[Any], part: HeapRange) -> str:
    """Lock a heap against rewriting until the transaction ends, and return its quoted name.

    Raises `TableRewritten` if it was rewritten before. The next statement has a newer snapshot, so it sees every
    current row of the heap.
    """

    def look() -> tuple[Any, ...]:
        return next(iter(run_statement(connection, _CURRENT, [part.oid], doing)), (None, None))

    doing = "read a table of an index"
    heap, _ = look()
    if heap is not None:
        run_statement(connection, f"lock table only {heap} in access share mode", [], doing)
        # The locked heap is the planned one, and still has the file that the ranges refer to.
        if look() == (heap, part.filenode):
            return heap
    name = heap or "a table of an index"
    raise TableRewritten(f"{name} was rewritten, truncated, renamed or dropped while documents were built from it")


@dataclass(slots=True)
class WriteReport:
    """What was written for a batch, or for a part of one."""

    documents: Counter[str] = field(default_factory=Counter[str])
    """By index."""
    rejections: list[Rejection] = field(default_factory=list[Rejection])

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for each in outcomes:
            self.documents[each.index] += each.documents
            self.rejections += each.rejections


class DocumentWriter:
    """Builds and writes documents for one thread."""

    def __init__(
        self,
        settings: DocumentsSettings,
        tasks: Tasks,
        job: Callable[[], BuildJob],
        generations: Generations,
        on_written: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """`job` is called for each wave, since generations change. `on_written` receives the outcomes of each wave."""
        self._settings = settings
        self._tasks = tasks
        self._here = ProcessTasks()
        self._job = job
        self._generations = generations
        self._on_written = on_written

    def write(self, keys: Iterable[ResolvedKeys]) -> WriteReport:
        """Build and write documents."""
        written = WriteReport()
        for wave in self._waves(keys):
            few = sum(map(len, wave)) <= self._settings.local_documents
            tasks = self._here if few else self._tasks
            # No generation may begin or end while documents are being written.
            with self._generations.writing():
                outcomes = tasks.run(wave, self._job(), description=_description(wave))
                self._on_written(outcomes)
            written.add(outcomes)
        return written

    def _waves(self, keys: Iterable[ResolvedKeys]) -> Iterator[list[ResolvedKeys]]:
        source = iter(keys)
        while wave := list(islice(source, self._settings.wave_chunks)):
            yield wave


def _description(wave: Sequence[ResolvedKeys]) -> str:
    indexes = sorted({each.index for each in wave})
    return f"build {sum(map(len, wave))} documents of {', '.join(indexes)}"
