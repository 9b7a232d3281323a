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
"""Patient with rows, not with locks: in a deadlock with somebody who empties or alters several tables we give way, long
before the server looks for a victim, and try again."""

_KEPT = 4
"""Connections that wait for the next task; in a Python worker of Spark one is enough."""
# Both answer for now, whatever snapshot the transaction has.
_CURRENT = """
    select pg_catalog.format('%I.%I', t.object_names[1], t.object_names[2]),
           pg_catalog.pg_relation_filenode($1::oid)::int8
    from pg_catalog.pg_identify_object_as_address(1259::oid, $1::oid, 0) t
"""


@dataclass(frozen=True, slots=True)
class DocumentsSettings:
    """How changes are grouped, and how much is done at once."""

    batch: BatchPolicy = field(default_factory=lambda: BatchPolicy(max_changes=10_000))
    failure_policies: FailurePolicies = field(default_factory=FailurePolicies)
    skip_backfill: bool = False
    """Nothing is built from tables, whatever the sink says: only changes are followed."""
    piece_changes: int = 20_000
    """A transaction with more is resolved in pieces, and confirmed as a whole."""
    chunk_documents: int = 1_000
    """Documents of one statement, and of one write to the sink."""
    wave_chunks: int = 32
    """Chunks of one job; how many keys are in memory at the same time follows from it."""
    local_documents: int = 2_000
    """As many documents, and no more, are built without a job. These take 0.1 s; a Spark job takes as long to start on
    an idle machine, and over a second on a busy one."""
    fan_out_documents: int = 20_000
    """Of one index and one piece of changes. If there are more, they are built beside the stream: others do not wait
    for them."""
    range_bytes: int = 8 << 20
    """Of the root table, TOAST included, in one range of a backfill: a second or two of work."""


class ConnectionPool:
    """Belongs to a process; what a fork has inherited is not used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, SourceSettings], list[psycopg.Connection[Any]]] = {}

    @contextmanager
    def borrow(self, source: SourceSettings) -> Iterator[psycopg.Connection[Any]]:
        """A connection in autocommit, for this thread alone; after an error it is not used again."""
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
                self.clear()  # the others are cut off as well
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
        """Close what waits."""
        with self._lock:
            waiting = [each for (process, _), idle in self._idle.items() if process == os.getpid() for each in idle]
            self._idle.clear()
        for each in waiting:
            each.close()


POOL = ConnectionPool()
"""The one of this process."""


class Generations:
    """May be used from any thread; not again by one that is inside already."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = 0
        self._changing = 0
        self._alone = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the generations stay what they are."""
        with self._changed:
            # Who waits to change them goes first, or there would always be somebody who writes.
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
        """Inside, nobody writes."""
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
    """A sink and the lock that keeps its users apart. In another process it is a copy, with a lock of its own."""

    def __init__(self, sink: Sink, lock: threading.RLock | None = None) -> None:
        self.sink = sink
        self.lock = lock or threading.RLock()

    def __getstate__(self) -> Sink:
        return self.sink

    def __setstate__(self, sink: Sink) -> None:
        self.sink = sink
        self.lock = threading.RLock()

    def write(self, index: str, built: pa.Table) -> tuple[Rejection, ...]:
        """Documents as `penstock.documents.build.BUILT`; durable afterwards, but for those that are refused."""
        name = pa.repeat(pa.scalar(index, pa.string()), built.num_rows)
        with self.lock:
            self.sink.write(pa.Table.from_arrays([name, *built.columns], schema=DOCUMENT_SCHEMA))
            return self.sink.flush(False).rejections


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk of documents, or of a range."""

    index: str
    documents: int
    """Bodies and removals."""
    bodies: int
    rejections: tuple[Rejection, ...] = ()
    removed: tuple[list[str], ...] = ()
    """The keys of documents that are not there, one array per key column; only if they are wanted."""
    taken: tuple[str, ...] = ()
    """Documents that were quarantined before, and are written now."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Build the documents of some keys, from the rows as they are now, and write them."""

    source: SourceSettings
    queries: Mapping[str, BuildQuery]
    sink: SharedSink
    recorded: frozenset[str] = frozenset()
    """Indexes whose removals are wanted."""
    quarantined: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Documents that were refused before."""

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
    """A piece of a root table."""

    part: int
    oid: int
    filenode: int
    """Of the heap when the ranges were planned."""
    condition: str


@dataclass(frozen=True, slots=True)
class RangeJob:
    """Build the documents of a range of the root table, and write them into the generation that is being filled."""

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
        """Write a piece while the server builds the next one; each with what was refused of it."""
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
    """Keep a heap from being rewritten until the transaction ends; its quoted name. `TableRewritten` if it was.

    The statement that comes after it has a younger snapshot, so it sees every row of the heap as it is now.
    """

    def look() -> tuple[Any, ...]:
        return next(iter(run_statement(connection, _CURRENT, [part.oid], doing)), (None, None))

    doing = "read a table of an index"
    heap, _ = look()
    if heap is not None:
        run_statement(connection, f"lock table only {heap} in access share mode", [], doing)
        # What was locked is what was meant, and its file is the one that the ranges are of.
        if look() == (heap, part.filenode):
            return heap
    name = heap or "a table of an index"
    raise TableRewritten(f"{name} was rewritten, emptied, renamed or dropped while documents were built from it")


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
    """Runs the jobs of one thread."""

    def __init__(
        self,
        settings: DocumentsSettings,
        tasks: Tasks,
        job: Callable[[], BuildJob],
        generations: Generations,
        on_written: Callable[[Sequence[Outcome]], None],
    ) -> None:
        """`job` is asked anew for each wave: which generations there are changes. `on_written` hears of each wave."""
        self._settings = settings
        self._tasks = tasks
        self._here = ProcessTasks()
        self._job = job
        self._generations = generations
        self._on_written = on_written

    def write(self, keys: Iterable[ResolvedKeys]) -> WriteReport:
        """Build and write all of them."""
        written = WriteReport()
        for wave in self._waves(keys):
            few = sum(map(len, wave)) <= self._settings.local_documents
            tasks = self._here if few else self._tasks
            # Nobody begins or ends a generation while documents are on their way to those that there are.
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
