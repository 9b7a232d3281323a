"""Spark with Delta: the options of a session that reads Delta tables, where `make setup` has fetched the jars."""

from __future__ import annotations

import os
import sys
from pathlib import Path

JARS_VARIABLE = "PENSTOCK_DELTA_JARS"
"""A folder with the jars; by default `jars` in the environment of the interpreter."""


def find_delta_jars() -> list[Path]:
    """The jars; empty if there are none."""
    folder = Path(os.environ.get(JARS_VARIABLE) or Path(sys.prefix) / "jars")
    return sorted(folder.glob("io.delta_*.jar"))


def delta_spark_options() -> dict[str, str]:
    """Options for the first session of a process; empty where the jars are missing."""
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
