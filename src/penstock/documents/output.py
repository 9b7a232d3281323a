"""All search indexes of a config, as one output of its stream.

    documents = DocumentsOutput(stream_settings, store, specifications, sink, tasks, relations=…)
    with Coordinator([tables, documents]) as coordinator:
        coordinator.wait()

It has three threads: one follows changes, one builds indexes from their tables, and one builds the documents of changes
that affect very many. Without Spark they do the work themselves (`penstock.workers.process_tasks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from penstock.destinations.base import Tasks
from penstock.documents.base import NoopObserver, Observer
from penstock.documents.builder import PostgresDocuments, fitting
from penstock.documents.catalog import load_catalog
from penstock.documents.engine import Engine
from penstock.documents.missed import MissedChanges, require_exact, require_published, require_whole
from penstock.documents.relation_map import RelationMap
from penstock.documents.statements import LOCKED, POOL, SESSION, require_primary
from penstock.documents.wal import WalCapture
from penstock.documents.writer import DocumentsSettings
from penstock.errors import PenstockError, QueryFailed, Retry, SourceError, TablesAltered
from penstock.output import RunningOutput, unknown_command
from penstock.retry import Backoff
from penstock.sinks.base import Sink
from penstock.source.connections import Role, connect
from penstock.specification.tree import IndexSpecification
from penstock.spool import Stopping
from penstock.state import Command, CommandKind, IndexBuild, Store, WorkKind
from penstock.state.quarantine import Quarantine
from penstock.stream import Published, Stream, StreamSettings
from penstock.workers import ApplyStatus, Lifecycle, Outages

__all__ = ["DocumentsOutput", "DocumentsSettings", "RunningDocuments"]

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = "documents"
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
        self._definition = output
        self._observer = output.observer or NoopObserver()
        self._relations = relations
        self._stream = stream
        self._begun = False
        self._outdated = False
        """True if the indexes have to be compiled again."""
        self._published: Published | None = None
        """The publication that the coordinator saw last, until the thread that follows changes has processed it."""
        self._outages = Outages()
        self._tables = {name for each in output.specifications for name in each.tables()}
        documents, _ = self._compile()
        self._session: PostgresDocuments | None = documents
        """None while there is no connection."""
        self._capture = WalCapture(
            self.output,
            self.settings.spool.path,
            self.settings.source,
            self.store,
            stream.start_of(self.output),
            documents,
            max_changes=output.documents.batch.max_changes,
            piece_changes=output.documents.piece_changes,
        )
        self._engine = Engine(
            self._capture,
            documents,
            output.sink,
            observer=output.observer,
            quarantine=output.quarantine,
            settings=output.documents,
            store=self.store,
            tasks=output.tasks,
            stop=lifecycle.stop,
            tally=self.tally,
        )
        self._builds = self._engine.builds
        self._missed = MissedChanges(
            self.settings, self.store, self._builds, self._engine.readiness, relations, self._check_wanted
        )
        try:
            self._engine.load()
        except BaseException:
            documents.connection.close()
            raise
        self._builds.held = True

    # State, for other threads

    @property
    def status(self) -> ApplyStatus:
        return replace(self._capture.status, outage=self._outages.current)

    @property
    def indexes(self) -> dict[str, IndexBuild]:
        return self._builds.all()

    @property
    def stopped(self) -> Mapping[str, PenstockError]:
        return self._builds.stopped

    @property
    def is_complete(self) -> bool:
        """True if every index serves that has not stopped, and only following changes is left to do."""
        return self._begun and not self._builds.unfinished and not self.unfinished_work

    @property
    def unfinished_work(self) -> bool:
        """True if documents of a fan-out are still to be built."""
        return any(
            self.store.get_index_work(name, WorkKind.FAN_OUT) for name in self.indexes.keys() - self.stopped.keys()
        )

    # Threads

    def start(self) -> None:
        """Start its threads: changes, backfill, fan-out, and lag if there is an observer."""
        self._start_rounds("changes", self._round)
        self._start_rounds("backfill", lambda: self._engine.backfill.round(_IDLE_SECONDS))
        self._start_rounds("fan-out", self._fan_out_round)
        if self._definition.observer is not None:
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
            except TablesAltered as error:
                logger.info("compiling the indexes again reason=%s", error.message)
                self._close_session()
            except Exception as error:
                if not (isinstance(error, PenstockError) and self._can_be_tried_again(error)):
                    self._observer.on_error(str(error))
                    raise
                delay = backoff.next_delay()
                self.tally.count("retries", name, type(error).__name__)
                logger.warning("documents: %s failed, retrying in=%.1fs error=%s", name, delay, error)
                if name == "changes":
                    self._outages.add(error)
                    self._close_session()
                stop.wait(delay)
            if stopping:
                return

    def _can_be_tried_again(self, error: PenstockError) -> bool:
        """Return True for an error that may pass, and for a statement whose tables have changed since it was compiled.

        If the server cannot say whether they have, the error of that question decides.
        """
        if isinstance(error, QueryFailed) and not _may_pass(error):
            try:
                with connect(self.settings.source, Role.DOCUMENTS, parameters=SESSION) as connection:
                    self._outdated = load_catalog(connection, self._tables) != self._capture.documents.catalog
            except SourceError as unanswered:
                return _may_pass(unanswered)
            return self._outdated
        return _may_pass(error)

    def _round(self) -> None:
        """Do the work that is due between batches, then process a batch, unless the output is paused."""
        if not self._begun:
            self._check_wanted()
            documents = self._session or self._open_session()
            # Here and not at the start: a sink that is away is waited for, and other outputs do not wait.
            is_first = not self._capture.resumes()
            self._engine.prepare()
            self._missed.begin(documents, self._stream.refresh(), is_first=is_first)
            self.store.upsert_replication_progress(self.status.applied)
            self._builds.held = False
            self._begun = True
            self._observer.on_live_started()
        if self._outdated:
            self._close_session()
        self._engine.retry_wanted()
        published, self._published = self._published, None
        if published is not None:
            self._look_at_catalog(published)
        with self.lifecycle.working() as may_work:
            if may_work:
                if self._session is None:
                    self._open_session()
                self._engine.step()
        if not may_work:
            self.lifecycle.stop.wait(_IDLE_SECONDS)

    def _fan_out_round(self) -> None:
        """Answer stored questions, once the sink has its indexes."""
        if self._begun:
            self._engine.fan_outs.round(_IDLE_SECONDS)
        else:
            self.lifecycle.stop.wait(_IDLE_SECONDS)

    def _report_lag(self) -> None:
        if not self.lifecycle.stop.wait(LAG_SECONDS):
            self._engine.report_lag()

    def _check_wanted(self) -> None:
        if self.lifecycle.stop.is_set():
            raise Stopping

    # Compiling

    def _compile(self) -> tuple[PostgresDocuments, Published]:
        """Compile the indexes over a new connection; also returns the publication of their changes."""
        output, settings = self._definition, self._definition.documents
        connection = connect(self.settings.source, Role.DOCUMENTS, parameters=SESSION)
        try:
            require_primary(connection)
            catalog = load_catalog(connection, self._tables)
            builds = self.store.get_index_builds()
            specifications, stopped = fitting(connection, output.specifications, catalog, builds)
            documents = PostgresDocuments(
                connection,
                connection,
                specifications,
                self._relations,
                catalog=catalog,
                stopped=stopped,
                chunk=settings.chunk_documents,
                owner=self.store.pipeline_id,
                source=self.settings.source,
                range_bytes=settings.range_bytes,
            )
            # Loaded after compiling, so that a partition that was just added is in both.
            published = self._stream.refresh()
            for name in published.unpublished.keys() & {str(each) for each in documents.wanted}:
                raise published.unpublished[name]
            require_published(documents, published.tables.values(), self.settings.publication)
            require_whole(documents, self.settings.publication)
            require_exact(documents, self.settings.types)
        except BaseException:
            connection.close()
            raise
        return documents, published

    def _open_session(self) -> PostgresDocuments:
        """Compile the indexes again, over a new connection."""
        self._close_session()
        documents, published = self._compile()
        with self._builds.holding():  # an index that fits again is built after its maps are filled
            try:
                self._engine.readiness.stop_unfit(documents)
                # First, because the backfill builds the wanted indexes with these.
                self._engine.documents = self._capture.documents = documents
                self._outdated = False
                self._engine.readiness.look_again(documents)
            except BaseException:
                documents.connection.close()
                raise
            self._session = documents
            if self._begun:
                self._missed.resume(documents, published)
        return documents

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.connection.close()
            self._session = None
            self._engine.receive_again()

    def _look_at_catalog(self, published: Published) -> None:
        """Detect changes that the server does not send: replaced and rewritten tables, partitions, labels of enums."""
        documents = self._session or self._open_session()
        if load_catalog(documents.connection, self._tables) == documents.catalog:
            self._missed.note(documents, published)
        else:
            self._open_session()

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
        names = command.options.get("indexes", ())
        for name in self.stopped.keys() & set(names):
            raise self.stopped[name]
        self._engine.rebuild(names)
        return True


def _may_pass(error: PenstockError) -> bool:
    """Return True if the error's class allows a retry, or if a statement was blocked by a lock of another session."""
    return error.retry is Retry.TIMED or error.facts.get("sqlstate") in LOCKED
