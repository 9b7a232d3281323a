"""The net effect of a batch on one table: which rows go, and which come, whatever happened in between.

With a key, a row that comes is the last image of its key, and every key that was touched loses the rows that it had.
A cell that was not sent is looked for along the chain of images before it, which follows the row through changes of its
key: 1 → 2 → 3 may send a large text not once. Where the chain begins at a row from before the batch, that row has it.
All of this is done before a changed key becomes a removal and a new row.

Without a key, rows are a multiset: what was added and removed cancels out, and what is left is removed row by row.

Where a cell comes from is a number, its *origin*: below `table.num_rows` a row of `table`; from there on the row that
had the key `touched[origin - table.num_rows]` before the batch; and `unknown`, which only the source can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.columns import ChangeColumns, concatenate_texts
from penstock.changes.keys import row_keys
from penstock.changes.segment import Operation, Texts

LIVE = np.iinfo(np.int64).min
"""In `gone_at`: the row is there."""

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NetChanges:
    """What a batch comes down to."""

    touched: pa.Array
    """Keys whose rows go, each once; without a key of the table, whole rows."""
    limits: _Indices | None
    """How many rows of each of them go; None: all."""
    table: pa.Table
    """What the new rows are taken from."""
    texts: Texts
    images: _Indices
    """For each new row, the row of `table` that it is."""
    keys: _Indices | None
    """For each new row, its key among the touched ones; None without a key."""
    gone_at: _Indices | None = None
    """For each new row, when it was deleted, or `LIVE`; None where deleted rows are not kept."""
    origins: Mapping[str, _Indices] = field(default_factory=dict[str, _Indices])
    """For each new row, where its cell comes from; of columns that are not all from `images`."""

    @property
    def unknown(self) -> int:
        """The origin of cells that nobody here has."""
        return self.table.num_rows + len(self.touched)

    def wanted(self) -> tuple[_Indices, list[str]]:
        """Of which touched keys the rows from before are needed, and which columns of them."""
        found: list[_Indices] = []
        columns: list[str] = []
        for name, origins in self.origins.items():
            codes = origins[(origins >= self.table.num_rows) & (origins < self.unknown)] - self.table.num_rows
            if len(codes):
                found.append(codes)
                columns.append(name)
        return (np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)), columns

    def located(self, before: KnownRows) -> NetChanges:
        """The same with `before`, the rows that were wanted, behind `table`; what is not among them is unknown.

        A deleted row of which nothing is known was never there.
        """
        if not self.origins:
            return self
        first, size = self.table.num_rows, len(before.numbers)
        places = np.full(len(self.touched) + 1, first + size, np.int64)
        places[before.numbers] = first + np.arange(size)
        origins = {
            name: np.where(found < first, found, places[np.maximum(found - first, 0)])
            for name, found in self.origins.items()
        }
        table, texts = self._extended(before)
        keep = np.ones(len(self.images), np.bool_)
        if self.gone_at is not None:
            is_unknown = np.logical_or.reduce([found == first + size for found in origins.values()])
            keep = ~(is_unknown & (self.gone_at != LIVE))
        located = replace(self, touched=self.touched[:0], limits=None, table=table, texts=texts, origins=origins)
        return located if keep.all() else located._filtered(keep)

    def incomplete(self) -> tuple[_Indices, list[str]]:
        """After `located`: the new rows that have cells of which nothing is known, and the columns of those."""
        masks = {name: found == self.unknown for name, found in self.origins.items()}
        names = [name for name, mask in masks.items() if mask.any()]
        if not names:
            return np.zeros(0, np.int64), []
        return np.flatnonzero(np.logical_or.reduce([masks[name] for name in names])), names

    def completed(self, answers: KnownRows) -> NetChanges:
        """After `located`: with the cells that were unknown, of new rows by their number."""
        places = np.full(len(self.images), -1, np.int64)
        places[answers.numbers] = self.table.num_rows + np.arange(len(answers.numbers))
        origins = {name: np.where(found == self.unknown, places, found) for name, found in self.origins.items()}
        table, texts = self._extended(answers)
        return replace(self, table=table, texts=texts, origins=origins)

    def without(self, rows: _Indices) -> NetChanges:
        """The same without some of the new rows."""
        keep = np.ones(len(self.images), np.bool_)
        keep[rows] = False
        return self._filtered(keep)

    def _filtered(self, keep: NDArray[np.bool_]) -> NetChanges:
        return replace(
            self,
            images=self.images[keep],
            keys=None if self.keys is None else self.keys[keep],
            gone_at=None if self.gone_at is None else self.gone_at[keep],
            origins={name: found[keep] for name, found in self.origins.items()},
        )

    def select(self, rows: _Indices) -> KnownRows:
        """Some of the new rows, as far as they are known."""
        origins = {name: found[rows] for name, found in self.origins.items()}
        masks = {name: (found < 0) | (found >= self.table.num_rows) for name, found in origins.items()}
        taken = {name: pa.array(np.where(masks[name], 0, found), mask=masks[name]) for name, found in origins.items()}
        own = pa.array(self.images[rows])
        columns = {name: self.table.column(name).take(taken.get(name, own)) for name in self.table.column_names}
        texts = {name: column.take(taken.get(name, own)) for name, column in self.texts.items()}
        return KnownRows(rows, pa.table(columns).combine_chunks(), texts)

    def rows(self) -> tuple[pa.Table, Texts]:
        """The new rows; nothing may be unknown any more."""
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
        """`table` and `texts` with rows behind them; columns that those do not have are NULL there."""
        if not len(more.numbers):
            return self.table, self.texts
        names = [name for name in self.table.column_names if name in more.table.column_names]
        added = more.table.select(names).cast(pa.schema([self.table.schema.field(name) for name in names]))
        table = pa.concat_tables([self.table, added], promote_options="default").combine_chunks()
        return table, concatenate_texts([self.texts, more.texts], [self.table.num_rows, len(more.numbers)])


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Rows that were read for their cells."""

    numbers: _Indices
    """What each row answers: a touched key, or a new row."""
    table: pa.Table
    """As many rows; the columns that were asked for."""
    texts: Texts = field(default_factory=dict[str, pa.Array])


