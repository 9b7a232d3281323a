"""A DuckDB file or a DuckLake catalog of a test, and what its readers see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, field_names, segment_layout
from penstock.destinations.base import DestinationContext
from penstock.destinations.duckdb import DuckDbDestination
from penstock.destinations.duckdb.control import Control
from penstock.destinations.duckdb.database import Database
from penstock.destinations.duckdb.destination import named
from penstock.destinations.table_layout import Known, Layout
from penstock.schema import TableSchema, quote_identifier
from penstock.testing.destinations.script import make_context


@dataclass(frozen=True)
class Duck:
    """A database for tests; readers open it for reading, as their programs would."""

    path: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def database(self) -> Database:
        return Database(self.path)

    def open(self, **options: Any) -> DuckDbDestination:
        return DuckDbDestination(self.path, **{**self.options, **options})

    def started(self, context: DestinationContext | None = None, **options: Any) -> DuckDbDestination:
        destination = self.open(**options)
        destination.startup(context or make_context())
        return destination

    def query(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.database.session(read_only=True) as session:
            session.run(f"use {quote_identifier(session.catalog)}")
            return session.rows(query)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        """Return what a reader of the table sees."""
        target = named(schema)
        try:
            with self.database.session(read_only=True) as session:
                if not session.exists(target):
                    return None
                rows = session.read(f"select * from {session.name(target)}", 1_000).read_all().to_pylist()
        except duckdb.Error:
            raise
        return [self._row(row) for row in rows]

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        texts = dict(row.pop(UNREPRESENTABLE, None) or ())
        return row | {name: Unrepresentable(text) for name, text in texts.items()}

    def readback(self, pipeline: str) -> DuckReadBack:
        return DuckReadBack(self.database, pipeline)


class DuckReadBack:
    """The tables of a pipeline (`ReadBack`)."""

    def __init__(self, database: Database, pipeline: str) -> None:
        self._database = database
        with database.session(read_only=True) as session:
            found = Control(pipeline).load(session).values()
        self._known: dict[str, Known] = {str(known.layout.source): known for known in found if known.layout is not None}

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return sorted(name for name, known in self._known.items() if known.is_copied)

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        return self._layout(table).source

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        layout, target = self._layout(table), self._known[table].readable
        assert target is not None
        live = " where _deleted_at is null" if layout.mode == "soft_delete" else ""
        names = ", ".join(map(quote_identifier, layout.columns))
        texts = f", {UNREPRESENTABLE}" if layout.has_texts else ""
        with self._database.session(read_only=True) as session:
            rows = session.read(f"select {names}{texts} from {session.name(target)}{live}", 10_000).read_all()
        arrow = segment_layout(layout.source).arrow_schema
        wanted = pa.schema([arrow.field(name) for name in field_names(layout.source)])
        maps = rows.column(UNREPRESENTABLE).cast(UNREPRESENTABLE_TYPE) if layout.has_texts else None
        found = rows.select(list(range(len(wanted)))).rename_columns(wanted.names).cast(wanted)
        nothing = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE)
        return found.append_column(UNREPRESENTABLE, nothing if maps is None else maps)

    def _layout(self, table: str) -> Layout:
        layout = self._known[table].layout
        assert layout is not None
        return layout
