"""Reads the rows of a mirror back, for `penstock verify`.

One query reads the table as it is at one moment. Snowflake keeps its result for a day, in batches that any process can
fetch, so tasks read them in parallel while the table changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.destinations.snowflake.connection import Connection, translated
from penstock.destinations.snowflake.control import Record
from penstock.destinations.snowflake.layout import DELETED_AT, Layout, Mode
from penstock.schema import TableSchema


@dataclass(frozen=True, slots=True)
class SnowflakeReader:
    """Reads a batch of a result; pickles."""

    layout: Layout

    def read(self, part: Any, /) -> Iterator[pa.RecordBatch]:
        """See `RangeReader`."""
        with translated(str(self.layout.schema)):
            rows = part.to_arrow()
            if rows is not None and rows.num_rows:
                yield self.layout.restored(rows)


@dataclass(frozen=True, slots=True)
class PinnedSnowflake:
    """See `PinnedTable`."""

    schema: TableSchema
    reader: SnowflakeReader
    parts: Sequence[Any]

    @property
    def arrow_schema(self) -> pa.Schema:
        """Return the names and types of the rows."""
        return self.reader.layout.restored_schema()

    def close(self) -> None:
        """See `PinnedTable`: Snowflake discards the result after a day."""


def pin_generation(connection: Connection, record: Record) -> PinnedSnowflake:
    """Read the current rows of a generation into a result."""
    layout, generation = record.layout, record.generation
    assert layout is not None
    assert generation is not None
    live = f" where {DELETED_AT} is null" if layout.mode is Mode.SOFT_DELETE else ""
    with connection.session() as session:
        parts = session.batches(f"select {layout.select()} from {connection.name(generation)}{live}")
    return PinnedSnowflake(layout.schema, SnowflakeReader(layout), parts)
