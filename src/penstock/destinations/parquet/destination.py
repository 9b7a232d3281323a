"""The Parquet destination: it plans on the driver, writes in tasks, and commits one manifest per table."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.steps import Segment
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.batch_events import leave_out
from penstock.destinations.naming import FOLDERS
from penstock.destinations.parquet.current import PinnedParquet, pin_generation
from penstock.destinations.parquet.folder import (
    FORMAT,
    DataFile,
    Generation,
    Manifest,
    ManifestKind,
    ManifestStep,
    NewSchema,
    Origin,
    Owner,
    RootFolder,
    TableFolder,
    make_folder,
    put_if_absent,
)
from penstock.destinations.parquet.tasks import ChangesItem, CopyTarget, write_changes, write_range
from penstock.destinations.refusals import (
    cannot_write,
    fenced_copy,
    foreign_table,
    not_copied,
    other_lineage,
    other_writer,
    require_same_folder,
    unexpected,
    unusable,
    while_mounted,
)
from penstock.destinations.shared_place import Folder, require_shared, require_written
from penstock.durable import probe_folder
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.observe.batches import spanned
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_PART_BYTES = 64 << 20
_COMMIT_THREADS = 8


@dataclass(slots=True)
class _Table:
    """A table that this process writes."""

    folder: TableFolder
    generation: Generation
    attempt: str
    next_number: int
    position: Lsn
    schema: TableSchema
    version: int
    """Of its schema."""
    schema_at: int
    """The number of the manifest that has the schema."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One table's part of a batch, without the changes that the table already has."""

    table: _Table
    changes: TableChanges
    items: tuple[ChangesItem, ...]
    schema: TableSchema
    """After it."""
    version: int


