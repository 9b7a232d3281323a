"""Reads what the postgres destination wrote back, as its server prints it (`tests.support.readback.ReadBack`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.changes.segment import UNREPRESENTABLE, join_texts, segment_layout
from penstock.destinations.postgres.control import Control, Known
from penstock.destinations.postgres.layout import DELETED_AT, Mode
from penstock.destinations.postgres.server import Server, settings_of
from penstock.schema import TableSchema
from penstock.source.connections import PINNED_PARAMETERS


class PostgresReadBack:
    """The tables of a pipeline in another database."""

    def __init__(self, dsn: str, pipeline: str) -> None:
        self._dsn = dsn
        server = Server(settings_of(dsn))
        with server.session() as session:
            found = Control("penstock", pipeline).load(session).values()
        self._known: dict[str, Known] = {
            str(known.layout.source): known for known in found if known.layout is not None and known.is_copied
        }

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return sorted(self._known)

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        layout = self._known[table].layout
        assert layout is not None
        return layout.source

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        known = self._known[table]
        assert known.layout is not None
        assert known.target is not None
        columns = segment_layout(known.layout.source).columns
        live = sql.SQL(f" where {DELETED_AT} is null" if known.layout.mode is Mode.SOFT_DELETE else "")
        names = [sql.Identifier(name) for name in known.layout.columns]
        query = sql.SQL("select {} from {}{}").format(
            sql.SQL(", ").join(names), sql.Identifier(known.target.namespace, known.target.name), live
        )
        cells, count = self._fetch(query)
        arrays: dict[str, pa.Array] = {}
        texts: dict[str, pa.Array] = {}
        for column, values in zip(columns, cells, strict=True):
            text = pa.array(values, pa.large_string())
            decoded = column.codec.decode(text)
            arrays[column.field_name] = decoded.array
            if decoded.rejected is not None:
                at = np.where(decoded.rejected, np.arange(count), 0)
                kept = text.take(pa.array(at, mask=~decoded.rejected))
                texts[column.field_name] = kept.cast(pa.string())
        maps = join_texts(texts, count)
        return pa.table(arrays if maps is None else {**arrays, UNREPRESENTABLE: maps})

    def _fetch(self, query: sql.Composed) -> tuple[list[list[Any]], int]:
        options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
        with psycopg.connect(self._dsn, autocommit=True, options=options) as connection:
            # As the server prints them: psycopg would parse some types, and a cast to text prints others.
            result = connection.execute(query).pgresult
            assert result is not None
            raw = [[result.get_value(row, at) for row in range(result.ntuples)] for at in range(result.nfields)]
            count = result.ntuples
        return [[None if cell is None else cell.decode() for cell in column] for column in raw], count
