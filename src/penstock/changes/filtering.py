"""The changes of the rows that pass a filter (`penstock.changes.filters`), from the columns of a segment."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.filters import Cells, RowFilter
from penstock.changes.segment import (
    OLD,
    OP,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Operation,
    field_names,
    join_texts,
    pack_unsent,
    split_texts,
    unsent_cells,
)


def filter_changes(bound: RowFilter, table: pa.Table) -> pa.Table:
    """The changes of the rows that pass a filter.

    An update after which a row does not pass becomes a delete, and an update by which it begins to pass an insert, as
    far as the old row is known. Otherwise a delete stays as it is: it does no harm to a row that was never there.
    """
    changes = _Filtered(bound, table)
    operations = changes.operations
    is_delete, is_update = operations == Operation.DELETE, operations == Operation.UPDATE
    passes = changes.passes_now()
    passed, is_known = changes.passed_before()
    unknown_delete = is_delete & changes.unsent_any
    leaves = is_update & ~passes & (passed | ~is_known)
    enters = is_update & passes & is_known & ~passed
    keep = np.where(is_delete, passes | unknown_delete, passes | leaves)
    table = changes.converted(leaves, enters)
    return table if keep.all() else table.filter(pa.array(keep))


class _Filtered:
    """Changes of a table, with what a filter needs to know of them."""

    def __init__(self, bound: RowFilter, table: pa.Table) -> None:
        self._filter = bound
        self._table = table
        self._texts = split_texts(table)
        self._columns = bound.schema.columns
        self._fields = dict(zip((each.name for each in self._columns), field_names(bound.schema), strict=True))
        self._needed = [column.name for column in bound.columns]
        self.operations: NDArray[np.int8] = table.column(OP).to_numpy()
        count = table.num_rows
        at, bits = unsent_cells(table.column(UNCHANGED))
        self._unsent = np.zeros((count, len(self._columns)), np.bool_)
        if len(at):
            self._unsent[at] = bits[:, : len(self._columns)]
        self._places = {column.name: place for place, column in enumerate(self._columns)}
        self._old = array_of(table.column(OLD)) if OLD in table.column_names else None
        self._has_old = np.zeros(count, np.bool_) if self._old is None else self._old.is_valid().to_numpy(False)
        self._old_names = {each.name for each in self._old.type} if self._old is not None else set[str]()
        self.unsent_any = self._unsent[:, [self._places[name] for name in self._needed]].any(axis=1)

    def passes_now(self) -> NDArray[np.bool_]:
        """Which rows pass, with the values of deleted rows as far as they were sent."""
        cells: dict[str, Cells] = {}
        for name in self._needed:
            field, place = self._fields[name], self._places[name]
            values, texts, unsent = array_of(self._table.column(field)), self._texts.get(field), self._unsent[:, place]
            # A delete without the value is not decided by it.
            unsent = unsent & (self.operations != Operation.DELETE)
            if field in self._old_names and (unsent & self._has_old).any():
                known = unsent & self._has_old
                values, texts = self._filled(field, known)
                unsent = unsent & ~known
            cells[name] = Cells(values, texts, unsent if unsent.any() else None)
        return self._filter.keep(cells, self._table.num_rows)

    def passed_before(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which old rows passed, and for which changes this is known."""
        count = self._table.num_rows
        if not self._has_old.any() or not {self._fields[name] for name in self._needed} <= self._old_names:
            return np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        cells = {
            name: Cells(field_of(self._old, self._fields[name]), self._texts.get(f"{OLD}.{self._fields[name]}"))
            for name in self._needed
        }
        return self._filter.keep(cells, count) & self._has_old, self._has_old

    def converted(self, leaves: NDArray[np.bool_], enters: NDArray[np.bool_]) -> pa.Table:
        """The changes, with deletes and inserts in place of some updates."""
        if not (leaves.any() or enters.any()):
            return self._table
        table, texts = self._table, dict(self._texts)
        unsent = self._unsent.copy()
        for column in self._columns:
            field, place = self._fields[column.name], self._places[column.name]
            from_old = np.zeros(len(leaves), np.bool_)
            if field in self._old_names:
                from_old = self._has_old & (leaves | (enters & unsent[:, place]))
                unsent[from_old, place] = False
            if not column.identity:
                unsent[leaves, place] = True
            if from_old.any() or not column.identity:
                values, kept = self._filled(field, from_old)
                hidden = pa.array(leaves & unsent[:, place])
                values = pc.if_else(hidden, pa.scalar(None, values.type), values)
                table = table.set_column(table.schema.get_field_index(field), table.schema.field(field), values)
                if kept is not None:
                    texts[field] = pc.if_else(hidden, pa.scalar(None, pa.string()), kept)
        operations = np.where(leaves, Operation.DELETE, np.where(enters, Operation.INSERT, self.operations))
        gone = leaves | enters
        for name in [each for each in texts if each.startswith(f"{OLD}.")]:
            texts[name] = pc.if_else(pa.array(gone), pa.scalar(None, pa.string()), texts[name])
        replaced: dict[str, pa.Array] = {OP: pa.array(operations.astype(np.int8)), UNCHANGED: pack_unsent(unsent)}
        if self._old is not None:
            replaced[OLD] = self._old.take(pa.array(np.arange(len(gone)), mask=gone | ~self._has_old))
        if UNREPRESENTABLE in table.column_names:
            maps = join_texts(texts, table.num_rows)
            replaced[UNREPRESENTABLE] = pa.nulls(table.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps
        for name, array in replaced.items():
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), array)
        return table

    def _filled(self, field: str, known: NDArray[np.bool_]) -> tuple[pa.Array, pa.Array | None]:
        """A column and its texts, some of them from the old row."""
        values, texts = array_of(self._table.column(field)), self._texts.get(field)
        if not known.any():
            return values, texts
        mask = pa.array(known)
        values = pc.if_else(mask, field_of(self._old, field), values)
        old_texts = self._texts.get(f"{OLD}.{field}")
        if texts is not None or old_texts is not None:
            nothing = pa.nulls(len(known), pa.string())
            texts = pc.if_else(mask, nothing if old_texts is None else old_texts, nothing if texts is None else texts)
        return values, texts


def field_of(rows: pa.StructArray | None, name: str) -> pa.Array:
    """A field by its name; Arrow's function would read a dot in it as a path."""
    assert rows is not None
    return pc.struct_field(rows, rows.type.get_field_index(name))


def array_of(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array."""
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
