"""The lake as a stranger reads it: delta-rs, which knows nothing of us; names and types are put back for comparing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE_TYPE
from penstock.destinations.delta.layout import DELETED_AT, Mode
from penstock.destinations.delta.reader import DeltaReader, LakeReader
from penstock.destinations.delta.storage import LocalStorage
from penstock.schema import TableSchema
from tests.unit.destinations.delta.reading import read_table, replay_history


class LakeReadBack:
    """See `penstock.testing.readback.ReadBack`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lake = DeltaReader(path)

    def tables(self) -> list[str]:
        return self._lake.tables()

    def schema(self, table: str) -> TableSchema:
        return self._lake.schema(table)

    def read_table(self, table: str) -> pa.Table:
        layout = self._lake.layout(table)
        folder = self._lake.folder(table)
        rows = pa.table(QueryBuilder().register("t", DeltaTable(folder)).execute("select * from t").read_all())
        rows = rows.cast(pa.schema([layout.schema.field(name) for name in rows.column_names]))
        if layout.mode is Mode.SOFT_DELETE:
            rows = rows.filter(rows[DELETED_AT].is_null())
        names = [*layout.columns, *(["_unrepresentable"] if layout.has_texts else [])]
        return LakeReader(LocalStorage(Path(folder)), layout).as_segment(rows.select(names))


class HistoryReadBack(LakeReadBack):
    """The rows that follow from the changes, and these (`penstock.testing.readback.ChangesReadBack`)."""

    def read_table(self, table: str) -> pa.Table:
        layout = self._lake.layout(table)
        rows = replay_history(self._path, layout.source) or []
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
        return LakeReader(LocalStorage(self._path), layout).as_segment(found)

    def read_changes(self, table: str) -> pa.Table:
        changes = read_table(self._path, self.schema(table))
        assert changes is not None
        return changes
