"""Source against destination, cell by cell, by the server's own text.

Any destination that can be read back can be compared: `ReadBack` is what it takes; `ParquetReader` is one. Nothing
may write while it is compared. Slow, and meant for tables of tests.
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
    """A destination's tables, as a reader finds them."""

    def tables(self) -> list[str]:
        """Their names, as in the source: `public.orders`."""
        ...

    def schema(self, table: str) -> TableSchema:
        """The source's schema that the rows have now."""
        ...

    def read_table(self, table: str) -> pa.Table:
        """The rows as they are now, with the names and types of segments; texts of cells that their types cannot hold
        in the column `_unrepresentable`, if there are any."""
        ...


@runtime_checkable
class ChangesReadBack(ReadBack, Protocol):
    """A destination that keeps every change."""

    def read_changes(self, table: str) -> pa.Table:
        """All changes, with `_commit_lsn` and `_ordinal`; rows of a copy have a negative ordinal."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryReadBack:
    """The memory destination, read back."""

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
    """Compare the tables of these names, in any schema, which are all that there are; gives the number of rows.

    Raises `Discrepancy`, which says where.
    """
    tables, wanted = readback.tables(), Counter(names)
    found = Counter(readback.schema(table).name for table in tables)
    if found != wanted:
        raise Discrepancy(f"tables missing: {sorted(wanted - found)}, too many: {sorted(found - wanted)}")
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(dsn, autocommit=True, options=options) as server:
        return sum(_check_table(server, readback, table) for table in tables)


def check_exactly_once(readback: ChangesReadBack) -> int:
    """No change is there twice; gives their number."""
    count = 0
    for table in readback.tables():
        changes = readback.read_changes(table)
        if not changes.num_rows:
            continue
        keys = np.stack([changes[name].to_numpy() for name in (COMMIT_LSN, ORDINAL)], axis=1)
        keys = keys[keys[:, 1] >= 0]
        twice = len(keys) - len(np.unique(keys, axis=0))
        if twice:
            raise Discrepancy(f"{table}: {twice} of {len(keys)} changes are there twice")
        count += len(keys)
    return count


def _check_table(server: psycopg.Connection[Any], readback: ReadBack, table: str) -> int:
    schema = readback.schema(table)
    columns = [column.name for column in schema.columns]
    expected = Counter(normalised(read_rows(server, sql.Identifier(schema.namespace, schema.name), columns), schema))
    found = Counter(_rows(readback.read_table(table), schema))
    if found != expected:
        raise Discrepancy(
            f"{table}: {(found - expected).total()} rows too many, {(expected - found).total()} missing; "
            f"{next(iter(found - expected), ())!r:.500} instead of {next(iter(expected - found), ())!r:.500}"
        )
    return expected.total()


def _rows(rows: pa.Table, schema: TableSchema) -> Iterator[Row]:
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
