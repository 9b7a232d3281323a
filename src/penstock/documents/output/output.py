"""All search indexes of a config as one output of its stream.

    documents = DocumentsOutput(stream_settings, store, specifications, sink, tasks, relations=…)
    with Coordinator([pipeline, documents]) as outputs:
        outputs.wait()

Three threads: one follows changes, one builds indexes from their tables, one builds the documents of changes that
concern very many. Without Spark they do the work themselves (`penstock.workers.process_tasks`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from penstock.destinations.base import Tasks
from penstock.documents.base import NoopObserver, Observer, Sink
from penstock.documents.build import require_primary
from penstock.documents.builder import DocumentKeys
from penstock.documents.catalog import load_catalog
from penstock.documents.output.backfill import Backfill
from penstock.documents.output.fan_out import FanOuts
from penstock.documents.output.indexes import Builds, Indexes, compile_indexes, require_published, require_whole
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
from penstock.errors import LeaseLost, PenstockError, Retry
from penstock.lsn import distance
from penstock.retry import Backoff
from penstock.source.connections import Role, connect
from penstock.source.lineage import current_position
from penstock.spool import Stopping
from penstock.state import (
    Command,
    CommandKind,
    CommandStatus,
    IndexBuild,
    Store,
    TableReplicationPhase,
    WorkKind,
)
from penstock.stream import Stream, StreamSettings
from penstock.workers import ApplyStatus, CopyStatus, SnapshotWait

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = "documents"
REFRESH_SECONDS = 5.0
"""How often the publication is looked at."""
COMMAND_SECONDS = 0.5
LAG_SECONDS = 5.0
"""How often an observer hears of the lag."""
STOP_SECONDS = 60.0
_IDLE_SECONDS = 0.5


class DocumentsOutput:
    """Runs in threads of this process (`penstock.coordinator.Output`)."""

    def __init__(
        self,
        settings: StreamSettings,
        store: Store,
        specifications: Sequence[IndexSpecification],
        sink: Sink,
        tasks: Tasks,
        *,
        relations: Callable[[], RelationMap],
        documents: DocumentsSettings | None = None,
        output: str = DEFAULT_OUTPUT,
        quarantine: Quarantine | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`relations` opens the relation maps (`open_relation_map`); `tasks` build documents and write them."""
        self._settings = settings
        self._documents = documents or DocumentsSettings()
        self._store = store
        self._specifications = tuple(specifications)
        self._tasks = tasks
        self._open_relations = relations
        self._output = output
        self._observer = observer or NoopObserver()
        self._is_observed = observer is not None
        self._sink = SharedSink(sink)
        self._generations = Generations()
        self._builds = Builds(store)
        self._rejections = Rejections(self._documents.failure_policies, quarantine, self._observer)
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._paused = threading.Event()
        self._error: BaseException | None = None
        self._started = False
        self._begun = False
        self._stream: Stream | None = None
        self._relations: RelationMap | None = None
        self._session: Session | None = None
        self._indexes: Indexes | None = None
        self._readiness: Readiness | None = None
        self._refresh_at = 0.0
        self._commanded = 0.0
        self._threads: list[threading.Thread] = []
        self._live: LiveChanges | None = None

    # What others see of it

    @property
    def settings(self) -> StreamSettings:
        return self._settings

    @property
    def store(self) -> Store:
        return self._store

    @property
    def output(self) -> str:
        """Its name among the outputs of the stream."""
        return self._output

    @property
    def status(self) -> ApplyStatus | None:
        """How far changes are followed; None before the start."""
        return self._live.status if self._live is not None else None

    @property
    def indexes(self) -> dict[str, IndexBuild]:
        """The last build of each index."""
        return self._builds.all()

    @property
    def phases(self) -> dict[str, TableReplicationPhase]:
        """None: indexes are built, tables are not copied."""
        return {}

    @property
    def copies(self) -> dict[str, CopyStatus]:
        """None."""
        return {}

    @property
    def waits(self) -> dict[str, SnapshotWait]:
        """None."""
        return {}

    @property
    def paused(self) -> bool:
        """Whether changes were told to wait."""
        return self._paused.is_set()

    @property
    def settled(self) -> bool:
        """Whether every index serves, and nothing is left to do but to follow changes."""
        return self._begun and not self._builds.unfinished and not self.unfinished_work

    @property
    def unfinished_work(self) -> bool:
        """Whether documents of a change that concerns very many are still to be built."""
        return any(self._store.get_index_work(name, WorkKind.FAN_OUT) for name in self.indexes)

    # For `Coordinator`, which starts and ends it

    def lead(self) -> None:
        """Take the lease."""
        if self._started:
            raise RuntimeError("an output is started once")
        self._started = True
        self._store.acquire_lease(on_lost=self._lose_lease)

    def follow(self, stream: Stream) -> None:
        """Refuse what cannot work, prepare indexes, and start; what takes long is left to threads."""
        self._stream = stream
        position = stream.start_of(self._output).position
        self._relations = self._open_relations()
        session = self._open_session()
        self._rejections.load()
        self._readiness = Readiness(
            self._settings,
            self._documents,
            self._store,
            self._sink.sink,
            self._relations,
            self._builds,
            self._check_wanted,
        )
        self._readiness.prepare(session.indexes)
        self._observer.on_indexes_ensured(len(self._specifications))
        fan_outs = FanOuts(
            source=self._settings.source,
            store=self._store,
            tasks=self._tasks,
            writer=self._writer(),
            rejections=self._rejections,
            indexes=self._compiled,
            stop=self._stop,
        )
        self._live = live = LiveChanges(
            name=self._output,
            spool=self._settings.spool.path,
            position=position,
            settings=self._documents,
            store=self._store,
            sink=self._sink,
            writer=self._writer(),
            rejections=self._rejections,
            builds=self._builds,
            fan_outs=fan_outs,
            observer=self._observer,
            stop=self._stop,
            altered=self._close_session,
        )
        backfill = Backfill(
            source=self._settings.source,
            settings=self._documents,
            store=self._store,
            sink=self._sink,
            tasks=self._tasks,
            generations=self._generations,
            builds=self._builds,
            writer=self._writer(),
            rejections=self._rejections,
            indexes=self._compiled,
            followed=lambda: live.status.acknowledged,
            observer=self._observer,
            stop=self._stop,
        )
        self._start("changes", lambda: self._round(live))
        self._start("backfill", lambda: backfill.round(_IDLE_SECONDS))
        self._start("fan-out", lambda: fan_outs.round(_IDLE_SECONDS))
        if self._is_observed:
            self._start("lag", lambda: self._tell_lag(live))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when it has not come in time. Raises what ended it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Ask it to end, without waiting."""
        self._stop.set()

    def settle(self) -> None:
        """Finish the batch at hand; the stream still runs."""
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_SECONDS)
        self._close_session()
        if self._relations is not None:
            self._relations.close()
            self._relations = None
        POOL.clear()

    def retire(self) -> None:
        """Give the lease back, last of all."""
        self._store.release_lease()

    # Threads

    def _start(self, name: str, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._run, args=(name, work), name=f"{self._output}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, name: str, work: Callable[[], object]) -> None:
        """Rounds until `stop`; the changes get one more, so that what has arrived is not read again."""
        backoff = Backoff(first=0.5, longest=30.0)
        while not self._lost.is_set():
            stopping = self._stop.is_set()
            if stopping and name != "changes":
                return
            try:
                work()
                backoff.reset()
            except PenstockError as error:
                if not _can_be_tried_again(error):
                    self._fail(error)
                    return
                delay = backoff.next_delay()
                logger.warning("documents: %s are tried again in=%.1fs error=%s", name, delay, error)
                if name == "changes":
                    self._close_session()
                self._stop.wait(delay)
            except Stopping:
                return
            except BaseException as error:
                self._fail(error)
                return
            if stopping:
                return

    def _fail(self, error: BaseException) -> None:
        logger.error("documents stop error=%s", error if isinstance(error, PenstockError) else type(error))
        self._observer.on_error(str(error))
        self._error = self._error or error
        self._stop.set()

    def _lose_lease(self, error: LeaseLost) -> None:
        self._error = error
        self._lost.set()
        self._stop.set()

    def _round(self, live: LiveChanges) -> None:
        assert self._stream is not None
        assert self._readiness is not None
        if not self._begun:
            self._check_wanted()
            session = self._session or self._open_session()
            self._readiness.begin(session.indexes, self._stream.look(), live.status.applied)
            self._begun = True
            self._observer.on_live_started()
        self._between_batches()
        if self._paused.is_set():
            self._stop.wait(_IDLE_SECONDS)
        else:
            live.round(self._session or self._open_session())

    def _tell_lag(self, live: LiveChanges) -> None:
        """How far what is acknowledged is behind the server: asked on a connection of its own, whatever others do."""
        if not self._stop.wait(LAG_SECONDS):
            self._observer.on_slot_lag(distance(live.status.acknowledged, current_position(self._settings.source)))

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise Stopping

    # What is compiled

    def _open_session(self) -> Session:
        """A connection, and the indexes as its database has them."""
        self._close_session()
        assert self._stream is not None
        connection = connect(self._settings.source, Role.DOCUMENTS, parameters=SESSION)
        try:
            require_primary(connection)
            indexes = compile_indexes(
                connection, self._specifications, self._relations, chunk=self._documents.chunk_documents
            )
            # After what is compiled: a partition that has just come is in both.
            published = self._stream.look()
            require_published(indexes, published.tables.values(), self._settings.publication)
            require_whole(connection, indexes, self._settings.publication)
            # First: whoever builds what is wanted builds it with these.
            self._indexes = indexes
            if self._readiness is not None:
                self._readiness.look_again(indexes)
        except BaseException:
            connection.close()
            raise
        self._session = Session(connection, indexes)
        if self._begun:
            assert self._readiness is not None
            self._readiness.resume(indexes, published)
        return self._session

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.connection.close()
            self._session = None

    def _compiled(self) -> Indexes:
        assert self._indexes is not None
        return self._indexes

    def _writer(self) -> DocumentWriter:
        return DocumentWriter(self._documents, self._tasks, self._job, self._generations, self._note)

    def _job(self) -> BuildJob:
        queries, recorded = self._compiled().queries, self._builds.recorded
        return BuildJob(self._settings.source, queries, self._sink, recorded, self._rejections.quarantined)

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        self._builds.record(outcomes)
        for each in outcomes:
            self._rejections.release(each.index, each.taken)

    # Between batches

    def _between_batches(self) -> None:
        assert self._stream is not None
        self._stream.check()
        now = time.monotonic()
        if now - self._commanded >= COMMAND_SECONDS:
            self._commanded = now
            for command in self._store.take_commands():
                self._obey(command)
            self._try_refused_again()
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            self._refresh()

    def _refresh(self) -> None:
        """Notice what the server does not send: replaced tables, added and removed partitions."""
        assert self._stream is not None
        assert self._readiness is not None
        session = self._session or self._open_session()
        published = self._stream.look()
        catalog = load_catalog(session.connection, session.indexes.catalog.tables)
        if catalog.heaps == session.indexes.catalog.heaps:
            self._readiness.note(session.indexes, published)
        else:
            self._open_session()

    def _try_refused_again(self) -> None:
        """Build quarantined documents for which a user asked for a retry; those rejected again stay quarantined."""
        indexes = self._compiled()
        for name, specification in indexes.specifications.items():
            ids = self._rejections.wanted(name)
            if not ids:
                continue
            self._rejections.load()
            keys = DocumentKeys.of(specification, indexes.catalog)
            parsed = [key for key in map(keys.parse, ids) if len(key) == len(keys.columns)]
            size = self._documents.chunk_documents
            chunks = [keys.resolved(parsed[first : first + size]) for first in range(0, len(parsed), size)]
            written = self._writer().write(chunks)
            self._rejections.quarantine(written.rejections, None)

    def _obey(self, command: Command) -> None:
        try:
            self._carry_out(command)
        except PenstockError as error:
            self._store.answer_command(command.number, CommandStatus.REFUSED, f"{error} {error.hint}".strip())
        else:
            self._store.answer_command(command.number, CommandStatus.DONE)

    def _carry_out(self, command: Command) -> None:
        match command.kind:
            case CommandKind.PAUSE:
                self._paused.set()
            case CommandKind.RESUME:
                self._paused.clear()
            case CommandKind.REFRESH:
                self._refresh_at = 0.0
            case CommandKind.REBUILD_INDEX:
                for name in self._named(command.options.get("indexes", ())):
                    self._builds.want(name, self._compiled().mappings[name].fingerprint, "requested by a user")
            case _:
                raise PenstockError(
                    f"documents do not know the command {command.kind.value!r}",
                    hint="It is for tables: name their output with --output.",
                )

    def _named(self, names: Collection[str]) -> list[str]:
        known = self._compiled().specifications.keys()
        unknown = sorted(set(names) - known)
        if unknown:
            raise PenstockError(f"there is no index {', '.join(unknown)}", hint=f"There is {', '.join(sorted(known))}.")
        return sorted(names or known)


def _can_be_tried_again(error: PenstockError) -> bool:
    """By its class; or because a statement has met somebody's lock."""
    return error.retry is Retry.TIMED or error.facts.get("sqlstate") in LOCKED
