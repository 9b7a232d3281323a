"""Changes in the form that resolving needs: the old and new texts of a few columns, column by column.

Postgres can cast the texts to the column's type. A cell may be NULL or omitted by the server, which is not the same:
`Cells.sent` distinguishes them. Omitted old values are filled in where that is certain: an update without an old row
has not changed the row's identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import EventBatch, Rows, TableChanges
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
    unsent_cells,
)
from penstock.changes.steps import Segment, Truncation
from penstock.schema import TableSchema, resolve_domain
from penstock.source.patterns import TableName

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of many changes."""

    texts: pa.StringArray
    """Null where the cell is NULL, and where the server omitted it."""
    sent: Flags

    @classmethod
    def absent(cls, count: int) -> Cells:
        """Return cells that were all omitted."""
        return cls(pa.nulls(count, pa.string()), np.zeros(count, np.bool_))

    @classmethod
    def of_rows(cls, columns: Sequence[str], rows: Sequence[Sequence[str | None]]) -> dict[str, Cells]:
        """Return the texts of rows, column by column; none was omitted."""
        sent = np.ones(len(rows), np.bool_)
        values = zip(*rows, strict=True) if rows else ((),) * len(columns)
        return {name: cls(pa.array(each, pa.string()), sent) for name, each in zip(columns, values, strict=True)}

    @classmethod
    def joined(cls, parts: Sequence[Cells]) -> Cells:
        """Join several pieces."""
        return cls(pa.concat_arrays([each.texts for each in parts]), np.concatenate([each.sent for each in parts]))

    def or_else(self, other: Cells, where: Flags) -> Cells:
        """Replace omitted cells by those of another column, where `where` is true."""
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
        """Join several pieces with the same columns, in order."""
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
    """The changes to the tables of the indexes, between two boundaries."""

    rows: tuple[RowChanges, ...] = ()
    truncated: frozenset[TableName] = frozenset()
    xids: frozenset[int] = frozenset()
    """The transaction ids of the stream; documents are built once all of them are visible."""
    unreadable: frozenset[TableName] = frozenset()
    """Tables with changes from before a column that connects rows got another type: their values mean nothing now."""
    is_snapshot: bool = False
    """True for current rows that have only the key columns of their documents."""
    unidentified: frozenset[TableName] = frozenset()
    """Tables with changes from which the server left out old values that were compiled for: old links are unknown."""
    is_new_server: bool = False
    """True if another server took over before these changes."""


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """The columns to read of a table's changes."""

    columns: tuple[str, ...]
    identity: frozenset[str] = field(default_factory=frozenset[str])
    oid: int = 0
    types: Mapping[str, int] = field(default_factory=dict[str, int])
    """The oids of the types of these columns, which the texts are cast to."""

    def fits(self, schema: TableSchema) -> bool:
        """Return whether rows of this schema have the columns in these types."""
        return all(self.types.get(each.name, each.type.oid) == each.type.oid for each in schema.columns)


def changes_in_pieces(batch: EventBatch, wanted: Mapping[TableName, WantedColumns], size: int) -> Iterator[Changes]:
    """Yield the changes of a batch to these tables, about `size` rows at a time, each piece with its transactions.

    The row's own values determine which documents a change affects, so the rows of one transaction may be resolved in
    several pieces. Truncated tables come first: their links are forgotten before new ones are stored.
    """
    names = {each.oid: name for name, each in wanted.items()}
    tables = [(names[each.table_id], each) for each in batch.tables if each.table_id in names]
    truncated = frozenset(name for name, table in tables if any(isinstance(step, Truncation) for step in table.steps))
    unreadable = frozenset(
        name
        for name, table in tables
        if any(isinstance(step, Rows) and not wanted[name].fits(step.schema) for step in table.steps)
    )
    rows: list[RowChanges] = []
    xids: set[int] = set()
    room = size
    for part, its_xids in _parts(tables, wanted, size):
        if len(part) > room and rows:
            yield Changes(tuple(rows), truncated, frozenset(xids), unreadable)
            truncated, unreadable, rows, xids, room = frozenset(), frozenset(), [], set(), size
        rows.append(part)
        xids |= its_xids
        room -= len(part)
    if rows or truncated or unreadable:
        yield Changes(tuple(rows), truncated, frozenset(xids), unreadable)


def merge_changes(parts: Sequence[Changes]) -> Changes:
    """Join several pieces, in order."""
    return Changes(
        tuple(rows for part in parts for rows in part.rows),
        frozenset(name for part in parts for name in part.truncated),
        frozenset(xid for part in parts for xid in part.xids),
        frozenset(name for part in parts for name in part.unreadable),
        all(part.is_snapshot for part in parts),
        frozenset(name for part in parts for name in part.unidentified),
        any(part.is_new_server for part in parts),
    )


