"""The net effect of a batch on one table: which rows are removed, and which are new.

With a key, the last image of a key is its new row, and every touched key loses its previous rows. An omitted value is
searched along the chain of earlier images, which follows the row through changes of its key: 1 → 2 → 3 may never send a
large text. If the chain begins at a row from before the batch, that row has the value. All of this happens before a
changed key becomes a removal and a new row.

Without a key, rows are a multiset: additions and removals cancel out, and the rest is removed row by row.

A number, the *origin*, says where a value comes from: below `table.num_rows`, a row of `table`; from there on, the row
that had the key `touched[origin - table.num_rows]` before the batch; or `unknown`, which only the source can answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.columns import ChangeColumns, concatenate_texts, in_one_piece
from penstock.changes.keys import row_keys
from penstock.changes.segment import Operation, Texts

LIVE = np.iinfo(np.int64).min
"""In `gone_at`: the row exists."""

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NetChanges:
    """The net effect of a batch."""

    touched: pa.Array
    """The keys whose rows are removed, each once; without a key, whole rows."""
    limits: _Indices | None
    """How many rows of each are removed; None for all."""
    table: pa.Table
    """The rows from which new rows are taken."""
    texts: Texts
    images: _Indices
    """For each new row, its row in `table`."""
    keys: _Indices | None
    """For each new row, the index of its key in `touched`; None without a key."""
    gone_at: _Indices | None = None
    """For each new row, when it was deleted, or `LIVE`; None if deleted rows are not kept."""
    origins: Mapping[str, _Indices] = field(default_factory=dict[str, _Indices])
    """For each new row, the origin of its value; only for columns that are not all from `images`."""
    new: NDArray[np.bool_] | None = None
    """For each touched key, True if its first change is an insert: there was no row before. None if nobody asked."""

    @property
    def unknown(self) -> int:
        """The origin of values that neither the batch nor the destination has."""
        return self.table.num_rows + len(self.touched)

    def wanted(self) -> tuple[_Indices, list[str]]:
        """The touched keys whose previous rows are needed, and the columns that are needed."""
        found: list[_Indices] = []
        columns: list[str] = []
        for name, origins in self.origins.items():
            codes = origins[(origins >= self.table.num_rows) & (origins < self.unknown)] - self.table.num_rows
            if len(codes):
                found.append(codes)
                columns.append(name)
        return (np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)), columns

    def split(self, numbers: _Indices) -> tuple[NetChanges, NetChanges]:
        """The new rows with values from the previous rows of these touched keys, and the other new rows.

        A new row has values of one previous row, at most: all chains of a row begin at the same row.
        """
        is_among = np.zeros(self.unknown + 1, np.bool_)
        is_among[self.table.num_rows + numbers] = True
        taken = np.logical_or.reduce([is_among[found] for found in self.origins.values()])
        return self._filtered(taken), self._filtered(~taken)

    def located(self, before: KnownRows) -> NetChanges:
        """Append `before`, the wanted rows, to `table`; values that are not among them become unknown.

        A deleted row with unknown values never existed.
        """
        if not self.origins:
            return self
        first, size = self.table.num_rows, len(before.numbers)
        places = np.full(len(self.touched) + 1, first + size, np.int64)
        places[before.numbers] = first + np.arange(size)
        # Most columns share their origins.
        moved = {id(found): found for found in self.origins.values()}
        moved = {
            at: np.where(found < first, found, places[np.maximum(found - first, 0)]) for at, found in moved.items()
        }
        origins = {name: moved[id(found)] for name, found in self.origins.items()}
        table, texts = self._extended(before)
        keep = np.ones(len(self.images), np.bool_)
        if self.gone_at is not None:
            is_unknown = np.logical_or.reduce([found == first + size for found in origins.values()])
            keep = ~(is_unknown & (self.gone_at != LIVE))
        located = replace(self, touched=self.touched[:0], limits=None, table=table, texts=texts, origins=origins)
        return located if keep.all() else located._filtered(keep)

    def incomplete(self) -> tuple[_Indices, list[str]]:
        """After `located`: the new rows with unknown values, and their columns."""
        masks = {name: found == self.unknown for name, found in self.origins.items()}
        names = [name for name, mask in masks.items() if mask.any()]
        if not names:
            return np.zeros(0, np.int64), []
        return np.flatnonzero(np.logical_or.reduce([masks[name] for name in names])), names

    def completed(self, answers: KnownRows) -> NetChanges:
        """After `located`: fill in unknown values, by the number of the new row."""
        places = np.full(len(self.images), -1, np.int64)
        places[answers.numbers] = self.table.num_rows + np.arange(len(answers.numbers))
        origins = {name: np.where(found == self.unknown, places, found) for name, found in self.origins.items()}
        table, texts = self._extended(answers)
        return replace(self, table=table, texts=texts, origins=origins)

    def without(self, rows: _Indices) -> NetChanges:
        """Leave out some of the new rows."""
        keep = np.ones(len(self.images), np.bool_)
        keep[rows] = False
        return self._filtered(keep)

    def _filtered(self, keep: NDArray[np.bool_]) -> NetChanges:
        kept = {id(found): found for found in self.origins.values()}
        kept = {at: found[keep] for at, found in kept.items()}
        return replace(
            self,
            images=self.images[keep],
            keys=None if self.keys is None else self.keys[keep],
            gone_at=None if self.gone_at is None else self.gone_at[keep],
            origins={name: kept[id(found)] for name, found in self.origins.items()},
        )

    def select(self, rows: _Indices) -> KnownRows:
        """Some of the new rows; unknown values are NULL."""
        origins = {name: found[rows] for name, found in self.origins.items()}
        masks = {name: (found < 0) | (found >= self.table.num_rows) for name, found in origins.items()}
        taken = {name: pa.array(np.where(masks[name], 0, found), mask=masks[name]) for name, found in origins.items()}
        own = pa.array(self.images[rows])
        columns = {name: self.table.column(name).take(taken.get(name, own)) for name in self.table.column_names}
        texts = {name: column.take(taken.get(name, own)) for name, column in self.texts.items()}
        return KnownRows(rows, pa.table(columns).combine_chunks(), texts)

    def rows(self) -> tuple[pa.Table, Texts]:
        """The new rows. Nothing may be unknown."""
        taken = {name: pa.array(found) for name, found in self.origins.items()}
        own = pa.array(self.images)
        in_order = len(self.images) == self.table.num_rows and bool((np.diff(self.images) == 1).all())
        columns = [
            self.table.column(name)
            if in_order and name not in taken
            else _array(self.table.column(name)).take(taken.get(name, own))
            for name in self.table.column_names
        ]
        texts = {name: column.take(taken.get(name, own)) for name, column in self.texts.items()}
        return pa.table(columns, schema=self.table.schema), texts

    def _extended(self, more: KnownRows) -> tuple[pa.Table, Texts]:
        """`table` and `texts` with rows appended; columns that these lack are NULL."""
        if not len(more.numbers):
            return self.table, self.texts
        names = [name for name in self.table.column_names if name in more.table.column_names]
        added = more.table.select(names).cast(pa.schema([self.table.schema.field(name) for name in names]))
        table = in_one_piece(pa.concat_tables([self.table, added], promote_options="default"))
        return table, concatenate_texts([self.texts, more.texts], [self.table.num_rows, len(more.numbers)])


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Rows that were read because their values are needed."""

    numbers: _Indices
    """For each row, the index of the touched key or new row that it belongs to."""
    table: pa.Table
    """The rows, with the columns that were requested."""
    texts: Texts = field(default_factory=dict[str, pa.Array])


