"""The rows of a table at one position, in pieces that tasks can read: what a destination is given to copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.copy.frames import frame_of
from penstock.copy.plan import CopyRange
from penstock.copy.reader import RangeReader
from penstock.lsn import Lsn
from penstock.schema import TableSchema


@dataclass(frozen=True, slots=True)
class CopyRows:
    """A table as it was at `position`: exactly the rows of the transactions that this boundary covers.

    Nothing is read until it is asked for, and then inside one snapshot, so every way of reading, on any machine that
    reaches the source, and every repetition gives the same rows; their order means nothing. It can be read only while
    the snapshot is kept: until `Destination.write_table_rows` returns.

    Everything here pickles. A job over ranges ships the ranges as its items and `reader` with its function:

        def write_range(reader, folder, part):
            for index, batch in enumerate(reader.read(part)):
                ...  # a file named by (attempt, part.index, index): tasks may run twice

        tasks.run(rows.ranges, partial(write_range, rows.reader, folder), description=f"copy {rows.schema}")

    What tasks write is identified by (`attempt`, `CopyRange.index`, number of the batch), never by its content: two
    equal batches of a table without a key are two batches. `TableRewritten` and `SnapshotLost` from any range void the
    whole attempt: raise them from `write_table_rows`, and another attempt follows.
    """

    reader: RangeReader
    attempt: str
    """Names this copy among all copies of the table."""
    position: Lsn
    ranges: tuple[CopyRange, ...]
    """Each row is in exactly one. There may be none (a partitioned table without partitions), and an empty table has
    ranges without rows: the table is created all the same."""

    @property
    def schema(self) -> TableSchema:
        """The table's schema at `position`."""
        return self.reader.schema

    @property
    def arrow_schema(self) -> pa.Schema:
        """Of every batch, also if there is none: the columns with the names and types of segments, and as the last
        one `_unrepresentable` (see `penstock.changes.segment`), which is NULL in most tables throughout."""
        return self.reader.arrow_schema

    @property
    def estimated_bytes(self) -> int:
        """On the source's disk."""
        return sum(part.estimated_bytes for part in self.ranges)

    @property
    def estimated_rows(self) -> int | None:
        """From the server's statistics; None if it has none. A row filter is not considered."""
        heaps = {part.leaf.oid: part.leaf.rows for part in self.ranges}
        return None if any(rows < 0 for rows in heaps.values()) else round(sum(heaps.values()))

    def read(self, part: CopyRange) -> Iterator[pa.RecordBatch]:
        """The rows of one range, here; in tasks use `reader`, which is smaller to ship."""
        return self.reader.read(part)

    def arrow(self) -> Iterator[pa.RecordBatch]:
        """All rows, here, one range after the other: for small tables and for destinations without tasks."""
        for part in self.ranges:
            yield from self.reader.read(part)

    def frame(self, session: Any, *, partitions: int | None = None) -> Any:
        """All rows as a typed data frame of the Spark session that is passed in; read when it is computed, and each
        time that it is. Columns as in `arrow_schema`. One core is left free unless `partitions` says otherwise."""
        return frame_of(session, self.arrow_schema, self.ranges, self.reader.read, partitions=partitions)