def compact(changes: ChangeColumns, key: Sequence[str], *, keep_deleted: bool = False) -> NetChanges:
    """The net effect of changes on a table whose rows are known by the columns `key`, or that has no key.

    With `keep_deleted` deleted rows stay, with the time at which they went.
    """
    return _compact_keyed(changes, key, keep_deleted) if key else _compact_multiset(changes, keep_deleted)


def keys_of(table: pa.Table, texts: Texts, names: Sequence[str]) -> pa.Array:
    """The keys of rows, made of these columns."""
    return row_keys([_array(table.column(name)) for name in names], [texts.get(name) for name in names])


def _compact_keyed(changes: ChangeColumns, names: Sequence[str], keep_deleted: bool) -> NetChanges:
    count = changes.count
    if any(name in changes.not_sent for name in names):
        raise ValueError("a change came without its key")
    keys = keys_of(changes.rows, changes.texts, names)
    if len(changes.old_at):
        keys = pa.concat_arrays([keys, keys_of(changes.old, changes.old_texts, names)])
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    touched, own, old = encoded.dictionary, codes[:count], codes[count:]
    moved = old != own[changes.old_at]
    moves, left = changes.old_at[moved], old[moved]

    # Of several assignments to one place the last one stays.
    last_own = np.full(len(touched), -1, np.int64)
    last_own[own] = np.arange(count)
    last_left = np.full(len(touched), -1, np.int64)
    last_left[left] = moves
    is_live = (last_own > last_left) & (changes.operations[last_own] != Operation.DELETE)
    is_image = np.zeros(count, np.bool_)
    is_image[last_own[is_live]] = True
    images = np.flatnonzero(is_image)
    row_codes = own[images]
    if not changes.not_sent and not keep_deleted:
        return NetChanges(touched, None, changes.rows, changes.texts, images, row_codes)

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
    return NetChanges(touched, None, changes.rows, changes.texts, starts, row_codes, gone_at, origins)


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
    """For each origin, where the chain of images before it ends: at a cell that was sent, or outside of the batch."""
    jumps = np.arange(unknown + 1)
    jumps[: len(missing)][missing] = before[missing]
    while True:
        # Each turn doubles the length of the chains that it follows.
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
    keys = keys_of(table.take(taken), {name: column.take(taken) for name, column in texts.items()}, names)
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
    """Without a key there is no row from before to take a cell from."""
    found: dict[str, _Indices] = {}
    for name, missing in changes.not_sent.items():
        padded = np.append(missing, np.zeros(len(changes.old_at), np.bool_))
        found[name] = np.where(padded[images], unknown, images)
    return found


def _rank(codes: _Indices) -> _Indices:
    """For each element, how many equal ones stand before it."""
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
