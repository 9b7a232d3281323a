"""What a reader sees of a table in the lake, in the terms of the contract: delta-rs, which knows nothing of us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from penstock.changes.events import Delete, Insert, Unchanged, Unrepresentable, Update
from penstock.changes.segment import field_names
from penstock.destinations.delta.layout import DELETED_AT, TableState, from_metadata
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import FOLDERS
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema


def read_state(lake: Path, schema: TableSchema) -> TableState | None:
    snapshot = DeltaLog(LocalStorage(lake / FOLDERS.table(schema)), str(schema)).refresh()
    return None if snapshot is None else from_metadata(snapshot.metadata)


def read_table(lake: Path, schema: TableSchema) -> pa.Table | None:
    """All rows and columns, read by delta-rs."""
    try:
        table = DeltaTable(str(lake / FOLDERS.table(schema)))
    except TableNotFoundError:
        return None
    found = QueryBuilder().register("t", table).execute("select * from t")
    return pa.table(found.read_all())


def read_rows(lake: Path, schema: TableSchema, *, deleted: bool = False) -> list[dict[str, Any]] | None:
    """Rows by the source's names, texts in the place of their cells; without those that were deleted softly."""
    state, table = read_state(lake, schema), read_table(lake, schema)
    if state is None or table is None:
        return None
    names = {name: column.name for name, column in zip(state.layout.columns, state.layout.source.columns, strict=True)}
    rows: list[dict[str, Any]] = []
    for row in table.to_pylist():
        if row.get(DELETED_AT) is not None and not deleted:
            continue
        cells = {names[name]: value for name, value in row.items() if name in names}
        for name, text in dict(row.get("_unrepresentable") or ()).items():
            cells[names[name]] = Unrepresentable(text)
        rows.append(cells)
    return rows


def replay_history(lake: Path, schema: TableSchema) -> list[dict[str, Any]] | None:
    """The rows that follow from the changes of a table in the mode `history`."""
    state, table = read_state(lake, schema), read_table(lake, schema)
    if state is None or table is None:
        return None
    source, versions = state.layout.source, state.layout.versions
    current = {column.attnum: column.name for column in source.columns}
    mirror = MirrorTable(source)
    changes = sorted(table.to_pylist(), key=lambda row: (row["_commit_lsn"], row["_ordinal"]))
    if len(versions) > 1:
        # A column that was added with a default has values in earlier rows which no change carries, so old rows that
        # the server sends may match none of them. A copy has these values.
        copies = [index for index, change in enumerate(changes) if change["_op"] == "resync"]
        changes = changes[copies[-1] if copies else 0 :]
    for change in changes:
        # A column is followed by its number; what a column that is gone had is not told.
        of_row = versions[change["_schema_version"] - 1]
        names = {each.lake_name: current[each.attnum] for each in of_row if each.attnum in current}
        texts = dict(change.get("_unrepresentable") or ())
        row: dict[str, Any] = dict.fromkeys(current.values())
        row |= {name: change[lake_name] for lake_name, name in names.items()}
        row |= {names[name]: Unrepresentable(text) for name, text in texts.items() if name in names}
        absent = {names[name]: Unchanged for name in change["_unchanged"] or () if name in names}
        old = change.get("_old")
        if old is not None:
            old = {names[name]: value for name, value in old.items() if name in names}
            old |= {
                names[name.removeprefix("_old.")]: Unrepresentable(text)
                for name, text in texts.items()
                if name.startswith("_old.") and name.removeprefix("_old.") in names
            }
        key, moment, xid = OrderKey(Lsn(change["_commit_lsn"]), change["_ordinal"]), change["_commit_time"], 0
        match change["_op"]:
            case "copy":
                mirror.insert(row)
            case "insert":
                mirror.apply(Insert(key, moment, xid, source, row | absent))
            case "update":
                mirror.apply(Update(key, moment, xid, source, row | absent, old))
            case "delete":
                sent = {name: value for name, value in row.items() if name not in absent}
                mirror.apply(Delete(key, moment, xid, source, sent))
            case "truncate" | "resync":
                mirror.clear()
    return mirror.rows()


def rows_of(table: pa.Table, schema: TableSchema) -> list[dict[str, Any]]:
    """Rows with the names of segments by those of the source, texts in the place of their cells."""
    names = dict(zip(field_names(schema), (column.name for column in schema.columns), strict=True))
    rows: list[dict[str, Any]] = []
    for row in table.to_pylist():
        cells = {names[name]: value for name, value in row.items() if name in names}
        cells |= {names[name]: Unrepresentable(text) for name, text in dict(row.get("_unrepresentable") or ()).items()}
        rows.append(cells)
    return rows