class ParquetDestination:
    """`type = "parquet"`: every change, appended to Parquet files; `ParquetReader` gives changes and current rows.

    | option | |
    |---|---|
    | `path` | a folder that the driver and all tasks see |
    | `compression` | of the files: `zstd` (default), `snappy`, `lz4`, `none` |
    """

    name = "parquet"
    capabilities = Capabilities(records_position=True, keeps_old_rows_while_copying=True)

    def __init__(self, path: str | Path, *, compression: str = "zstd") -> None:
        if "://" in str(path):
            raise unusable(
                "the parquet destination writes to a folder, not to an object store",
                hint="Use a path that the driver and all tasks see.",
            )
        if compression not in ("zstd", "snappy", "lz4", "none"):
            raise unusable(f"unknown compression {compression!r}", hint="Use zstd, snappy, lz4 or none.")
        self._root = RootFolder(Path(path).absolute())
        self._compression = compression
        self._writer = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._folders: dict[int, TableFolder] = {}
        """Where each table is written."""
        self._rows: dict[int, TableFolder] = {}
        """Where readers find it; another folder while the table is moving."""
        self._tables: dict[int, _Table] = {}
        self._context: DestinationContext | None = None

    @property
    def marker(self) -> Path | None:
        """The file that shows that the folder's disk is mounted."""
        return self._root.marker

    def probe(self) -> None:
        """See `ProbedDestination`."""
        with self._usable():
            probe_folder(self._root.path)
            if self._root.marker.exists():
                self._check_format()

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        require_same_folder(self.marker, context.store)
        with self._usable():
            make_folder(self._root.path)
            put_if_absent(self._root.marker, json.dumps({"format": FORMAT}))
            self._check_format()
        require_shared(context, Folder(self._root.path))
        for folder in self._root.tables():
            owner = folder.owner()
            generations = folder.generations()
            if owner is None or owner.pipeline_id != context.pipeline_id or not generations:
                continue
            last = generations[-1].last()
            if last is None or last[1].kind is not ManifestKind.FENCED:
                self._folders[generations[-1].origin().table_id] = folder
        for folder, owner, current in self._root.readable():
            if owner.pipeline_id == context.pipeline_id and self._is_of_this_server(current):
                self._rows[current.origin().table_id] = folder

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "The folder must be writable, on a file system that has hard links."
            raise cannot_write(str(self._root.path), error, hint=hint) from error

    def _check_format(self) -> None:
        found = json.loads(self._root.marker.read_text())["format"]
        if found > FORMAT:
            raise unusable(
                f"{self._root.path} was written by a newer version (format {found})", hint="Run that version."
            )

    @while_mounted
    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context = self._started
        folder = self._root.table(context.take_folder(schema))
        owner = folder.claim(context.pipeline_id, schema)
        if owner.pipeline_id != context.pipeline_id:
            raise foreign_table(str(schema), owner.pipeline_id, context.pipeline_id)
        with self._lock:
            before = self._folders.get(schema.table_id)
            # A table that gave its folder to this one is copied to another folder.
            self._folders = {table_id: other for table_id, other in self._folders.items() if other != folder}
            self._tables = {table_id: other for table_id, other in self._tables.items() if other.folder != folder}
            self._folders[schema.table_id] = folder
            self._tables.pop(schema.table_id, None)
        generation = folder.begin_generation(Origin(schema.table_id, attempt))
        older = [each for each in folder.generations() if each.number < generation.number]
        left = before.generations() if before is not None and before != folder else []
        if left and left[-1].origin().table_id == schema.table_id:
            # The table was renamed: fence off writers of its old folder, too. Not those of a table that is copied there
            # from now on, as when two tables exchange their names.
            older += left
        for each in older:
            each.fence(self._manifest(ManifestKind.FENCED, attempt, Lsn(0), Lsn(0)))

    @while_mounted
    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context = self._started
        folder = self._folders.get(schema.table_id)
        generations = folder.generations() if folder is not None else []
        if folder is None or not generations or generations[-1].origin() != Origin(schema.table_id, rows.attempt):
            raise fenced_copy(str(schema), rows.attempt)
        generation = generations[-1]
        if generation.last() is None:
            version = _next_version(generations[:-1], schema)
            target = CopyTarget(
                str(schema), str(generation.data), rows.position, rows.arrow_schema, version, self._compression
            )
            written = context.tasks.run(
                rows.ranges, partial(write_range, rows.reader, target), description=f"copy {schema}"
            )
            files = [each for each in written if each is not None]
            require_written(str(schema), ((generation.data / file.name, file.bytes) for file in files))
            steps = (NewSchema(schema, ""), *files)
            manifest = self._manifest(ManifestKind.COPY, rows.attempt, rows.position, rows.position, steps)
            generation.append(0, replace(manifest, schema_version=version))
        manifest = generation.manifest(0)
        if manifest.kind is not ManifestKind.COPY or manifest.position != rows.position:
            raise fenced_copy(str(schema), rows.attempt)
        folder.remove_incomplete(generation)
        self._record_rows(schema, folder)
        logger.info("table copied table=%s rows=%d", schema, sum(file.rows for file in manifest.files))

    @while_mounted
    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        errors: dict[int, PenstockError] = {}
        plans: dict[int, _Plan] = {}
        for changes in batch.tables:
            try:
                plan = self._plan(batch, changes)
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                continue
            if plan.changes.steps:
                plans[changes.table_id] = plan
        items = [item for plan in plans.values() for item in plan.items]
        written: list[DataFile | PenstockError | None] = []
        if items:
            written = self._started.tasks.run(items, write_changes, description=_describe(batch, plans))
        results: dict[tuple[int, int], list[DataFile]] = {}
        for item, result in zip(items, written, strict=True):
            if isinstance(result, PenstockError):
                errors.setdefault(item.table_id, result)
            elif result is not None:
                results.setdefault((item.table_id, item.step), []).append(result)
        with spanned("commit"):
            errors |= self._commit(batch, [plan for table_id, plan in plans.items() if table_id not in errors], results)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        with self._lock:
            table, folder = self._tables.get(table_id), self._folders.get(table_id)
        if table is not None:
            return table.position
        generations = folder.generations() if folder is not None else []
        last = generations[-1].last() if generations else None
        if (
            last is None
            or last[1].kind is ManifestKind.FENCED
            or not self._started.knows(last[1].lineage, last[1].position)
        ):
            return None
        return last[1].position

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`."""
        folder = self._rows.get(table_id)
        return None if folder is None else folder.path.relative_to(self._root.path).as_posix()

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`."""
        folder = self._rows.get(table_id)
        owner = None if folder is None else folder.owner()
        if folder is not None and owner is not None and owner.table != name and _is_last(folder, table_id):
            folder.rename(Owner(owner.pipeline_id, name))

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        return {
            current.origin().table_id: str(folder.path)
            for folder, owner, current in self._root.readable()
            if owner.pipeline_id == pipeline_id
        }

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: files are never changed."""
        return True

    def pin(self, schema: TableSchema) -> PinnedParquet | None:
        """See `ReadableDestination`."""
        for _, _, current in self._root.readable():
            if current.origin().table_id == schema.table_id:
                return pin_generation(current)
        return None

    def shutdown(self) -> None:
        """See `Destination`."""
        self._tables.clear()

    def _plan(self, batch: EventBatch, changes: TableChanges) -> _Plan:
        table = self._open(changes)
        changes = leave_out(changes, table.position, batch.begin)
        schema, version = table.schema, table.version
        steps: list[TableStep] = []
        items: list[ChangesItem] = []
        for step in changes.steps:
            if isinstance(step, SchemaChange):
                if step.new == schema:
                    continue  # the table has it from a batch that ended in the middle of this one
                schema, version = step.new, version + (not step.new.has_columns_of(schema))
            elif isinstance(step, Rows):
                folder, number = str(table.generation.data), table.next_number
                items += [
                    ChangesItem(
                        changes.table_id,
                        len(steps),
                        replace(step, segments=part),
                        folder,
                        number,
                        version,
                        self._compression,
                    )
                    for part in _parts(step.segments)
                ]
            steps.append(step)
        return _Plan(table, replace(changes, steps=tuple(steps)), tuple(items), schema, version)

    def _open(self, changes: TableChanges) -> _Table:
        """Take the table over; the previous writer notices at its next manifest."""
        with self._lock:
            table, folder = self._tables.get(changes.table_id), self._folders.get(changes.table_id)
        if table is not None:
            return table
        generations = folder.generations() if folder is not None else []
        if folder is None or not generations:
            self._refuse_foreign(changes)
            raise not_copied(changes.table)
        generation = generations[-1]
        while True:
            last = generation.last()
            if last is None or last[1].kind is ManifestKind.FENCED:
                raise not_copied(changes.table)
            number, manifest = last
            if manifest.epoch > self._started.epoch:
                raise other_writer(changes.table)
            if not self._started.knows(manifest.lineage, manifest.position):
                raise other_lineage(changes.table, manifest.lineage, self._started.lineage)
            position = manifest.position
            schema, version, at = generation.schema()
            opened = self._manifest(ManifestKind.OPENED, manifest.attempt, position, position)
            opened = replace(opened, schema_version=version, schema_at=at)
            if generation.append(number + 1, opened):
                break
        swept = generation.sweep(number + 1)
        if swept:
            logger.info("files that no manifest names were removed table=%s files=%d", changes.table, len(swept))
        table = _Table(folder, generation, manifest.attempt, number + 2, manifest.position, schema, version, at)
        with self._lock:
            self._tables[changes.table_id] = table
        return table

    def _commit(
        self, batch: EventBatch, plans: list[_Plan], files: dict[tuple[int, int], list[DataFile]]
    ) -> dict[int, PenstockError]:
        """Write the manifests, several at a time, because each waits for the disk."""

        def commit(plan: _Plan) -> PenstockError | None:
            try:
                self._put(batch, plan, files)
            except Exception as error:
                return unexpected(plan.changes.table, error)
            return None

        if not plans:
            return {}
        with ThreadPoolExecutor(min(_COMMIT_THREADS, len(plans)), thread_name_prefix="parquet-commit") as pool:
            outcomes = list(pool.map(commit, plans))
        pairs = zip(plans, outcomes, strict=True)
        return {plan.changes.table_id: error for plan, error in pairs if error is not None}

    def _put(self, batch: EventBatch, plan: _Plan, files: dict[tuple[int, int], list[DataFile]]) -> None:
        table = plan.table
        steps: list[ManifestStep] = []
        for number, step in enumerate(plan.changes.steps):
            match step:
                case Rows():
                    found = files.get((plan.changes.table_id, number), [])
                    data = table.generation.data
                    require_written(plan.changes.table, ((data / file.name, file.bytes) for file in found))
                    steps += found
                case SchemaChange():
                    steps.append(NewSchema(step.new, step.version))
                case _:
                    steps.append(step)
        end = table.position if reaches(table.position, batch.end) else batch.end
        at = table.next_number if any(isinstance(step, NewSchema) for step in steps) else table.schema_at
        manifest = self._manifest(ManifestKind.CHANGES, table.attempt, table.position, end, tuple(steps))
        manifest = replace(manifest, schema_version=plan.version, schema_at=at)
        if not table.generation.append(table.next_number, manifest):
            taken = table.generation.manifest(table.next_number)
            raise (
                fenced_copy(plan.changes.table, table.attempt)
                if taken.kind is ManifestKind.FENCED
                else other_writer(plan.changes.table)
            )
        table.next_number += 1
        table.position = manifest.position
        table.schema, table.version, table.schema_at = plan.schema, plan.version, at

    def _manifest(
        self, kind: ManifestKind, attempt: str, begin: Lsn, position: Lsn, steps: tuple[ManifestStep, ...] = ()
    ) -> Manifest:
        context = self._started
        return Manifest(
            kind, self._writer, context.pipeline_id, context.lineage, attempt, context.epoch, begin, position, steps
        )

    def _refuse_foreign(self, changes: TableChanges) -> None:
        schema = next((step.schema for step in changes.steps if isinstance(step, Rows)), None)
        owner = None if schema is None else self._root.table(FOLDERS.table(schema)).owner()
        if owner is not None and owner.pipeline_id != self._started.pipeline_id:
            raise foreign_table(changes.table, owner.pipeline_id, self._started.pipeline_id)

    def _record_rows(self, schema: TableSchema, folder: TableFolder) -> None:
        """Record that a copy is complete: the table is in this folder, and no longer in the one before."""
        with self._lock:
            before = self._rows.get(schema.table_id)
            self._rows = {table_id: other for table_id, other in self._rows.items() if other != folder}
            self._rows[schema.table_id] = folder
        self.name_table(schema.table_id, str(schema))
        if before is not None and before != folder and before.is_left() and _is_last(before, schema.table_id):
            before.release()
            paths = [each.path.relative_to(self._root.path) for each in (before, folder)]
            logger.info("table moved, its old folder is left as it was table=%s from=%s to=%s", schema, *paths)

    def _is_of_this_server(self, generation: Generation) -> bool:
        """Return False for a table of another server, which may have given its number to another table."""
        last = generation.last()
        return last is not None and last[1].lineage.partition("/")[0] == self._started.lineage.partition("/")[0]

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


def _is_last(folder: TableFolder, table_id: int) -> bool:
    """Return True if no other table was copied to the folder since."""
    generations = folder.generations()
    return bool(generations) and generations[-1].origin().table_id == table_id


def _next_version(earlier: list[Generation], schema: TableSchema) -> int:
    """Return the version of a new copy's schema, which continues that of the copy before."""
    copied = [each for each in earlier if each.is_copied() and each.origin().table_id == schema.table_id]
    if not copied:
        return 1
    known, version, _ = copied[-1].schema()
    return version + (not known.has_columns_of(schema))


def _parts(segments: tuple[Segment, ...]) -> list[tuple[Segment, ...]]:
    """Group consecutive segments into files of a good size."""
    parts: list[list[Segment]] = []
    size = 0
    for segment in segments:
        if not parts or size + segment.bytes > _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(segment)
        size += segment.bytes
    return [tuple(part) for part in parts]


def _describe(batch: EventBatch, plans: dict[int, _Plan]) -> str:
    names = [plan.changes.table for plan in plans.values()]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"write {shown} up to {batch.end}"
