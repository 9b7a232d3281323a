"""Finds the rows that differ, from the digests and rows that tasks wrote for differing buckets: counts, keys and
columns.

Rows are compared as multisets. Each row is paired with one row of the other side that has the same digest. Of the
unpaired rows, those whose key both sides have are changed; the others are missing or extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import UNREPRESENTABLE, split_texts
from penstock.comparison.digest import DigestedRows, digest_cells
from penstock.comparison.report import Counts, Difference, Kind
from penstock.comparison.scan import BUCKET, DIGESTS, RECENT, TEXTS, Scan, Side, read_files

Key = tuple[int, int]
"""The two lanes of a key's digest."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files that tasks wrote, by side."""

    folder: str
    digests: Mapping[Side, tuple[str, ...]]
    rows: Mapping[Side, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of comparing two sets of rows."""

    counts: Counts
    keys: tuple[Key, ...]
    """Some of the keys whose rows differ."""


def compare_buckets(files: Files, limit: int, buckets: tuple[int, int]) -> Compared:
    """Compare the rows of some buckets, from the first number to before the second. Runs in a task."""
    rows = {side: _read_digests(files, side, buckets) for side in files.digests}
    (source, recent), (destination, _) = rows[Side.SOURCE], rows[Side.DESTINATION]
    if Side.LATER not in rows:
        return compare_digests(source, destination, limit=limit)
    return compare_around(source, recent, destination, rows[Side.LATER][0], limit=limit)


def compare_digests(source: DigestedRows, destination: DigestedRows, *, limit: int) -> Compared:
    """Compare rows by their digests; return at most `limit` keys."""
    counts, keys = _compare(source, destination)
    return Compared(counts, tuple((int(one), int(other)) for one, other in keys[:, :limit].T))


def compare_around(
    source: DigestedRows, recent: NDArray[np.bool_], before: DigestedRows, later: DigestedRows, *, limit: int
) -> Compared:
    """Compare the source with a destination that was read before it and after it.

    A key has moved if the source's row is recent, or if the destination's row changed between the two reads. All other
    rows stayed the same throughout and must be equal. Keys that moved are compared with the later read; a row that
    differs there may have changed again and counts as unsettled.
    """
    _, changed = _compare(before, later)
    # If two keys share the first lane, which is extremely rare, both count as moved.
    moved = np.concatenate([source.keys[0][recent], changed[0]])
    here, there = np.isin(source.keys[0], moved), np.isin(before.keys[0], moved)
    still = compare_digests(source.take(~here), before.take(~there), limit=limit)
    counts, unsettled = _compare(source.take(here), later.take(np.isin(later.keys[0], moved)))
    return Compared(still.counts + Counts(equal=counts.equal, unsettled=unsettled.shape[1]), still.keys)


def _compare(source: DigestedRows, destination: DigestedRows) -> tuple[Counts, NDArray[np.uint64]]:
    """Return how many rows are equal and how many differ, and the keys of those that differ."""
    keys = np.concatenate([source.keys, destination.keys], axis=1)
    words = np.concatenate([keys, np.concatenate([source.rows, destination.rows], axis=1)])
    if not words.shape[1]:
        return Counts(), keys
    order = np.lexsort(words[::-1])
    words = words[:, order]
    is_source = (order < len(source)).astype(np.int64)
    rows = _starts(words)
    here, there = np.add.reduceat(is_source, rows), np.add.reduceat(1 - is_source, rows)
    same = np.minimum(here, there)
    first_of_key = _starts(words[:2, rows])
    missing, extra = np.add.reduceat(here - same, first_of_key), np.add.reduceat(there - same, first_of_key)
    changed = np.minimum(missing, extra)
    counts = Counts(
        equal=int(same.sum()),
        missing=int((missing - changed).sum()),
        extra=int((extra - changed).sum()),
        changed=int(changed.sum()),
    )
    return counts, words[:2, rows[first_of_key[np.flatnonzero(missing + extra)]]]


def describe(scan: Scan, files: Files, keys: Sequence[Key], show_values: bool) -> list[Difference]:
    """Return the rows that have these keys, as far as tasks wrote them. Runs in a task."""
    tables = {side: _read_rows(files, side, keys) for side in (Side.SOURCE, Side.DESTINATION)}
    found: list[Difference] = []
    # Cold: about ten keys, for a person to read.
    for key in keys:
        rows = {side: _Row.list_of(table, key, scan) for side, table in tables.items()}
        found += _pair(scan, rows[Side.SOURCE], rows[Side.DESTINATION], show_values)
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, for display."""

    digest: tuple[int, int]
    cells: Mapping[str, Any]
    """By column name, as they are shown."""
    digests: Mapping[str, tuple[int, int]]

    @classmethod
    def list_of(cls, table: pa.Table, key: Key, scan: Scan) -> list[_Row]:
        at = np.flatnonzero(_matching(table, {key}))
        if not len(at):
            return []
        rows = table.take(pa.array(at)).combine_chunks()
        texts = split_texts(rows.select([TEXTS]).rename_columns([UNREPRESENTABLE]))
        cells: dict[str, list[Any]] = {}
        digests: dict[str, list[tuple[int, int]]] = {}
        for number, name in enumerate(scan.columns.names):
            column, kept = _array(rows.column(str(number))), texts.get(str(number))
            values = (
                column.to_pylist()
                if kept is None
                else [
                    value if text is None else text
                    for value, text in zip(column.to_pylist(), kept.to_pylist(), strict=True)
                ]
            )
            cells[name] = [_shown(value) for value in values]
            digests[name] = [(int(one), int(other)) for one, other in digest_cells(column, number, kept).T]
        lanes = [rows.column(name).to_pylist() for name in DIGESTS[2:]]
        return [
            cls(
                (lanes[0][index], lanes[1][index]),
                {name: values[index] for name, values in cells.items()},
                {name: values[index] for name, values in digests.items()},
            )
            for index in range(rows.num_rows)
        ]


def _pair(scan: Scan, source: list[_Row], destination: list[_Row], show_values: bool) -> list[Difference]:
    """Compare rows that share a key: equal rows are paired, the others are differences."""
    for row in list(source):
        twin = next((other for other in destination if other.digest == row.digest), None)
        if twin is not None:
            source.remove(row)
            destination.remove(twin)
    names = scan.columns.names
    key_names = [names[number] for number in scan.key]

    def key_of(row: _Row) -> dict[str, Any]:
        return {name: row.cells[name] for name in key_names}

    def values_of(row: _Row, columns: Sequence[str]) -> dict[str, Any] | None:
        return {name: row.cells[name] for name in columns} if show_values else None

    found: list[Difference] = []
    pairs = min(len(source), len(destination))
    for here, there in zip(source[:pairs], destination[:pairs], strict=True):
        columns = tuple(name for name in names if here.digests[name] != there.digests[name])
        values = values_of(here, columns), values_of(there, columns)
        found.append(Difference(Kind.CHANGED, key_of(here), columns, *values))
    found += [Difference(Kind.MISSING, key_of(row), source=values_of(row, names)) for row in source[pairs:]]
    found += [Difference(Kind.EXTRA, key_of(row), destination=values_of(row, names)) for row in destination[pairs:]]
    return found


def _read_digests(files: Files, side: Side, buckets: tuple[int, int]) -> tuple[DigestedRows, NDArray[np.bool_]]:
    """Return the digests, and which rows are recent."""
    recent: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    parts: list[NDArray[np.uint64]] = [np.zeros((4, 0), np.uint64)]
    for table in read_files(files.folder, files.digests[side]):
        first, end = np.searchsorted(table.column(BUCKET).to_numpy(), buckets)
        part = table.slice(int(first), int(end - first))
        parts.append(np.stack([part.column(name).to_numpy() for name in DIGESTS]))
        recent.append(part.column(RECENT).to_numpy())
    words = np.concatenate(parts, axis=1)
    return DigestedRows(words[:2], words[2:]), np.concatenate(recent)


def _read_rows(files: Files, side: Side, keys: Sequence[Key]) -> pa.Table:
    wanted = set(keys)
    parts = [table.filter(pa.array(_matching(table, wanted))) for table in read_files(files.folder, files.rows[side])]
    return pa.concat_tables(parts) if parts else pa.table({})


def _matching(table: pa.Table, keys: set[Key]) -> NDArray[np.bool_]:
    """Return which rows have one of these keys. There are few keys, so each is compared separately."""
    found = np.zeros(table.num_rows, np.bool_)
    if table.num_rows:
        first, second = (table.column(name).to_numpy() for name in DIGESTS[:2])
        for one, other in keys:
            found |= (first == np.uint64(one)) & (second == np.uint64(other))
    return found


def _starts(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where the value changes in columns of sorted words."""
    changes = (words[:, 1:] != words[:, :-1]).any(axis=0)
    return np.flatnonzero(np.append(True, changes))


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _shown(value: Any) -> Any:
    """Return a value that people can read and JSON can hold."""
    match value:
        case None | bool() | int() | str():
            return value
        case bytes():
            return f"\\x{value.hex()}"
        case datetime() | date() | time() | Decimal() | float():
            return str(value)
        case list():
            return [_shown(each) for each in value]
        case _:
            return str(value)
