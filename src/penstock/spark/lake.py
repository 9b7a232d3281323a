"""Options with which a Spark session reads Delta tables. Penstock itself needs no Delta jars."""

from __future__ import annotations

import sys
from pathlib import Path

COORDINATES = "io.delta:delta-spark_4.1_2.13:4.4.0"
"""For `spark.jars.packages`."""
POSTGRES_DRIVER = "org.postgresql:postgresql:42.7.7"
"""The driver with which Spark writes to PostgreSQL by JDBC, tried with this version."""
_OPTIONS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def delta_options(folder: Path | None = None) -> dict[str, str] | None:
    """Return options for a session that reads Delta tables, or None if the folder has no jars.

    The default is the folder of the environment in which `make setup` stores them.
    """
    jars = sorted((folder or Path(sys.prefix) / "jars").glob("io.delta_*.jar"))
    return {"spark.jars": ",".join(map(str, jars)), **_OPTIONS} if jars else None
