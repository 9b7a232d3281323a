"""Reads both sides of a table in tasks: rows with their digests, by buckets of their keys.

Rows with the same key fall into the same bucket on both sides. For each bucket, a task returns the number of rows and
the sum of their digests. Two sums are equal exactly if both tasks saw the same rows, each equally often, in any order
(except for a collision of 128 bits). So while source and destination are equal, nothing is written, sorted or sent.
Tasks read the rows of differing buckets once more and write them to a folder, where they are compared one by one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.segment import XID, join_texts, split_texts
from penstock.comparison.digest import LANES, DigestedRows, Digests, digest_cells, digest_rows
from penstock.comparison.schemas import common_type
from penstock.copy.progress import RangeRead
from penstock.destinations.base import RangeReader
from penstock.errors import NotComparable
from penstock.observe.reports import tell
from penstock.values.datetimes import TimeCodec

BUCKET, TEXTS, RECENT = "bucket", "texts", "recent"
DIGESTS = ("key_0", "key_1", "row_0", "row_1")
_SLICE_ROWS = 1 << 15
"""Rows digested at a time: as many as fit into the processor's cache."""
_FILE_ROWS = 1 << 20
_HALF = np.uint64(32)
_TRANSACTIONS = 1 << 32
_FIRST_TRANSACTION = 3
"""Lower numbers mark rows that are older than all others."""


class Side(StrEnum):
    """One of the two sides."""

    SOURCE = "source"
    DESTINATION = "destination"
    LATER = "later"
    """The destination again, at a position after the source's."""


