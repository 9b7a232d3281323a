"""Count the contents of a lake with an independent reader, to check the work of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from numpy.typing import NDArray

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


def read_versions(folder: Path) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """When each version could be seen, and when its new rows were written; all by the same machine's clock."""
    for path in sorted((folder / "_delta_log").glob("[0-9]*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        if not any("txn" in action for action in actions):
            continue
        # A file that is removed and added in one version is an old one, with more rows deleted.
        removed = {action["remove"]["path"] for action in actions if "remove" in action}
        added = [action["add"]["path"] for action in actions if "add" in action]
        new = [unquote(each) for each in added if each not in removed]
        if any("metaData" in action for action in actions):
            continue
        moments = [pq.read_table(folder / each, columns=["updated_at"])["updated_at"] for each in new]
        column = pa.chunked_array([chunk for each in moments for chunk in each.chunks], pa.timestamp("us", "UTC"))
        yield path.stat().st_mtime, column.drop_null().cast("int64").to_numpy() / 1e6


KEYS = {"parquet": parquet_keys, "delta": delta_keys}
