"""Changes as resolving needs them: for a few columns of a table, the texts before and after, column by column.

Texts are what Postgres reads as the column's type. A cell may be NULL, or not sent at all, which is not the same:
`Cells.sent` tells. What the server leaves out because it did not change is put in where that is certain: an update that
says nothing about the row before has not changed the row's identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.changes.batch import EventBatch, Rows, Truncate
from penstock.changes.segment import (
    COMMIT_LSN,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    Operation,
    field_names,
)
from penstock.schema import TableSchema
from penstock.source.patterns import TableName

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of many changes."""

    texts: pa.StringArray
    """Null where the cell is NULL, and where it was not sent."""
    sent: Flags

    @classmethod
    def absent(cls, count: int) -> Cells:
        """Nothing was sent."""
        return cls(pa.nulls(count, pa.string()), np.zeros(count, np.bool_))

    @classmethod
    def joined(cls, parts: Sequence[Cells]) -> Cells:
        """Several pieces as one."""
        return cls(pa.concat_arrays([each.texts for each in parts]), np.concatenate([each.sent for each in parts]))

    def or_else(self, other: Cells, where: Flags) -> Cells:
        """These, and where they were not sent those of another column, if `where` allows it."""
        take = where & ~self.sent & other.sent
        return Cells(pc.if_else(pa.array(take), other.texts, self.texts), self.sent | take)


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of one table, in their order."""

    table: TableName
    operations: NDArray[np.int8]
    """`penstock.changes.segment.Operation`."""
    commit_lsn: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    old: Mapping[str, Cells]
    new: Mapping[str, Cells]

    def __len__(self) -> int:
        return len(self.operations)

    @classmethod
    def joined(cls, table: TableName, parts: Sequence[RowChanges]) -> RowChanges:
        """Several pieces with the same columns as one, in their order."""
        return cls(
            table,
            np.concatenate([each.operations for each in parts]),
            np.concatenate([each.commit_lsn for each in parts]),
            np.concatenate([each.ordinal for each in parts]),
            {name: Cells.joined([each.old[name] for each in parts]) for name in parts[0].old},
            {name: Cells.joined([each.new[name] for each in parts]) for name in parts[0].new},
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened to the tables of the indexes, between two boundaries."""

    rows: tuple[RowChanges, ...] = ()
    truncated: frozenset[TableName] = frozenset()
    xids: frozenset[int] = frozenset()
    """The transactions, as the stream names them; documents are built when all of them can be seen."""
    is_snapshot: bool = False
    """Rows that are there now, with nothing but what names their documents."""


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """What to read of a table's changes."""

    columns: tuple[str, ...]
    identity: frozenset[str] = field(default_factory=frozenset[str])


def collect_changes(batch: EventBatch, wanted: Mapping[TableName, WantedColumns]) -> Changes:
    """The changes of a batch that concern these tables; only the columns that are needed are read."""
    rows: list[RowChanges] = []
    truncated: set[TableName] = set()
    xids: set[int] = set()
    for table in batch.tables:
        for step in table.steps:
            if isinstance(step, Rows):
                name = TableName(step.schema.namespace, step.schema.name)
                for file in step.segments if name in wanted else ():
                    segment = file.read(needed_fields(file.path, step.schema, wanted[name]))
                    xids.update(pc.unique(segment.column(XID)).to_pylist())
                    rows.append(row_changes(segment, step.schema, name, wanted[name]))
            elif isinstance(step, Truncate):
                truncated |= {name for name in wanted if str(name) == table.table}
    return Changes(tuple(rows), frozenset(truncated), frozenset(xids))


def merge_changes(parts: Sequence[Changes]) -> Changes:
    """Several pieces as one, in their order."""
    return Changes(
        tuple(rows for part in parts for rows in part.rows),
        frozenset(name for part in parts for name in part.truncated),
        frozenset(xid for part in parts for xid in part.xids),
        all(part.is_snapshot for part in parts),
    )


