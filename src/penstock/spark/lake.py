"""What a Spark session needs to read Delta tables itself: jars, which Penstock does without."""

from __future__ import annotations

import sys
from pathlib import Path

COORDINATES = "io.delta:delta-spark_4.1_2.13:4.4.0"
"""For `spark.jars.packages`, where a session may fetch them."""
_OPTIONS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def delta_options(folder: Path | None = None) -> dict[str, str] | None:
    """Options for a session that reads Delta tables; None if the jars are not in the folder.

    The folder is that of the environment, where `make setup` puts them, unless another one is named.
    """
    jars = sorted((folder or Path(sys.prefix) / "jars").glob("io.delta_*.jar"))
    return {"spark.jars": ",".join(map(str, jars)), **_OPTIONS} if jars else None
