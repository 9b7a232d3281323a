"""The duckdb destination: one machine, a file or a DuckLake catalog, and one task at a time that writes it."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import RLock

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.duckdb.apply import SLICE_ROWS, Work, apply_work
from penstock.destinations.duckdb.control import Control, require_allowed
from penstock.destinations.duckdb.copying import CopyTarget, StagedRange, clear_stage, finish_copy, write_range
from penstock.destinations.duckdb.database import LAKE, Database, Session
from penstock.destinations.duckdb.layout import new_layout
from penstock.destinations.duckdb.reader import PinnedTable, pin_table
from penstock.destinations.naming import FOLDERS, Naming
from penstock.destinations.refusals import fenced_copy, foreign_table, require_same_database, unexpected, unusable
from penstock.destinations.table_layout import Known, Mode, Target, table_capabilities
from penstock.destinations.table_parts import TableWork, describe_shares, is_of_this_server, plan_table
from penstock.errors import PenstockError
from penstock.lsn import Lsn
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_NAMES = Naming(allowed=r"(?!.*___)[a-z_][a-z0-9_]*", separator="/", mark="___", max_bytes=120, case_sensitive=False)
"""DuckDB ignores the case of names."""
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)? ?[KMGT]i?B")
_SHARED_ROWS = 4 * SLICE_ROWS
"""The most changes of a table in a batch that other tables share; only a large transaction has more."""


class DuckDbDestination:
    """`type = "duckdb"`: tables of a DuckDB file or a DuckLake catalog on this machine.

    | option | |
    |---|---|
    | `path` | the file, such as `lake.db`; or `ducklake:` and a catalog, such as `ducklake:lake.ducklake` |
    | `data_path` | the folder of a DuckLake's data files; a catalog that exists knows it |
    | `mode` | `mirror` (default): the rows of the source; `history`: every change; `soft_delete`: deleted rows stay |
    | `memory` | the memory that DuckDB may use (`1GB`) |
    | `lock_timeout` | seconds to wait for a program that has the file open, before the batch is tried again (10) |
    | `stage` | the folder for files of a copy in progress; by default next to the file or catalog |
    | `commit_interval` | seconds between two batches (1) |
    """

    name = "duckdb"

    def __init__(
        self,
        path: str,
        *,
        data_path: str | None = None,
        mode: str = "mirror",
        memory: str = "1GB",
        lock_timeout: float = 10.0,
        stage: str | None = None,
        commit_interval: float = 1.0,
    ) -> None:
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")
        for name, value in (("lock_timeout", lock_timeout), ("commit_interval", commit_interval)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise unusable(f"{name} must be a number of seconds above zero")
        if not path or path == LAKE or path.startswith(":"):
            raise unusable("path must be a file, or ducklake: and a catalog", hint='Such as path = "lake.db".')
        if data_path is not None and not path.startswith(LAKE):
            raise unusable("data_path is only for a DuckLake", hint='Remove it, or use path = "ducklake:…".')
        self.commit_interval = float(commit_interval)
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._mode = Mode(mode)
        if _MEMORY.fullmatch(memory) is None:
            raise unusable(f"memory cannot be {memory!r}", hint='Such as memory = "4GB".')
        self._database = Database.of(path, data_path, memory, float(lock_timeout))
        beside = self._database.catalog_file
        if stage is None and beside is None:
            raise unusable("stage must be a folder of this machine", hint="It has the files of copies in progress.")
        self._stage = Path(os.path.abspath(stage or f"{beside}.stage"))
        self._context: DestinationContext | None = None
        self._lock = RLock()
        """Held while this pipeline has the database open, here or in a task."""
        self._known: dict[int, Known] | None = None
        """The records, as far as this process has seen them; None after anything else than a batch."""

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        return table_capabilities(self._mode)

    def probe(self) -> None:
        """See `ProbedDestination`: create what the first copy would create, and roll it back."""
        path = Path(self._database.path)
        is_new = not self._database.is_lake and not path.exists()
        if not path.parent.is_dir() and not self._database.is_lake:
            raise unusable(f"the folder {path.parent} does not exist", hint=f"Run: mkdir -p {path.parent}.")
        try:
            with self._database.session(create=True) as session:
                session.run("begin")
                self._control("probe").create(session)
                session.run("rollback")
        finally:
            if is_new:
                path.unlink(missing_ok=True)

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        if context.tasks.elsewhere:
            raise unusable(
                f"{self._database.location} is on one machine, but the tasks of this pipeline run on others",
                hint='Use a local master in [spark], such as master = "local[4]".',
            )
        if not self._database.is_lake:
            require_same_database(Path(self._database.path), context.store)
        self._context = context
        with self._database.transaction(create=True) as session:
            control = self._control(context.pipeline_id)
            control.create(session)
            control.take_over(session, context.epoch)
        clear_stage(self._own_stage)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        place = context.take_folder(schema)
        with self._changing(), self._database.transaction() as session:
            target = _target(schema, place, control.load(session))
            require_allowed(schema, target)
            control.begin(session, schema, place, target, attempt, context.epoch)
        folder = self._own_stage / str(schema.table_id)
        for left in folder.glob("*") if folder.exists() else ():
            if left.name != _digest(attempt):
                clear_stage(left)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context = self._started
        known = self._load().get(schema.table_id)
        if known is None or known.attempt != rows.attempt or known.target is None:
            raise fenced_copy(str(schema), rows.attempt)
        if known.is_copied:
            if known.position != rows.position:
                raise fenced_copy(str(schema), rows.attempt)
            return
        folder = self._own_stage / str(schema.table_id) / _digest(rows.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        target = CopyTarget(
            *(self._database, self._control(context.pipeline_id), schema, rows.attempt, rows.position),
            *(rows.arrow_schema, new_layout(schema, rows.arrow_schema, self._mode), str(folder)),
            *(context.epoch, context.lineage),
        )
        ranges = context.tasks.run(rows.ranges, partial(write_range, rows.reader, target), description=f"copy {schema}")
        with self._changing():
            finish = partial(finish_copy, target)
            context.tasks.run([tuple(ranges)], finish, description=f"finish the copy of {schema}")
        clear_stage(folder.parent)
        logger.info("table copied table=%s rows=%d", schema, _count(ranges))

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        if not batch.tables:
            return completed()
        with self._lock:
            try:
                errors = self._write(batch)
            except BaseException:
                # Whether it was committed is in the database.
                self._known = None
                raise
            if errors:
                self._known = None
        return completed(WriteResult.failures(errors))

    def _write(self, batch: EventBatch) -> dict[int, PenstockError]:
        context = self._started
        control = self._control(context.pipeline_id)
        errors: dict[int, PenstockError] = {}
        works: list[TableWork] = []
        known = self._load()
        for changes in batch.tables:
            try:
                if changes.table_id not in known:
                    self._refuse_foreign(control, changes)
                work = plan_table(
                    *(batch, changes, known.get(changes.table_id), context, self._mode), shared_rows=_SHARED_ROWS
                )
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                continue
            if work is not None:
                works.append(work)
        if not works:
            return errors
        item = Work(
            *(self._database, control, context.epoch, context.lineage, context.records_ddl, tuple(works)),
            source=context.source_rows,
        )
        is_long = batch.alone and batch.row_count > _SHARED_ROWS
        with context.tasks.copying() if is_long else nullcontext():
            (outcomes,) = context.tasks.run([item], apply_work, description=describe_shares(batch, works))
        for work, outcome in zip(works, outcomes, strict=True):
            if isinstance(outcome, PenstockError):
                errors[work.table_id] = outcome
            else:
                known[work.table_id] = outcome
        return errors

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        known = self._load().get(table_id)
        if known is None or not known.is_copied or known.position is None:
            return None
        return known.position if self._started.knows(known.lineage, known.position) else None

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`; the folder stands for the name of the table."""
        known = self._load().get(table_id)
        if known is None or known.readable is None or not is_of_this_server(known, self._started):
            return None
        return known.place

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`; a record has the name since the last change of the schema."""

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        with self._reading() as session:
            control = self._control(pipeline_id)
            known = control.load(session) if session is not None and control.exists(session) else {}
        return {
            table_id: f"{self._database.location} {each.readable}"
            for table_id, each in known.items()
            if each.readable is not None
        }

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        control = self._control(self._started.pipeline_id)
        with self._changing(), self._database.transaction() as session:
            known = control.load(session).get(table_id)
            if known is None or not is_of_this_server(known, self._started):
                return False
            for target in {known.target, known.former} - {None}:
                assert target is not None
                session.run(f"drop table if exists {session.name(target)}")
            control.forget(session, table_id)
        clear_stage(self._own_stage / str(table_id))
        logger.info("the data of a dropped table was deleted table=%s", known.source)
        return True

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: a DuckLake has snapshots, and a file cannot be read while it is written."""
        return self._database.is_lake

    def pin(self, schema: TableSchema) -> PinnedTable | None:
        """See `ReadableDestination`."""
        control = self._control("")
        with self._reading() as session:
            if session is None or not control.exists(session):
                return None
            found = [known for known in control.all(session) if known.table_id == schema.table_id]
            found.sort(key=lambda known: known.source != str(schema))
            for known in found:
                if known.readable is not None and known.layout is not None:
                    return pin_table(self._database, session, known.readable, known.layout)
        return None

    def shutdown(self) -> None:
        """See `Destination`."""
        self._known = None

    def _refuse_foreign(self, control: Control, changes: TableChanges) -> None:
        with self._lock, self._database.session() as session:
            for step in changes.steps:
                schema = step.new if isinstance(step, SchemaChange) else step.schema if isinstance(step, Rows) else None
                owner = None if schema is None else control.owner(session, named(schema))
                if owner is not None and owner != control.pipeline:
                    raise foreign_table(changes.table, owner, control.pipeline)

    def _load(self) -> dict[int, Known]:
        with self._lock:
            if self._known is None:
                with self._database.session() as session:
                    self._known = self._control(self._started.pipeline_id).load(session)
            return self._known

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Within the block, this thread alone has the database; records are read again after it."""
        with self._lock:
            try:
                yield
            finally:
                self._known = None

    @contextmanager
    def _reading(self) -> Iterator[Session | None]:
        """Open the database for reading, in any process; None if it does not exist."""
        file = self._database.catalog_file
        if file is not None and not Path(file).exists():
            yield None
            return
        with self._lock, self._database.session(read_only=True) as session:
            yield session

    def _control(self, pipeline_id: str) -> Control:
        return Control(pipeline_id)

    @property
    def _own_stage(self) -> Path:
        return self._stage / _digest(self._started.pipeline_id)

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


def named(schema: TableSchema) -> Target:
    """Return the table of the database for a table of the source that has its own place."""
    return Target(*_NAMES.table(schema).split("/"))


def _target(schema: TableSchema, place: str, known: Mapping[int, Known]) -> Target:
    """Return the table that a copy goes to. A place that is not that of its name belongs to a renamed table."""
    own = named(schema)
    if place == FOLDERS.table(schema):
        return own
    for each in known.values():
        if each.place == place and each.target is not None:
            return each.target
    return Target(own.namespace, f"{own.name}_{schema.table_id}")


def _count(ranges: list[StagedRange]) -> int:
    return sum(each.rows for each in ranges)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
