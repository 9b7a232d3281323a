"""Reads a table back for `penstock verify`: a file in ranges of its rows, a DuckLake as of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, field_names, join_texts, split_texts
from penstock.destinations.duckdb.database import Database, Session
from penstock.destinations.table_layout import DELETED_AT, Layout, Mode, Target
from penstock.errors import NotComparable
from penstock.schema import TableSchema, quote_identifier

_PART_ROWS = 1_000_000
_BATCH_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads parts of a table; pickles."""

    database: Database
    target: Target
    layout: Layout
    version: int | None
    """The snapshot of a DuckLake."""
    arrow_schema: pa.Schema

    def read(self, part: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part, which is a condition."""
        fields = dict(zip(self.layout.columns, field_names(self.layout.source), strict=True))
        with self.database.session(read_only=True) as session:
            for batch in session.read(self.query(session, part), _BATCH_ROWS):
                rows = pa.Table.from_batches([batch])
                texts = {fields[name]: text for name, text in split_texts(rows).items() if name in fields}
                maps = join_texts(texts, rows.num_rows)
                maps = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps
                rows = rows.select(list(range(len(fields)))).append_column(UNREPRESENTABLE, maps)
                yield from rows.rename_columns(self.arrow_schema.names).to_batches()

    def query(self, session: Session, part: str) -> str:
        """Return the query for a part; an empty one is the whole table."""
        where = [part] if part else []
        if self.layout.mode is Mode.SOFT_DELETE:
            where.append(f"{DELETED_AT} is null")
        names = ", ".join(map(quote_identifier, self.layout.columns))
        texts = f", {UNREPRESENTABLE}" if self.layout.has_texts else ""
        moment = "" if self.version is None else f" at (version => {self.version})"
        condition = f" where {' and '.join(where)}" if where else ""
        return f"select {names}{texts} from {session.name(self.target)}{moment}{condition}"


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table at one moment; see `base.PinnedTable`."""

    schema: TableSchema
    parts: tuple[str, ...]
    reader: TableReader

    @property
    def arrow_schema(self) -> pa.Schema:
        """See `base.PinnedTable`."""
        return self.reader.arrow_schema

    def close(self) -> None:
        """See `base.PinnedTable`."""


def pin_table(database: Database, session: Session, target: Target, layout: Layout) -> PinnedTable:
    """Return the table of a layout."""
    if layout.mode is Mode.HISTORY:
        raise NotComparable(
            f"{layout.source} holds every change, not the rows of the source",
            hint='Only tables in the modes "mirror" and "soft_delete" can be compared.',
            table=str(layout.source),
        )
    version: int | None = None
    parts: tuple[str, ...] = ("",)
    if database.is_lake:
        ((version,),) = session.rows(f"select id from ducklake_current_snapshot('{session.catalog}')")
    else:
        ((last,),) = session.rows(f"select coalesce(max(rowid), 0) from {session.name(target)}")
        starts = range(0, last + 1, _PART_ROWS)
        parts = tuple(f"rowid >= {start} and rowid < {start + _PART_ROWS}" for start in starts)
    empty = TableReader(database, target, layout, version, pa.schema([]))
    found = session.read(f"{empty.query(session, '')} limit 0", 1).schema
    types = [found.field(number).type for number in range(len(layout.columns))]
    fields = zip(field_names(layout.source), types, strict=True)
    arrow = pa.schema([*fields, (UNREPRESENTABLE, UNREPRESENTABLE_TYPE)])
    return PinnedTable(layout.source, parts, TableReader(database, target, layout, version, arrow))
