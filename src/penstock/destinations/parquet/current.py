"""The current rows of a table at one moment, by columns, for `verify`.

Files never change, so a list of them is a pin. Copied rows are read file by file, without the rows whose keys were
changed since. One more part has the net effect of all changes. A table without a key whose rows were changed is a
single part.

If there are more changes than a task should have in memory, each part has a share of the keys instead (`Share`): it
reads all files, one after the other, and keeps what concerns its keys. A row that moves from one share to another is
deleted in the first and inserted in the second. If the server omitted values of such a row, they are in the first
share, so one more share has the keys of all such rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, concatenate_changes, concatenate_texts, constant_of, read_changes
from penstock.changes.compaction import KnownRows, NetChanges, compact, keys_of
from penstock.changes.keys import fingerprints
from penstock.changes.segment import (
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Operation,
    Texts,
    field_names,
    join_texts,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.parquet.folder import DataFile, Generation, ManifestKind, NewSchema
from penstock.destinations.refusals import unknown_row
from penstock.schema import ReplicaIdentity, TableSchema

SHARE_BYTES = 16 << 20
"""Size of the files with the changes that a part has in memory; a file is compressed to about a quarter."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the keys: one of `count` shares, or, with the number `count`, the keys of `_entangled`."""

    number: int
    count: int

    def has(self, keys: pa.Array, entangled: pa.Array) -> NDArray[np.bool_]:
        """Return which of the keys belong to it."""
        apart = pc.is_in(keys, entangled).to_numpy(zero_copy_only=False) if len(entangled) else np.zeros(len(keys), "?")
        if self.number == self.count:
            return apart
        # Keys that are numbers may all be multiples of the count.
        mixed = (fingerprints(keys).view(np.uint64) * _MULTIPLIER) >> _HALF
        return ((mixed * np.uint64(self.count)) >> _HALF == self.number) & ~apart


@dataclass(frozen=True, slots=True)
class CurrentPart:
    """Some of the current rows."""

    copied: tuple[str, ...]
    """Files of the copy, for their rows that no change has touched."""
    changes: bool
    """True to include the rows that changes have left."""
    share: Share | None = None
    """Only rows with these keys; None for all."""


@dataclass(frozen=True, slots=True)
class PinnedParquet:
    """See `penstock.destinations.base.PinnedTable`."""

    schema: TableSchema
    reader: CurrentReader
    parts: Sequence[CurrentPart]

    @property
    def arrow_schema(self) -> pa.Schema:
        """Return the names and types of the rows."""
        return self.reader.types

    def close(self) -> None:
        """Do nothing: no resource is held."""


