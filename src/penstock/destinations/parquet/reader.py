"""Reading what the parquet destination wrote: only what manifests name, of the newest copy that is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.batch import EventBatch, Rows, TableChanges, TableStep
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import copied_rows, table_events
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.parquet.folder import Generation, RootFolder
from penstock.destinations.parquet.manifests import DataFile, Manifest, ManifestKind, NewSchema
from penstock.lsn import Lsn
from penstock.schema import TableSchema


class ParquetReader:
    """The tables under a path; may be used while a pipeline writes.

    Each call sees the state of one moment. Tables are named as in the source: `"public.orders"`.
    """

    def __init__(self, path: str | Path) -> None:
        self._root = RootFolder(Path(path).absolute())

    def tables(self) -> list[str]:
        """Those with a complete copy."""
        owned = [(folder, folder.owner()) for folder in self._root.tables()]
        return sorted(owner.table for folder, owner in owned if owner is not None and folder.current() is not None)

    def positions(self) -> dict[str, Lsn]:
        """Up to where each table is."""
        return {table: self.manifests(table)[-1].position for table in self.tables()}

    def schema(self, table: str) -> TableSchema:
        """As of the last change."""
        steps = [step for manifest in self.manifests(table) for step in manifest.steps]
        return [step.schema for step in steps if isinstance(step, NewSchema)][-1]

    def manifests(self, table: str) -> list[Manifest]:
        """The records of a table, from its copy on."""
        return list(self._generation(table).manifests())

    def files(self, table: str) -> list[Path]:
        """The files that count, in order: what Spark or others can read."""
        generation = self._generation(table)
        return [generation.data / file.name for manifest in generation.manifests() for file in manifest.files]

    def read_changes(self, table: str) -> pa.Table:
        """The copied rows (`_op` 0) and every change since, in order; columns as in `penstock.changes.segment`.

        Truncates have no row. Where the schema changed, a column that a row's version does not have is NULL.
        """
        tables = [pq.read_table(path) for path in self.files(table)]
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    def read_table(self, table: str) -> pa.Table:
        """The rows as they are now, with the names and types of segments."""
        return self.mirror(table).arrow()

    def mirror(self, table: str) -> MirrorTable:
        """The rows as they are now; row by row, so not for large tables."""
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

    def _generation(self, table: str) -> Generation:
        for folder in self._root.tables():
            owner = folder.owner()
            if owner is not None and owner.table == table:
                generation = folder.current()
                if generation is not None:
                    return generation
        raise KeyError(table)


def _apply(mirror: MirrorTable, generation: Generation, manifest: Manifest, current: NewSchema) -> NewSchema:
    """Apply a manifest's steps; gives the schema after it."""
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
    # A change of the schema without rows behind it.
    mirror.change_schema(current.schema)
    return current
