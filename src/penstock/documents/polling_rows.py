"""What polling reads of a table: which rows changed, which of them were delivered already, and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg import sql

from penstock.changes.segment import Operation
from penstock.documents.catalog import SourceCatalog, SourceTable
from penstock.documents.expressions import column, table_name
from penstock.documents.images import Cells, RowChanges, WantedColumns
from penstock.documents.statements import as_literal
from penstock.errors import ConfigError
from penstock.schema import ReplicaIdentity
from penstock.source.patterns import TableName

XMIN = "xmin"
TIME_TYPES = ("timestamptz", "timestamp")
_VERSIONS = pa.schema([pa.field(name, pa.int64()) for name in ("mark", "place", "writer")])

# The whole number of a row's transaction: the one with these 32 bits that is nearest to where the server is.
_WHOLE_XID = "($2::int8 + ((r.xmin::text::int8 - $2::int8 % 4294967296) + 6442450944) % 4294967296 - 2147483648)"
_VERSION = (
    "(((r.ctid::text::point)[0])::int8 << 16) + ((r.ctid::text::point)[1])::int8,"
    " (r.tableoid::int8 << 32) + r.xmin::text::int8"
)


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table, what is read of it, and how it tells what changed."""

    table: SourceTable
    columns: tuple[str, ...]
    cursor: str = XMIN
    """`xmin`, or a column with the time of the last change."""


def polled_catalog(catalog: SourceCatalog) -> SourceCatalog:
    """The catalog as polling has it: of a changed row nothing but its primary key is known from before."""
    return SourceCatalog(
        {
            name: replace(
                table, identity=ReplicaIdentity.DEFAULT, identity_columns=frozenset(table.primary_key), leaves=()
            )
            for name, table in catalog.tables.items()
        }
    )


def polled_tables(
    catalog: SourceCatalog,
    wanted: Mapping[TableName, WantedColumns],
    cursors: Mapping[TableName, str] | None = None,
    default: str = XMIN,
) -> list[PolledTable]:
    """What to poll, for a resolver's wanted columns; `cursors` says which tables have a column for it."""
    found: list[PolledTable] = []
    for name in sorted(wanted):
        table = catalog.table(name)
        if not table.primary_key:
            raise ConfigError(f"{name} has no primary key, and cannot be polled", hint="Add one.")
        cursor = (cursors or {}).get(name, default)
        if cursor != XMIN:
            _check_cursor(table, cursor)
        found.append(PolledTable(table, wanted[name].columns, cursor))
    return found


def changed_query(table: PolledTable) -> sql.Composed:
    """Mark, place and writer of each row from a mark on, and its columns as texts. Takes the mark and the next xid."""
    if table.cursor == XMIN:
        mark, where = _WHOLE_XID, f"{_WHOLE_XID} >= $1 and {_WHOLE_XID} < $2"
    else:
        stamp = column("r", table.cursor).as_string(None)
        zone = " at time zone 'UTC'" if table.table.column(table.cursor).base.name == "timestamp" else ""
        mark = f"(extract(epoch from {stamp}) * 1000000)::int8"
        where = f"{stamp} >= pg_catalog.to_timestamp($1::float8 / 1000000){zone} and isfinite({stamp}) and $2::int8 > 0"
    return sql.SQL("select {}, {}, {} from {} r where {}").format(
        sql.SQL(as_literal(mark)),
        sql.SQL(as_literal(_VERSION)),
        texts_of(table.columns),
        table_name(table.table.name),
        sql.SQL(as_literal(where)),
    )


@dataclass(slots=True)
class Delivered:
    """Row versions above the mark from which rows are read again: where they lie, and who wrote them."""

    versions: pa.Table = field(default_factory=lambda: _VERSIONS.empty_table())

    def take(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The columns of rows that are new here, which are then not new any more."""
        marks, places, writers = (pa.array(each, pa.int64()) for each in list(zip(*rows, strict=True))[:3])
        number = pa.array(np.arange(len(rows)))
        read = pa.Table.from_arrays([marks, places, writers], schema=_VERSIONS)
        new = read.append_column("number", number)
        if self.versions.num_rows:
            new = new.join(self.versions.drop_columns("mark"), ["place", "writer"], join_type="left anti")
        chosen = np.sort(new.column("number").to_numpy())
        self.versions = pa.concat_tables([self.versions, read.take(pa.array(chosen))])
        # Cold: as many as changed between two polls.
        return [tuple(rows[index][3:]) for index in chosen]

    def forget(self, floor: int) -> None:
        """Nothing below is read again."""
        if self.versions.num_rows:
            self.versions = self.versions.filter(pa.array(self.versions.column("mark").to_numpy() >= floor))


def texts_of(columns: Sequence[str]) -> sql.Composed:
    """Columns of `r` as texts, for a select."""
    return sql.SQL(", ").join([sql.SQL("{}::pg_catalog.text").format(column("r", each)) for each in columns])


def cells_of(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Cells]:
    """Texts of rows, column by column."""
    sent = np.ones(len(rows), np.bool_)
    values = zip(*rows, strict=True)
    return {name: Cells(pa.array(each, pa.string()), sent) for name, each in zip(columns, values, strict=True)}


def row_images(
    table: TableName,
    count: int,
    images: Mapping[str, Cells],
    known_before: Sequence[str],
    operation: Operation,
    order: int,
    ordinal: int,
) -> RowChanges:
    """Changes of which only these columns are known from before."""
    return RowChanges(
        table,
        np.full(count, operation, np.int8),
        np.full(count, order, np.int64),
        np.arange(ordinal, ordinal + count, dtype=np.int64),
        {name: cells if name in known_before else Cells.absent(count) for name, cells in images.items()},
        images,
    )


def _check_cursor(table: SourceTable, cursor: str) -> None:
    found = table.column(cursor)
    if found.base.name not in TIME_TYPES:
        raise ConfigError(
            f"{table.name}.{cursor} is {found.type}: to poll by it, it has to be a timestamp",
            hint=f'Name another column, or "{XMIN}".',
        )
