"""Other people's readers of Delta tables, each as a function from a table's folder to its rows in the order of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars
import pyarrow as pa

from tests.unit.destinations.delta.lake import SCHEMA


def read_with_spark(session: Any, path: Path, *, where: str | None = None, version: int | None = None) -> pa.Table:
    """Spark's own reader, which judges."""
    reader = session.read.format("delta")
    frame = (reader if version is None else reader.option("versionAsOf", version)).load(str(path))
    return _in_order((frame if where is None else frame.where(where)).toArrow())


def read_with_polars(path: Path, *where: polars.Expr) -> pa.Table:
    return _in_order(polars.scan_delta(str(path)).filter(*where).collect().to_arrow())


def read_with_delta_rs(path: Path, *, where: str = "true") -> pa.Table:
    """`QueryBuilder`, which knows vectors."""
    query = deltalake.QueryBuilder().register("items", deltalake.DeltaTable(str(path)))
    return _in_order(pa.table(query.execute(f"select * from items where {where}").read_all()))


def read_with_pyarrow(path: Path, schema: pa.Schema) -> pa.Table:
    """Does not know vectors, and refuses tables that have them."""
    return _in_order(deltalake.DeltaTable(str(path)).to_pyarrow_table(), schema)


def read_with_duckdb(path: Path, schema: pa.Schema) -> pa.Table:
    """Over delta-rs' data set; does not know vectors."""
    items = deltalake.DeltaTable(str(path)).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("items", items)
        return _in_order(connection.sql("select * from items").to_arrow_table(), schema)


def _in_order(rows: pa.Table, schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = [rows[field.name].cast(field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema).sort_by("id").combine_chunks()
