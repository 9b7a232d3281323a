"""Reads a table of the lake as in its source: a pinned version, in parts, with the names and types of segments.

For comparing with the source, and for tests; other programs use any Delta reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.segment import UNREPRESENTABLE, join_texts, split_texts
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import iterate_data_file
from penstock.destinations.delta.layout import DELETED_AT, Mode, TableLayout, from_metadata
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.pins import Pin, pin_version, release_pin
from penstock.destinations.delta.snapshot import Snapshot
from penstock.destinations.delta.storage import Storage, open_storage
from penstock.destinations.delta.table import all_places
from penstock.destinations.naming import FOLDERS
from penstock.errors import NotComparable
from penstock.schema import TableSchema
from penstock.values import TypeSettings, codec_for

PIN_SECONDS = 6 * 3600.0
"""How long a reader that died may keep old files from being deleted."""


class DeltaReader:
    """The tables under a path, as in the source; may be used while a pipeline writes.

    Tables are named as in the source: `"public.orders"`. Each call sees the newest version.
    """

    def __init__(self, path: str | Path, storage_options: Mapping[str, str] | None = None) -> None:
        self._storage = open_storage(path, storage_options)

    def tables(self) -> list[str]:
        """Return the tables with a complete copy."""
        return sorted(self._found())

    def schema(self, table: str) -> TableSchema:
        """Return the source's schema of the current rows."""
        return self._look(table).layout.source

    def layout(self, table: str) -> TableLayout:
        """Return the table's layout in the lake."""
        return self._look(table).layout

    def folder(self, table: str) -> str:
        """Return the table's location, for other readers."""
        return self._look(table).storage.url

    def read_table(self, table: str) -> pa.Table:
        """Return the live rows, named and typed as in segments, without soft-deleted ones."""
        found = self._look(table)
        reader = LakeReader(found.storage, found.layout)
        batches = [batch for add in found.snapshot.files.values() for batch in reader.read(add)]
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        return pa.concat_tables(tables, promote_options="default") if tables else reader.nothing()

    def _look(self, table: str) -> _Found:
        return self._found(table)[table]

    def _found(self, table: str | None = None) -> dict[str, _Found]:
        """Return the tables with a complete copy by name; with `table`, without the logs of tables of other names."""
        found: dict[str, _Found] = {}
        for table_id, place in all_places(self._storage):
            if table is not None and place.table not in ("", table):
                continue
            storage = self._storage.child(place.folder)
            snapshot = DeltaLog(storage, place.table or place.folder).refresh()
            state = None if snapshot is None else from_metadata(snapshot.metadata)
            # The rows of another table that has taken over the folder are listed under that table's place.
            if snapshot and state and state.copied and state.layout.source.table_id == table_id:
                found[place.table or str(state.layout.source)] = _Found(storage, snapshot, state.layout)
        return found


@dataclass(frozen=True, slots=True)
class _Found:
    """A table in its folder."""

    storage: Storage
    snapshot: Snapshot
    layout: TableLayout


@dataclass(frozen=True, slots=True)
class LakeReader:
    """Reads the live rows of files; pickles."""

    storage: Storage
    layout: TableLayout

    def read(self, part: Add, /) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file, named and typed as in segments."""
        soft = self.layout.mode is Mode.SOFT_DELETE
        names = self._names()
        wanted = [*names, *([DELETED_AT] if soft else [])]
        schema = pa.schema([self.layout.schema.field(name) for name in wanted])
        for rows in iterate_data_file(self.storage, part, schema):
            if soft:
                rows = rows.filter(rows.column(DELETED_AT).is_null()).select(names)
            yield from self.as_segment(rows).to_batches()

    def nothing(self) -> pa.Table:
        """Return a table without rows."""
        return self.as_segment(pa.schema([self.layout.schema.field(name) for name in self._names()]).empty_table())

    def _names(self) -> list[str]:
        """Return the columns to read. Another program may have removed some of the source's columns from the table."""
        names = [*self.layout.columns, *([UNREPRESENTABLE] if self.layout.has_texts else [])]
        there = set(self.layout.schema.names)
        return [name for name in names if name in there]

    def as_segment(self, rows: pa.Table) -> pa.Table:
        """Return rows of the lake, named and typed as in segments."""
        back = {lake: name for name, lake in self.layout.renames.items()}
        for column in self.layout.source.columns:
            name = self.layout.names[column.attnum]
            if column.attnum in self.layout.times and name in rows.column_names:
                codec = codec_for(column.type, column.type_modifier, TypeSettings())
                at = rows.schema.get_field_index(name)
                rows = rows.set_column(at, name, _read_times(rows.column(name), codec.arrow_type))
        if UNREPRESENTABLE in rows.column_names:
            texts = {back[name]: column for name, column in split_texts(rows).items() if name in back}
            maps = join_texts(texts, rows.num_rows)
            at = rows.schema.get_field_index(UNREPRESENTABLE)
            if maps is not None:
                rows = rows.set_column(at, UNREPRESENTABLE, maps)
        return rows.rename_columns([back.get(name, name) for name in rows.column_names])


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A version of a table that stays readable until it is closed (`penstock.destinations.base.PinnedTable`)."""

    schema: TableSchema
    parts: tuple[Add, ...]
    reader: LakeReader
    version: int
    pin: Pin

    @property
    def arrow_schema(self) -> pa.Schema:
        """Return the names and types of the rows: those that the log has."""
        return self.reader.nothing().schema

    def close(self) -> None:
        """Release the version."""
        release_pin(self.reader.storage, self.pin)


def pin_table(lake: Storage, schema: TableSchema) -> PinnedVersion | None:
    """Pin the newest version of a table; None if there is none with a complete copy."""
    for folder in _folders_of(lake, schema):
        storage = lake.child(folder)
        snapshot = DeltaLog(storage, str(schema)).refresh()
        state = None if snapshot is None else from_metadata(snapshot.metadata)
        if snapshot is None or state is None or not state.copied or state.layout.source.table_id != schema.table_id:
            continue
        if state.layout.mode is Mode.HISTORY:
            raise NotComparable(
                f"{schema} keeps every change, so its rows cannot be compared with the source",
                hint='Use mode = "mirror" or "soft_delete" for tables that you want to compare.',
                table=str(schema),
            )
        pin = pin_version(storage, snapshot.version, seconds=PIN_SECONDS, reason="comparison with its source")
        reader = LakeReader(storage, state.layout)
        return PinnedVersion(state.layout.source, tuple(snapshot.files.values()), reader, snapshot.version, pin)
    return None


def _folders_of(lake: Storage, schema: TableSchema) -> Iterator[str]:
    """Yield where a table may be. One that kept its folder when it was renamed is found by its number."""
    yield FOLDERS.table(schema)
    for _, place in all_places(lake):
        yield place.folder


def _read_times(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Parse the texts that `penstock.destinations.delta.schema.fit` printed."""
    if pa.types.is_time(wanted):
        # Arrow has no cast from text to times: read them as timestamps of the first day.
        day, nothing = pa.scalar("1970-01-01 ", column.type), pa.scalar("", column.type)
        moments = pc.cast(pc.binary_join_element_wise(day, column, nothing), pa.timestamp("us"))
        return pc.cast(moments, wanted)
    chunks: list[pa.Array] = []
    for chunk in column.chunks:
        values = _read_times(pa.chunked_array([chunk.flatten()]), wanted.value_type).combine_chunks()
        counts = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32))
        chunks.append(pa.ListArray.from_arrays(offsets, values, mask=chunk.is_null()))
    return pa.chunked_array(chunks, wanted)
