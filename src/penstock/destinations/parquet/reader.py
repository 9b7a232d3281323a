"""Reads the parquet destination's tables: the files that manifests name, of the newest complete copy.

`ParquetReader` returns changes and rows to users; `penstock.destinations.parquet.current` returns current rows to
`verify`, by columns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.changes.batch import EventBatch, Rows, TableChanges, TableStep
from penstock.changes.segment import (
    OLD,
    RESERVED,
    UNREPRESENTABLE,
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
