"""Makes `format("penstock")` known to a Spark session."""

from __future__ import annotations

from typing import Any

from penstock.datasource.keeper import keeper_of_process
from penstock.errors import ConfigError

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: Any) -> None:
    """Make `format("penstock")` available to `spark.read` and `spark.readStream` in a Spark session (4.0 or newer).

    Call it once per session, in the process of the driver. It also lets Spark pass filters on to Python data sources
    (`spark.sql.python.filterPushdown.enabled`, from Spark 4.1 on), so that the server reads fewer rows.

    Arguments:
        spark: a `SparkSession`. A session of Spark Connect is refused: its driver is another process.

    Returns:
        Nothing; the session knows the format from now on.

    Raises:
        ConfigError: the session is one of Spark Connect, or its Spark is too old.

    Example:
        import penstock
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.getOrCreate()
        penstock.register(spark)
        orders = spark.read.format("penstock").option("url", "postgresql://…").option("table", "public.orders").load()
        orders.groupBy("status").count().show()
    """
    if ".connect." in type(spark).__module__:
        raise ConfigError(
            'format("penstock") does not work over Spark Connect',
            hint="Register it in the process of the driver, for example with spark-submit.",
        )
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < (4, 0):
        raise ConfigError(f'format("penstock") needs Spark 4.0 or newer, and this is {spark.version}')
    from penstock.datasource.source import PenstockSource

    # Pickled by value, because it is no attribute of a module: the address reaches the processes that plan.
    here = {"keeper": keeper_of_process().address, "cores": max(1, spark.sparkContext.defaultParallelism)}
    registered = type(PenstockSource.__name__, (PenstockSource,), here)
    registered.__doc__ = PenstockSource.__doc__
    spark.dataSource.register(registered)
    if version >= (4, 1):
        spark.conf.set(_PUSHDOWN, "true")
