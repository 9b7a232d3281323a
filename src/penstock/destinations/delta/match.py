"""Finding rows again: every live row of the keys that a batch touched, in all files that can have one.

Each file is asked through its key index. A key may have several rows, after a copy that was resumed, and all of them
are found. Rows of tables without a key are found by all their cells, of which the index keeps a fingerprint only, so
what it finds is read and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.destinations.delta.index import IndexFolder, KeyIndex, KeyQuery, build_index
from penstock.destinations.delta.layout import DELETED_AT, TableLayout
from penstock.destinations.delta.rows import LiveFile, dead_rows, read_keys, read_rows
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector
from penstock.destinations.refusals import unknown_row

_FEW = 20


@dataclass(frozen=True, slots=True)
class FileMatch:
    """The live rows of one file that have one of the keys."""

    file: LiveFile
    row_count: int
    """Of the whole file."""
    dead: Vector
    """The rows that were dead before."""
    keys: NDArray[np.int64]
    """Which key each row has."""
    rows: NDArray[np.int64]


def find_rows(
    storage: Storage,
    layout: TableLayout,
    files: Sequence[LiveFile],
    keys: pa.Array,
    limits: NDArray[np.int64] | None = None,
) -> list[FileMatch]:
    """The live rows of keys; with `limits` only so many of each, and then there must be as many."""
    columns = layout.match_columns
    if not columns or not len(keys):
        return []
    folder = index_folder(storage, layout)
    folder.tidy([file.file for file in files])
    query = KeyQuery.of(keys)
    left = None if limits is None else limits.copy()
    found: list[FileMatch] = []
    for file in files:
        index = _open(storage, layout, folder, file.file)
        codes, rows = index.find(query)
        if not len(rows):
            continue
        dead = dead_rows(storage, file)
        alive = _alive(rows, dead, index.row_count)
        codes, rows = codes[alive], rows[alive]
        if left is not None and len(rows):
            same = _are_same(storage, layout, file.file, keys, codes, rows)
            codes, rows = _limit(codes[same], rows[same], left)
        if len(rows):
            found.append(FileMatch(file, index.row_count, dead, codes, rows))
    if left is not None and left.any():
        raise unknown_row(str(layout.source), f"{int(left.sum())} rows that were changed or deleted are not there")
    return found


def index_folder(storage: Storage, layout: TableLayout) -> IndexFolder:
    """Where the indexes of a table are."""
    return IndexFolder.of(storage, [layout.schema.field(name) for name in layout.match_columns])


def prepare_index(storage: Storage, layout: TableLayout, file: str) -> None:
    """Make the index of a file before somebody waits for it."""
    if layout.key and layout.match_columns:
        _open(storage, layout, index_folder(storage, layout), file)


def _open(storage: Storage, layout: TableLayout, folder: IndexFolder, file: str) -> KeyIndex:
    def build() -> bytes:
        return build_index(read_keys(storage, file, layout.schema, layout.match_columns), keep_keys=bool(layout.key))

    return folder.open(file, build)


def _alive(rows: NDArray[np.int64], dead: Vector, row_count: int) -> NDArray[np.bool_]:
    if not len(dead):
        return np.ones(len(rows), np.bool_)
    if len(dead) < _FEW * len(rows):
        return dead.alive(row_count)[rows]
    # Few rows of a file with many dead ones: not all of these are looked at.
    return np.isin(rows, Vector.of(rows).difference(dead).rows().astype(np.int64))


def _are_same(
    storage: Storage,
    layout: TableLayout,
    file: str,
    keys: pa.Array,
    codes: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which of the rows really are what was looked for, and not deleted softly."""
    numbers, places = np.unique(rows, return_inverse=True)
    there = read_keys(storage, file, layout.schema, layout.match_columns, numbers)
    same = pc.equal(there.take(pa.array(places)), keys.take(pa.array(codes))).to_numpy(zero_copy_only=False)
    if DELETED_AT in layout.schema.names and DELETED_AT not in layout.columns:
        deleted = read_rows(storage, file, layout.schema, [DELETED_AT], numbers).column(0)
        same = same & deleted.is_null().to_numpy()[places]
    return same


def _limit(
    codes: NDArray[np.int64], rows: NDArray[np.int64], left: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As many rows of each key as are left to find, which are fewer then."""
    order = np.argsort(codes, kind="stable")
    codes, rows = codes[order], rows[order]
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1])) if len(codes) else np.zeros(0, np.int64)
    ranks = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    keep = ranks < left[codes]
    np.subtract.at(left, codes[keep], 1)
    return codes[keep], rows[keep]
