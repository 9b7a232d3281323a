"""A table that was copied to a destination, faults that are planted there, and the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.comparison.compare import CompareSettings, compare_table
from penstock.comparison.report import Report, TableReport
from penstock.copy import CopyRows
from penstock.destinations.delta.layout import Mode
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.planner import plan_table
from penstock.destinations.delta.snapshot import Application
from penstock.destinations.delta.storage import open_storage
from penstock.destinations.delta.table import Batch, LakeTable
from penstock.destinations.delta.tasks import apply_changes
from penstock.destinations.delta.write import WrittenFiles
from penstock.destinations.naming import FOLDERS
from penstock.destinations.parquet import ParquetReader
from penstock.destinations.registry import create_destination
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.source.lineage import Ancestry, Lineage
from penstock.testing.destinations.script import LocalTasks, ScriptedSource, ScriptedTransaction, make_context

Fault = Callable[[ScriptedTransaction], None]

DESTINATIONS: dict[str, dict[str, Any]] = {
    "parquet": {},
    "delta": {"maintenance": False},
    "delta without vectors": {"maintenance": False, "deletion_vectors": False},
    "delta soft_delete": {"maintenance": False, "mode": "soft_delete"},
    "postgres": {"schema": "copied"},
    "postgres soft_delete": {"schema": "copied", "mode": "soft_delete"},
}


class Place:
    """A destination in a folder, as a process that writes opens it, and as one that only looks does."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self._type = kind.split()[0]
        place = {} if self._type == "postgres" else {"path": str(folder / "lake")}
        self._options = {**place, **DESTINATIONS[kind], **options}
        self._folder = folder
        self._plants = 0

    def open(self) -> Any:
        """To look."""
        return create_destination(self._type, self._options)

    def started(self) -> Any:
        """To write."""
        destination = self.open()
        destination.startup(make_context())
        return destination

    def copy(self, rows: CopyRows) -> None:
        """As a pipeline does it."""
        destination = self.started()
        destination.drop_table_for_copy(rows.schema, rows.attempt)
        destination.write_table_rows(rows.schema, rows)
        destination.shutdown()

    def plant(self, rows: CopyRows, fault: Fault) -> None:
        """Change the destination, and not the source, through the code that writes every batch."""
        destination = self.started()
        position = destination.position(rows.schema.table_id)
        self._plants += 1
        script = ScriptedSource(self._folder / f"faults-{self._plants}", start=Lsn(position))
        with script.transaction() as transaction:
            fault(transaction)
        result = destination.write_events(script.batch()).result(30)
        assert all(each.error is None for each in result.tables.values())
        destination.shutdown()

    def compare(self, rows: CopyRows, **settings: Any) -> TableReport:
        """The table against its source; tasks get what they need through pickle."""
        pinned = self.open().pin(rows.schema)
        try:
            return compare_table(rows, pinned, LocalTasks(), CompareSettings(**settings))
        finally:
            pinned.close()


def plant_in(kind: str, lake: Path, pipeline: str, schema: TableSchema, fault: Fault) -> None:
    """The same in the lake of a pipeline that does not run now, in its name and behind its last position."""
    destination: Any = create_destination(kind, {"path": str(lake)})
    lineage, epoch = _RECORDED[kind](lake, schema)
    destination.startup(replace(make_context(pipeline, ancestry=Ancestry(lineage)), epoch=epoch))
    script = ScriptedSource(lake.parent / "faults", start=Lsn(destination.position(schema.table_id)))
    with script.transaction() as transaction:
        fault(transaction)
    result = destination.write_events(script.batch()).result(30)
    assert all(each.error is None for each in result.tables.values())
    destination.shutdown()


def _recorded_in_parquet(lake: Path, schema: TableSchema) -> tuple[Lineage, int]:
    last = ParquetReader(lake).manifests(str(schema))[-1]
    return _parse(last.lineage), last.epoch


def _recorded_in_delta(lake: Path, schema: TableSchema) -> tuple[Lineage, int]:
    snapshot = DeltaLog(open_storage(lake).child(FOLDERS.table(schema)), str(schema)).refresh()
    assert snapshot is not None
    applications = [Application.parse(each) for each in snapshot.transactions]
    return _parse(next(each.lineage for each in applications if each is not None)), 0


def _parse(name: str) -> Lineage:
    system, timeline, database, slot = name.split("/")
    return Lineage(system, int(timeline), database, slot)


_RECORDED = {"parquet": _recorded_in_parquet, "delta": _recorded_in_delta}


def exit_code(report: TableReport) -> int:
    return Report(Lsn(0), (report,)).exit_code


def plant_beside(folder: Path, lake: Path, pipeline: str, schema: TableSchema, fault: Fault) -> None:
    """The same in a Delta table whose pipeline runs: at the position that it has, so that the pipeline goes on."""
    storage = open_storage(lake).child(FOLDERS.table(schema))
    lineage, _ = _recorded_in_delta(lake, schema)
    context = make_context(pipeline, ancestry=Ancestry(lineage))
    table = LakeTable(DeltaLog(storage), str(schema), schema.table_id, context, True)
    for attempt in itertools.count():
        position = table.require_position(table.require())
        script = ScriptedSource(folder / f"faults-{attempt}", start=position)
        with script.transaction() as transaction:
            fault(transaction)
        batch = script.batch()
        [changes] = batch.tables
        plan = plan_table(batch, changes, table, mode=Mode.MIRROR, deletion_vectors=True, source=None)
        assert plan is not None
        written = apply_changes(plan.work)
        assert isinstance(written, WrittenFiles)
        if table.position(plan.version) == position and table.commit(
            Batch(plan.version, plan.state, position, written)
        ):
            return