def compact(
    changes: ChangeColumns, key: Sequence[str], *, keep_deleted: bool = False, mark_new: bool = False
) -> NetChanges:
    """Compute the net effect of changes on a table whose rows are identified by the columns `key`, or that has no key.

    With `keep_deleted`, deleted rows stay, with the time of their deletion. With `mark_new`, the result says which keys
    of a table with a key had no row before.
    """
    return _compact_keyed(changes, key, keep_deleted, mark_new) if key else _compact_multiset(changes, keep_deleted)


def keys_of(table: pa.Table, texts: Texts, names: Sequence[str], *, whole: bool = False) -> pa.Array:
    """The keys of rows, from these columns; with `whole`, they are the whole row of a table without a key."""
    columns = [_array(table.column(name)) for name in names]
    return row_keys(columns, [texts.get(name) for name in names], whole=whole)


def touched_keys(changes: ChangeColumns, names: Sequence[str]) -> tuple[pa.Array, pa.Table, Texts]:
    """Return the keys that occur in changes, before or after them, each once: as in `keys_of`, and as cells."""
    if any(name in changes.not_sent for name in names):
        raise ValueError("a change has no key")
    cells = changes.rows.select(names)
    keys, texts = keys_of(cells, changes.texts, names), changes.texts
    if len(changes.old_at):
        old = changes.old.select(names).cast(cells.schema)
        keys = pa.concat_arrays([keys, keys_of(old, changes.old_texts, names)])
        cells = pa.concat_tables([cells, old])
        texts = concatenate_texts([texts, changes.old_texts], [changes.count, len(changes.old_at)])
    _, first = np.unique(keys.dictionary_encode().indices.to_numpy(), return_index=True)
    taken = pa.array(first)
    found = {name: column.take(taken) for name, column in texts.items() if name in names}
    return keys.take(taken), cells.take(taken).combine_chunks(), found


