"""Tables as an output: from a stream to a destination.

A `TablesOutput` says where they go; a coordinator runs it (`penstock.coordinator`). The apply worker applies changes
and does nothing else. The coordinator's thread starts a table sync worker for each table that has to be copied, a few
at a time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from penstock import failpoints
from penstock.changes.transform import Transforms
from penstock.copy import CopySettings
from penstock.copy.fetch import SourceFetch
from penstock.destinations.base import (
    Destination,
    DestinationContext,
    DroppingDestination,
    FolderDestination,
    Tasks,
)
from penstock.destinations.folders import RenameRules, TableFolders
from penstock.errors import PenstockError, PublicationChanged, Retry
from penstock.lsn import Lsn
from penstock.output import REMINDER_SECONDS, RunningOutput, unknown_command
from penstock.source.catalog import load_table, sort_by_size
from penstock.source.connections import CATALOG_LIMITS, Role, connect
from penstock.source.indexes import read_indexes
from penstock.source.lineage import current_position
from penstock.source.membership import Membership, changes_between
from penstock.source.shapes import TableShape, remembering
from penstock.state import (
    Command,
    CommandKind,
    DataSync,
    Errored,
    Init,
    Ready,
    Store,
    SyncDone,
    TableReplicationPhase,
)
from penstock.state.transitions import discover, resync
from penstock.stream import OnLostSlot, Published, Stream, StreamSettings
from penstock.workers import (
    ApplyHold,
    ApplyStatus,
    ApplyWorker,
    BatchSettings,
    Board,
    CopyStatus,
    DropColumn,
    DropTable,
    ErrorHold,
    HoldLimits,
    Lifecycle,
    SchemaChanges,
    SnapshotWait,
    SyncPool,
    TableSync,
    TableSyncView,
)
from penstock.workers.catalog_changes import CatalogChanges, CatalogSettings
from penstock.workers.failures import Policies, as_error, errored

__all__ = ["DEFAULT_OUTPUT", "OnLostSlot", "RunningTables", "TablesOutput", "TablesSettings"]

logger = logging.getLogger(__name__)

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
    schema_changes: SchemaChanges = field(default_factory=SchemaChanges)
    of_tables: Mapping[str, SchemaChanges] = field(default_factory=dict[str, SchemaChanges])
    """Instead of `schema_changes`, for single tables by their names."""
    rename_tables: RenameRules = field(default_factory=RenameRules)
    transforms: Transforms = field(default_factory=Transforms)
    """What happens to columns and rows of single tables."""

    @property
    def policies(self) -> dict[str, str]:
        """How tables follow changes of their schemas, for people: by name, and under `""` all others."""
        own = {name: policy for name, policy in self.of_tables.items() if policy != self.schema_changes}
        return {name: str(policy) for name, policy in ({"": self.schema_changes} | own).items()}

    @property
    def output_id(self) -> str:
        """The name of the output among those of all pipelines, in the store and at the destination."""
        return self.id if self.output == DEFAULT_OUTPUT else f"{self.id}:{self.output}"

    def policies_with(self, store: Store) -> Policies:
        """The policies of tables, also of those that were renamed since an earlier process stored their names."""
        known_as = {table_id: shape.known_as for table_id, shape in store.get_table_shapes().items() if shape.known_as}
        policies = Policies(self.schema_changes, self.of_tables, known_as)
        membership = store.get_publication_membership(self.publication)
        policies.remember({} if membership is None else membership.names)
        return policies


@dataclass(frozen=True, slots=True)
class TablesOutput:
    """One output of a stream that writes tables to a destination (`penstock.output.Output`)."""

    settings: TablesSettings
    store: Store
    destination: Destination
    tasks: Tasks
    """Runs the data work."""
    open_session: Callable[[], Any] = lambda: None
    """Returns the Spark session, or None without Spark."""

    @property
    def output(self) -> str:
        """Its name among the outputs of the stream."""
        return self.settings.output

    @contextmanager
    def opened(self, stream: Stream, lifecycle: Lifecycle, epoch: int, published: Published) -> Iterator[RunningTables]:
        """Run the output inside the block; see `penstock.output.Output`."""
        start = stream.start_of(self.output)
        folders = self._folders()
        transforms = remembering(self.settings.transforms, self.store.get_table_shapes())
        policies = self.settings.policies_with(self.store)
        with ExitStack() as stack:
            self.destination.startup(
                DestinationContext(
                    pipeline_id=self.settings.output_id,
                    epoch=epoch,
                    store=self.store,
                    tasks=self.tasks,
                    open_session=self.open_session,
                    source_rows=SourceFetch(self.settings.source, self.settings.types, transforms),
                    indexes_of=lambda schema: read_indexes(self.settings.source, schema.table_id),
                    transform_of=transforms.statement_of,
                    records_ddl=self.settings.ddl_trigger,
                    keeps_dropped_columns=lambda schema: (
                        policies.of(schema.table_id, str(schema)).drop_column is DropColumn.KEEP
                    ),
                    **({} if folders is None else {"take_folder": folders.take}),
                )
            )
            stack.callback(self.destination.shutdown)
            running = RunningTables(
                self, lifecycle, start, published, folders, transforms, policies, lambda: stream.headroom.wal_limit
            )
            stack.callback(running.drain)
            running.start()
            yield running

    def _folders(self) -> TableFolders | None:
        """Return what decides where tables go; None for a destination without folders."""
        if not isinstance(self.destination, FolderDestination):
            return None
        return TableFolders(self.settings.rename_tables, self.destination.folder_of)


class RunningTables(RunningOutput):
    """Tables that are copied and followed, in threads of this process."""

    def __init__(
        self,
        output: TablesOutput,
        lifecycle: Lifecycle,
        start: Lsn,
        published: Published,
        folders: TableFolders | None = None,
        transforms: Transforms | None = None,
        policies: Policies | None = None,
        wal_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`wal_limit` returns what `Headroom.wal_limit` says."""
        settings = output.settings
        super().__init__(settings.output, settings, output.store, lifecycle)
        self._tables = settings
        self.destination = output.destination
        self._tasks = output.tasks
        self._names: dict[int, str] = dict(published.tables)
        self._policies = policies or Policies(settings.schema_changes, settings.of_tables)
        self._folders = folders
        self._left_out: dict[int, int] = {}
        """Tables that are not followed, and the ones whose names theirs read like."""
        self._transforms = transforms or Transforms()
        self._told: dict[int, str] = {}
        """The names that the destination was told."""
        self._waiting: dict[int, int] = {}
        """Tables that wait until another one has left their folder, as last logged."""
        self._pool = SyncPool(settings.max_table_sync_workers)
        self._syncs: dict[int, TableSyncView] = {}
        """The last copy of each table by this process."""
        self._membership = self.store.get_publication_membership(settings.publication)
        if self._membership is not None:
            # Also of tables that were dropped while the pipeline was stopped.
            self._names = {**self._membership.names, **self._names}
        self._board = Board(
            self.store,
            start,
            # A table that has left is forgotten right below, so the destination is not queried for it.
            lambda table_id: self._recorded(table_id) if table_id in published.tables else None,
            self._name_of,
        )
        self._apply = ApplyWorker(
            name=settings.output,
            spool=settings.spool.path,
            board=self._board,
            store=self.store,
            destination=self.destination,
            lifecycle=lifecycle,
            settings=settings.batches,
            error_hold=settings.error_hold,
            # The rest of the spool is for changes that the destination does not have yet.
            hold_limits=HoldLimits(settings.copy.resume_max_bytes, settings.spool.max_bytes // 2, wal_limit),
            types=settings.types,
            transforms=self._transforms,
            try_tasks=lambda: self._tasks.run([None], _do_nothing, description="check that tasks run"),
            schema_changes=self._schema_changes,
            tally=self.tally,
        )
        self._catalog = CatalogChanges(
            CatalogSettings(settings.source, settings.publication, settings.copy, settings.types, settings.ddl_trigger),
            *(self._apply, self._board, self.store, self.destination, self._tasks, lifecycle.stop),
            transforms=self._transforms,
            policy_of=self._schema_changes,
            known_as=self._policies.known_as,
        )
        self.refresh(published)
        self._hold = ApplyHold(
            self._apply,
            self._board,
            self.store,
            lifecycle,
            server_position=lambda: current_position(settings.source),
            name_of=self._name_of,
        )

    @property
    def status(self) -> ApplyStatus:
        return self._apply.status

    @property
    def table_ids(self) -> dict[str, int]:
        return {self._name_of(table_id): table_id for table_id in self._board.phases()}

    @property
    def phases(self) -> dict[str, TableReplicationPhase]:
        return {self._name_of(table_id): phase for table_id, phase in self._board.phases().items()}

    @property
    def pending(self) -> set[str]:
        """The tables that do not follow yet what the last look at the catalog has shown."""
        return {self._name_of(table_id) for table_id in self._catalog.pending}

    @property
    def copies(self) -> dict[str, CopyStatus]:
        return {
            self._name_of(table_id): view.copy_status
            for table_id, view in list(self._syncs.items())
            if view.copy_status is not None
        }

    @property
    def waits(self) -> dict[str, SnapshotWait]:
        return {
            self._name_of(table_id): view.waiting
            for table_id, view in list(self._syncs.items())
            if view.waiting is not None
        }

    def start(self) -> None:
        """Start the apply worker."""
        self.start_thread("apply", self._apply.run)

    def drain(self) -> None:
        super().drain()
        while not self._pool.join(REMINDER_SECONDS):
            logger.warning("table sync workers have not ended yet output=%s", self.output)

    # For the coordinator's thread

    def refresh(self, published: Published) -> None:
        """Follow the publication: new tables start, removed ones stop, re-added ones start over."""
        published = replace(published, tables=self._told_apart(published))
        self._names |= published.tables
        self._policies.remember(published.tables)
        self._remember_rules(published)
        seen, now = self._membership, published.membership
        change = changes_between(seen, now) if seen is not None else None
        self._warn_of_types({} if seen is None else seen.names, published.tables)
        states = self._board.phases()
        for table_id in self._without_data(states.keys() - published.tables.keys()):
            logger.info("table left the publication table=%s", self._name_of(table_id))
            self._board.remove(table_id)
            failpoints.reach("after_removed")
        for table_id in published.tables.keys() - states.keys():
            self._board.set_phase(table_id, discover(None))
        for table_id in change.readded if change else ():
            if table_id in published.tables:
                logger.info("table was removed and added again, copying it again table=%s", self._name_of(table_id))
                self._board.set_phase(table_id, resync())
        self._notice_identities(change.reidentified if change else (), now)
        for table_id in change.regenerated if change else ():
            self._catalog.copy_for(table_id, "its generated columns are published now")
        self._catalog.notice(published.shapes, published.leaves)
        self._follow_names(published)
        # Last, so that a table that was not processed is noticed again, even by the next process.
        if now != seen:
            self.store.store_publication_membership(self._tables.publication, now)
        self._membership = now

    def _remember_rules(self, published: Published) -> None:
        """Learn the names of tables and columns with rules; store them before the first copy, which may be late."""
        known = self.store.get_table_shapes()
        found: dict[int, TableShape] = {}
        for table_id in published.tables.keys() & published.shapes.keys():
            name, shape = published.tables[table_id], published.shapes[table_id]
            self._transforms.remember(table_id, name, shape.columns)
            rules = self._transforms.in_force(table_id, name)
            stored = known[table_id].rules if table_id in known else None
            is_known = rules is None or (stored is not None and stored.table == rules.table)
            # Not during a copy, which stores the shape of its snapshot: this reading may be later.
            if not is_known and isinstance(self._board.phase(table_id), Init | None):
                found[table_id] = replace(
                    known.get(table_id, shape), rules=rules, known_as=self._policies.known_as(table_id)
                )
        self.store.store_table_shapes(found)

    def _told_apart(self, published: Published) -> dict[int, str]:
        """Return the tables; of those whose names read alike, only the one that is known longest.

        `a."b.c"` and `"a.b".c` read alike: commands, settings and readers could not tell them apart.
        """
        names, known = published.membership.table_names(), self._board.phases()
        owners: dict[str, int] = {}
        left_out: dict[int, int] = {}
        for table_id in sorted(published.tables, key=lambda each: (each not in known, each)):
            owner = owners.setdefault(published.tables[table_id], table_id)
            if owner != table_id:
                left_out[table_id] = owner
        for table_id, owner in left_out.items():
            if self._left_out.get(table_id) != owner:
                text = "table is skipped, because its name reads like that of another table=%s other=%s"
                logger.warning(text, names[table_id].quoted, names[owner].quoted)
        self._left_out = left_out
        return {table_id: name for table_id, name in published.tables.items() if table_id not in left_out}

    def _warn_of_types(self, before: Mapping[int, str], names: Mapping[int, str]) -> None:
        """Name the tables that lost their `types` when they were renamed."""
        typed = {override.table for override in self._tables.types.overrides}
        for table_id, name in names.items():
            if before.get(table_id) in typed and name not in typed:
                text = "table was renamed, and [tables] has types only for its former name table=%s former=%s"
                logger.warning(text, name, before[table_id])

    def _without_data(self, table_ids: Collection[int]) -> Iterator[int]:
        """Yield tables that have left, after the data of those that were dropped is deleted if the config says so."""
        for table_id in table_ids:
            if self._policies.of(table_id, self._name_of(table_id)).drop_table is DropTable.DROP:
                name = self._name_of(table_id)
                try:
                    with connect(self._tables.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
                        is_dropped = load_table(connection, table_id) is None
                    if is_dropped and not isinstance(self.destination, DroppingDestination):
                        logger.warning("the destination cannot delete tables, its data stays table=%s", name)
                    elif is_dropped and isinstance(self.destination, DroppingDestination):
                        self.destination.drop_table(table_id)
                except (OSError, PenstockError) as error:
                    # It is tried again with the next look at the publication.
                    logger.warning("cannot delete a dropped table table=%s error=%s", name, type(error).__name__)
                    continue
            yield table_id

    def _notice_identities(self, reidentified: Collection[int], membership: Membership) -> None:
        """Copy partitioned tables again whose captured changes may lack what identifies rows now.

        While partitions do not fit together, the table sync worker refuses the copy, with the statements that help.
        """
        for table_id, phase in self._board.phases().items():
            is_followed = isinstance(phase, SyncDone | Ready)
            if table_id in reidentified:
                # A log says of each change what the server said then, and goes on.
                if self.destination.capabilities.updates_rows or not is_followed:
                    self._catalog.copy_for(table_id, "its partitions have other replica identities than before")
            elif is_followed and membership.is_unidentified(table_id):
                self._catalog.copy_again(
                    table_id, "the replica identities of its partitions do not fit together: see penstock check"
                )

    def _schema_changes(self, table_id: int) -> SchemaChanges:
        policy = self._policies.of(table_id, self._name_of(table_id))
        shape = self.store.get_table_shapes().get(table_id)
        is_partitioned = shape is not None and shape.is_partitioned
        return policy.allowed(self.destination.capabilities, is_partitioned=is_partitioned)

    def _follow_names(self, published: Published) -> None:
        """Have the tables copied again that were renamed and belong into another folder; tell readers all names."""
        folders = self._folders
        if folders is None:
            return
        capabilities = self.destination.capabilities
        keeping = {each for each in published.tables if self._schema_changes(each).keeps_place(capabilities)}
        names = published.membership.table_names()
        folders.publish({table_id: names[table_id] for table_id in published.tables}, keeping)
        self._finish_copies(folders)
        phases = self._board.phases()
        for table_id, (folder, target) in folders.misplaced().items():
            if not isinstance(phases.get(table_id), Init | Errored | None):
                text = "table was renamed, copying it to another folder table=%s from=%s to=%s"
                logger.info(text, self._name_of(table_id), folder, target)
                self._board.set_phase(table_id, resync())
        assert isinstance(self.destination, FolderDestination)
        for table_id, name in published.tables.items():
            if isinstance(phases.get(table_id), SyncDone | Ready) and self._told.get(table_id) != name:
                try:
                    self.destination.name_table(table_id, name)
                    self._told[table_id] = name
                except (OSError, PenstockError) as error:
                    # Changes do not depend on it, and it is tried again.
                    logger.warning("cannot record the name of a table table=%s error=%s", name, type(error).__name__)

    def _finish_copies(self, folders: TableFolders) -> None:
        phases = self._board.phases()
        folders.finish([each for each, phase in phases.items() if not isinstance(phase, Init | DataSync | Errored)])

    def tend(self, *, source_answers: bool) -> None:
        """Answer comparisons whose boundary is reached; start table sync workers."""
        self._hold.answer()
        if source_answers:
            self._start_workers()

    @property
    def is_urgent(self) -> bool:
        return self._hold.active

    def carry_out(self, command: Command) -> bool:
        """Carry out verify, resync and rollback."""
        match command.kind:
            case CommandKind.VERIFY:
                self._hold.take(command)
                return False  # answered when the boundary is reached
            case CommandKind.RESYNC:
                self._board.resync(self._named(command.tables))
                failpoints.reach("after_resync")
            case CommandKind.ROLLBACK:
                named = self._named(command.tables)
                if not command.tables:
                    phases = self._board.phases()
                    named = [table_id for table_id in named if isinstance(phases.get(table_id), Errored)]
                self._board.roll_back(named)
            case _:
                raise unknown_command(command)
        return True

    def _named(self, tables: tuple[str, ...]) -> list[int]:
        """Return the tables with these names; all if there are none."""
        by_name = {self._name_of(table_id): table_id for table_id in self._board.phases()}
        unknown = [name for name in tables if name not in by_name]
        if unknown:
            raise PenstockError(f"not in this pipeline: {', '.join(unknown)}")
        return [by_name[name] for name in tables or by_name]

    # Copies

    def _start_workers(self) -> None:
        waiting = [table_id for table_id in self._board.to_copy() if not self._pool.is_running(table_id)]
        waiting = self._with_folders(waiting)
        free = self._pool.free
        if len(waiting) > free > 0:
            with connect(self._tables.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
                waiting = sort_by_size(connection, waiting)
        for table_id in waiting[:free]:
            if self.lifecycle.stop.is_set():
                return
            self._pool.start(table_id, self._worker(table_id), self._sync_failed)

    def _with_folders(self, table_ids: list[int]) -> list[int]:
        """Leave out tables whose folder is not known yet, or has the rows of a table that has not moved yet."""
        folders = self._folders
        if folders is None or not table_ids:
            return table_ids
        table_ids = [table_id for table_id in table_ids if folders.knows(table_id)]
        self._finish_copies(folders)
        to_copy = self._board.to_copy()
        waits = {table_id: folders.waits_for(table_id, to_copy) for table_id in table_ids}
        found = {table_id: other for table_id, other in waits.items() if other is not None}
        for table_id, other in found.items():
            if self._waiting.get(table_id) != other:
                text = "copy waits until another table has left its folder table=%s other=%s"
                logger.info(text, self._name_of(table_id), self._name_of(other))
        self._waiting = found
        return [table_id for table_id in table_ids if table_id not in found]

    def _worker(self, table_id: int) -> TableSync:
        settings = self._tables
        worker = TableSync(
            table_id,
            reader=settings.output,
            source=settings.source,
            publication=settings.publication,
            spool=settings.spool.path,
            board=self._board,
            store=self.store,
            destination=self.destination,
            tasks=self._tasks,
            stop=self.lifecycle.stop,
            batches=settings.batches,
            copy=settings.copy,
            types=settings.types,
            transforms=self._transforms,
            schema_changes=self._schema_changes(table_id),
            known_as=self._policies.known_as(table_id),
            tally=self.tally,
        )
        self._syncs[table_id] = worker.view
        return worker

    def _sync_failed(self, table_id: int, error: Exception) -> None:
        if self.lifecycle.stop.is_set():
            return
        history = [record.phase for record in self.store.get_table_replication_history(table_id)]
        # A copy that succeeded since then resets the back-off.
        recent = itertools.takewhile(lambda past: not isinstance(past, SyncDone | Ready), reversed(history))
        after = next((past for past in recent if isinstance(past, Errored)), None)

        def fail(phase: TableReplicationPhase) -> Errored:
            # A table that was dropped or unpublished is forgotten at the next look; one that came back is copied.
            has_left = isinstance(error, PublicationChanged)
            failed = errored(phase, error, position=None, after=after, timed=has_left)
            if not has_left:
                self.tally.count("errors", type(as_error(error)).__name__)
            level = logging.INFO if has_left else logging.ERROR
            text = "copy stopped table=%s reason=%s"
            logger.log(level, text, self._name_of(table_id), failed.reason, extra={"reported_as": "stopped"})
            return failed

        self._board.advance(table_id, self._syncs[table_id].attempt, fail)
        if isinstance(error, PenstockError) and error.retry is Retry.RESTART:
            self.lifecycle.fail(error)

    def _name_of(self, table_id: int) -> str:
        return self._names.get(table_id, str(table_id))

    def _recorded(self, table_id: int) -> Lsn | None:
        """Return up to where a table is durable, as recorded by the destination or by the store."""
        if self.destination.capabilities.records_position:
            return self.destination.position(table_id)
        return self.store.get_table_position(table_id)


def _do_nothing(_: None) -> None:
    """Run as a task to check that tasks run."""
