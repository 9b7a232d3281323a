"""Builds documents and writes them to the sink, in tasks.

`DocumentWriter` turns keys into documents in waves, so memory does not grow with their number. A wave is one job,
whatever the number of indexes. A few documents are built in this process instead: a Spark job costs more than they do.

Jobs pickle: a query, the source settings, and a sink. Their results are small: counts, rejections, and the keys of
removed documents if they are wanted.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import IO, Any, Self

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import pq

from penstock.destinations.base import Tasks
from penstock.documents.base import DOCUMENT_SCHEMA, BatchPolicy, FailurePolicies, Rejection, Sink
from penstock.documents.build import BuildQuery, build_pieces, build_range, range_keys, require_primary
from penstock.documents.builder import build_apart, is_about_values, split_id
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.statements import run_statement
from penstock.errors import QueryFailed, ServerUnavailable, TableRewritten
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.workers.process_tasks import ProcessTasks

SESSION: Mapping[str, str] = {
    **NO_TIMEOUTS,
    "lock_timeout": "200",
    # Each statement has a snapshot of its own, whatever the role's default is.
    "default_transaction_isolation": "read committed",
}
"""No timeout for rows, a short one for locks: in a deadlock with a session that truncates or alters several tables,
this session gives way and retries long before the server chooses a victim."""

_BACKLOG_BYTES = 32 << 20
"""Documents that wait in memory for the sink, by task; more of them wait on disk."""
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
        is_new = connection is None
        connection = connection or connect(source, Role.DOCUMENTS, parameters=SESSION)
        try:
            # A connection that was idle may be broken: its first statement says so, and that may be a `begin`.
            with translated(connection, "read rows for documents"):
                if is_new:
                    require_primary(connection)  # the address may lead to several servers
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
    """The number of bodies that the sink has accepted."""
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
        with Backlog() as backlog:
            _build(self.source, self.queries[keys.index], keys, backlog, len(keys))
            backlog.end()
            sent = _send(backlog, keys.index, self.sink, self.quarantined.get(keys.index))
        removed: tuple[list[str], ...] = ()
        if sent.removed and keys.index in self.recorded:
            width = len(keys.keys)
            split = [split_id(id_, width) for id_ in sent.removed]
            removed = tuple(list(each) for each in zip(*split, strict=True))
        return Outcome(keys.index, len(keys), sent.bodies, tuple(sent.rejections), removed, tuple(sent.taken))


def _build(source: SourceSettings, query: BuildQuery, keys: ResolvedKeys, backlog: Backlog, chunk: int) -> None:
    with POOL.borrow(source) as connection:
        for built in build_apart(lambda part: build_pieces(connection, query, part.keys, chunk=chunk), keys):
            backlog.put(built)


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
        try:
            return self._written(partial(self._read, part))
        except QueryFailed as error:
            if not is_about_values(error):
                raise
        # One row spoils the statement for all: list the keys, and find it.
        return self._written(partial(self._read_apart, part))

    def _read(self, part: HeapRange, backlog: Backlog) -> None:
        with POOL.borrow(self.source) as connection, connection.transaction():
            heap = lock_heap(connection, part)
            for built in build_range(connection, self.query, heap, part.condition, chunk=self.chunk):
                backlog.put(built)

    def _read_apart(self, part: HeapRange, backlog: Backlog) -> None:
        with POOL.borrow(self.source) as connection, connection.transaction():
            keys = range_keys(connection, self.query, lock_heap(connection, part), part.condition)
        for first in range(0, len(keys[0]), self.chunk):
            some = ResolvedKeys(self.query.index, tuple(each[first : first + self.chunk] for each in keys))
            _build(self.source, self.query, some, backlog, self.chunk)

    def _written(self, read: Callable[[Backlog], None]) -> Outcome:
        """Send documents while others are read. Reading never waits for the sink: it holds a lock and a snapshot."""
        index = self.query.index
        with ThreadPoolExecutor(1, thread_name_prefix="documents-range") as sender, Backlog() as backlog:
            sending = sender.submit(_send, backlog, index, self.sink, self.quarantined)
            try:
                read(backlog)
            finally:
                backlog.end()
                wait([sending])
            sent = sending.result()
        return Outcome(index, sent.documents, sent.bodies, tuple(sent.rejections), (), tuple(sent.taken))


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """Documents in a temporary file, which is gone when it is closed."""

    file: IO[bytes]

    @classmethod
    def of(cls, built: pa.Table) -> _OnDisk:
        file = tempfile.TemporaryFile(prefix="penstock-documents-")  # noqa: SIM115 (`read` closes it)
        with pa.ipc.new_stream(file, built.schema) as writer:
            writer.write_table(built)
        file.seek(0)
        return cls(file)

    def read(self) -> pa.Table:
        with self.file, pa.ipc.open_stream(self.file) as reader:
            return reader.read_all()


class Backlog:
    """Documents between the server and the sink: a few in memory, the others in temporary files.

    One thread puts, one iterates. Iterating ends after `end`.
    """

    def __init__(self, most_bytes: int = _BACKLOG_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[pa.Table | Rejection | _OnDisk | None] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Discard documents that were not taken."""
        while not self._queue.empty():
            self._queue.get()

    def put(self, built: pa.Table | Rejection) -> None:
        if isinstance(built, Rejection):
            self._queue.put(built)
            return
        with self._lock:
            fits = self._bytes + built.nbytes <= self._most
            self._bytes += built.nbytes if fits else 0
        self._queue.put(built if fits else _OnDisk.of(built))

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[pa.Table | Rejection]:
        while (built := self._queue.get()) is not None:
            if isinstance(built, _OnDisk):
                built = built.read()
            elif not isinstance(built, Rejection):
                with self._lock:
                    self._bytes -= built.nbytes
            yield built


@dataclass(slots=True)
class _Sent:
    """What a sink has made of documents."""

    documents: int = 0
    bodies: int = 0
    """Those that the sink has accepted."""
    rejections: list[Rejection] = field(default_factory=list[Rejection])
    removed: list[str] = field(default_factory=list[str])
    taken: list[str] = field(default_factory=list[str])


def _send(backlog: Backlog, index: str, sink: SharedSink, quarantined: frozenset[str] | None) -> _Sent:
    sent = _Sent()
    for built in backlog:
        if isinstance(built, Rejection):
            sent.documents += 1
            sent.rejections.append(built)
            continue
        refused = sink.write(index, built)
        gone = pc.is_null(built.column("body"))
        sent.documents += built.num_rows
        sent.bodies += built.num_rows - built.column("body").null_count - len(refused)
        sent.rejections += refused
        sent.removed += built.column("id").filter(gone).to_pylist()
        sent.taken += _taken(built, quarantined, refused)
    return sent


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