def _compact_keyed(
    changes: ChangeColumns, names: Sequence[str], keep_deleted: bool, mark_new: bool = False
) -> NetChanges:
    count = changes.count
    if any(name in changes.not_sent for name in names):
        raise ValueError("a change has no key")
    keys = keys_of(changes.rows, changes.texts, names)
    if len(changes.old_at):
        keys = pa.concat_arrays([keys, keys_of(changes.old, changes.old_texts, names)])
    touched, codes = _encoded(keys)
    own, old = codes[:count], codes[count:]
    moved = old != own[changes.old_at]
    moves, left = changes.old_at[moved], old[moved]

    # Of several assignments to one index, the last one wins.
    last_own = np.full(len(touched), -1, np.int64)
    last_own[own] = np.arange(count)
    last_left = np.full(len(touched), -1, np.int64)
    last_left[left] = moves
    is_live = (last_own > last_left) & (changes.operations[last_own] != Operation.DELETE)
    is_image = np.zeros(count, np.bool_)
    is_image[last_own[is_live]] = True
    images = np.flatnonzero(is_image)
    row_codes = own[images]
    new = _new(changes.operations, own, moves, left, len(touched)) if mark_new else None
    if not changes.not_sent and not keep_deleted:
        return NetChanges(touched, None, changes.rows, changes.texts, images, row_codes, new=new)

    before = _before(changes.operations, own, moves, left, len(touched))
    starts, gone_at = images, None
    if keep_deleted:
        gone = np.flatnonzero(~is_live)
        ends = np.maximum(last_own[gone], last_left[gone])
        starts = np.concatenate([images, before[ends]])
        gone_at = np.concatenate([np.full(len(images), LIVE), changes.commit_times[ends]])
        row_codes = np.concatenate([row_codes, gone])
    origins: dict[str, _Indices] = {}
    for name in changes.rows.column_names:
        missing = changes.not_sent.get(name)
        found = starts if missing is None else _resolve(missing, before, count + len(touched))[starts]
        if missing is not None or keep_deleted:
            origins[name] = found
    return NetChanges(touched, None, changes.rows, changes.texts, starts, row_codes, gone_at, origins, new)


def _new(operations: NDArray[np.int8], own: _Indices, moves: _Indices, left: _Indices, keys: int) -> NDArray[np.bool_]:
    """For each key, whether its first change is an insert."""
    count = len(operations)
    first_own, first_left = np.full(keys, count, np.int64), np.full(keys, count, np.int64)
    first_own[own[::-1]] = np.arange(count)[::-1]
    first_left[left[::-1]] = moves[::-1]
    is_first = first_own < first_left
    return is_first & (operations[np.minimum(first_own, count - 1)] == Operation.INSERT)


def _encoded(keys: pa.Array) -> tuple[pa.Array, _Indices]:
    """The keys, each once, and the index of each one among them."""
    if pa.types.is_integer(keys.type):
        # Sorting numbers takes less time than hashing them, and a tenth of the memory.
        numbers, codes = np.unique(keys.to_numpy(zero_copy_only=False), return_inverse=True)
        return pa.array(numbers), codes
    encoded = keys.dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy().astype(np.int64)


