"""Current rows as changes: what the backfill of an index without ranges reads, and the parts that polling shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
from psycopg import sql

from penstock.changes.segment import Operation
from penstock.documents.base import Change, SnapshotTable
from penstock.documents.catalog import SourceCatalog
from penstock.documents.expressions import column, rows_of
from penstock.documents.images import Cells, Changes, RowChanges
from penstock.documents.statements import read_pieces
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.patterns import TableName

CHUNK = 10_000


class _Nothing:
    def confirm(self) -> None:
        """Do nothing: a snapshot moves no position."""


def read_snapshot(
    source: SourceSettings, catalog: SourceCatalog, tables: Sequence[SnapshotTable], chunk: int = CHUNK
) -> Iterator[Change]:
    """Yield the current rows of tables as inserts (`Changes.is_snapshot`), `chunk` rows at a time."""
    with connect(source, Role.DOCUMENTS, parameters=NO_TIMEOUTS) as connection:
        for each in tables:
            text = sql.SQL("select {} from {} r").format(texts_of(each.columns), rows_of(catalog.table(each.table)))
            for rows in read_texts(connection, text, [], chunk, f"read {each.table}"):
                images = Cells.of_rows(each.columns, rows)
                changes = row_images(each.table, len(rows), images, (), Operation.INSERT, 0, 0)
                yield Change(Changes((changes,), is_snapshot=True), _Nothing())


def read_texts(
    connection: psycopg.Connection[Any], text: sql.Composed, parameters: list[Any], chunk: int, doing: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Run a query and yield its rows in pieces; closes the connection if they are not read to the end."""
    for rows in read_pieces(connection, text.as_string(None), parameters, chunk, doing):
        try:
            yield rows
        except GeneratorExit:
            # No reader is left: the run has ended, perhaps because of this connection.
            connection.close()
            raise


def texts_of(columns: Sequence[str]) -> sql.Composed:
    """Return columns of `r` as texts, for a select."""
    return sql.SQL(", ").join([sql.SQL("{}::pg_catalog.text").format(column("r", each)) for each in columns])


def row_images(
    table: TableName,
    count: int,
    images: Mapping[str, Cells],
    known_before: Sequence[str],
    operation: Operation,
    order: int,
    ordinal: int,
) -> RowChanges:
    """Return changes of which only the columns `known_before` have old values."""
    return RowChanges(
        table,
        np.full(count, operation, np.int8),
        np.full(count, order, np.int64),
        np.arange(ordinal, ordinal + count, dtype=np.int64),
        {name: cells if name in known_before else Cells.absent(count) for name, cells in images.items()},
        images,
    )
