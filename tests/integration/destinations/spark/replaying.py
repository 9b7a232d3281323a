"""The rows that result from the change rows that a spark destination wrote."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.events import Delete, Event, Insert, Truncate, Unchanged, Unrepresentable, Update
from penstock.changes.segment import COMMIT_LSN, OLD, OP, ORDINAL, UNCHANGED, UNREPRESENTABLE, field_names
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.spark import Batch
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema


def replay(folder: Path, schema: TableSchema) -> list[dict[str, Any]] | None:
    """Return the rows of a table, from the batches that `folder_writer` wrote; None if it was never copied."""
    mirror: MirrorTable | None = None
    for batch, rows in batches(folder / str(schema.table_id)):
        if batch.kind == "copy":
            mirror = MirrorTable(batch.schema)
        assert mirror is not None
        mirror.change_schema(batch.schema)
        for row in sorted(rows, key=lambda row: (row[COMMIT_LSN], row[ORDINAL])):
            mirror.apply(event_of(row, batch.schema))
    return None if mirror is None else mirror.rows()


def batches(folder: Path) -> list[tuple[Batch, list[dict[str, Any]]]]:
    """Return the complete batches of a table, in order."""
    found = sorted(folder.iterdir(), key=lambda each: int(each.name)) if folder.exists() else []
    return [
        (
            pickle.loads((each / "_batch").read_bytes()),
            pa.concat_tables([pq.read_table(file) for file in each.glob("*.parquet")]).to_pylist(),
        )
        for each in found
        if (each / "_batch").exists()
    ]


def event_of(row: dict[str, Any], schema: TableSchema) -> Event:
    """Return the event that a change row stands for."""
    key = OrderKey(Lsn(row[COMMIT_LSN]), max(0, row[ORDINAL]))
    texts = dict(row[UNREPRESENTABLE] or ())
    pairs = [(column.name, name) for column, name in zip(schema.columns, field_names(schema), strict=True)]

    def cells(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        return {
            column: Unrepresentable(texts[prefix + name]) if prefix + name in texts else record[name]
            for column, name in pairs
            if name in record
        }

    if row[OP] == "truncate":
        return Truncate(key, 0, 0, (schema.table_id,), (str(schema),), False, False)
    own = cells(row) | {column: Unchanged for column, name in pairs if name in (row[UNCHANGED] or ())}
    old = None if row.get(OLD) is None else cells(row[OLD], f"{OLD}.")
    match row[OP]:
        case "copy" | "insert":
            return Insert(key, 0, 0, schema, own)
        case "update":
            return Update(key, 0, 0, schema, own, old)
        case _:
            return Delete(key, 0, 0, schema, own if old is None else old)
