"""Statistics of data files, by which readers skip files: counts, bounds and nulls of the first columns.

Bounds must never be narrower than the values, or a reader with a filter loses rows. So a bound that its JSON cannot say
exactly is rounded outwards or left out: long texts are cut, the upper one with the highest letter behind; floats with
NaN have none, because engines disagree where NaN stands; neither do dates outside of years 1 to 9999. Decimals are
written with all their digits, which is why the JSON is put together here and never parsed and written again.
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
"""How many columns have statistics, unless they are named; what Delta's own writers do."""
_TEXT_LETTERS = 32
_HIGHEST = "\U0010ffff"
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000
_TIGHT = re.compile(r'"tightBounds"\s*:\s*(true|false)')


def collect_statistics(data: pa.Table, columns: Sequence[str] | None = None) -> str:
    """The `stats` of a file with these rows; of the named columns, or of the first ones."""
    names = data.column_names[:INDEXED_COLUMNS] if columns is None else columns
    lowest: dict[str, str] = {}
    highest: dict[str, str] = {}
    nulls: dict[str, str] = {}
    for name in names:
        column = data[name]
        if pa.types.is_struct(column.type):
            continue
        nulls[name] = str(column.null_count)
        bounds = _bounds(column)
        if bounds is not None:
            lowest[name], highest[name] = bounds
    return _object(
        {
            "numRecords": str(data.num_rows),
            "minValues": _object(lowest),
            "maxValues": _object(highest),
            "nullCount": _object(nulls),
            "tightBounds": "true",
        }
    )


def loosened(statistics: str) -> str:
    """The same statistics for a file of which some rows are deleted: its bounds still hold, but may be too wide."""
    found = _TIGHT.search(statistics)
    if found is not None:
        return f'{statistics[: found.start()]}"tightBounds":false{statistics[found.end() :]}'
    head = statistics.rstrip().removesuffix("}").rstrip()
    return f'{head}{"" if head.endswith("{") else ","}"tightBounds":false}}'


def record_count(statistics: str | None) -> int | None:
    """The number of rows in a file, deleted ones included; None if its statistics do not say."""
    return None if statistics is None else json.loads(statistics).get("numRecords")


def _bounds(column: pa.ChunkedArray) -> tuple[str, str] | None:
    """The bounds of a column as JSON; None if it has none, or none that can be said."""
    kind = column.type
    if column.null_count == len(column):
        return None
    if pa.types.is_integer(kind):
        low, high = _min_max(column)
        return str(low), str(high)
    if pa.types.is_decimal(kind):
        low, high = _min_max(column)
        return format(low, "f"), format(high, "f")
    if pa.types.is_floating(kind):
        low, high = _min_max(column)
        if pc.any(pc.is_nan(column)).as_py() or not (math.isfinite(low) and math.isfinite(high)):
            return None
        return json.dumps(low), json.dumps(high)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        low, high = _min_max(column)
        return _quoted(low[:_TEXT_LETTERS]), _quoted(_cut_upwards(high))
    if pa.types.is_date32(kind):
        low, high = _min_max(column.cast(pa.int32()))
        if low < _FIRST_DAY or high > _LAST_DAY:
            return None
        return _quoted(str(np.datetime64(low, "D"))), _quoted(str(np.datetime64(high, "D")))
    if pa.types.is_timestamp(kind):
        low, high = _min_max(column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()))
        if low < _FIRST_DAY * _DAY_MICROSECONDS or high >= (_LAST_DAY + 1) * _DAY_MICROSECONDS:
            return None
        zone = "" if kind.tz is None else "Z"
        return _quoted(f"{np.datetime64(low, 'us')}{zone}"), _quoted(f"{np.datetime64(high, 'us')}{zone}")
    return None


def _min_max(column: pa.ChunkedArray) -> tuple[Any, Any]:
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def _cut_upwards(text: str) -> str:
    """A text that is not longer than it has to be, and not below the given one in the order of its bytes."""
    end = _TEXT_LETTERS
    while end < len(text) and text[end] == _HIGHEST:
        end += 1
    return text if end >= len(text) else text[:end] + _HIGHEST


def _object(members: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{_quoted(name)}:{value}" for name, value in members.items()) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
