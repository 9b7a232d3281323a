"""Join two tables as they change: payments with their orders, if both were committed within an hour.

    spark-submit examples/spark/join.py postgresql://…

The tables are `public.orders (id, customer)` and `public.payments (id, order_id, amount)`. Each stream has its own
slot.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as Spark's users write it)

import penstock


def join(spark: SparkSession, url: str, folder: str) -> DataFrame:
    """Return a streaming frame of new payments with their orders."""
    orders = inserts(spark, url, folder, "orders").select("id", "customer", F.col("_commit_time").alias("ordered"))
    payments = inserts(spark, url, folder, "payments").select("order_id", "amount", F.col("_commit_time").alias("paid"))
    within = "order_id = id and paid >= ordered and paid <= ordered + interval 1 hour"
    return (
        orders.withWatermark("ordered", "10 minutes")
        .join(payments.withWatermark("paid", "10 minutes"), F.expr(within))
        .select("order_id", "customer", "amount", "ordered", "paid")
    )


def inserts(spark: SparkSession, url: str, folder: str, table: str) -> DataFrame:
    """Return the new rows of a table."""
    changes = (
        spark.readStream.format("penstock")
        .option("url", url)
        .option("table", f"public.{table}")
        .option("slot", f"join_{table}")
        .option("spoolLocation", f"{folder}/{table}")
        .load()
    )
    return changes.where("_op = 'insert'")


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    penstock.register(session)
    query = join(session, sys.argv[1], "spool").writeStream.outputMode("append").format("console").start()
    query.awaitTermination()
