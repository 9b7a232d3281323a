"""Turns changes of the spool into documents, in one thread of the output.

    entries ─▶ changes ─▶ visible? ─▶ resolve ─▶ build and write ─▶ flush ─▶ links ─▶ progress ─▶ acknowledge

A batch is a run of whole transactions. Work for later (rebuilding an index, a change that affects very many documents)
is stored before the links of rows, and those before progress: after a crash in between, changes are delivered again and
never lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from penstock import failpoints
from penstock.changes.batch import EventBatch, build_batch
from penstock.changes.steps import Segment, Truncation
from penstock.documents.base import BatchStatistics, Observer
from penstock.documents.images import Changes, changes_in_pieces
from penstock.documents.output.fan_out import FanOuts
from penstock.documents.output.indexes import Builds, Indexes
from penstock.documents.output.writer import DocumentsSettings, DocumentWriter, SharedSink
from penstock.documents.quarantine import Rejections
from penstock.documents.resolve import Question, ResolvedKeys
from penstock.documents.statements import wait_until_visible
from penstock.lsn import Lsn, reaches
from penstock.schema import ReplicaIdentity, TableSchema
from penstock.source.patterns import TableName
from penstock.spool import Entry, SpoolReader
from penstock.state import Store
from penstock.workers import ApplyStatus

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2
"""How long a round waits for changes."""
TAKEN_OVER = "another server took over"
"""Why an index is rebuilt after a failover."""
_GATHER_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the source, and the indexes compiled with it."""

    connection: psycopg.Connection[Any]
    indexes: Indexes


