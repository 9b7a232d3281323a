"""The engine of ClickHouse in the process of a test: its databases, and what readers of their views see.

A process has one engine, which locks its folder. What another process wrote is read by one of its own:
`python -m tests.support.clickhouse URL DATABASE PIPELINE FOLDER` writes all tables to files.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, field_names, join_texts, segment_layout
from penstock.destinations.base import DestinationContext
from penstock.destinations.clickhouse import ClickHouseDestination
from penstock.destinations.clickhouse.control import Control, Known
from penstock.destinations.clickhouse.encoding import decode
from penstock.destinations.clickhouse.layout import NULL_ARRAYS, Layout
from penstock.destinations.clickhouse.server import Server, quote
from penstock.destinations.naming import IDENTIFIERS
from penstock.schema import TableSchema
from penstock.testing.destinations.script import make_context


@dataclass(frozen=True)
class ClickHouse:
    """A database of the engine in this process. Reads views with a client of its own, as their readers would."""

    url: str
    database: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def server(self) -> Server:
        return Server(self.url, self.database)

    def open(self, **options: Any) -> ClickHouseDestination:
        return ClickHouseDestination(self.url, database=self.database, **{**self.options, **options})

    def readback(self, pipeline: str) -> ClickHouseReadBack:
        return ClickHouseReadBack(self.url, self.database, pipeline)

    def started(self, context: DestinationContext | None = None, **options: Any) -> ClickHouseDestination:
        destination = self.open(**options)
        destination.startup(context or make_context())
        return destination

    def query(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query; `{database}` stands for the database."""
        return [tuple(row) for row in self.server.rows(query.format(database=f"`{self.database}`"))]

    def drop(self) -> None:
        """Drop the database."""
        self.server.run(f"drop database if exists {quote(self.database)}")

    def views(self) -> list[str]:
        where = f"database = '{self.database}' and engine = 'View'"
        return sorted(name for (name,) in self.query(f"select name from system.tables where {where}"))

    def data_tables(self) -> list[str]:
        where = f"database = '{self.database}' and engine != 'View' and name != 'penstock_tables'"
        return sorted(name for (name,) in self.query(f"select name from system.tables where {where}"))

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        """Return what a reader of the view sees."""
        view = IDENTIFIERS.table(schema)
        if view not in self.views():
            return None
        rows = self.server.read(f"select * from {self.server.name(view)}").to_pylist()
        names = {column.name for column in schema.columns}
        return [self._row(row, names) for row in rows]

    def _row(self, row: dict[str, Any], names: set[str]) -> dict[str, Any]:
        texts = {name.decode(): text.decode() for name, text in row.pop("_unrepresentable", ())}
        row.pop("_null_arrays", None)
        assert set(row) == names
        cells = {name: cell.decode() if isinstance(cell, bytes) else cell for name, cell in row.items()}
        return cells | {name: Unrepresentable(text) for name, text in texts.items()}


class ClickHouseReadBack:
    """The views of a pipeline."""

    def __init__(self, url: str, database: str, pipeline: str) -> None:
        self._server = Server(url, database)
        found = Control(self._server, pipeline).load().values()
        self._known: dict[str, Known] = {
            str(known.layout.source): known for known in found if known.layout is not None and known.is_copied
        }

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return sorted(self._known)

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        return self._layout(table).source

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        layout = self._layout(table)
        columns = [each for each in layout.columns if each.attnum is not None]
        named = {each.stored: f"v.{quote(each.name)}" for each in columns}
        shown = [
            f"{f'toString({named[each.stored]})' if each.type == 'UUID' else named[each.stored]} as {each.stored}"
            for each in columns
        ]
        # Names in the view back to those of the table, which `decode` expects.
        back = ", ".join(f"{name!r}" for name in (each.stored for each in layout.columns))
        names = ", ".join("'" + each.name.replace("\\", "\\\\").replace("'", "\\'") + "'" for each in layout.columns)
        if layout.has_texts:
            shown.append(f"mapApply((k, v) -> (transform(k, [{names}], [{back}], k), v), v.{UNREPRESENTABLE}) as texts")
        if layout.has_lists:
            shown.append(f"arrayMap(k -> transform(k, [{names}], [{back}], k), v.{NULL_ARRAYS}) as nulls")
        rows = self._server.read(f"select {', '.join(shown)} from {self._server.name(self._known[table].view)} as v")
        renamed = {"texts": UNREPRESENTABLE, "nulls": NULL_ARRAYS}
        rows = rows.rename_columns([renamed.get(name, name) for name in rows.column_names])
        found, texts = decode(rows, layout.source, layout)
        maps = join_texts(texts, rows.num_rows)
        nothing = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE)
        arrow = segment_layout(layout.source).arrow_schema
        wanted = pa.schema([arrow.field(name) for name in field_names(layout.source)])
        found = found.select(wanted.names).cast(wanted)
        return found.append_column(UNREPRESENTABLE, nothing if maps is None else maps)

    def _layout(self, table: str) -> Layout:
        layout = self._known[table].layout
        assert layout is not None
        return layout


class ExportedReadBack:
    """The views of a pipeline that has ended, from a folder that this process cannot open (`ReadBack`)."""

    def __init__(self, url: str, database: str, pipeline: str) -> None:
        with TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", __name__, url, database, pipeline, folder], check=True)
            self._tables: dict[str, tuple[TableSchema, pa.Table]] = pickle.loads((Path(folder) / "tables").read_bytes())

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return sorted(self._tables)

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        return self._tables[table][0]

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        return self._tables[table][1]


def main(url: str, database: str, pipeline: str, folder: str) -> None:
    """Write all tables of a pipeline to a file."""
    found = ClickHouseReadBack(url, database, pipeline)
    tables = {table: (found.schema(table), found.read_table(table)) for table in found.tables()}
    (Path(folder) / "tables").write_bytes(pickle.dumps(tables))


if __name__ == "__main__":
    main(*sys.argv[1:])
