"""Reads Delta tables with delta-rs, and restores names and types for comparison with the source; a pipeline into both
Delta and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE_TYPE
from penstock.coordinator import Coordinator
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.layout import DELETED_AT, Mode
from penstock.destinations.delta.reader import DeltaReader, LakeReader
from penstock.destinations.delta.storage import open_storage
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.lsn import reaches
from penstock.schema import TableSchema
from penstock.state import MemoryStore, Store
from penstock.tables import TablesOutput
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import current_position, tables_settings, wait_for
from tests.support.readback import ReadBack, check_equal
from tests.unit.destinations.delta.reading import read_table, replay_history


class LakeReadBack:
    """See `tests.support.readback.ReadBack`."""

    def __init__(self, path: Path | str, storage_options: Mapping[str, str] | None = None) -> None:
        self._options = dict(storage_options or {})
        self._lake = DeltaReader(path, storage_options)

    def tables(self) -> list[str]:
        return self._lake.tables()

    def schema(self, table: str) -> TableSchema:
        return self._lake.schema(table)

    def read_table(self, table: str) -> pa.Table:
        layout = self._lake.layout(table)
        folder = self._lake.folder(table)
        delta = DeltaTable(folder, storage_options=self._options or None)
        rows = pa.table(QueryBuilder().register("t", delta).execute("select * from t").read_all())
        rows = rows.cast(pa.schema([layout.schema.field(name) for name in rows.column_names]))
        if layout.mode is Mode.SOFT_DELETE:
            rows = rows.filter(rows[DELETED_AT].is_null())
        names = [*layout.columns, *(["_unrepresentable"] if layout.has_texts else [])]
        return LakeReader(open_storage(folder, self._options), layout).as_segment(rows.select(names))


class HistoryReadBack(LakeReadBack):
    """The rows that result from the changes, and the changes (`tests.support.readback.ChangesReadBack`)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path

    def read_table(self, table: str) -> pa.Table:
        layout = self._lake.layout(table)
        rows = replay_history(self._folder, layout.source) or []
        names = dict(zip(layout.columns, (column.name for column in layout.source.columns), strict=True))
        cells = {
            lake: pa.array(
                [None if isinstance(row[name], Unrepresentable) else row[name] for row in rows],
                layout.schema.field(lake).type,
            )
            for lake, name in names.items()
        }
        texts = [
            [(lake, row[name].text) for lake, name in names.items() if isinstance(row[name], Unrepresentable)] or None
            for row in rows
        ]
        found = pa.table(cells).append_column("_unrepresentable", pa.array(texts, UNREPRESENTABLE_TYPE))
        return LakeReader(open_storage(self._folder), layout).as_segment(found)

    def read_changes(self, table: str) -> pa.Table:
        changes = read_table(self._folder, self.schema(table))
        assert changes is not None
        return changes


class BothLakes:
    """One pipeline whose tables go to Delta and to Parquet; a context manager, which may be entered again."""

    def __init__(self, database: Any, folder: Path, **changes: Any) -> None:
        self.database = database
        self.folder = folder
        self.readbacks: dict[str, ReadBack] = {
            "Delta": LakeReadBack(folder / "delta"),
            "Parquet": ParquetReader(folder / "parquet"),
        }
        self._settings = tables_settings(database, folder, "both", manage_publication=True, **changes)
        self.stores: dict[str, Store] = {name: MemoryStore(f"both/{name}") for name in ("delta", "parquet")}

    def __enter__(self) -> BothLakes:
        destinations = {
            "delta": DeltaDestination(self.folder / "delta"),
            "parquet": ParquetDestination(self.folder / "parquet"),
        }
        self.running = Coordinator(
            [
                TablesOutput(replace(self._settings, output=name), self.stores[name], destination, ProcessTasks())
                for name, destination in destinations.items()
            ]
        )
        self.running.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.running.shutdown()

    def wait(self, tables: int) -> None:
        """Wait until this many tables are ready at both, with everything that is committed now."""
        end = current_position(self.database)

        def done() -> bool:
            self.running.wait(0)
            phases = [output.phases for output in self.running]
            stopped = [(name, phase) for each in phases for name, phase in each.items() if phase.name == "errored"]
            assert not stopped, stopped
            return (
                all(len(each) == tables for each in phases)
                and {phase.name for each in phases for phase in each.values()} == {"ready"}
                and all(reaches(output.status.applied, end) for output in self.running)
            )

        wait_for(done, f"{tables} tables at both")

    def check_equal(self, names: list[str]) -> None:
        for readback in self.readbacks.values():
            check_equal(self.database.dsn, readback, names)
