"""Options of a Spark session that reads Delta tables, with the jars that `make setup` downloads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

JARS_VARIABLE = "PENSTOCK_DELTA_JARS"
"""The folder of the jars; by default `jars` in the interpreter's environment."""


def find_delta_jars() -> list[Path]:
    """Return the jars; empty if there are none."""
    folder = Path(os.environ.get(JARS_VARIABLE) or Path(sys.prefix) / "jars")
    return sorted(folder.glob("io.delta_*.jar"))


def delta_spark_options() -> dict[str, str]:
    """Return options for the first session of a process; empty if the jars are missing."""
    jars = find_delta_jars()
    if not jars:
        return {}
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # The log of a small table is not worth 50 tasks.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": "2",
    }
