"""All search indexes of a config, as one output of its stream.

    documents = DocumentsOutput(stream_settings, store, specifications, sink, tasks, relations=…)
    with Coordinator([tables, documents]) as coordinator:
        coordinator.wait()

It has three threads: one follows changes, one builds indexes from their tables, and one builds the documents of changes
that affect very many. Without Spark they do the work themselves (`penstock.workers.process_tasks`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from penstock.destinations.base import Tasks
from penstock.documents.base import NoopObserver, Observer, Sink
from penstock.documents.build import require_primary
from penstock.documents.builder import DocumentKeys
from penstock.documents.catalog import load_catalog
from penstock.documents.output.backfill import Backfill
from penstock.documents.output.fan_out import FanOuts
from penstock.documents.output.indexes import (
    Builds,
    Indexes,
    compile_indexes,
    require_exact,
    require_published,
    require_whole,
)
from penstock.documents.output.live import LiveChanges, Session
from penstock.documents.output.readiness import Readiness
from penstock.documents.output.writer import (
    POOL,
    SESSION,
    BuildJob,
    DocumentsSettings,
    DocumentWriter,
    Generations,
    Outcome,
    SharedSink,
)
from penstock.documents.quarantine import Quarantine, Rejections
from penstock.documents.relation_map import RelationMap
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import LOCKED
from penstock.errors import PenstockError, QueryFailed, Retry
from penstock.lsn import distance
from penstock.output import RunningOutput, unknown_command
from penstock.retry import Backoff
from penstock.source.connections import Role, connect
from penstock.source.lineage import current_position
from penstock.spool import Stopping
from penstock.state import Command, CommandKind, IndexBuild, Store, WorkKind
from penstock.stream import Published, Stream, StreamSettings
from penstock.workers import ApplyStatus, Lifecycle, Outages
from penstock.workers.process_tasks import ProcessTasks

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = "documents"
RETRY_SECONDS = 0.5
"""How often the output checks for quarantined documents that a user wants to retry."""
LAG_SECONDS = 5.0
"""How often an observer receives the lag."""
_IDLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class DocumentsOutput:
    """All search indexes of a config, as an output of its stream (`penstock.output.Output`)."""

    settings: StreamSettings
    store: Store
    specifications: Sequence[IndexSpecification]
    sink: Sink
    tasks: Tasks
    """Builds documents and writes them."""
    relations: Callable[[], RelationMap] = field(kw_only=True)
    """Opens the relation maps (`open_relation_map`)."""
    documents: DocumentsSettings = field(default_factory=DocumentsSettings, kw_only=True)
    output: str = field(default=DEFAULT_OUTPUT, kw_only=True)
    quarantine: Quarantine | None = field(default=None, kw_only=True)
    observer: Observer | None = field(default=None, kw_only=True)

    @contextmanager
    def opened(
        self, stream: Stream, lifecycle: Lifecycle, epoch: int, published: Published
    ) -> Iterator[RunningDocuments]:
        """Reject invalid setups, prepare the indexes, and run inside the block; slow work is left to threads."""
        del epoch, published  # documents are fenced by their versions; each compilation loads the publication itself
        with ExitStack() as stack:
            stack.callback(POOL.clear)
            relations = self.relations()
            stack.callback(relations.close)
            try:
                running = RunningDocuments(self, stream, lifecycle, relations)
            except Exception as error:
                if self.observer is not None:
                    self.observer.on_error(str(error))
                raise
            stack.callback(running.drain)
            running.start()
            yield running


class RunningDocuments(RunningOutput):
    """The running documents output, with its threads."""

    def __init__(self, output: DocumentsOutput, stream: Stream, lifecycle: Lifecycle, relations: RelationMap) -> None:
        super().__init__(output.output, output.settings, output.store, lifecycle)
        self._documents = output.documents
        self._specifications = output.specifications
        self._tasks = output.tasks
        if not output.sink.runs_in_tasks and not isinstance(output.tasks, ProcessTasks):
            self._tasks = ProcessTasks()
        self._relations = relations
        self._stream = stream
        self._observer = output.observer or NoopObserver()
        self._is_observed = output.observer is not None
        self._sink = SharedSink(output.sink)
        self._generations = Generations()
        self._builds = Builds(self.store)
        self._rejections = Rejections(self._documents.failure_policies, output.quarantine, self._observer)
        self._begun = False
        self._outdated = False
        """True if the indexes have to be compiled again."""
        self._published: Published | None = None
        """The publication that the coordinator saw last, until the thread that follows changes has processed it."""
        self._retried_at = 0.0
        self._readiness = Readiness(
            self.settings,
            self._documents,
            self.store,
            self._sink.sink,
            self._relations,
            self._builds,
            self._check_wanted,
        )
        connection, self._indexes, _ = self._compile()
        self._session: Session | None = Session(connection, self._indexes)
        """None while there is no connection."""
        try:
            self._rejections.load()
            self._builds.load()
        except BaseException:
            connection.close()
            raise
        self._builds.held = True
        self._fan_outs = FanOuts(
            source=self.settings.source,
            store=self.store,
            tasks=self._tasks,
            writer=self._writer(),
            rejections=self._rejections,
            indexes=self._compiled,
            stop=lifecycle.stop,
        )
        self._outages = Outages()
        self._live = LiveChanges(
            name=self.output,
            spool=self.settings.spool.path,
            position=stream.start_of(self.output),
            settings=self._documents,
            store=self.store,
            sink=self._sink,
            writer=self._writer(),
            rejections=self._rejections,
            builds=self._builds,
            fan_outs=self._fan_outs,
            observer=self._observer,
            stop=lifecycle.stop,
            altered=self._close_session,
        )
        self._backfill = Backfill(
            source=self.settings.source,
            settings=self._documents,
            store=self.store,
            sink=self._sink,
            tasks=self._tasks,
            generations=self._generations,
            builds=self._builds,
            writer=self._writer(),
            rejections=self._rejections,
            indexes=self._compiled,
            followed=lambda: self.status.acknowledged,
            observer=self._observer,
            stop=lifecycle.stop,
        )

    # State, for other threads

    @property
    def status(self) -> ApplyStatus:
        return replace(self._live.status, outage=self._outages.current)

    @property
    def indexes(self) -> dict[str, IndexBuild]:
        return self._builds.all()

    @property
    def is_complete(self) -> bool:
        """True if every index serves, and only following changes is left to do."""
        return self._begun and not self._builds.unfinished and not self.unfinished_work

    @property
    def unfinished_work(self) -> bool:
        """True if documents of a fan-out are still to be built."""
        return any(self.store.get_index_work(name, WorkKind.FAN_OUT) for name in self.indexes)

    # Threads

    def start(self) -> None:
        """Start its threads: changes, backfill, fan-out, and lag if there is an observer."""
        self._start_rounds("changes", self._round)
        self._start_rounds("backfill", lambda: self._backfill.round(_IDLE_SECONDS))
        self._start_rounds("fan-out", self._fan_out_round)
        if self._is_observed:
            self._start_rounds("lag", self._report_lag)

    def drain(self) -> None:
        super().drain()
        self._close_session()

    def _start_rounds(self, name: str, work: Callable[[], object]) -> None:
        self.start_thread(name, lambda: self._run(name, work))

    def _run(self, name: str, work: Callable[[], object]) -> None:
        """Run rounds until the output stops. Changes get one more round, so that the next start need not read them
        again."""
        stop = self.lifecycle.stop
        backoff = Backoff(first=0.5, longest=30.0)
        while not self.lifecycle.lost.is_set():
            stopping = stop.is_set()
            if stopping and name != "changes":
                return
            try:
                work()
                backoff.reset()
                if name == "changes":
                    self._outages.end()
            except Stopping:
                return
            except Exception as error:
                if not isinstance(error, PenstockError) or not (_can_be_tried_again(error) or self._is_outdated(error)):
                    self._observer.on_error(str(error))
                    raise
                delay = backoff.next_delay()
                logger.warning("documents: %s failed, retrying in=%.1fs error=%s", name, delay, error)
                if name == "changes":
                    self._outages.add(error)
                    self._close_session()
                stop.wait(delay)
            if stopping:
                return

    def _is_outdated(self, error: PenstockError) -> bool:
        """Return True if a statement failed, and tables have changed since it was compiled."""
        if not isinstance(error, QueryFailed):
            return False
        compiled = self._compiled().catalog
        with connect(self.settings.source, Role.DOCUMENTS, parameters=SESSION) as connection:
            self._outdated = load_catalog(connection, compiled.tables) != compiled
        return self._outdated

    def _round(self) -> None:
        """Do the work that is due between batches, then process a batch, unless the output is paused."""
        if not self._begun:
            self._check_wanted()
            session = self._session or self._open_session()
            # Here and not at the start: a sink that is away is waited for, and other outputs do not wait.
            self._readiness.prepare(session.indexes)
            self._observer.on_indexes_ensured(len(self._specifications))
            self._readiness.begin(session, self._stream.refresh(), self.status.applied)
            self._begun = True
            self._observer.on_live_started()
        if self._outdated:
            self._close_session()
        self._between_batches()
        with self.lifecycle.working() as may_work:
            if may_work:
                self._live.round(self._session or self._open_session())
        if not may_work:
            self.lifecycle.stop.wait(_IDLE_SECONDS)

    def _fan_out_round(self) -> None:
        """Answer stored questions, once the sink has its indexes."""
        if self._begun:
            self._fan_outs.round(_IDLE_SECONDS)
        else:
            self.lifecycle.stop.wait(_IDLE_SECONDS)

    def _report_lag(self) -> None:
        """Report how far the acknowledged position is behind the server, using a separate connection."""
        if not self.lifecycle.stop.wait(LAG_SECONDS):
            self._observer.on_slot_lag(distance(self.status.acknowledged, current_position(self.settings.source)))

    def _check_wanted(self) -> None:
        if self.lifecycle.stop.is_set():
            raise Stopping

    # Compiling

    def _compile(self) -> tuple[psycopg.Connection[Any], Indexes, Published]:
        """Return a connection, the indexes compiled against its database, and the publication of their changes."""
        connection = connect(self.settings.source, Role.DOCUMENTS, parameters=SESSION)
        try:
            require_primary(connection)
            indexes = compile_indexes(
                connection,
                self._specifications,
                self._relations,
                chunk=self._documents.chunk_documents,
                owner=self.store.pipeline_id,
            )
            # Loaded after compiling, so that a partition that was just added is in both.
            published = self._stream.refresh()
            for name in published.unpublished.keys() & {str(each) for each in indexes.wanted}:
                raise published.unpublished[name]
            require_published(indexes, published.tables.values(), self.settings.publication)
            require_whole(connection, indexes, self.settings.publication)
            require_exact(indexes, self.settings.types)
        except BaseException:
            connection.close()
            raise
        return connection, indexes, published

    def _open_session(self) -> Session:
        """Compile the indexes again, over a new connection."""
        self._close_session()
        connection, indexes, published = self._compile()
        try:
            # First, because the backfill builds the wanted indexes with these.
            self._indexes = indexes
            self._outdated = False
            self._readiness.look_again(indexes)
        except BaseException:
            connection.close()
            raise
        self._session = Session(connection, indexes)
        if self._begun:
            self._readiness.resume(self._session, published)
        return self._session

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.connection.close()
            self._session = None

    def _compiled(self) -> Indexes:
        return self._indexes

    def _writer(self) -> DocumentWriter:
        return DocumentWriter(self._documents, self._tasks, self._job, self._generations, self._note)

    def _job(self) -> BuildJob:
        queries, recorded = self._compiled().queries, self._builds.recorded
        return BuildJob(self.settings.source, queries, self._sink, recorded, self._rejections.quarantined)

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        self._builds.record(outcomes)
        for each in outcomes:
            self._rejections.release(each.index, each.taken)

    # Between batches

    def _between_batches(self) -> None:
        now = time.monotonic()
        if now - self._retried_at >= RETRY_SECONDS:
            self._retried_at = now
            self._try_refused_again()
        published, self._published = self._published, None
        if published is not None:
            self._look_at_catalog(published)

    def _look_at_catalog(self, published: Published) -> None:
        """Detect changes that the server does not send: replaced and rewritten tables, partitions, labels of enums."""
        session = self._session or self._open_session()
        if load_catalog(session.connection, session.indexes.catalog.tables) == session.indexes.catalog:
            self._readiness.note(session, published)
        else:
            self._open_session()

    def _try_refused_again(self) -> None:
        """Build quarantined documents that a user wants to retry; those rejected again stay quarantined."""
        indexes = self._compiled()
        for name, specification in indexes.specifications.items():
            ids = self._rejections.wanted(name)
            if not ids:
                continue
            self._rejections.load()
            keys = DocumentKeys.of(specification, indexes.catalog)
            written = self._writer().write(keys.of_ids(ids, self._documents.chunk_documents))
            self._rejections.quarantine(written.rejections, None)
            # Neither accepted nor rejected: ids that no document can have, such as those of an earlier key.
            self._rejections.forget(name, set(ids).intersection(self._rejections.wanted(name)))

    # For the coordinator's thread

    def refresh(self, published: Published) -> None:
        """Let the thread that follows changes process the publication between two batches."""
        self._published = published

    def tend(self, *, source_answers: bool) -> None:
        """Do nothing: the output's threads find their work themselves."""

    def carry_out(self, command: Command) -> bool:
        """Rebuild indexes."""
        if command.kind is not CommandKind.REBUILD_INDEX:
            raise unknown_command(
                command, "This command is for tables: use --output to name an output that writes tables."
            )
        for name in self._named(command.options.get("indexes", ())):
            self._builds.want(name, self._compiled().mappings[name].fingerprint, "requested by a user")
        return True

    def _named(self, names: Collection[str]) -> list[str]:
        known = self._compiled().specifications.keys()
        unknown = sorted(set(names) - known)
        if unknown:
            raise PenstockError(
                f"no such index: {', '.join(unknown)}", hint=f"Known indexes: {', '.join(sorted(known))}."
            )
        return sorted(names or known)


def _can_be_tried_again(error: PenstockError) -> bool:
    """Return True if the error's class allows a retry, or if a statement was blocked by a lock of another session."""
    return error.retry is Retry.TIMED or error.facts.get("sqlstate") in LOCKED
