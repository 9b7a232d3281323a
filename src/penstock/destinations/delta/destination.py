"""The Delta destination: it plans on the driver, works in tasks, and commits each table once, with its position."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from penstock.changes.batch import EventBatch, Rows, TableChanges
from penstock.changes.segment import segment_layout
from penstock.copy.resume import FinishedRanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.delta import marker
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.copy import (
    CopiedFile,
    CopyTarget,
    FormerFile,
    group_ranges,
    keep_deleted,
    write_ranges,
)
from penstock.destinations.delta.files import LiveFile
from penstock.destinations.delta.layout import Mode, TableState, new_layout
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.pins import WritesInFlight
from penstock.destinations.delta.maintenance.schedule import Maintenance, MaintenanceSettings
from penstock.destinations.delta.parts import PartWork, part_filter, remove_rows
from penstock.destinations.delta.planner import SHARED_ROWS, Plan, plan_table
from penstock.destinations.delta.reader import PinnedVersion, pin_table
from penstock.destinations.delta.registration import Registration
from penstock.destinations.delta.resume import (
    RangeRecord,
    forget_copies,
    read_finished,
    require_present,
    reread_changed,
    taken_over,
    write_and_record,
)
from penstock.destinations.delta.schema import table_configuration
from penstock.destinations.delta.split import Splitter
from penstock.destinations.delta.storage import LocalStorage, Storage, open_storage
from penstock.destinations.delta.table import Batch, Catalog, LakeTable, Place, Version
from penstock.destinations.delta.tasks import Rewrite, rewrite_file
from penstock.destinations.delta.write import WrittenFiles, copy_marker, require_listed, require_seen, write_rows
from penstock.destinations.naming import FOLDERS
from penstock.destinations.refusals import (
    busy,
    concerns_all_tables,
    fenced_copy,
    not_copied,
    not_followed,
    raised,
    require_same_folder,
    unexpected,
    unusable,
    while_mounted,
)
from penstock.destinations.shared_place import require_shared
from penstock.errors import IllegalTransition, PenstockError, TableOwned
from penstock.lsn import Lsn, reaches
from penstock.observe.batches import spanned
from penstock.schema import TableSchema
from penstock.source.bounds import Bounds

logger = logging.getLogger(__name__)

_COMMIT_THREADS = 8
_ROUNDS = 20
"""How often a batch is written again because other commits, mostly by maintenance, came first."""


class DeltaDestination:
    """`type = "delta"`: Delta tables that mirror the source.

    | option | |
    |---|---|
    | `path` | a folder that the driver and all tasks see, or a URL like `s3://bucket/lake` |
    | `mode` | `mirror` (default): the rows of the source; `history`: every change; `soft_delete`: deleted rows stay |
    | `deletion_vectors` | `true` (default), or `false` for readers that do not support them: files are rewritten |
    | `column_mapping` | `true` renames columns without rewriting files; not all readers support it (`false`) |
    | `commit_interval` | seconds between two commits of a busy table (0.5) |
    | `storage_options` | of the object store: `{aws_endpoint = "…", aws_region = "…"}` |
    | `maintenance` | `true` (default): compaction, checkpoints and clean-up while the pipeline runs |
    | `register` | `{catalog = "…", schema = "…"}`: after its copy, a table appears in a catalog of the Spark session |
    | `log_retention_hours`, `file_retention_hours` | how long old versions (24) and old files (2) are kept |
    """

    name = "delta"

    def __init__(
        self,
        path: str | Path,
        *,
        mode: str = "mirror",
        deletion_vectors: bool = True,
        column_mapping: bool = False,
        commit_interval: float = 0.5,
        storage_options: Mapping[str, str] | None = None,
        maintenance: bool = True,
        log_retention_hours: float = 24.0,
        file_retention_hours: float = 2.0,
        register: object = None,
    ) -> None:
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")
        switches = {
            "deletion_vectors": deletion_vectors,
            "column_mapping": column_mapping,
            "maintenance": maintenance,
        }
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise unusable(f"{name} must be true or false")
        if isinstance(commit_interval, bool) or not isinstance(commit_interval, int | float) or commit_interval <= 0:
            raise unusable("commit_interval must be a number of seconds above zero", hint="The default is 0.5.")
        self.commit_interval = float(commit_interval)
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._mode = Mode(mode)
        self._deletion_vectors = deletion_vectors
        self._column_mapping = column_mapping
        self._maintained = maintenance
        self._settings = MaintenanceSettings(
            log_retention_hours=log_retention_hours, file_retention_hours=file_retention_hours
        )
        self._storage = open_storage(path, storage_options)
        self._registration = Registration.parse(register)
        self._writes = WritesInFlight()
        self._splitter = Splitter()
        self._lock = threading.Lock()
        self._tables: dict[int, LakeTable] = {}
        self._context: DestinationContext | None = None
        self._catalog: Catalog | None = None
        self._maintenance: Maintenance | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        mirrors = self._mode is not Mode.HISTORY
        return Capabilities(
            records_position=True,
            updates_rows=mirrors,
            keeps_old_rows_while_copying=True,
            fills_added_columns=mirrors,
            accepts_unknown_rows=mirrors,
            resumes_copies=mirrors,
            loses_nothing_by_a_copy=self._mode is Mode.MIRROR,
            keeps_deleted_rows=self._mode is Mode.SOFT_DELETE,
        )

    @property
    def marker(self) -> Path | None:
        """The file that shows that the lake's disk is mounted; None in an object store."""
        return self._storage.local_path(marker.MARKER)

    def probe(self) -> None:
        """See `ProbedDestination`."""
        marker.probe(self._storage)

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        require_same_folder(self.marker, context.store)
        marker.mark(self._storage)
        if isinstance(self._storage, LocalStorage):
            self._storage = replace(self._storage, marker=self.marker)
        require_shared(context, self._storage)
        if self._registration is not None and context.session is None:
            raise unusable(
                "register needs Spark", hint='Set another master than "none" in [spark], or remove register.'
            )
        self._catalog = Catalog(self._storage, context.pipeline_id)
        if self._maintained:
            self._maintenance = Maintenance(self._written, context.tasks, self._settings, writes=self._writes)
            self._maintenance.start()

    @while_mounted
    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        folder, before = self._started.take_folder(schema), self._started_catalog.place(schema.table_id)
        table = self._table(schema.table_id, str(schema), folder)
        self._fence(table, schema, attempt)
        if before is not None and before.folder != folder:
            # The table was renamed: fence off writers of its old folder, too.
            old = self._table(schema.table_id, str(schema), before.folder)
            with suppress(TableOwned):
                self._fence(old, schema, attempt, only_own=True)
        with self._lock:
            # A table that gave its folder to this one is copied to another folder.
            self._tables = {table_id: other for table_id, other in self._tables.items() if other.folder != folder}
            self._tables[schema.table_id] = table

    @while_mounted
    def finished_ranges(self, schema: TableSchema, copy: str) -> list[FinishedRanges]:
        """See `ResumingDestination`."""
        table = self._known(schema.table_id, str(schema))
        version = None if table is None else table.look()
        if table is None or version is None:
            return []
        return read_finished(table.log, copy)

    @while_mounted
    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        table = self._known(schema.table_id, str(schema))
        version = None if table is None else table.look()
        if table is None or version is None or version.state.begun != rows.attempt:
            raise fenced_copy(str(schema), rows.attempt)
        if version.state.is_copied:
            if table.position(version) != rows.position:
                raise fenced_copy(str(schema), rows.attempt)
            forget_copies(table.log.storage)
            self._record_place(table, schema)
            return
        before = version.state.layout
        is_known = before.mode is self._mode and before.source.table_id == schema.table_id
        is_known = is_known and table.precedes(version, rows.position)
        # A log of changes keeps what it has; the copy follows it.
        continues = is_known and self._mode is Mode.HISTORY
        layout = (
            before.evolved(schema, rows.arrow_schema)
            if continues
            else new_layout(schema, self._mode, rows.arrow_schema)
        )
        if is_known and not continues and self._started.keeps_dropped_columns(schema):
            layout = layout.keeping(before)
        storage, resumable = table.log.storage, rows.resumable
        target = CopyTarget(str(schema), storage, layout.with_texts(), rows.attempt, rows.position)
        record = None if resumable is None else RangeRecord.of(resumable, target.layout)
        with self._writes.writing():
            forget_copies(storage, but=None if record is None else record.copy)
            work = partial(write_and_record, rows.reader, target, record)
            written = self._started.tasks.run(group_ranges(rows.ranges), work, description=f"copy {schema}")
            files = [file for each in written for file in each]
            if resumable is not None and resumable.finished and record is not None:
                files += taken_over(str(schema), resumable, record)
                files = reread_changed(
                    *(self._started.tasks, rows.reader, resumable, target, files),
                    deletion_vectors=self._deletion_vectors,
                )
                require_present(str(schema), storage, files)
            if is_known and self._mode is Mode.SOFT_DELETE:
                files += self._keep_deleted(version, target, [file.add for file in files])
            if any(file.has_texts for file in files):
                layout = layout.with_texts()
            added = [file.add for file in files]
            if continues:
                added.append(write_rows(table.log.storage, layout, copy_marker(rows.position, layout)))
            state = replace(version.state, table_id=schema.table_id, copied=rows.attempt, layout=layout)
            require_listed(str(schema), storage, added)
            table.commit_copy(version, state, rows.position, added, self._configuration(), keep=continues)
            forget_copies(storage)
        self._record_place(table, schema)
        count = sum(file.row_count for file in files)
        logger.info("table copied table=%s rows=%d files=%d", schema, count, len(files))

    @while_mounted
    def replace_part(self, schema: TableSchema, rows: CopyRows, leaves: Sequence[Bounds], *, inside: bool) -> None:
        """See `PartDestination`."""
        table = self._known(schema.table_id, str(schema))
        if table is None:
            raise not_copied(str(schema))
        with self._writes.writing():
            files: list[CopiedFile] | None = None
            for _ in range(_ROUNDS):
                version = table.require()
                layout = version.state.layout
                if layout.source != rows.schema:
                    raise not_followed(str(schema), "its columns changed together with its partitions")
                if not reaches(rows.position, table.require_position(version)):
                    raise fenced_copy(str(schema), rows.attempt)
                stays = part_filter(layout, leaves, inside=inside)
                if files is None:
                    target = CopyTarget(
                        str(schema), table.log.storage, layout.with_texts(), rows.attempt, rows.position
                    )
                    copied = self._started.tasks.run(
                        group_ranges(rows.ranges),
                        partial(write_ranges, rows.reader, target),
                        description=f"copy {schema}",
                    )
                    files = [file for each in copied for file in each]
                work = [
                    PartWork(str(schema), table.log.storage, layout, LiveFile.of(add), stays, self._deletion_vectors)
                    for add in version.snapshot.files.values()
                    if not stays.keeps_all(add)
                ]
                outcomes = self._started.tasks.run(work, remove_rows, description=f"remove rows of {schema}")
                written = WrittenFiles.all_of([raised(outcome) for outcome in outcomes])
                written = replace(written, added=(*written.added, *(file.add for file in files)))
                state = version.state
                if any(file.has_texts for file in files):
                    state = replace(state, layout=layout.with_texts())
                require_seen(str(schema), table.log.storage, written)
                if table.commit(Batch(version, state, rows.position, written)):
                    count = sum(file.row_count for file in files)
                    text = "partitions copied table=%s position=%s rows=%d removed=%d"
                    logger.info(text, schema, rows.position, count, written.dead_count)
                    return
        raise busy(str(schema))

    @while_mounted
    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        errors: dict[int, PenstockError] = {}
        left = {changes.table_id: changes for changes in batch.tables}
        with self._writes.writing():
            done: list[tuple[Rewrite, Add | PenstockError | None]] = []
            for _ in range(_ROUNDS):
                left = self._round(batch, left, errors, done)
                if not left:
                    break
        errors |= {table_id: busy(changes.table) for table_id, changes in left.items()}
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        table = self._known(table_id, str(table_id))
        try:
            return None if table is None else table.position(table.require())
        except (IllegalTransition, TableOwned):
            return None

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`."""
        place = self._started_catalog.place(table_id)
        if place is None or place.system not in ("", self._system):
            return None
        table = self._known(table_id, place.table or str(table_id))
        try:
            version = None if table is None else table.look()
        except TableOwned:
            return None
        # Another table may have taken the folder over.
        return place.folder if version is not None and version.state.table_id == table_id else None

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`."""
        place = self._started_catalog.place(table_id)
        if place is not None and place.system in ("", self._system):
            self._started_catalog.record(table_id, replace(place, table=name))

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        folder = self.folder_of(table_id)
        table = None if folder is None else self._known(table_id, str(table_id))
        if table is None:
            return False
        with self._lock:
            self._tables.pop(table_id, None)
        with self._writes.writing():
            table.delete_files()
        self._started_catalog.forget(table_id)
        logger.info("the data of a dropped table was deleted table_id=%d folder=%s", table_id, folder)
        return True

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        places = Catalog(self._storage, pipeline_id).places()
        return {table_id: self._storage.child(place.folder).url for table_id, place in places.items()}

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`."""
        return True

    def pin(self, schema: TableSchema) -> PinnedVersion | None:
        """See `ReadableDestination`."""
        return pin_table(self._storage, schema)

    def shutdown(self) -> None:
        """See `Destination`."""
        if self._maintenance is not None:
            self._maintenance.stop()
        self._tables.clear()

    def _round(
        self,
        batch: EventBatch,
        tables: Mapping[int, TableChanges],
        errors: dict[int, PenstockError],
        done: list[tuple[Rewrite, Add | PenstockError | None]],
    ) -> dict[int, TableChanges]:
        """Run one job and its commits; return the tables that have to be written again.

        `done` are the files that earlier rounds rewrote, so that a lost race does not repeat them.
        """
        plans: list[Plan] = []
        for changes in tables.values():
            try:
                plan = self._plan(batch, changes)
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                if concerns_all_tables(errors[changes.table_id]):
                    raise errors[changes.table_id] from error
                continue
            if plan is not None:
                plans.append(plan)
        plans = self._rewrite(batch, plans, errors, done)
        if not plans:
            return {}
        works = [plan.work for plan in plans]
        is_long = batch.alone and batch.row_count > SHARED_ROWS
        with self._started.tasks.copying() if is_long else nullcontext():
            results = self._splitter.write(self._started.tasks, works, description=_describe(batch, plans))
        ready: list[tuple[Plan, WrittenFiles]] = []
        for plan, result in zip(plans, results, strict=True):
            if isinstance(result, PenstockError):
                errors[plan.work.table_id] = result
            else:
                ready.append((plan, result))
        again: dict[int, TableChanges] = {}
        for (plan, _), outcome in zip(ready, self._commit(ready), strict=True):
            if isinstance(outcome, PenstockError):
                errors[plan.work.table_id] = outcome
            elif not outcome:
                again[plan.work.table_id] = tables[plan.work.table_id]
        return again

    def _keep_deleted(self, version: Version, target: CopyTarget, copied: list[Add]) -> list[CopiedFile]:
        """Write the rows that are deleted, and those that a copy lacks, from the files before it."""
        moment = int(datetime.now(UTC).timestamp() * 1_000_000)
        files = tuple(LiveFile.of(add) for add in copied)
        items = [
            FormerFile(LiveFile.of(add), version.state.layout, files, moment) for add in version.snapshot.files.values()
        ]
        work = partial(keep_deleted, target)
        kept = self._started.tasks.run(items, work, description=f"keep deleted rows of {target.table}")
        return [file for file in kept if file is not None]

    def _rewrite(
        self,
        batch: EventBatch,
        plans: list[Plan],
        errors: dict[int, PenstockError],
        done: list[tuple[Rewrite, Add | PenstockError | None]],
    ) -> list[Plan]:
        """Rewrite files of tables whose columns changed, in one job; return the plans that succeeded."""
        known = {item.file: item for item, _ in done}
        new = [item for plan in plans for item in plan.rewrites if known.get(item.file) != item]
        if new:
            text = f"rewrite {len(new)} files of {', '.join(sorted({item.table for item in new}))}"
            with self._started.tasks.copying() if batch.alone else nullcontext():
                done += zip(new, self._started.tasks.run(new, rewrite_file, description=text), strict=True)
        outcomes = {item.file: outcome for item, outcome in done}
        ready: list[Plan] = []
        for plan in plans:
            files = [outcomes[item.file] for item in plan.rewrites]
            failures = [each for each in files if isinstance(each, PenstockError)]
            if failures:
                errors[plan.work.table_id] = failures[0]
            else:
                ready.append(plan.rewritten([each for each in files if not isinstance(each, PenstockError)]))
                if plan.rewrites:
                    logger.info("columns changed, files rewritten table=%s files=%d", plan.work.table, len(files))
        return ready

    def _plan(self, batch: EventBatch, changes: TableChanges) -> Plan | None:
        table = self._known(changes.table_id, changes.table)
        if table is None:
            self._refuse_foreign(changes)
            raise not_copied(changes.table)
        table.name = changes.table
        return plan_table(
            batch,
            changes,
            table,
            mode=self._mode,
            deletion_vectors=self._deletion_vectors,
            source=self._started.source_rows,
            records_ddl=self._started.records_ddl,
            column_mapping=self._column_mapping,
            keeps_dropped=self._started.keeps_dropped_columns,
        )

    @spanned("commit")
    def _commit(self, ready: list[tuple[Plan, WrittenFiles]]) -> list[bool | PenstockError]:
        """Commit tables, several at a time, because each commit waits for the disk."""

        def commit(item: tuple[Plan, WrittenFiles]) -> bool | PenstockError:
            plan, written = item
            try:
                exchanged = tuple(add for add in plan.exchanged.values() if add is not None)
                seen = replace(written, added=(*written.added, *exchanged))
                require_seen(plan.work.table, plan.work.storage, seen)
                done = plan.table.commit(Batch(plan.version, plan.state, plan.end, written, plan.exchanged))
            except Exception as error:
                return unexpected(plan.work.table, error)
            logger.debug(
                "batch written table=%s position=%s rows=%d dead=%d committed=%s seconds=%s",
                *(plan.work.table, plan.end, written.row_count, written.dead_count, done, written.seconds),
            )
            return done

        if len(ready) <= 1:
            return [commit(item) for item in ready]
        with ThreadPoolExecutor(min(_COMMIT_THREADS, len(ready)), thread_name_prefix="delta-commit") as pool:
            return list(pool.map(commit, ready))

    def _fence(self, table: LakeTable, schema: TableSchema, attempt: str, *, only_own: bool = False) -> None:
        """Let no earlier attempt write to a folder; with `only_own`, only if the folder is still the table's own."""
        for _ in range(_ROUNDS):
            version = table.look()
            if version is not None and version.state.begun == attempt:
                return
            if only_own and (version is None or version.state.table_id != schema.table_id):
                return
            if version is None:
                # The types of its columns are known when it is copied.
                layout = new_layout(schema, self._mode, segment_layout(schema).arrow_schema)
                state = TableState(self._started.pipeline_id, schema.table_id, attempt, "", layout)
                done = table.fence(state, None, self._configuration())
            else:
                state = replace(version.state, begun=attempt, table_id=schema.table_id)
                done = table.fence(state, version.snapshot, {})
            if done:
                return
        raise busy(str(schema))

    def _known(self, table_id: int, name: str) -> LakeTable | None:
        with self._lock:
            table = self._tables.get(table_id)
        if table is not None:
            return table
        place = self._started_catalog.place(table_id)
        if place is None:
            return None
        table = self._table(table_id, name, place.folder)
        with self._lock:
            return self._tables.setdefault(table_id, table)

    def _table(self, table_id: int, name: str, folder: str) -> LakeTable:
        log = DeltaLog(self._storage.child(folder), name)
        return LakeTable(log, name, table_id, self._started, self._deletion_vectors, folder)

    def _record_place(self, table: LakeTable, schema: TableSchema) -> None:
        """Record that the rows of a table are in the folder that they were copied to, in the catalog of Spark, too."""
        catalog = self._started_catalog
        folder, before = table.folder, catalog.place(schema.table_id)
        catalog.record(schema.table_id, Place(folder, str(schema), self._system))
        if before is not None and before.folder != folder:
            logger.info(
                "table moved, its old folder is left as it was table=%s from=%s to=%s", schema, before.folder, folder
            )
        if self._registration is not None:
            self._registration.register(self._started.session, schema, table.log.storage.url)

    @property
    def _system(self) -> str:
        """The server of the tables, which a failover does not change."""
        return self._started.lineage.partition("/")[0]

    def _refuse_foreign(self, changes: TableChanges) -> None:
        schema = next((step.schema for step in changes.steps if isinstance(step, Rows)), None)
        if schema is not None:
            self._table(changes.table_id, changes.table, FOLDERS.table(schema)).look()

    def _configuration(self) -> dict[str, str]:
        return table_configuration(
            self._started.pipeline_id,
            deletion_vectors=self._deletion_vectors,
            log_retention_hours=self._settings.log_retention_hours,
            file_retention_hours=self._settings.file_retention_hours,
        )

    def _written(self) -> dict[str, Storage]:
        """Return the tables that this process writes, by folder, for maintenance.

        Names are not unique: a table may have the name that another one had when it was last written.
        """
        with self._lock:
            return {table.folder: table.log.storage for table in self._tables.values()}

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context

    @property
    def _started_catalog(self) -> Catalog:
        if self._catalog is None:
            raise RuntimeError("startup was not called")
        return self._catalog


def _describe(batch: EventBatch, plans: list[Plan]) -> str:
    names = [plan.work.table for plan in plans]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"write {shown} up to {batch.end}"
