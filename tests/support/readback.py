"""Compares destination and source cell by cell, as the server's text.

This works for any destination with a `ReadBack`, such as `ParquetReader`. Nothing may write meanwhile. It is slow, and
meant for the small tables of tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.changes.segment import COMMIT_LSN, ORDINAL, UNREPRESENTABLE, segment_layout
from penstock.destinations.memory import MemoryDestination
from penstock.schema import TableSchema
from penstock.source.connections import PINNED_PARAMETERS
from tests.support.oracle import normalised
from tests.support.replay import Discrepancy, Row, element_delimiter, from_arrow, from_text
from tests.support.workload import read_rows


class ReadBack(Protocol):
    """A destination's tables, as a reader sees them."""

    def tables(self) -> list[str]:
        """Return their names in the source, such as `public.orders`."""
        ...

    def schema(self, table: str) -> TableSchema:
        """Return the source schema that the rows have now."""
        ...

    def read_table(self, table: str) -> pa.Table:
        """Return the current rows, with the names and types of segments; the column `_unrepresentable`, if present,
        has the texts of cells that their types cannot hold."""
        ...


@runtime_checkable
class ChangesReadBack(ReadBack, Protocol):
    """A destination that keeps every change."""

    def read_changes(self, table: str) -> pa.Table:
        """Return all changes, with `_commit_lsn` and `_ordinal`; copied rows have a negative ordinal."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryReadBack:
    """`ReadBack` of the memory destination."""

    destination: MemoryDestination

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return self.destination.tables()

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        return self.destination.storage.find(table).schema

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        return self.destination.arrow(table)


def check_equal(dsn: str, readback: ReadBack, names: Iterable[str]) -> int:
    """Compare all tables, which must have exactly these names in any schema; return the number of rows.

    Raise `Discrepancy` with the place of the first difference.
    """
    tables, wanted = readback.tables(), Counter(names)
    found = Counter(readback.schema(table).name for table in tables)
    if found != wanted:
        raise Discrepancy(f"tables missing: {sorted(wanted - found)}, too many: {sorted(found - wanted)}")
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(dsn, autocommit=True, options=options) as server:
        return sum(check_table(server, readback, table) for table in tables)


def check_exactly_once(readback: ChangesReadBack) -> int:
    """Check that no change appears twice; return the number of changes."""
    count = 0
    for table in readback.tables():
        changes = readback.read_changes(table)
        if not changes.num_rows:
            continue
        keys = np.stack([changes[name].to_numpy() for name in (COMMIT_LSN, ORDINAL)], axis=1)
        keys = keys[keys[:, 1] >= 0]
        twice = len(keys) - len(np.unique(keys, axis=0))
        if twice:
            raise Discrepancy(f"{table}: {twice} of {len(keys)} changes appear twice")
        count += len(keys)
    return count


def check_table(server: psycopg.Connection[Any], readback: ReadBack, table: str) -> int:
    """Compare one table; return the number of rows, or raise `Discrepancy`."""
    schema = readback.schema(table)
    columns = [column.name for column in schema.columns]
    expected = Counter(normalised(read_rows(server, sql.Identifier(schema.namespace, schema.name), columns), schema))
    found = Counter(formatted(readback.read_table(table), schema))
    if found != expected:
        raise Discrepancy(
            f"{table}: {(found - expected).total()} rows too many, {(expected - found).total()} missing; "
            f"{next(iter(found - expected), ())!r:.500} instead of {next(iter(expected - found), ())!r:.500}"
        )
    return expected.total()


def formatted(rows: pa.Table, schema: TableSchema) -> Iterator[Row]:
    """Yield what `ReadBack.read_table` returned, in the form of `normalised`."""
    kept: list[Any] = [None] * rows.num_rows
    if UNREPRESENTABLE in rows.column_names:
        kept = rows.column(UNREPRESENTABLE).to_pylist()
    texts = [dict(cell or ()) for cell in kept]
    cells: list[list[Any]] = []
    for column in segment_layout(schema).columns:
        type_, delimiter = column.codec.arrow_type, element_delimiter(column.column)
        cells.append(
            [
                from_text(text[column.field_name], type_, delimiter)
                if column.field_name in text
                else from_arrow(value, type_)
                for text, value in zip(texts, rows.column(column.field_name).to_pylist(), strict=True)
            ]
        )
    yield from zip(*cells, strict=True)