@dataclass(frozen=True, slots=True)
class CurrentReader:
    """Reads parts; pickles."""

    schema: TableSchema
    """As of the last change."""
    types: pa.Schema
    """The columns, by their names in segments of that schema."""
    copied: tuple[str, ...]
    copied_names: tuple[str | None, ...]
    """The names of the columns in the files of the copy; None for a column that they lack."""
    changes: tuple[Rows, ...]
    constants: tuple[tuple[str, pa.Scalar], ...] = ()
    """What rows from before a column was added have in it."""

    def read(self, part: CurrentPart, /) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part."""
        share, net = part.share, None
        if self.changes:
            net = _net_changes(self) if share is None else _net_of_share(self, share)
        left = None if net is None or net.limits is None else net.limits.copy()
        for path in part.copied:
            for rows in self._read_copied(path):
                if share is not None:
                    rows = rows.filter(pa.array(share.has(self._keys(rows), _entangled(self))))
                yield from (rows if net is None else self._untouched(rows, net, left)).to_batches()
        if part.changes and net is not None:
            yield from self._remaining(net).to_batches()

    def fit(self, rows: pa.Table) -> pa.Table:
        """Return some of the columns with their current types."""
        return rows.cast(pa.schema([self.types.field(name) for name in rows.column_names]))

    @property
    def key(self) -> list[str]:
        numbers = {column.attnum for column in self.schema.key}
        pairs = zip(self.schema.columns, field_names(self.schema), strict=True)
        return [name for column, name in pairs if column.attnum in numbers]

    def _read_copied(self, path: str) -> Iterator[pa.Table]:
        """Yield the rows of a file of the copy, with the table's current columns."""
        renamed = {name: new for name, new in zip(self.copied_names, self.types.names, strict=True) if name is not None}
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[*renamed, UNREPRESENTABLE], use_threads=False):
                table = pa.Table.from_batches([batch])
                texts = {renamed[name]: column for name, column in split_texts(table).items() if name in renamed}
                yield self._whole({new: table.column(name) for name, new in renamed.items()}, texts, table.num_rows)

    def _whole(self, columns: dict[str, pa.ChunkedArray], texts: Texts, count: int) -> pa.Table:
        constants = dict(self.constants)
        arrays = [
            columns[field.name].cast(field.type)
            if field.name in columns
            else pa.repeat(constants.get(field.name, pa.scalar(None, field.type)), count)
            for field in self.types
        ]
        maps = join_texts(texts, count)
        arrays.append(pa.nulls(count, UNREPRESENTABLE_TYPE) if maps is None else maps)
        return pa.Table.from_arrays(arrays, names=[*self.types.names, UNREPRESENTABLE])

    @property
    def can_entangle(self) -> bool:
        """True if values of a row with another key can be omitted."""
        return bool(self.key) and self.schema.replica_identity is not ReplicaIdentity.FULL

    @property
    def identity(self) -> list[str]:
        """The columns that say which row is meant."""
        return self.key or list(self.types.names)

    def read_changes(self) -> Iterator[ChangeColumns]:
        """Yield the changes, file by file."""
        for step in self.changes:
            yield read_changes([step], self.schema, dict(self.constants)).fitted({}, self.fit)

    def change_keys(self, changes: ChangeColumns) -> tuple[pa.Array, pa.Array]:
        """Return the keys of changes, and those that `old_at` had before."""
        own = keys_of(changes.rows, changes.texts, self.identity, whole=not self.key)
        if not len(changes.old_at):
            return own, own[:0]
        old = changes.old.select(self.identity).cast(changes.rows.select(self.identity).schema)
        return own, keys_of(old, changes.old_texts, self.identity, whole=not self.key)

    def _keys(self, rows: pa.Table) -> pa.Array:
        return keys_of(rows, split_texts(rows), self.identity, whole=not self.key)

    def _untouched(self, rows: pa.Table, net: NetChanges, left: NDArray[np.int64] | None) -> pa.Table:
        """Return the rows of the copy that still exist; without a key, `left` counts how many of each to remove."""
        at = pc.index_in(self._keys(rows), net.touched)
        if left is None:
            return rows.filter(at.is_null())
        numbers = pc.fill_null(at, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        gone = np.zeros(len(numbers), np.bool_)
        touched = np.flatnonzero(numbers >= 0)
        order = touched[np.argsort(numbers[touched], kind="stable")]
        ordered = numbers[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(order) else ordered
        ranks = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        gone[order] = ranks < left[ordered]
        np.subtract.at(left, numbers[gone], 1)
        return rows.filter(pa.array(~gone))

    def _remaining(self, net: NetChanges) -> pa.Table:
        """Return the rows that changes have left; omitted values come from the copied row."""
        wanted, columns = net.wanted()
        if len(wanted):
            net = net.located(self._find_copied(net, wanted, columns))
        elif net.origins:
            net = net.located(KnownRows(np.zeros(0, np.int64), self.types.empty_table()))
        if len(net.incomplete()[0]):
            raise unknown_row(str(self.schema), "a changed or deleted row does not exist")
        rows, texts = net.rows()
        return self._whole({name: rows.column(name) for name in rows.column_names}, texts, len(net.images))

    def _find_copied(self, net: NetChanges, wanted: NDArray[np.int64], columns: list[str]) -> KnownRows:
        keys = net.touched.take(pa.array(wanted))
        numbers: list[NDArray[np.int64]] = []
        tables: list[pa.Table] = []
        for path in self.copied:
            for rows in self._read_copied(path):
                at = pc.index_in(self._keys(rows), keys)
                found = at.is_valid()
                tables.append(rows.filter(found))
                numbers.append(wanted[at.drop_null().to_numpy(zero_copy_only=False)])
        table = pa.concat_tables(tables).combine_chunks() if tables else self._whole({}, {}, 0)
        texts = {name: column for name, column in split_texts(table).items() if name in columns}
        found_numbers = np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
        return KnownRows(found_numbers, table.select(columns), texts)


def pin_generation(generation: Generation) -> PinnedParquet:
    """Return the current rows of a copy and the changes since."""
    copy, *later = list(generation.manifests())
    copied_schema = next(step.schema for step in copy.steps if isinstance(step, NewSchema))
    copied = [str(generation.data / file.name) for file in copy.files]
    current, steps = copied_schema, list[Rows]()
    first = copied_schema
    for manifest in later:
        if manifest.kind is not ManifestKind.CHANGES:
            continue
        for step in manifest.steps:
            match step:
                case NewSchema():
                    current = step.schema
                case Truncation():
                    # A truncate: nothing before it counts.
                    copied, steps, first = [], [], current
                case DataFile():
                    steps.append(Rows(current, "", (generation.segment(manifest, step, current, ""),)))
    names = dict(zip((column.attnum for column in copied_schema.columns), field_names(copied_schema), strict=True))
    types = _types(current, [(copied_schema, path) for path in copied[:1]], steps)
    known = {column.attnum for column in first.columns}
    reader = CurrentReader(
        schema=current,
        types=types,
        copied=tuple(copied),
        copied_names=tuple(names.get(column.attnum) for column in current.columns),
        changes=tuple(steps),
        constants=tuple(
            (field.name, constant_of(str(current), column, field.type))
            for column, field in zip(current.columns, types, strict=True)
            if column.attnum not in known and not pa.types.is_null(field.type)
        ),
    )
    return PinnedParquet(current, reader, _parts(reader))


def _parts(reader: CurrentReader) -> tuple[CurrentPart, ...]:
    if not reader.changes:
        return tuple(CurrentPart((path,), changes=False) for path in reader.copied)
    size = sum(segment.bytes for step in reader.changes for segment in step.segments)
    if size > SHARE_BYTES:
        count = -(-size // SHARE_BYTES)
        return tuple(
            CurrentPart(reader.copied, changes=True, share=Share(number, count))
            for number in range(count + reader.can_entangle)
        )
    if not reader.key:
        return (CurrentPart(reader.copied, changes=True),)
    return (*(CurrentPart((path,), changes=False) for path in reader.copied), CurrentPart((), changes=True))


def _types(schema: TableSchema, copied: Sequence[tuple[TableSchema, str]], changes: Sequence[Rows]) -> pa.Schema:
    """Return the type of each column in the newest file that has it; null if no file has it."""
    newest: dict[int, pa.DataType] = {}
    seen: dict[TableSchema, str] = dict(copied)
    seen |= {step.schema: step.segments[-1].path for step in changes}
    for version, path in seen.items():
        found = pq.read_schema(path)
        for column, name in zip(version.columns, field_names(version), strict=True):
            newest[column.attnum] = found.field(name).type
    pairs = zip(schema.columns, field_names(schema), strict=True)
    return pa.schema([pa.field(name, newest.get(column.attnum, pa.null())) for column, name in pairs])


@lru_cache(maxsize=2)
def _net_changes(reader: CurrentReader) -> NetChanges:
    """Compute the net changes, cached for the next part that this process reads."""
    changes = read_changes(_joined(reader.changes), reader.schema, dict(reader.constants)).fitted({}, reader.fit)
    return compact(changes, reader.key)


def _net_of_share(reader: CurrentReader, share: Share) -> NetChanges:
    entangled = _entangled(reader)
    own = [_own(reader, share, entangled, changes) for changes in reader.read_changes()]
    return compact(concatenate_changes(own, reader.schema), reader.key)


def _own(reader: CurrentReader, share: Share, entangled: pa.Array, changes: ChangeColumns) -> ChangeColumns:
    """Return the changes of a share: a row that leaves it is deleted, and one that arrives has no old identity."""
    keys, old_keys = reader.change_keys(changes)
    is_own, was_own = share.has(keys, entangled), share.has(old_keys, entangled)
    leaves = was_own & ~is_own[changes.old_at]
    stays = was_own & is_own[changes.old_at]
    at = np.flatnonzero(is_own)
    gone_at = changes.old_at[leaves]
    order = pa.array(np.argsort(np.concatenate([at, gone_at]), kind="stable"))
    places = np.full(changes.count, -1, np.int64)
    places[np.sort(np.concatenate([at, gone_at]))] = np.arange(len(order))
    rows, texts = changes.rows.take(pa.array(at)), {n: each.take(pa.array(at)) for n, each in changes.texts.items()}
    if len(gone_at):
        left = pa.array(np.flatnonzero(leaves))
        identity = changes.old.select(reader.identity).take(left).cast(rows.select(reader.identity).schema)
        rows = pa.concat_tables([rows, identity], promote_options="default").take(order)
        left_texts = {name: each.take(left) for name, each in changes.old_texts.items()}
        texts = {
            name: each.take(order)
            for name, each in concatenate_texts([texts, left_texts], [len(at), len(gone_at)]).items()
        }
    kept = np.concatenate([at, gone_at])[order.to_numpy()]
    operations = changes.operations.copy()
    operations[gone_at] = Operation.DELETE
    not_sent = {
        name: missing[kept] & (operations[kept] != Operation.DELETE) for name, missing in changes.not_sent.items()
    }
    stay = pa.array(np.flatnonzero(stays))
    return replace(
        changes,
        operations=operations[kept],
        commit_times=changes.commit_times[kept],
        rows=rows.combine_chunks(),
        texts=texts,
        not_sent={name: missing for name, missing in not_sent.items() if missing.any()},
        old_at=places[changes.old_at[stays]],
        old=changes.old.take(stay).combine_chunks() if len(changes.old_at) else changes.old,
        old_texts={name: each.take(stay) for name, each in changes.old_texts.items()},
    )


@lru_cache(maxsize=2)
def _entangled(reader: CurrentReader) -> pa.Array:
    """Return the keys, before and after, of rows that got another key while values were omitted; few rows do."""
    found: list[pa.Array] = []
    for changes in reader.read_changes() if reader.can_entangle else ():
        if changes.not_sent and len(changes.old_at):
            keys, old = reader.change_keys(changes)
            omits = np.logical_or.reduce(list(changes.not_sent.values()))[changes.old_at]
            found += [keys.take(pa.array(changes.old_at[omits])), old.filter(pa.array(omits))]
    return pc.unique(pa.concat_arrays(found)) if found else pa.nulls(0)


def _joined(steps: Sequence[Rows]) -> list[Rows]:
    """Merge adjacent steps with the same schema."""
    joined: list[Rows] = []
    for step in steps:
        if joined and joined[-1].schema == step.schema:
            joined[-1] = Rows(step.schema, "", (*joined[-1].segments, *step.segments))
        else:
            joined.append(step)
    return joined
