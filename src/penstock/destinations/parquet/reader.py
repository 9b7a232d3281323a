"""Reads the parquet destination's tables: the files that manifests name, of the newest complete copy.

`ParquetReader` returns changes and rows to users. `PinnedParquet` returns the rows at one moment, by columns; files
never change, so a list of them is a pin. Copied rows are read file by file, without the rows whose keys were changed
since. One more part has the net effect of all changes, computed in memory that grows with their number. A table without
a key whose rows were changed is a single part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.changes.batch import EventBatch, Rows, TableChanges, TableStep
from penstock.changes.columns import constant_of, read_changes
from penstock.changes.compaction import KnownRows, NetChanges, compact, keys_of
from penstock.changes.segment import (
    OLD,
    RESERVED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Texts,
    field_names,
    join_texts,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import copied_rows, table_events
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.parquet.folder import (
    DataFile,
    Generation,
    Manifest,
    ManifestKind,
    NewSchema,
    RootFolder,
    TableFolder,
)
from penstock.destinations.refusals import unknown_row
from penstock.lsn import Lsn
from penstock.schema import TableSchema


class ParquetReader:
    """The tables under a path; may be used while a pipeline writes.

    Each call sees the state at one moment. Tables are named as in the source: `"public.orders"`.
    """

    def __init__(self, path: str | Path) -> None:
        self._root = RootFolder(Path(path).absolute())

    def tables(self) -> list[str]:
        """Return the tables with a complete copy."""
        return sorted(owner.table for _, owner, _ in self._root.readable())

    def folder(self, table: str) -> str:
        """Return the path of a table."""
        return str(self._generation(table).path.parent.parent)

    def positions(self) -> dict[str, Lsn]:
        """Return the position of each table."""
        return {table: self.manifests(table)[-1].position for table in self.tables()}

    def schema(self, table: str) -> TableSchema:
        """Return the schema as of the last change."""
        steps = [step for manifest in self.manifests(table) for step in manifest.steps]
        return [step.schema for step in steps if isinstance(step, NewSchema)][-1]

    def manifests(self, table: str) -> list[Manifest]:
        """Return the manifests of a table, starting with its copy."""
        return list(self._generation(table).manifests())

    def files(self, table: str, *, version: int | None = None, earlier: bool = False) -> list[Path]:
        """Return the files of the newest copy and the changes since, in order, for Spark or other readers.

        With `version`, only those whose rows have this version of the schema: they have the same columns and types.
        With `earlier`, also the files of earlier copies.
        """
        generations = self._earlier(table) if earlier else [self._generation(table)]
        found = [each for generation in generations for each in generation.versions()]
        return [path for number, path in found if version in (None, number)]

    def read_changes(self, table: str, *, earlier: bool = False) -> pa.Table:
        """Return the copied rows (`_op` 0) and every change since, in order; columns as in `penstock.changes.segment`.

        With `earlier`, also earlier copies and their changes. Truncates have no row. After a schema change, a column
        that a row's version lacks is NULL. Columns that had the same name and other types are `name`, `name_2` ….
        """
        types: dict[str, pa.DataType] = {}
        tables = [_with_own_names(pq.read_table(path), types) for path in self.files(table, earlier=earlier)]
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    def read_table(self, table: str) -> pa.Table:
        """Return the current rows, with the names and types of segments."""
        return self.mirror(table).arrow()

    def mirror(self, table: str) -> MirrorTable:
        """Return the current rows as a mirror; row by row, so not for large tables."""
        generation = self._generation(table)
        copy, *changes = generation.manifests()
        schema = next(step.schema for step in copy.steps if isinstance(step, NewSchema))
        mirror = MirrorTable(schema)
        for file in copy.files:
            for row in copied_rows(pq.read_table(generation.data / file.name), schema):
                mirror.insert(row)
        current = NewSchema(schema, "")
        for manifest in changes:
            if manifest.kind is ManifestKind.CHANGES:
                current = _apply(mirror, generation, manifest, current)
        return mirror

    def _earlier(self, table: str) -> list[Generation]:
        """Return all copies of a table, oldest first."""
        current = self._generation(table)
        table_id = current.origin().table_id
        found = (each for each in TableFolder(current.path.parent.parent).generations() if each.is_copied())
        return [each for each in found if each.origin().table_id == table_id and each.number <= current.number]

    def _generation(self, table: str) -> Generation:
        for _, owner, generation in self._root.readable(table):
            if owner.table == table:
                return generation
        raise KeyError(table)


def _with_own_names(rows: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    """Return rows with names that have one type each; `types` are those of the files before."""
    names: dict[str, str] = {}
    for field in rows.schema:
        if field.name not in RESERVED:
            name, number = field.name, 2
            while name in names.values() or types.get(name, field.type) != field.type:
                name, number = f"{field.name}_{number}", number + 1
            names[field.name] = name
            types[name] = field.type
    if all(name == new for name, new in names.items()):
        return rows
    texts = {f"{prefix}{name}": f"{prefix}{new}" for name, new in names.items() for prefix in ("", f"{OLD}.")}
    maps = join_texts({texts[name]: column for name, column in split_texts(rows).items()}, rows.num_rows)
    columns: list[tuple[str, Any]] = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if name == UNREPRESENTABLE and maps is not None:
            column = maps
        elif name == OLD:
            old = column.combine_chunks()
            fields = [field.with_name(names[field.name]) for field in old.type]
            arrays = [pc.struct_field(old, number) for number in range(len(fields))]
            column = pa.StructArray.from_arrays(arrays, fields=fields, mask=old.is_null())
        columns.append((names.get(name, name), column))
    return pa.Table.from_arrays([column for _, column in columns], names=[name for name, _ in columns])


def _apply(mirror: MirrorTable, generation: Generation, manifest: Manifest, current: NewSchema) -> NewSchema:
    """Apply a manifest's steps; return the schema after it."""
    steps: list[TableStep] = []
    for step in manifest.steps:
        match step:
            case DataFile():
                segment = generation.segment(manifest, step, current.schema, current.version)
                steps.append(Rows(current.schema, current.version, (segment,)))
            case NewSchema():
                current = step
            case Truncation():
                steps.append(replace(step, table_id=current.schema.table_id, table=str(current.schema)))
    changes = TableChanges(current.schema.table_id, str(current.schema), tuple(steps))
    batch = EventBatch(manifest.begin, manifest.position, 0, 0, 0, (changes,))
    for event in table_events(batch, changes, None):
        mirror.apply(event)
    # A schema change that no rows follow.
    mirror.change_schema(current.schema)
    return current


@dataclass(frozen=True, slots=True)
class CurrentPart:
    """Some of the current rows."""

    copied: tuple[str, ...]
    """Files of the copy, for their rows that no change has touched."""
    changes: bool
    """True to include the rows that changes have left."""


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
        net = _net_changes(self) if self.changes else None
        left = None if net is None or net.limits is None else net.limits.copy()
        for path in part.copied:
            for rows in self._read_copied(path):
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

    def _keys(self, rows: pa.Table) -> pa.Array:
        return keys_of(rows, split_texts(rows), self.key or list(self.types.names), whole=not self.key)

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


def _joined(steps: Sequence[Rows]) -> list[Rows]:
    """Merge adjacent steps with the same schema."""
    joined: list[Rows] = []
    for step in steps:
        if joined and joined[-1].schema == step.schema:
            joined[-1] = Rows(step.schema, "", (*joined[-1].segments, *step.segments))
        else:
            joined.append(step)
    return joined