def _before(operations: NDArray[np.int8], own: _Indices, moves: _Indices, left: _Indices, keys: int) -> _Indices:
    """For each change, the origin of the row that it replaces."""
    count = len(operations)
    unknown = count + keys
    codes, events = np.concatenate([own, left]), np.concatenate([np.arange(count), moves])
    gives_row = np.zeros(len(codes), np.bool_)
    gives_row[:count] = operations != Operation.DELETE
    order = np.argsort(codes * count + events)
    previous = np.full(len(codes), -1, np.int64)
    same = codes[order[1:]] == codes[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    origins = np.where(previous < 0, count + codes, np.where(gives_row[previous], events[previous], unknown))
    before = origins[:count].copy()
    before[moves] = origins[count:]
    before[operations == Operation.INSERT] = unknown
    return before


def _resolve(missing: NDArray[np.bool_], before: _Indices, unknown: int) -> _Indices:
    """For each origin, the end of its chain of earlier images: a value that was sent, or a row outside of the batch."""
    jumps = np.arange(unknown + 1)
    jumps[: len(missing)][missing] = before[missing]
    while True:
        # Each round doubles the length of the chains that it follows.
        further = jumps[jumps]
        if np.array_equal(further, jumps):
            return jumps
        jumps = further


def _compact_multiset(changes: ChangeColumns, keep_deleted: bool) -> NetChanges:
    names = list(changes.rows.column_names)
    is_update = changes.operations[changes.old_at] == Operation.UPDATE
    added = np.flatnonzero(changes.operations != Operation.DELETE)
    deleted = np.flatnonzero(changes.operations == Operation.DELETE)
    replaced = np.flatnonzero(is_update)
    table, texts = changes.rows, changes.texts
    if len(changes.old_at):
        old = changes.old.select(names).cast(table.schema)
        table = pa.concat_tables([table, old]).combine_chunks()
        texts = concatenate_texts([texts, changes.old_texts], [changes.count, len(changes.old_at)])
    removed = np.concatenate([deleted, changes.count + replaced])
    if len(removed) == 0:
        nothing = pa.nulls(0, pa.large_binary())
        gone_at = np.full(len(added), LIVE) if keep_deleted else None
        origins = _unknown_cells(changes, added, table.num_rows)
        return NetChanges(nothing, np.zeros(0, np.int64), table, texts, added, None, gone_at, origins)
    used = np.concatenate([added, removed])
    taken = pa.array(used)
    taken_texts = {name: column.take(taken) for name, column in texts.items()}
    keys = keys_of(table.take(taken), taken_texts, names, whole=True)
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    plus, minus = codes[: len(added)], codes[len(added) :]
    size = len(encoded.dictionary)
    net = np.bincount(plus, minlength=size) - np.bincount(minus, minlength=size)
    images = np.sort(added[_rank(plus) < net[plus]])
    gone_at = None
    if keep_deleted:
        times = np.concatenate([changes.commit_times[deleted], changes.commit_times[changes.old_at[replaced]]])
        gone_at = np.concatenate([np.full(len(images), LIVE), times])
        images = np.concatenate([images, removed])
    fewer = np.flatnonzero(net < 0)
    touched = encoded.dictionary.take(pa.array(fewer))
    origins = _unknown_cells(changes, images, table.num_rows + len(touched))
    return NetChanges(touched, -net[fewer], table, texts, images, None, gone_at, origins)


def _unknown_cells(changes: ChangeColumns, images: _Indices, unknown: int) -> dict[str, _Indices]:
    """Without a key, there is no previous row to take a value from."""
    found: dict[str, _Indices] = {}
    for name, missing in changes.not_sent.items():
        padded = np.append(missing, np.zeros(len(changes.old_at), np.bool_))
        found[name] = np.where(padded[images], unknown, images)
    return found


def _rank(codes: _Indices) -> _Indices:
    """For each element, the number of equal elements before it."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(codes) else np.zeros(0, np.int64)
    counts = np.diff(np.append(starts, len(codes)))
    ranks = np.empty(len(codes), np.int64)
    ranks[order] = np.arange(len(codes)) - np.repeat(starts, counts)
    return ranks


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
