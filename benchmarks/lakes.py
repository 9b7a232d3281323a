"""Count the contents of a lake with an independent reader, to check the work of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder

from penstock.destinations.parquet import ParquetReader


def parquet_keys(lake: Path, table: str) -> tuple[int, int]:
    """How many rows were copied or changed, and the sum of their keys (`id`)."""
    keys = [pq.read_table(path, columns=["id"])["id"] for path in ParquetReader(lake).files(f"public.{table}")]
    return sum(map(len, keys)), sum(pc.sum(each).as_py() for each in keys)


def delta_keys(lake: Path, table: str) -> tuple[int, int]:
    """How many rows there are, and the sum of their keys (`id`)."""
    row = query_delta(lake, table, "select count(*) as rows, sum(id) as keys from t")[0]
    return row["rows"], row["keys"]


def query_delta(lake: Path, table: str, query: str) -> list[dict[str, Any]]:
    """Ask DataFusion, through delta-rs; the table is called `t`."""
    found = QueryBuilder().register("t", DeltaTable(str(lake / "public" / table))).execute(query).read_all()
    return pa.table(found).to_pylist()


KEYS = {"parquet": parquet_keys, "delta": delta_keys}
