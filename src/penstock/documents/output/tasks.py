"""What runs in tasks: build documents, hand them to a copy of the sink, and say what became of them.

Jobs pickle: a query, where the source is, and a sink. What comes back is small: counts, refusals, and the keys of
documents that are gone, if somebody wants to know them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from penstock import failpoints
from penstock.documents.base import WRITTEN, Rejection, Sink
from penstock.documents.build import BuildQuery, build_documents, build_range
from penstock.documents.output.connections import POOL
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.statements import run_statement
from penstock.errors import TableRewritten
from penstock.source.connections import SourceSettings

# Both answer for now, whatever snapshot the transaction has.
_CURRENT = """
    select pg_catalog.format('%I.%I', t.object_names[1], t.object_names[2]),
           pg_catalog.pg_relation_filenode($1::oid)::int8
    from pg_catalog.pg_identify_object_as_address(1259::oid, $1::oid, 0) t
"""


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
        if failpoints.is_off("document_versions"):
            place = built.schema.get_field_index("version")
            same = pa.repeat(pa.scalar(1, pa.int64()), built.num_rows)
            built = built.set_column(place, built.schema.field("version"), same)
        name = pa.repeat(pa.scalar(index, pa.string()), built.num_rows)
        with self.lock:
            self.sink.write(pa.Table.from_arrays([name, *built.columns], schema=WRITTEN))
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
    """Documents that were set aside before, and are written now."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Build the documents of some keys, from the rows as they are now, and write them."""

    source: SourceSettings
    queries: Mapping[str, BuildQuery]
    sink: SharedSink
    recorded: frozenset[str] = frozenset()
    """Indexes whose removals are wanted."""
    aside: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
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
        taken = _taken(built, self.aside.get(keys.index), rejections)
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
    aside: frozenset[str] = frozenset()

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
            taken += _taken(built, self.aside, refused)
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


def _taken(built: pa.Table, aside: frozenset[str] | None, refused: Sequence[Rejection]) -> tuple[str, ...]:
    if not aside:
        return ()
    ids = built.column("id")
    known = ids.filter(pc.is_in(ids, value_set=pa.array(sorted(aside), pa.string()))).to_pylist()
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
