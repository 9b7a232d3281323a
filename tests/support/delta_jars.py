"""Options of a Spark session that reads Delta tables, with the jars that `make setup` downloads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlencode

from psycopg.conninfo import conninfo_to_dict

JARS_VARIABLE = "PENSTOCK_DELTA_JARS"
"""The folder of the jars; by default `jars` in the interpreter's environment."""


def find_delta_jars() -> list[Path]:
    """Return the jars; empty if there are none."""
    return _find("io.delta_*.jar")


def find_postgres_driver() -> list[Path]:
    """Return the jar of PostgreSQL's JDBC driver; empty if there is none."""
    return _find("org.postgresql_*.jar")


def jdbc_url(dsn: str) -> str:
    """Return the address of a database for JDBC."""
    found = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    login = urlencode({name: found[name] for name in ("user", "password") if name in found})
    return f"jdbc:postgresql://{found['host']}:{found['port']}/{found['dbname']}?{login}"


def _find(pattern: str) -> list[Path]:
    folder = Path(os.environ.get(JARS_VARIABLE) or Path(sys.prefix) / "jars")
    return sorted(folder.glob(pattern))


def delta_spark_options() -> dict[str, str]:
    """Return options for the first session of a process; empty if the jars are missing."""
    jars = find_delta_jars()
    if not jars:
        return {}
    return {
        "spark.jars": ",".join(map(str, (*jars, *find_postgres_driver()))),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # The log of a small table is not worth 50 tasks.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": "2",
    }