@dataclass(frozen=True, slots=True)
class SideRows:
    """How one side is read."""

    reader: RangeReader
    names: tuple[str | None, ...]
    """The names of the table's columns on this side, in order; None for a column that it lacks, which is NULL in every
    row."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some parts of one side, for one task."""

    index: int
    side: Side
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Some rows, with digests."""

    columns: list[pa.Array]
    """In the order and with the types of the table."""
    texts: dict[int, pa.Array]
    """Texts of cells that their type cannot hold, by column number."""
    digests: DigestedRows
    buckets: NDArray[np.int64]
    recent: NDArray[np.bool_] | None = None
    """Which rows were written by `Scan.recent` transactions; None if that does not matter."""


@dataclass(frozen=True, slots=True)
class BucketSums:
    """Counts and sums of each bucket."""

    counts: NDArray[np.int64]
    sums: Digests

    @classmethod
    def nothing(cls, buckets: int) -> BucketSums:
        return cls(np.zeros(buckets, np.int64), np.zeros((LANES, buckets), np.uint64))

    def add(self, buckets: NDArray[np.int64], rows: Digests) -> None:
        """Add rows, in place."""
        np.add.at(self.counts, buckets, 1)
        for lane in range(LANES):
            np.add.at(self.sums[lane], buckets, rows[lane])

    def merge(self, other: BucketSums) -> None:
        """Add the sums of another piece, in place."""
        np.add(self.counts, other.counts, out=self.counts)
        np.add(self.sums, other.sums, out=self.sums)

    def differing(self, other: BucketSums) -> NDArray[np.bool_]:
        """Return the buckets whose counts or sums differ."""
        return (self.counts != other.counts) | (self.sums != other.sums).any(axis=0)


@dataclass(frozen=True, slots=True)
class Scan:
    """A table, and how both sides of it are read; pickles."""

    table: str
    columns: pa.Schema
    """Names and types, as in segments."""
    key: tuple[int, ...]
    """The key columns by number; empty if rows are a multiset."""
    sides: Mapping[Side, SideRows]
    buckets: int
    sample: float = 1.0
    """The fraction of the rows that is compared: the same rows on both sides."""
    recent: tuple[int, int] | None = None
    """If the sides are not at one position: the transactions that may have written since the first read, from the first
    number to before the second."""

    def read(self, piece: Piece) -> Iterator[ReadRows]:
        """Yield the rows of a piece, some at a time."""
        side = self.sides[piece.side]
        for part in piece.parts:
            for batch in side.reader.read(part):
                for start in range(0, batch.num_rows, _SLICE_ROWS):
                    yield self._digest(batch.slice(start, _SLICE_ROWS), side)

    def _digest(self, batch: pa.RecordBatch, side: SideRows) -> ReadRows:
        numbers = {name: number for number, name in enumerate(side.names) if name is not None}
        kept = split_texts(pa.Table.from_batches([batch]))
        texts = {numbers[name]: column for name, column in kept.items() if name in numbers}
        columns = [
            pa.nulls(batch.num_rows, wanted.type) if name is None else self._fit(batch.column(name), wanted)
            for name, wanted in zip(side.names, self.columns, strict=True)
        ]
        recent = self._recent(batch)
        if self.sample < 1:
            wanted = self._sampled(columns, texts)
            columns = [column.filter(pa.array(wanted)) for column in columns]
            texts = {number: column.filter(pa.array(wanted)) for number, column in texts.items()}
            recent = None if recent is None else recent[wanted]
        if not columns:
            # A table without columns: its rows are all the same.
            empty = np.zeros((LANES, batch.num_rows), np.uint64)
            return ReadRows([], {}, DigestedRows(empty, empty), np.zeros(batch.num_rows, np.int64))
        digests = digest_rows(columns, texts, self.key)
        return ReadRows(columns, texts, digests, find_buckets(digests.keys, self.buckets), recent)

    def _recent(self, batch: pa.RecordBatch) -> NDArray[np.bool_] | None:
        """Return which rows were written by recent transactions; numbers wrap around after 32 bits."""
        if self.recent is None or XID not in batch.schema.names:
            return None
        return are_recent(batch.column(XID).to_numpy(), *self.recent)

    def _fit(self, column: pa.Array, wanted: pa.Field) -> pa.Array:
        # Arrow casts more than can be compared: a text to the number that it spells, for example.
        if common_type(column.type, wanted.type) is not None or common_type(wanted.type, column.type) is not None:
            # Arrow's message may contain a cell.
            with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
                return fit_type(column, wanted.type)
        raise NotComparable(
            f"{self.table}: column {wanted.name!r} is {wanted.type} at the source, {column.type} at the destination",
            hint="Run `penstock resync` for this table, or find out which program changed it.",
            table=self.table,
        )

    def _sampled(self, columns: list[pa.Array], texts: dict[int, pa.Array]) -> NDArray[np.bool_]:
        """Return which rows are in the sample. Keys are chosen by the lane that buckets do not use."""
        keys = np.zeros(len(columns[0]) if columns else 0, np.uint64)
        for number in self.key or range(len(columns)):
            keys += digest_cells(columns[number], number, texts.get(number))[1]
        return keys < np.uint64(int(self.sample * 2**64))


def are_recent(transactions: NDArray[np.int64], first: int, end: int) -> NDArray[np.bool_]:
    """Return which transactions lie between the first number and the end. A frozen row keeps its number, even if it is
    older than half of all numbers, so a number that seems to come after the first may in fact be older."""
    within = (transactions - first) % _TRANSACTIONS < (end - first) % _TRANSACTIONS
    return within & (transactions >= _FIRST_TRANSACTION)


def find_buckets(keys: Digests, count: int) -> NDArray[np.int64]:
    """Return the bucket of each key."""
    return (((keys[0] >> _HALF) * np.uint64(count)) >> _HALF).astype(np.int64)


def fit_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return a destination's column in the source's type, with the same values."""
    if column.type == wanted:
        return column
    if pa.types.is_time(wanted) and _is_text(column.type):
        return TimeCodec(wanted).decode(pc.cast(column, pa.large_string())).array
    if pa.types.is_list(wanted) and pa.types.is_list(column.type) and pa.types.is_time(wanted.value_type):
        ends = column.offsets
        values = fit_type(column.values.slice(ends[0].as_py(), ends[-1].as_py() - ends[0].as_py()), wanted.value_type)
        shifted = pc.subtract(ends, ends[0])
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(shifted, values, type=wanted, mask=mask)
    return pc.cast(column, wanted)


