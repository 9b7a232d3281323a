"""The messages of changes: which events a change becomes, with which key, in which order.

| change | messages |
|---|---|
| row of a copy | `r` |
| insert | `c` |
| update | `u` |
| update that changes the key | `d` and a tombstone with the old key, `c` with the new one |
| delete | `d` and a tombstone |
| truncate | `t`, without a key |

A message is made of columns: rows are taken apart into the events that they become, each kind of event is encoded
column by column (`Format`), and the events are put into the order of the changes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    XID,
    Operation,
    Texts,
    field_names,
    split_texts,
    unsent_cells,
)
from penstock.changes.steps import Truncation
from penstock.destinations.postgres.encoding import Cells, cells_of
from penstock.lsn import Lsn
from penstock.schema import TableSchema

_BYTES = pa.large_binary()
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in order; a NULL key is none, a NULL value a tombstone."""

    keys: pa.Array
    values: pa.Array

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Side:
    """The rows before or after changes, column by column."""

    cells: tuple[Cells, ...]
    valid: Flags | None = None
    """Which changes have such a row; None means all."""
    omitted: dict[int, Flags] = field(default_factory=dict[int, Flags])
    """By the number of a column: which values the server omitted and nothing here knows."""
    sent: frozenset[int] = frozenset()
    """The numbers of the columns that the server sends of old rows."""

    def take(self, rows: NDArray[np.int64]) -> Side:
        """Return the side of some changes."""
        index = pa.array(rows)
        return Side(
            tuple(each.take(index) for each in self.cells),
            None if self.valid is None else self.valid[rows],
            {number: flags[rows] for number, flags in self.omitted.items() if flags[rows].any()},
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and when changes were made; an array for each field, as in segments."""

    commit_lsn: pa.Array
    ordinal: pa.Array
    commit_time: pa.Array
    """Microseconds."""
    xid: pa.Array
    snapshot: bool = False

    def take(self, rows: NDArray[np.int64]) -> Origin:
        """Return the origin of some changes."""
        index = pa.array(rows)
        lsn, ordinal = self.commit_lsn.take(index), self.ordinal.take(index)
        return Origin(lsn, ordinal, self.commit_time.take(index), self.xid.take(index), self.snapshot)

    def __len__(self) -> int:
        return len(self.commit_lsn)


class Format(Protocol):
    """Turns columns into the bytes of keys and values: JSON or Avro, in an envelope or flat."""

    def keys(self, schema: TableSchema, cells: Sequence[Cells], count: int) -> pa.Array:
        """Return the keys of rows, from the cells of `schema.key`."""
        ...

    def values(
        self, schema: TableSchema, before: Side | None, after: Side | None, operations: pa.Array, origin: Origin
    ) -> pa.Array:
        """Return the values of events; `operations` are letters."""
        ...


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes messages of changes."""

    format: Format
    tombstones: bool = True

    def copied(self, rows: pa.Table, schema: TableSchema, position: Lsn, time: int) -> Messages:
        """Return the messages of rows of a copy, made at `time`."""
        count = rows.num_rows
        cells = tuple(cells_of(rows, split_texts(rows), schema))
        origin = Origin(_same(int(position), count), _same(0, count), _same(time, count), _same(0, count), True)
        keys = self._keys(schema, cells, count)
        return Messages(keys, self.format.values(schema, None, Side(cells), _letters("r", count), origin))

    def truncate(self, step: Truncation, schema: TableSchema) -> Messages:
        """Return the message of a truncate."""
        origin = Origin(
            _same(int(step.key.commit_lsn), 1),
            _same(step.key.ordinal, 1),
            _same(step.commit_time, 1),
            _same(step.xid, 1),
        )
        return Messages(pa.nulls(1, _BYTES), self.format.values(schema, None, None, _letters("t", 1), origin))

    def emptied(self, schema: TableSchema, position: Lsn, time: int) -> Messages:
        """Return the message that precedes the rows of a new copy: whatever was there is gone."""
        origin = Origin(_same(int(position), 1), _same(0, 1), _same(time, 1), _same(0, 1), True)
        return Messages(pa.nulls(1, _BYTES), self.format.values(schema, None, None, _letters("t", 1), origin))

    def changes(self, rows: pa.Table, schema: TableSchema) -> Messages:
        """Return the messages of changes, which have the columns of a segment."""
        count = rows.num_rows
        texts = split_texts(rows)
        operations = rows.column(OP).to_numpy()
        current, old = tuple(cells_of(rows, texts, schema)), _old_side(rows, texts, schema)
        after = _filled(current, old, rows, operations)
        is_delete, keyed = operations == Operation.DELETE, bool(schema.key)
        origin = Origin(
            _array(rows.column(COMMIT_LSN)),
            _array(rows.column(ORDINAL)),
            pc.cast(_array(rows.column(COMMIT_TIME)), pa.int64()),
            _array(rows.column(XID)),
        )
        new_keys = self._keys(schema, after.cells, count)
        moved, old_keys = np.zeros(count, np.bool_), new_keys
        if keyed and old is not None and old.valid is not None and old.valid.any():
            old_keys = self._keys(schema, old.cells, count)
            differs = pc.not_equal(old_keys, new_keys).to_numpy(zero_copy_only=False)
            moved = old.valid & differs & ~is_delete
        removed, written = np.flatnonzero(is_delete | moved), np.flatnonzero(~is_delete)
        parts: list[tuple[NDArray[np.int64], pa.Array, pa.Array]] = []
        if len(removed):
            before = _chosen(current, old, moved, removed)
            keys = pc.if_else(
                pa.array(moved[removed]), old_keys.take(pa.array(removed)), new_keys.take(pa.array(removed))
            )
            letters = _letters("d", len(removed))
            parts.append((removed, keys, self.format.values(schema, before, None, letters, origin.take(removed))))
            if self.tombstones and keyed:
                parts.append((removed, keys, pa.nulls(len(removed), _BYTES)))
        if len(written):
            letters = pa.array(np.where((operations == Operation.UPDATE) & ~moved, "u", "c"))
            before = None if old is None else Side(old.cells, None if old.valid is None else old.valid & ~moved)
            if before is not None and (before.valid is None or not before.valid[written].any()):
                before = None
            if len(written) < count:
                index = pa.array(written)
                before = None if before is None else before.take(written)
                after, origin, letters = after.take(written), origin.take(written), letters.take(index)
                new_keys = new_keys.take(index)
            parts.append((written, new_keys, self.format.values(schema, before, after, letters, origin)))
        return _in_order(parts)

    def _keys(self, schema: TableSchema, cells: Sequence[Cells], count: int) -> pa.Array:
        if not schema.key:
            return pa.nulls(count, _BYTES)
        numbers = {column.attnum: number for number, column in enumerate(schema.columns)}
        chosen = [cells[numbers[column.attnum]] for column in schema.key]
        return pc.cast(self.format.keys(schema, chosen, count), _BYTES)


def _in_order(parts: Sequence[tuple[NDArray[np.int64], pa.Array, pa.Array]]) -> Messages:
    """Put the events of the same change one after the other, and changes in their order."""
    keys = pa.concat_arrays([pc.cast(each[1], _BYTES) for each in parts])
    values = pa.concat_arrays([pc.cast(each[2], _BYTES) for each in parts])
    if len(parts) > 1:
        index = pa.array(np.argsort(np.concatenate([each[0] for each in parts]), kind="stable"))
        keys, values = keys.take(index), values.take(index)
    return Messages(keys, values)


def _old_side(rows: pa.Table, texts: Texts, schema: TableSchema) -> Side | None:
    """Return what the server sent of the rows before; columns that it never sends are NULL."""
    if OLD not in rows.column_names:
        return None
    column = _array(rows.column(OLD))
    if column.null_count == len(column):
        return None
    fields = {each.name: number for number, each in enumerate(column.type)}
    cells: list[Cells] = []
    names = field_names(schema)
    for name, described in zip(names, schema.columns, strict=True):
        if name in fields:
            cells.append(Cells(pc.struct_field(column, fields[name]), described.type, texts.get(f"{OLD}.{name}")))
        else:
            cells.append(Cells(pa.nulls(len(column), rows.schema.field(name).type), described.type))
    sent = frozenset(number for number, name in enumerate(names) if name in fields)
    return Side(tuple(cells), column.is_valid().to_numpy(zero_copy_only=False), sent=sent)


def _filled(current: tuple[Cells, ...], old: Side | None, rows: pa.Table, operations: NDArray[np.int8]) -> Side:
    """Return the new rows. Omitted values are taken from the old row where the server sent it."""
    at, bits = unsent_cells(rows.column(UNCHANGED), operations != Operation.DELETE)
    if not len(at):
        return Side(current)
    cells, omitted = list(current), dict[int, Flags]()
    for number in np.flatnonzero(bits[:, : len(current)].any(axis=0)).tolist():
        flags = np.zeros(rows.num_rows, np.bool_)
        flags[at] = bits[:, number] == 1
        if old is not None and old.valid is not None and number in old.sent:
            known = flags & old.valid
            cells[number] = _choose(pa.array(known), old.cells[number], cells[number])
            flags &= ~known
        if flags.any():
            omitted[number] = flags
    return Side(tuple(cells), None, omitted)


def _chosen(current: tuple[Cells, ...], old: Side | None, moved: Flags, rows: NDArray[np.int64]) -> Side:
    """Return the removed rows: the old one where the key changed, otherwise what the server sent with the delete."""
    side = Side(current).take(rows)
    if old is None or not moved.any():
        return side
    is_old, before = pa.array(moved[rows]), old.take(rows)
    return Side(tuple(_choose(is_old, one, other) for one, other in zip(before.cells, side.cells, strict=True)))


def _choose(where: pa.Array, one: Cells, other: Cells) -> Cells:
    """Return `one` where the flag is set, `other` elsewhere."""
    texts = None
    if one.texts is not None or other.texts is not None:
        nulls = pa.nulls(len(where), pa.string())
        texts = pc.if_else(
            where, nulls if one.texts is None else one.texts, nulls if other.texts is None else other.texts
        )
    return Cells(pc.if_else(where, one.array, other.array), one.type, texts)


def _same(value: int, count: int) -> pa.Array:
    return pa.array(np.full(count, value, np.int64))


def _letters(letter: str, count: int) -> pa.Array:
    return pa.array(np.full(count, letter))


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
