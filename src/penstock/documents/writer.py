"""Builds documents and writes them to the sink, in tasks.

`DocumentWriter` turns keys into documents in waves, so memory does not grow with their number. A wave is one job,
whatever the number of indexes. A few documents are built in this process instead: a Spark job costs more than they do.

Jobs pickle: what builds documents, and a sink. Their results are small: counts, rejections, and the ids of removed
documents if they are wanted.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import SimpleQueue
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from penstock.destinations.base import Tasks
from penstock.documents.base import BatchPolicy, DocumentBuilder, FailurePolicies, TaskBuilder
from penstock.documents.builder import RANGE_BYTES, BuildsHere, is_about_values
from penstock.documents.builds import Builds
from penstock.documents.quarantine import Rejections
from penstock.documents.resolve import ResolvedKeys
from penstock.errors import QueryFailed
from penstock.observe.tally import Tally
from penstock.sinks.base import DOCUMENT_SCHEMA, Rejection, Sink
from penstock.workers.process_tasks import ProcessTasks

_BACKLOG_BYTES = 32 << 20
"""Documents that wait in memory for the sink, by task; more of them wait on disk."""


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
    range_bytes: int = RANGE_BYTES


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
    removed: tuple[str, ...] = ()
    """The ids of removed documents; only for indexes in `BuildJob.recorded`."""
    taken: tuple[str, ...] = ()
    """Quarantined documents that the sink has now accepted."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Builds the documents of some keys from the current rows, and writes them."""

    builder: TaskBuilder
    sink: SharedSink
    recorded: frozenset[str] = frozenset()
    """Indexes whose removals are reported."""
    quarantined: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Ids of quarantined documents by index."""

    def __call__(self, keys: ResolvedKeys) -> Outcome:
        with Backlog() as backlog:
            # Read before they are sent: a connection is not held while the sink takes its time.
            for built in self.builder.pieces(keys):
                backlog.put(built)
            backlog.end()
            sent = _send(backlog, keys.index, self.sink, self.quarantined.get(keys.index, frozenset()))
        # After a failure, documents that were built before it have been built once more.
        return replace(sent, documents=len(keys), removed=sent.removed if keys.index in self.recorded else ())


@dataclass(frozen=True, slots=True)
class BuildRange:
    """A range of an index (`DocumentBuilder.ranges`), and its place among them."""

    part: int
    range: Any


@dataclass(frozen=True, slots=True)
class RangeJob:
    """Builds the documents of a range, and writes them to the generation being filled."""

    builder: TaskBuilder
    index: str
    sink: SharedSink
    quarantined: frozenset[str] = frozenset()

    def __call__(self, part: BuildRange) -> Outcome:
        try:
            return self._written(self.builder.range_pieces(self.index, part.range))
        except QueryFailed as error:
            if not is_about_values(error):
                raise
        # One row spoils the statement for all.
        return self._written(self.builder.range_pieces(self.index, part.range, apart=True))

    def _written(self, pieces: Iterator[pa.Table | Rejection]) -> Outcome:
        """Send documents while others are read. Reading never waits for the sink: it holds a lock and a snapshot."""
        with ThreadPoolExecutor(1, thread_name_prefix="documents-range") as sender, Backlog() as backlog:
            sending = sender.submit(_send, backlog, self.index, self.sink, self.quarantined)
            try:
                for built in pieces:
                    backlog.put(built)
            finally:
                backlog.end()
                wait([sending])
            return replace(sending.result(), removed=())


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


def _send(backlog: Backlog, index: str, sink: SharedSink, quarantined: frozenset[str]) -> Outcome:
    documents = bodies = 0
    rejections: list[Rejection] = []
    removed: list[str] = []
    taken: list[str] = []
    for built in backlog:
        if isinstance(built, Rejection):
            documents += 1
            rejections.append(built)
            continue
        refused = sink.write(index, built)
        documents += built.num_rows
        bodies += built.num_rows - built.column("body").null_count - len(refused)
        rejections += refused
        removed += built.column("id").filter(pc.is_null(built.column("body"))).to_pylist()
        taken += _taken(built, quarantined, refused)
    return Outcome(index, documents, bodies, tuple(rejections), tuple(removed), tuple(taken))


def _taken(built: pa.Table, quarantined: frozenset[str], refused: Sequence[Rejection]) -> tuple[str, ...]:
    if not quarantined:
        return ()
    ids = built.column("id")
    known = ids.filter(pc.is_in(ids, value_set=pa.array(sorted(quarantined), pa.string()))).to_pylist()
    return tuple(set(known).difference(each.id for each in refused))


class DocumentWriter:
    """Builds and writes documents, for all threads of an engine."""

    def __init__(
        self,
        settings: DocumentsSettings,
        tasks: Tasks,
        sink: Sink,
        documents: Callable[[], DocumentBuilder],
        builds: Builds,
        rejections: Rejections,
        tally: Tally | None = None,
    ) -> None:
        """`documents` returns the builder as it was last compiled."""
        self._tally = tally or Tally()
        self.sink = SharedSink(sink)
        self.generations = Generations()
        self._settings = settings
        self._tasks = tasks
        self._here = ProcessTasks()
        self._documents = documents
        self._builds = builds
        self._rejections = rejections

    def write(self, keys: Iterable[ResolvedKeys]) -> tuple[Counter[str], list[Rejection]]:
        """Build and write documents; return their number by index, and the rejections."""
        documents: Counter[str] = Counter()
        rejections: list[Rejection] = []
        for wave in self._waves(keys):
            few = sum(map(len, wave)) <= self._settings.local_documents
            tasks = self._here if few else self._tasks
            # No generation may begin or end while documents are being written.
            with self.generations.writing():
                job = BuildJob(self._builder, self.sink, self._builds.recorded, self._rejections.quarantined)
                outcomes = tasks.run(wave, job, description=_description(wave))
                for index in sorted({each.index for each in outcomes}):
                    mine = [each for each in outcomes if each.index == index]
                    changed = sum(each.documents for each in mine)
                    self._builds.record(index, changed, [each.removed for each in mine if each.removed])
                    documents[index] += changed
            rejections += self._take(outcomes)
        return documents, rejections

    def write_apart(self, keys: Iterable[ResolvedKeys]) -> int:
        """Build and write documents that belong to no batch; return their number."""
        documents, rejections = self.write(keys)
        self._rejections.handle(rejections, None)
        return documents.total()

    def fill(self, index: str, parts: Sequence[BuildRange]) -> dict[int, int]:
        """Build the documents of ranges, into the generation being filled; return how many each has, by part."""
        filling = self.filling(index)
        # Its own lock: changes do not wait for the requests of a backfill.
        sink = SharedSink(filling, self.sink.lock if filling is self.sink.sink else None)
        job = RangeJob(self._builder, index, sink, self._rejections.quarantined.get(index, frozenset()))
        with self._tasks.copying():
            outcomes = self._tasks.run(parts, job, description=f"fill index {index}")
        self._rejections.handle(self._take(outcomes), None)
        return {part.part: outcome.bodies for part, outcome in zip(parts, outcomes, strict=True)}

    @property
    def parallel(self) -> int:
        """How many ranges are filled at the same time."""
        with self._tasks.copying():
            return self._tasks.parallel

    def filling(self, index: str) -> Sink:
        """Return a sink that writes only to the generation being filled."""
        with self.sink.lock:
            return self.sink.sink.filling(index)

    @property
    def _builder(self) -> TaskBuilder:
        documents = self._documents()
        return documents.for_tasks() or BuildsHere(documents)

    def _take(self, outcomes: Iterable[Outcome]) -> list[Rejection]:
        """Return the rejections; documents that the sink has accepted leave the quarantine."""
        for each in outcomes:
            self._rejections.release(each.index, each.taken)
            self._tally.count("documents", each.index, "sent", by=each.bodies)
            removed = each.documents - each.bodies - len(each.rejections)
            self._tally.count("documents", each.index, "removed", by=removed)
        return [rejection for each in outcomes for rejection in each.rejections]

    def _waves(self, keys: Iterable[ResolvedKeys]) -> Iterator[list[ResolvedKeys]]:
        source = iter(keys)
        while wave := list(islice(source, self._settings.wave_chunks)):
            yield wave


def _description(wave: Sequence[ResolvedKeys]) -> str:
    indexes = sorted({each.index for each in wave})
    return f"build {sum(map(len, wave))} documents of {', '.join(indexes)}"
