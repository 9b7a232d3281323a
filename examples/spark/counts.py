"""Count the changes of a table per minute and kind, while they happen.

    spark-submit examples/spark/counts.py postgresql://…

The table is `public.orders`. The time of a change is that of its commit, by the clock of the database.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as Spark's users write it)

import penstock


def count(spark: SparkSession, url: str, **options: str) -> DataFrame:
    """Return a streaming frame: how many changes of each kind were committed in each minute."""
    changes = (
        spark.readStream.format("penstock")
        .option("url", url)
        .option("table", "public.orders")
        .option("slot", "orders_counts")
        .options(**options)
        .load()
    )
    minutes = changes.withWatermark("_commit_time", "5 minutes").groupBy(F.window("_commit_time", "1 minute"), "_op")
    return minutes.count()


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    penstock.register(session)
    count(session, sys.argv[1]).writeStream.outputMode("update").format("console").start().awaitTermination()