def sum_piece(scan: Scan, piece: Piece) -> BucketSums:
    """Return the sums of a piece. Runs in a task."""
    sums = BucketSums.nothing(scan.buckets)
    for rows in scan.read(piece):
        sums.add(rows.buckets, rows.digests.rows)
    tell(RangeRead(piece.index, int(sums.counts.sum())))
    return sums


@dataclass(frozen=True, slots=True)
class Collection:
    """Which rows of both sides are written, and where."""

    folder: str
    wanted: NDArray[np.bool_]
    """By bucket: True to write the digests of its rows."""
    detailed: NDArray[np.bool_]
    """By bucket: True to write the rows, too."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The files that one task wrote."""

    side: Side
    digests: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def collect_piece(scan: Scan, collection: Collection, piece: Piece) -> Collected:
    """Write the digests of rows in differing buckets, and some of the rows, to new files. Runs in a task."""
    digests: list[pa.Table] = []
    rows: list[pa.Table] = []
    files: tuple[list[str], list[str]] = ([], [])
    count = 0
    for each in scan.read(piece):
        wanted = collection.wanted[each.buckets]
        if not wanted.any():
            continue
        table = digest_table(each)
        digests.append(table.filter(pa.array(wanted)))
        detailed = collection.detailed[each.buckets]
        if detailed.any():
            rows.append(_with_cells(table, each).filter(pa.array(detailed)))
        count += int(wanted.sum())
        if count >= _FILE_ROWS:
            _flush(collection, piece, digests, rows, files)
            count = 0
    _flush(collection, piece, digests, rows, files)
    tell(RangeRead(piece.index, 0))
    return Collected(piece.side, tuple(files[0]), tuple(files[1]))


def digest_table(rows: ReadRows) -> pa.Table:
    """Return buckets and digests as columns."""
    lanes = [*rows.digests.keys, *rows.digests.rows]
    arrays = [pa.array(rows.buckets), *(pa.array(np.ascontiguousarray(lane)) for lane in lanes)]
    recent = np.zeros(len(rows.buckets), np.bool_) if rows.recent is None else rows.recent
    return pa.Table.from_arrays([*arrays, pa.array(recent)], names=[BUCKET, *DIGESTS, RECENT])


def read_files(folder: str, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the files that tasks wrote, each sorted by bucket, mapped into memory instead of read."""
    for name in names:
        with pa.memory_map(str(Path(folder) / name)) as source:
            yield pa.ipc.open_file(source).read_all()


def _with_cells(digests: pa.Table, rows: ReadRows) -> pa.Table:
    for number, column in enumerate(rows.columns):
        digests = digests.append_column(str(number), column)
    texts = {str(number): column for number, column in rows.texts.items()}
    maps = join_texts(texts, digests.num_rows)
    kind = pa.map_(pa.string(), pa.string())
    return digests.append_column(TEXTS, pa.nulls(digests.num_rows, kind) if maps is None else maps)


def _flush(
    collection: Collection,
    piece: Piece,
    digests: list[pa.Table],
    rows: list[pa.Table],
    files: tuple[list[str], list[str]],
) -> None:
    for what, tables, names in (("digests", digests, files[0]), ("rows", rows, files[1])):
        if tables:
            name = f"{piece.side}-{what}-{uuid.uuid4().hex}.arrow"
            table = pa.concat_tables(tables).sort_by(BUCKET).combine_chunks()
            path = str(Path(collection.folder) / name)
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
                file.write_table(table)
            names.append(name)
            tables.clear()


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
