"""A pipeline: one output over one stream, from a source's publication to a destination.

    with TablesOutput(settings, store, destination, tasks) as pipeline:
        pipeline.wait()

Starting takes the lease, opens the stream (publication, slot, capture), and starts the apply worker. That one starts a
table sync worker for each table that has to be copied, a few at a time. Outputs that share a stream run in one
`Coordinator`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock import failpoints
from penstock.coordinator import Coordinator
from penstock.copy import CopySettings
from penstock.copy.fetch import SourceFetch
from penstock.destinations.base import Destination, DestinationContext, Tasks
from penstock.errors import IllegalTransition, LeaseLost, PenstockError, Retry, SourceError
from penstock.lsn import Lsn
from penstock.retry import Backoff
from penstock.source.catalog import sort_by_size
from penstock.source.connections import Role, connect
from penstock.source.lineage import Lineage, current_position
from penstock.source.publications import Membership, changes_between
from penstock.state import (
    Command,
    CommandKind,
    CommandStatus,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    Store,
    SyncDone,
    TableReplicationPhase,
)
from penstock.state.transitions import discover, resync
from penstock.stream import OnLostSlot, Stream, StreamSettings
from penstock.workers import (
    ApplyStatus,
    ApplyWorker,
    BatchSettings,
    Board,
    CopyStatus,
    Cuts,
    ErrorHold,
    SnapshotWait,
    SyncPool,
    TableSync,
)
from penstock.workers.failures import errored

__all__ = ["DEFAULT_OUTPUT", "Coordinator", "OnLostSlot", "TablesOutput", "TablesSettings"]

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""How often the publication is looked at."""
COMMAND_SECONDS = 0.5
STOP_SECONDS = 60.0


DEFAULT_OUTPUT = "tables"


@dataclass(frozen=True, slots=True)
class TablesSettings(StreamSettings):
    """One output over one stream."""

    output: str = DEFAULT_OUTPUT
    """The name of this output among those of the stream."""
    max_table_sync_workers: int = 4
    batches: BatchSettings = field(default_factory=BatchSettings)
    error_hold: ErrorHold = field(default_factory=ErrorHold)
    copy: CopySettings = field(default_factory=CopySettings)

    @property
    def output_id(self) -> str:
        """What the output is called where those of other pipelines are too: in the store, and at the destination."""
        return self.id if self.output == DEFAULT_OUTPUT else f"{self.id}:{self.output}"


