"""Statistics of data files, by which readers skip files: counts, bounds and nulls of the first columns.

Bounds must never be narrower than the values, or a reader with a filter loses rows. So a bound that JSON cannot express
exactly is widened or left out. Long texts are truncated, and the upper bound gets the highest character appended.
Floats with NaN have no bounds, because engines disagree about the order of NaN; neither have dates outside the years 1
to 9999. Decimals are written with all their digits, so the JSON is assembled here and never parsed and written again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

INDEXED_COLUMNS = 32
"""How many columns have statistics unless they are named; the default of Delta's own writers."""
_TEXT_LETTERS = 32
_HIGHEST = "\U0010ffff"
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000
_TIGHT = re.compile(r'"tightBounds"\s*:\s*(true|false)')


class StatisticsCollector:
    """Collects the statistics of a file that is written in pieces."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None) -> None:
        names = schema.names[:INDEXED_COLUMNS] if columns is None else columns
        self._types = {name: schema.field(name).type for name in names}
        self._types = {name: kind for name, kind in self._types.items() if not pa.types.is_struct(kind)}
        self._nulls = dict.fromkeys(self._types, 0)
        self._bounds: dict[str, tuple[Any, Any]] = {}
        self._unbounded = {name for name, kind in self._types.items() if not _has_bounds(kind)}
        self._rows = 0

    def add(self, data: pa.Table) -> None:
        """Add rows, which have the schema's types."""
        self._rows += data.num_rows
        for name in self._types:
            column = data[name]
            self._nulls[name] += column.null_count
            if name in self._unbounded or column.null_count == len(column):
                continue
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                self._unbounded.add(name)
                continue
            low, high = _min_max(column)
            before = self._bounds.get(name, (low, high))
            self._bounds[name] = min(low, before[0]), max(high, before[1])

    def result(self) -> str:
        """Return the `stats` of the file."""
        lowest: dict[str, str] = {}
        highest: dict[str, str] = {}
        for name, (low, high) in self._bounds.items():
            texts = None if name in self._unbounded else _texts(self._types[name], low, high)
            if texts is not None:
                lowest[name], highest[name] = texts
        return _object(
            {
                "numRecords": str(self._rows),
                "minValues": _object(lowest),
                "maxValues": _object(highest),
                "nullCount": _object({name: str(count) for name, count in self._nulls.items()}),
                "tightBounds": "true",
            }
        )


def collect_statistics(data: pa.Table, columns: Sequence[str] | None = None) -> str:
    """Return the `stats` of a file with these rows, for the named columns or for the first ones."""
    collector = StatisticsCollector(data.schema, columns)
    collector.add(data)
    return collector.result()


def loosened(statistics: str) -> str:
    """Return the statistics of a file after some rows were deleted: its bounds still hold, but may be too wide."""
    found = _TIGHT.search(statistics)
    if found is not None:
        return f'{statistics[: found.start()]}"tightBounds":false{statistics[found.end() :]}'
    head = statistics.rstrip().removesuffix("}").rstrip()
    return f'{head}{"" if head.endswith("{") else ","}"tightBounds":false}}'


def record_count(statistics: str | None) -> int | None:
    """Return the number of rows in a file, including deleted ones; None if its statistics omit it."""
    return None if statistics is None else json.loads(statistics).get("numRecords")


def _has_bounds(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
    )


def _min_max(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return bounds that compare as their values do; dates and timestamps as numbers, since Python's types overflow."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def _texts(kind: pa.DataType, low: Any, high: Any) -> tuple[str, str] | None:
    """Return bounds as JSON; None if JSON cannot express them."""
    if pa.types.is_integer(kind):
        return str(low), str(high)
    if pa.types.is_decimal(kind):
        return format(low, "f"), format(high, "f")
    if pa.types.is_floating(kind):
        return (json.dumps(low), json.dumps(high)) if math.isfinite(low) and math.isfinite(high) else None
    if pa.types.is_string(kind):
        return _quoted(low[:_TEXT_LETTERS]), _quoted(_cut_upwards(high))
    if pa.types.is_date32(kind):
        if low < _FIRST_DAY or high > _LAST_DAY:
            return None
        return _quoted(str(np.datetime64(low, "D"))), _quoted(str(np.datetime64(high, "D")))
    if low < _FIRST_DAY * _DAY_MICROSECONDS or high >= (_LAST_DAY + 1) * _DAY_MICROSECONDS:
        return None
    zone = "" if kind.tz is None else "Z"
    return _quoted(f"{np.datetime64(low, 'us')}{zone}"), _quoted(f"{np.datetime64(high, 'us')}{zone}")


def _cut_upwards(text: str) -> str:
    """Return a text of limited length that is not below the given one in byte order."""
    end = _TEXT_LETTERS
    while end < len(text) and text[end] == _HIGHEST:
        end += 1
    return text if end >= len(text) else text[:end] + _HIGHEST


def _object(members: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{_quoted(name)}:{value}" for name, value in members.items()) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
