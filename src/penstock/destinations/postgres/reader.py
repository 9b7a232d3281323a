"""Reads a table back for `penstock verify`: in one snapshot, in ranges of its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa

from penstock.copy.binary import tuple_layout
from penstock.copy.plan import CHUNK_BYTES, RANGE_BYTES, TID_RANGES_SINCE, CopyRange, CopySettings, Leaf, plan_ranges
from penstock.copy.reader import read_columns
from penstock.destinations.postgres.layout import DELETED_AT, Layout, Mode, Target
from penstock.destinations.postgres.server import Server, Session
from penstock.errors import NotComparable
from penstock.schema import TableSchema, quote_identifier
from penstock.source.snapshots import enter_snapshot, export_snapshot
from penstock.values import TypeSettings


@dataclass(frozen=True, slots=True)
class TargetReader:
    """Reads ranges of a table; pickles."""

    server: Server
    snapshot: str
    schema: TableSchema
    """The source's schema of the rows."""
    columns: tuple[str, ...]
    """Their names at the destination."""
    target: Target
    where: str

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns as in segments, then `_unrepresentable`."""
        return tuple_layout(self.schema, TypeSettings()).arrow_schema

    def read(self, part: CopyRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range."""
        with closing(self.server.connect()) as connection:
            connection.autocommit = True
            with self.server.translated(connection, str(self.schema)):
                enter_snapshot(connection, self.snapshot)
                condition = " and ".join(filter(None, (part.condition, self.where)))
                yield from read_columns(
                    connection,
                    tuple_layout(self.schema, TypeSettings()),
                    [quote_identifier(name) for name in self.columns],
                    self.target.sql,
                    condition,
                    CopySettings(chunk_bytes=CHUNK_BYTES),
                )


@dataclass(frozen=True, slots=True)
class PinnedTarget:
    """A table at one moment; see `PinnedTable`."""

    schema: TableSchema
    parts: tuple[CopyRange, ...]
    reader: TargetReader
    keeper: psycopg.Connection[Any]
    """Keeps the snapshot."""

    @property
    def arrow_schema(self) -> pa.Schema:
        """See `PinnedTable`."""
        return self.reader.arrow_schema

    def close(self) -> None:
        """See `PinnedTable`."""
        self.keeper.close()


def pin_target(server: Server, target: Target, layout: Layout) -> PinnedTarget | None:
    """Take a snapshot of a table; None if it does not exist."""
    if layout.mode is Mode.HISTORY:
        raise NotComparable(
            f"{layout.source} holds every change, not the rows of the source",
            hint='Only tables in the modes "mirror" and "soft_delete" can be compared.',
            table=str(layout.source),
        )
    keeper = server.connect()
    try:
        with server.translated(keeper, str(layout.source)):
            keeper.execute("set transaction isolation level repeatable read, read only")
            session = Session(server, keeper)
            found = session.rows(
                "select c.oid::int8, pg_catalog.pg_relation_size(c.oid) / current_setting('block_size')::int8, "
                "pg_catalog.pg_table_size(c.oid) from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass(%s)",
                [target.sql],
            )
            if not found:
                keeper.close()
                return None
            ((oid, blocks, size),) = found
            snapshot = export_snapshot(keeper)
            can_seek = keeper.info.server_version >= TID_RANGES_SINCE
    except BaseException:
        keeper.close()
        raise
    parts = plan_ranges(oid, [Leaf(oid, 0, blocks, size, ())], range_bytes=RANGE_BYTES, can_seek=can_seek)
    where = f"{DELETED_AT} is null" if layout.mode is Mode.SOFT_DELETE else ""
    reader = TargetReader(server, snapshot, layout.source, tuple(layout.columns), target, where)
    return PinnedTarget(layout.source, parts, reader, keeper)