class TablesOutput:
    """Runs in threads of this process; capture is a child of it."""

    def __init__(
        self,
        settings: TablesSettings,
        store: Store,
        destination: Destination,
        tasks: Tasks,
        session: Any = None,
    ) -> None:
        """`tasks` runs the data work; `session` is the Spark session, if there is one."""
        self._settings = settings
        self._store = store
        self._destination = destination
        self._tasks = tasks
        self._session = session
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._started = False
        self._epoch = 0
        self._pool = SyncPool(settings.max_table_sync_workers)
        self._workers: dict[int, TableSync] = {}
        self._names: dict[int, str] = {}
        self._membership: Membership | None = None
        self._refresh_at = 0.0
        self._refreshing = Backoff(first=REFRESH_SECONDS, longest=60.0)
        self._commanded = 0.0
        self._alone: Coordinator | None = None
        self._stream: Stream | None = None
        self._apply: ApplyWorker | None = None
        self._cuts: Cuts | None = None
        self._board: Board | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> TablesOutput:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    @property
    def settings(self) -> TablesSettings:
        return self._settings

    @property
    def store(self) -> Store:
        return self._store

    @property
    def output(self) -> str:
        """Its name among the outputs of the stream."""
        return self._settings.output

    @property
    def status(self) -> ApplyStatus | None:
        """How far apply is; None before the start."""
        return self._apply.status if self._apply else None

    @property
    def phases(self) -> dict[str, TableReplicationPhase]:
        """Every table's phase, by name."""
        return {self._names.get(table_id, str(table_id)): phase for table_id, phase in self._shown_phases().items()}

    @property
    def copies(self) -> dict[str, CopyStatus]:
        """Each table's last copy by this process, by the table's name; from when it is planned."""
        return {
            self._names.get(table_id, str(table_id)): worker.copy_status
            for table_id, worker in list(self._workers.items())
            if worker.copy_status is not None
        }

    @property
    def waits(self) -> dict[str, SnapshotWait]:
        """The tables whose copies wait for open transactions to end, by name, with whom they wait for."""
        return {
            self._names.get(table_id, str(table_id)): worker.waiting
            for table_id, worker in list(self._workers.items())
            if worker.waiting is not None
        }

    @property
    def paused(self) -> bool:
        """Whether apply was told to wait."""
        return self._apply is not None and self._apply.paused.is_set()

    def start(self) -> None:
        """Returns when changes flow; copies run on. Raises what prevents it, and leaves nothing running then."""
        self._alone = Coordinator([self])
        self._alone.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when it has not come in time. Raises what ended the pipeline."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Ask it to end, without waiting: from now on a copy that is given up is no error of its table."""
        self._stop.set()

    def shutdown(self) -> None:
        """Finish the batch at hand, store how far it went, and stop everything; may be called twice."""
        if self._alone is not None:
            self._alone.shutdown()

    # For `Coordinator`, which starts and ends the pipelines of a stream

    def lead(self) -> None:
        """Take the lease."""
        if self._started:
            raise RuntimeError("a pipeline is started once")
        self._started = True
        failpoints.reach("before_lease")
        self._epoch = self._store.acquire_lease(on_lost=self._lose_lease).epoch
        failpoints.reach("after_lease")

    def follow(self, stream: Stream) -> None:
        """Start the destination and apply, over a stream that is open."""
        settings = self._settings
        self._stream = stream
        start = stream.start_of(settings.output)
        self._refresh_tables()
        self._destination.startup(
            DestinationContext(
                pipeline_id=settings.output_id,
                epoch=self._epoch,
                lineage=_lineage_name(start.lineage),
                continues=_lineage_name(start.continues) if start.continues else None,
                store=self._store,
                tasks=self._tasks,
                session=self._session,
                source_rows=SourceFetch(settings.source, settings.types),
            )
        )
        self._board = Board(self._store, start.position, self._recorded, self._name_of)
        self._apply = ApplyWorker(
            name=settings.output,
            spool=settings.spool.path,
            board=self._board,
            store=self._store,
            destination=self._destination,
            stop=self._stop,
            settings=settings.batches,
            error_hold=settings.error_hold,
            types=settings.types,
            each_round=self._each_round,
        )
        self._cuts = Cuts(
            self._apply,
            self._board,
            self._store,
            server_position=lambda: current_position(settings.source),
            name_of=self._name_of,
        )
        self._thread = threading.Thread(target=self._run, name=f"apply-{settings.output}", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Finish the batch at hand; the stream still runs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        self._pool.join(STOP_SECONDS)
        if self._apply is not None:
            self._apply = None
            self._destination.shutdown()

    def retire(self) -> None:
        """Give the lease back, last of all."""
        self._store.release_lease()

    def _run(self) -> None:
        assert self._apply is not None
        try:
            self._apply.run()
        except BaseException as error:
            logger.error("the pipeline stops error=%s", error if isinstance(error, PenstockError) else type(error))
            self._error = self._error or error
            self._stop.set()

    def _shown_phases(self) -> Mapping[int, TableReplicationPhase]:
        return {} if self._board is None else self._board.phases()

    def _lose_lease(self, error: LeaseLost) -> None:
        self._error = error
        if self._apply is not None:
            self._apply.lost.set()
        self._stop.set()

    def _refresh_tables(self) -> None:
        """Follow the publication: new tables start, removed ones stop, re-added ones start over."""
        assert self._stream is not None
        publication = self._settings.publication
        now = self._stream.look()
        self._names |= now.tables
        seen = self._membership or self._store.get_publication_membership(publication)
        change = changes_between(seen, now.membership) if seen is not None else None
        states = self._store.get_table_replication_states()
        for table_id in states.keys() - now.tables.keys():
            logger.info("table left the publication table=%s", self._names.get(table_id, table_id))
            self._remove(table_id)
            failpoints.reach("after_removed")
        for table_id in now.tables.keys() - states.keys():
            self._set_phase(table_id, discover(None))
        for table_id in change.readded if change else ():
            if table_id in now.tables:
                logger.info("table was removed and added again, it is copied anew table=%s", now.tables[table_id])
                self._set_phase(table_id, resync(states.get(table_id)))
        # Last: what was not acted upon is noticed again, also by the next process.
        if now.membership != seen:
            self._store.store_publication_membership(publication, now.membership)
        self._membership = now.membership

    def _name_of(self, table_id: int) -> str:
        return self._names.get(table_id, str(table_id))

    def _recorded(self, table_id: int) -> Lsn | None:
        """Up to where a table is durable, by the destination's own record or by the store's."""
        if self._destination.capabilities.records_position:
            return self._destination.position(table_id)
        return self._store.get_table_position(table_id)

    # Between batches

    def _each_round(self) -> None:
        assert self._stream is not None
        self._stream.check()
        assert self._cuts is not None
        now = time.monotonic()
        self._cuts.settle()
        if now - self._commanded >= COMMAND_SECONDS or self._cuts.active:
            self._commanded = now
            for command in self._store.take_commands():
                self._obey(command)
        if now >= self._refresh_at:
            self._try_to_refresh()
        if not self._refreshing.attempt:
            # From a server that does not answer nothing can be copied.
            self._start_workers()

    def _try_to_refresh(self) -> None:
        """Look at the publication; while the server does not answer, what was captured is applied all the same."""
        try:
            self._refresh_tables()
        except SourceError as error:
            if error.retry is not Retry.TIMED:
                raise
            delay = self._refreshing.next_delay()
            logger.warning("the publication cannot be looked at, trying again in=%.1fs error=%s", delay, error)
            self._refresh_at = time.monotonic() + delay
        else:
            self._refreshing.reset()
            self._refresh_at = time.monotonic() + REFRESH_SECONDS

    def _start_workers(self) -> None:
        assert self._board is not None
        if self._stop.is_set():
            return
        free = self._pool.free
        waiting = [
            table_id
            for table_id, phase in self._board.phases().items()
            if isinstance(phase, Init | DataSync | FinishedCopy) and not self._pool.is_running(table_id)
        ]
        if len(waiting) > free > 0:
            with connect(self._settings.source, Role.CATALOG) as connection:
                waiting = sort_by_size(connection, waiting)
        for table_id in waiting[:free]:
            self._pool.start(table_id, self._worker(table_id), self._sync_failed)

    def _worker(self, table_id: int) -> TableSync:
        assert self._board is not None
        settings = self._settings
        self._workers[table_id] = TableSync(
            table_id,
            reader=settings.output,
            source=settings.source,
            publication=settings.publication,
            spool=settings.spool.path,
            board=self._board,
            store=self._store,
            destination=self._destination,
            tasks=self._tasks,
            stop=self._stop,
            batches=settings.batches,
            copy=settings.copy,
            types=settings.types,
        )
        return self._workers[table_id]

    def _sync_failed(self, table_id: int, error: Exception) -> None:
        assert self._board is not None
        if self._stop.is_set():
            return
        history = [record.phase for record in self._store.get_table_replication_history(table_id)]
        # A copy that got through since then is a new beginning for the back-off.
        recent = itertools.takewhile(lambda past: not isinstance(past, SyncDone | Ready), reversed(history))
        after = next((past for past in recent if isinstance(past, Errored)), None)

        def fail(phase: TableReplicationPhase) -> Errored:
            failed = errored(phase, error, position=None, after=after)
            text = "copy stopped table=%s reason=%s"
            logger.error(text, self._name_of(table_id), failed.reason, extra={"told_as": "stopped"})
            return failed

        self._board.advance(table_id, self._workers[table_id].attempt, fail)

    # Commands

    def _obey(self, command: Command) -> None:
        try:
            self._carry_out(command)
        except (IllegalTransition, PenstockError) as error:
            self._store.answer_command(
                command.number, CommandStatus.REFUSED, ". ".join(filter(None, (str(error), error.hint)))
            )
        else:
            if command.kind is not CommandKind.VERIFY:  # answered when it has come true
                self._store.answer_command(command.number, CommandStatus.DONE)

    def _carry_out(self, command: Command) -> None:
        assert self._board is not None
        assert self._apply is not None
        match command.kind:
            case CommandKind.PAUSE:
                self._apply.paused.set()
            case CommandKind.RESUME:
                self._apply.paused.clear()
            case CommandKind.REFRESH:
                self._refresh_at = 0.0
            case CommandKind.VERIFY:
                assert self._cuts is not None
                self._cuts.take(command)
            case CommandKind.RESYNC:
                for table_id in self._named(command.tables):
                    if self._pool.is_running(table_id):
                        raise IllegalTransition(f"{self._names[table_id]} is being copied now")
                    self._board.set_phase(table_id, resync(None))
                    failpoints.reach("after_resync")
            case CommandKind.ROLLBACK:
                for table_id in self._named(command.tables):
                    phase = self._store.rollback_table_replication_state(table_id)
                    position = phase.lsn if isinstance(phase, SyncDone) else None
                    self._board.show(table_id, phase, position=position)
            case _:
                raise PenstockError(f"this pipeline does not know the command {command.kind.value!r}")

    def _named(self, tables: tuple[str, ...]) -> list[int]:
        by_name = {self._names.get(table_id, str(table_id)): table_id for table_id in self._shown_phases()}
        unknown = [name for name in tables if name not in by_name]
        if unknown:
            raise PenstockError(f"not in this pipeline: {', '.join(unknown)}")
        return [by_name[name] for name in tables]

    def _set_phase(self, table_id: int, phase: TableReplicationPhase) -> None:
        if self._board is not None:
            self._board.set_phase(table_id, phase)
        else:
            self._store.update_table_replication_state(table_id, phase)

    def _remove(self, table_id: int) -> None:
        if self._board is not None:
            self._board.remove(table_id)
        else:
            self._store.delete_table_pipeline_state(table_id)


def _lineage_name(lineage: Lineage) -> str:
    return "/".join(str(value) for value in asdict(lineage).values())
