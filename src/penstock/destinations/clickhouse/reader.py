"""Reads a table back for `penstock verify`: its current rows, in ranges of its key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, field_names, join_texts
from penstock.destinations.clickhouse.control import Known
from penstock.destinations.clickhouse.encoding import decode, read_type, selected
from penstock.destinations.clickhouse.layout import NULL_ARRAYS, Layout, Mode, Shape
from penstock.destinations.clickhouse.server import Server
from penstock.errors import NotComparable
from penstock.schema import TableSchema

_PART_ROWS = 2_000_000
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads parts of a table; pickles."""

    server: Server
    generation: str
    layout: Layout
    floor: int

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns as in segments, then `_unrepresentable`."""
        schema = self.layout.source
        fields: list[pa.Field] = []
        for column, name in zip(schema.columns, field_names(schema), strict=True):
            stored = self.layout.of(column.attnum)
            assert stored is not None
            fields.append(pa.field(name, read_type(stored)))
        return pa.schema([*fields, pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)])

    def read(self, part: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part, which is a condition."""
        schema = self.arrow_schema
        for block in self.server.stream(self._query(part), str(self.layout.source)):
            rows, texts = decode(pa.Table.from_batches([block]), self.layout.source, self.layout)
            maps = join_texts(texts, rows.num_rows)
            nothing = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE)
            rows = rows.append_column(UNREPRESENTABLE, nothing if maps is None else maps)
            yield from rows.select(schema.names).cast(schema).to_batches()

    def _query(self, part: str) -> str:
        layout = self.layout
        columns = [selected(each) for each in layout.columns if each.attnum is not None]
        columns += [UNREPRESENTABLE] if layout.has_texts else []
        columns += [NULL_ARRAYS] if layout.has_lists else []
        rows = layout.rows(self.server.name(self.generation), self.floor)
        return f"select {', '.join(columns)} from {rows}{f' where {part}' if part else ''}"


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table at one moment; see `base.PinnedTable`. Nothing writes it until it is closed."""

    schema: TableSchema
    parts: tuple[str, ...]
    reader: TableReader

    @property
    def arrow_schema(self) -> pa.Schema:
        """See `base.PinnedTable`."""
        return self.reader.arrow_schema

    def close(self) -> None:
        """See `base.PinnedTable`."""


def pin_table(server: Server, known: Known) -> PinnedTable:
    """Return the table of a record."""
    layout = known.layout
    assert layout is not None
    if layout.mode is Mode.HISTORY:
        raise NotComparable(
            f"{layout.source} holds every change, not the rows of the source",
            hint='Only tables in the mode "mirror" can be compared.',
            table=str(layout.source),
        )
    parts = _parts(server, known.generation, layout)
    return PinnedTable(layout.source, parts, TableReader(server, known.generation, layout, known.floor))


def _parts(server: Server, generation: str, layout: Layout) -> tuple[str, ...]:
    """Return conditions that divide the table by its first column, if that has whole numbers."""
    if layout.shape is not Shape.KEYED or not pa.types.is_integer(layout.key[0].arrow):
        return ("",)
    name = layout.key[0].stored
    ((count, low, high),) = server.rows(f"select count(), min({name}), max({name}) from {server.name(generation)}")
    parts = min(_MOST_PARTS, count // _PART_ROWS + 1)
    step = (high - low) // parts + 1
    return tuple(f"{name} >= {low + number * step} and {name} < {low + (number + 1) * step}" for number in range(parts))