class LiveChanges:
    """Follows the spool from a position on. One thread calls `round`; any thread may read `status`."""

    def __init__(
        self,
        *,
        name: str,
        spool: Path,
        position: Lsn,
        settings: DocumentsSettings,
        store: Store,
        sink: SharedSink,
        writer: DocumentWriter,
        rejections: Rejections,
        builds: Builds,
        fan_outs: FanOuts,
        observer: Observer,
        stop: threading.Event,
        altered: Callable[[], None],
    ) -> None:
        """`name` is the reader's name in the spool. `altered` is called when a table differs from what was compiled."""
        self._name = name
        self._reader = SpoolReader(spool)
        self._settings = settings
        self._store = store
        self._sink = sink
        self._writer = writer
        self._rejections = rejections
        self._builds = builds
        self._fan_outs = fan_outs
        self._observer = observer
        self._stop = stop
        self._altered = altered
        self._position = position
        self._acknowledged = position
        self._versions: set[tuple[int, str]] = set()
        self._changes = 0
        self._batches = 0
        self._last_commit_time = 0

    @property
    def status(self) -> ApplyStatus:
        """Positions and counters."""
        return ApplyStatus(self._position, self._acknowledged, self._changes, self._batches, self._last_commit_time)

    def round(self, session: Session) -> bool:
        """Process one batch, if the spool has changes; return True if there may be more."""
        taken = self._take(session.indexes)
        if not taken:
            return False
        self._follow_server(session.indexes)
        if self._is_altered(taken, session.indexes):
            self._altered()
            return True
        end = taken[-1].end
        batch = self._batch(taken, end)
        documents: Counter[str] = Counter()
        seconds = 0.0
        caught_up = self._has_caught_up(end)
        if batch.row_count:
            self._observer.on_changes_captured(batch.row_count)
        for changes in changes_in_pieces(batch, session.indexes.wanted, self._settings.piece_changes):
            seconds += self._apply(session, changes, end, documents, caught_up=caught_up)
        self._want_unidentified(taken, session.indexes)
        self._finish(batch, end)
        if batch.row_count or documents:
            self._batches += 1
            self._changes += batch.row_count
            self._observer.on_batch_committed(BatchStatistics(batch.row_count, documents, seconds))
        return not caught_up

    def _take(self, indexes: Indexes) -> list[Entry]:
        """Return entries with about `max_changes` relevant changes, or those that arrive within `max_delay`."""
        policy = self._settings.batch
        names = indexes.names
        if not self._reader.wait(self._position, IDLE_SECONDS):
            return []
        deadline = time.monotonic() + policy.max_delay
        while True:
            taken, count = _gather(self._reader.entries(self._position), names, policy.max_changes)
            left = deadline - time.monotonic()
            if not count or count >= policy.max_changes or left <= 0 or self._stop.is_set():
                return taken
            self._stop.wait(min(left, _GATHER_SECONDS))

    def _batch(self, entries: Sequence[Entry], end: Lsn) -> EventBatch:
        tables = {step.table_id for entry in entries for step in entry.steps if isinstance(step, Segment | Truncation)}
        return build_batch(
            entries,
            begin=self._position,
            end=end,
            positions=dict.fromkeys(tables, self._position),
            schemas={},
            schema_of=self._reader.load_schema,
        )

    def _follow_server(self, indexes: Indexes) -> None:
        """After a failover, rebuild all indexes before positions of the new server are stored.

        It may reuse transaction numbers, which are the versions of documents.
        """
        found = self._reader.ancestry
        if found is None or not found.follows(self._store.ancestry):
            return
        # Stored first: after a crash in between, this happens again.
        if not self._settings.skip_backfill:
            for name, mapping in indexes.mappings.items():
                self._builds.want(name, mapping.fingerprint, TAKEN_OVER)
        self._store.use_lineage(found)

    def _is_altered(self, entries: Sequence[Entry], indexes: Indexes) -> bool:
        """Return True if rows have a new schema that differs from the compiled one."""
        altered = False
        for (table_id, version), name in _versions_of(entries, indexes).items():
            if (table_id, version) in self._versions:
                continue
            self._versions.add((table_id, version))
            schema = self._reader.load_schema(table_id, version)
            known = indexes.catalog.table(indexes.catalog.top(name)).columns
            altered |= not _is_identified(schema, name, indexes) or any(
                each.name not in known or known[each.name].type.oid != each.type.oid for each in schema.columns
            )
        return altered

    def _want_unidentified(self, entries: Sequence[Entry], indexes: Indexes) -> None:
        """Rebuild indexes whose tables had another replica identity meanwhile: old links of those rows are unknown."""
        tables = {
            str(name)
            for (table_id, version), name in _versions_of(entries, indexes).items()
            if not _is_identified(self._reader.load_schema(table_id, version), name, indexes)
        }
        for index in sorted(indexes.over(tables)):
            self._builds.want(
                index, indexes.mappings[index].fingerprint, "one of its tables had a different replica identity"
            )

    def _apply(
        self, session: Session, changes: Changes, end: Lsn, documents: Counter[str], *, caught_up: bool
    ) -> float:
        """Make all affected documents durable, or store them as work for later; return the seconds of the flush."""
        resolver = session.indexes.resolver
        wait_until_visible(session.connection, sorted(changes.xids))
        resolution = resolver.resolve(session.connection, changes)
        many: list[Question] = []
        written = self._writer.write(self._keys(session, resolution.questions, many))
        started = time.monotonic()
        with self._sink.lock:
            report = self._sink.sink.flush(caught_up)
        seconds = time.monotonic() - started
        self._rejections.handle([*written.rejections, *report.rejections], end)
        documents += written.documents
        self._fan_outs.add(many, session.indexes)
        marks = {name: mapping.fingerprint for name, mapping in session.indexes.mappings.items()}
        for index in sorted(resolution.whole_indexes):
            self._builds.want_next(index, marks[index], "one of its tables was truncated")
        for index in sorted(resolution.outdated_indexes):
            self._builds.want_next(index, marks[index], "a column that connects its tables has another type")
        failpoints.reach("after_documents")
        resolver.remember(resolution)
        failpoints.reach("after_links")
        return seconds

    def _keys(self, session: Session, questions: Sequence[Question], many: list[Question]) -> Iterator[ResolvedKeys]:
        """Yield the documents of all questions; questions with very many go into `many` instead."""
        limit = self._settings.fan_out_documents
        for question in questions:
            count = 0
            with closing(session.indexes.resolver.answer(session.connection, question)) as parts:
                for part in parts:
                    count += len(part)
                    if count > limit:
                        many.append(question)
                        break
                    yield part

    def _finish(self, batch: EventBatch, end: Lsn) -> None:
        self._store.upsert_replication_progress(end)
        failpoints.reach("after_documents_progress")
        self._reader.readers.advance(self._name, end)
        failpoints.reach("after_documents_acknowledge")
        self._last_commit_time = max(self._last_commit_time, batch.last_commit_time)
        self._position = self._acknowledged = end
        self._reader.forget(end)

    def _has_caught_up(self, end: Lsn) -> bool:
        captured = self._reader.captured
        return captured is None or reaches(end, captured)


def _versions_of(entries: Sequence[Entry], indexes: Indexes) -> dict[tuple[int, str], TableName]:
    """Return the schemas of the rows in these entries: table id and version, with the table's name."""
    names = indexes.names
    return {
        (step.table_id, step.version): names[step.table_id]
        for entry in entries
        for step in entry.steps
        if isinstance(step, Segment) and step.table_id in names
    }


def _is_identified(schema: TableSchema, name: TableName, indexes: Indexes) -> bool:
    """Return True if the server sends at least the old values that were compiled for.

    The schema of a partitioned table that is published as a whole does not show this: its partitions decide.
    """
    if name in indexes.catalog.tables and indexes.catalog.table(name).leaves:
        return True
    wanted = indexes.wanted[name]
    is_full = schema.replica_identity is ReplicaIdentity.FULL
    sent = {each.name for each in schema.columns if is_full or each.identity}
    return sent >= wanted.identity.intersection(wanted.columns)


def _gather(entries: Sequence[Entry], tables: Container[int], limit: int) -> tuple[list[Entry], int]:
    """Return the first entries with about `limit` changes of these tables, and the number of changes."""
    taken: list[Entry] = []
    count = 0
    for entry in entries:
        taken.append(entry)
        for step in entry.steps:
            if isinstance(step, Segment) and step.table_id in tables:
                count += step.rows
            elif isinstance(step, Truncation) and step.table_id in tables:
                count += 1
        if count >= limit:
            break
    return taken, count