def row_changes(segment: pa.Table, schema: TableSchema, name: TableName, wanted: WantedColumns) -> RowChanges:
    """Return the old and new values of these columns in a segment; columns that the schema lacks count as omitted."""
    operations = segment.column(OP).to_numpy()
    count = len(operations)
    deleted = operations == Operation.DELETE
    updated = operations == Operation.UPDATE
    fields = dict(zip((column.name for column in schema.columns), field_names(schema), strict=True))
    indexes = {column.name: index for index, column in enumerate(schema.columns)}
    at, unsent = unsent_cells(segment.column(UNCHANGED))
    old: dict[str, Cells] = {}
    new: dict[str, Cells] = {}
    for column in wanted.columns:
        if column not in fields:
            old[column] = new[column] = Cells.absent(count)
            continue
        is_bytea = resolve_domain(schema.columns[indexes[column]].type, -1)[0].name == "bytea"
        texts = _texts(segment, fields[column], segment.column(fields[column]), is_bytea=is_bytea)
        sent = np.ones(count, np.bool_)
        if at.size:
            sent[at] = unsent[:, indexes[column]] == 0
        before = _old_cells(segment, fields[column], is_bytea=is_bytea)
        # A value that the server omitted is unchanged, so the old row has it, if the server sent one.
        new[column] = _masked(texts, sent & ~deleted).or_else(before, updated)
        old[column] = before.or_else(_masked(texts, sent & deleted), deleted)
    for column in wanted.identity.intersection(wanted.columns):
        old[column] = old[column].or_else(new[column], updated)
    return RowChanges(
        name, operations, segment.column(COMMIT_LSN).to_numpy(), segment.column(ORDINAL).to_numpy(), old, new
    )


def distinct_tuples(parts: Iterable[Sequence[Cells]], width: int) -> list[list[str]]:
    """Return the distinct tuples without omitted or NULL cells, column by column."""
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


def _parts(
    tables: Sequence[tuple[TableName, TableChanges]], wanted: Mapping[TableName, WantedColumns], size: int
) -> Iterator[tuple[RowChanges, set[int]]]:
    for name, table in tables:
        for step in table.steps:
            if isinstance(step, Rows) and wanted[name].fits(step.schema):
                for file in step.segments:
                    segment = file.read(_needed_fields(file, step.schema, wanted[name]))
                    for first in range(0, segment.num_rows, size):
                        part = segment.slice(first, size).combine_chunks()
                        xids = set(pc.unique(part.column(XID)).to_pylist())
                        yield row_changes(part, step.schema, name, wanted[name]), xids


def _needed_fields(segment: Segment, schema: TableSchema, wanted: WantedColumns) -> list[str]:
    """Return the fields to read of a segment: those that describe the changes, and the wanted columns."""
    fields = dict(zip((column.name for column in schema.columns), field_names(schema), strict=True))
    needed = {OP, COMMIT_LSN, ORDINAL, XID, UNCHANGED, OLD, UNREPRESENTABLE}
    needed |= {fields[name] for name in wanted.columns if name in fields}
    there: list[str] = segment.arrow_schema().names
    return [name for name in there if name in needed]


def _old_cells(segment: pa.Table, field_name: str, *, is_bytea: bool) -> Cells:
    if OLD not in segment.column_names:
        return Cells.absent(segment.num_rows)
    old = segment.column(OLD).combine_chunks()
    if old.type.get_field_index(field_name) < 0:
        return Cells.absent(segment.num_rows)
    sent = old.is_valid().to_numpy(zero_copy_only=False)
    return _masked(_texts(segment, f"{OLD}.{field_name}", pc.struct_field(old, field_name), is_bytea=is_bytea), sent)


def _masked(texts: pa.StringArray, sent: Flags) -> Cells:
    return Cells(pc.if_else(pa.array(sent), texts, pa.scalar(None, pa.string())), sent)


def _texts(segment: pa.Table, name: str, values: pa.ChunkedArray | pa.Array, *, is_bytea: bool) -> pa.StringArray:
    """Convert typed values to texts that Postgres can cast; unrepresentable values already have one.

    With `unknown_types = "bytes"`, values of other types than `bytea` are the bytes of their texts.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if is_bytea and (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        # Cold: Arrow has no hexadecimal form, and keys are rarely bytes.
        texts = pa.array([None if each is None else f"\\x{each.hex()}" for each in array.to_pylist()], pa.string())
    else:
        texts = array.cast(pa.string())
    if UNREPRESENTABLE in segment.column_names:
        kept = pc.map_lookup(segment.column(UNREPRESENTABLE).combine_chunks(), name, "first")
        texts = pc.coalesce(kept.cast(pa.string()), texts)
    return texts
