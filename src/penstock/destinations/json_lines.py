"""Changes as lossless JSON objects, one per line; the format of `penstock tail --json`.

Decimals are strings, bytes are `\\x…`, times are ISO, and numbers that JSON cannot express (NaN, infinities) are
strings. Omitted values are listed in `unchanged` and absent from the row. Unrepresentable values appear as the source's
text and are listed in `unrepresentable`. A row of a copy has the operation `copy`.
"""

from __future__ import annotations

import functools
import json
import math
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np

from penstock.changes.events import (
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    Message,
    Relation,
    Row,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
)
from penstock.lsn import Lsn
from penstock.schema import PostgresType, TableSchema, resolve_domain


def event_to_json(event: Event) -> str | None:
    """Return the object of an event; None for relations, which add nothing to the rows."""
    match event:
        case Begin() | Commit():
            record: dict[str, Any] = {
                "op": type(event).__name__.lower(),
                "commit_lsn": str(event.commit_lsn),
                "xid": event.xid,
                "commit_time": event.commit_time.isoformat(),
            }
        case Insert() | Update() | Delete():
            record = _head(type(event).__name__.lower(), event) | _table(event.table)
            if not isinstance(event, Delete):
                record |= _cells("", "row", event.table, event.row)
            old = event.old if not isinstance(event, Insert) else None
            if old is not None:
                record |= _cells("old_", "old", event.table, old)
        case Truncate():
            record = _head("truncate", event) | {
                "tables": list(event.tables),
                "cascade": event.cascade,
                "restart_identity": event.restart_identity,
            }
        case Message():
            record = _head("message", event) | {"prefix": event.prefix, "content": lossless(event.content)}
        case Relation():
            return None
    return _line(record)


def copied_row_to_json(table: TableSchema, row: Row, position: Lsn) -> str:
    """Return the object of a row as it was at a position."""
    return _line({"op": "copy", "position": str(position)} | _table(table) | _cells("", "row", table, row))


def lossless(value: Any) -> Any:
    """Return a cell as a value that JSON can express."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isfinite(value):
                return value
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case Decimal():
            return format(value, "f")
        case bytes():
            return f"\\x{value.hex()}"
        case datetime() | date() | time():
            return value.isoformat()
        case Unrepresentable():
            return value.text
        case list():
            return [lossless(item) for item in value]
        case _:
            return str(value)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _head(operation: str, event: Insert | Update | Delete | Truncate | Message) -> dict[str, Any]:
    return {
        "op": operation,
        "commit_lsn": str(event.key.commit_lsn),
        "ordinal": event.key.ordinal,
        "xid": event.xid,
        "commit_time": event.commit_time.isoformat(),
    }


def _table(table: TableSchema) -> dict[str, Any]:
    return {"schema": table.namespace, "table": table.name, "key": [column.name for column in table.key]}


def _cells(prefix: str, name: str, table: TableSchema, row: Row) -> dict[str, Any]:
    row = short_floats(table, row)
    unchanged = [column for column, value in row.items() if value is Unchanged]
    unfit = [column for column, value in row.items() if isinstance(value, Unrepresentable)]
    record: dict[str, Any] = {
        name: {column: lossless(value) for column, value in row.items() if value is not Unchanged}
    }
    if unchanged:
        record[f"{prefix}unchanged"] = unchanged
    if unfit:
        record[f"{prefix}unrepresentable"] = unfit
    return record


def short_floats(table: TableSchema, row: Row) -> Row:
    """Return `real` values as the shortest number that is the same `real`: 0.1, not 0.10000000149011612."""
    names = _real_columns(table)
    if not names.intersection(row):
        return row
    return {name: _short_float(value) if name in names else value for name, value in row.items()}


def _short_float(value: Any) -> Any:
    if isinstance(value, list):
        return [_short_float(item) for item in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


@functools.lru_cache(maxsize=1024)
def _real_columns(table: TableSchema) -> frozenset[str]:
    def is_real(type_: PostgresType | None) -> bool:
        if type_ is None:
            return False
        base, _ = resolve_domain(type_, -1)
        return base.name == "float4" or is_real(base.element)

    return frozenset(column.name for column in table.columns if is_real(column.type))