def row_changes(segment: pa.Table, schema: TableSchema, name: TableName, wanted: WantedColumns) -> RowChanges:
    """The images of these columns in a segment; a column that the schema does not have counts as not sent."""
    operations = segment.column(OP).to_numpy()
    count = len(operations)
    deleted = operations == Operation.DELETE
    fields = dict(zip((column.name for column in schema.columns), field_names(schema), strict=True))
    indexes = {column.name: index for index, column in enumerate(schema.columns)}
    absent = _Bitmap(segment.column(UNCHANGED))
    old: dict[str, Cells] = {}
    new: dict[str, Cells] = {}
    for column in wanted.columns:
        if column not in fields:
            old[column] = new[column] = Cells.absent(count)
            continue
        texts = _texts(segment, fields[column], segment.column(fields[column]))
        sent = ~absent.column(indexes[column])
        before = _old_cells(segment, fields[column])
        new[column] = _masked(texts, sent & ~deleted)
        old[column] = before.or_else(_masked(texts, sent & deleted), deleted)
    updated = operations == Operation.UPDATE
    for column in wanted.identity.intersection(wanted.columns):
        old[column] = old[column].or_else(new[column], updated)
    return RowChanges(
        name, operations, segment.column(COMMIT_LSN).to_numpy(), segment.column(ORDINAL).to_numpy(), old, new
    )


def distinct_tuples(parts: Iterable[Sequence[Cells]], width: int) -> list[list[str]]:
    """The different tuples of cells in which every cell was sent and none is NULL, column by column."""
    tables: list[pa.Table] = []
    names = [str(number) for number in range(width)]
    for part in parts:
        usable = np.logical_and.reduce(
            [cells.sent & cells.texts.is_valid().to_numpy(zero_copy_only=False) for cells in part]
        )
        mask = pa.array(usable)
        tables.append(pa.table([cells.texts.filter(mask) for cells in part], names=names))
    if not tables:
        return [[] for _ in names]
    grouped = pa.concat_tables(tables).group_by(names).aggregate([])
    return [grouped.column(name).to_pylist() for name in names]


class _Bitmap:
    """The bitmaps of cells that were not sent, as a matrix of bytes."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._valid = column.is_valid().to_numpy()
        present = column.drop_null().combine_chunks()
        joined = np.frombuffer(b"".join(present.to_pylist()), np.uint8) if len(present) else np.empty(0, np.uint8)
        self._bytes = joined.reshape(len(present), -1) if len(present) else joined

    def column(self, index: int) -> Flags:
        absent = np.zeros(len(self._valid), np.bool_)
        if self._bytes.size:
            absent[self._valid] = (self._bytes[:, index >> 3] >> (index & 7)) & 1
        return absent


def needed_fields(path: str, schema: TableSchema, wanted: WantedColumns) -> list[str]:
    """What to read of a segment: the columns that say what happened, and those that are asked for."""
    fields = dict(zip((column.name for column in schema.columns), field_names(schema), strict=True))
    needed = {OP, COMMIT_LSN, ORDINAL, XID, UNCHANGED, OLD, UNREPRESENTABLE}
    needed |= {fields[name] for name in wanted.columns if name in fields}
    there: list[str] = pq.read_schema(path).names
    return [name for name in there if name in needed]


def _old_cells(segment: pa.Table, field_name: str) -> Cells:
    if OLD not in segment.column_names:
        return Cells.absent(segment.num_rows)
    old = segment.column(OLD).combine_chunks()
    if old.type.get_field_index(field_name) < 0:
        return Cells.absent(segment.num_rows)
    sent = old.is_valid().to_numpy(zero_copy_only=False)
    return _masked(_texts(segment, f"{OLD}.{field_name}", pc.struct_field(old, field_name)), sent)


def _masked(texts: pa.StringArray, sent: Flags) -> Cells:
    return Cells(pc.if_else(pa.array(sent), texts, pa.scalar(None, pa.string())), sent)


def _texts(segment: pa.Table, name: str, values: pa.ChunkedArray | pa.Array) -> pa.StringArray:
    """Typed values as texts that Postgres reads; cells that their type cannot hold have theirs already."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        # Cold: Arrow has no hexadecimal form, and keys are rarely bytes.
        texts = pa.array([None if each is None else f"\\x{each.hex()}" for each in array.to_pylist()], pa.string())
    else:
        texts = array.cast(pa.string())
    if UNREPRESENTABLE in segment.column_names:
        kept = pc.map_lookup(segment.column(UNREPRESENTABLE).combine_chunks(), name, "first")
        texts = pc.coalesce(kept.cast(pa.string()), texts)
    return texts
