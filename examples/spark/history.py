"""Keep every version of a row in Delta, with the time from which and to which it was valid (SCD type 2).

    spark-submit --packages io.delta:delta-spark_4.1_2.13:4.4.0 examples/spark/history.py postgresql://… /lake/prices

The table is `public.prices (id, price)`. A version is identified by its change, so a batch that comes twice changes
nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 (as Spark's users write it)

import penstock


def start(spark: SparkSession, url: str, folder: str, **trigger: bool) -> Any:
    """Start the query; return it. `trigger` is passed on, for example `availableNow=True`."""
    changes = (
        spark.readStream.format("penstock")
        .option("url", url)
        .option("table", "public.prices")
        .option("slot", "prices_history")
        .option("startingPosition", "snapshot")
        .option("spoolLocation", f"{folder}/spool")
        .load()
    )
    target = f"delta.`{folder}/table`"
    spark.sql(
        f"create table if not exists {target} (id int, price decimal(10, 2), valid_from timestamp, valid_to timestamp,"
        " lsn bigint, ordinal bigint) using delta"
    )
    writer = changes.writeStream.foreachBatch(lambda batch, number: apply(batch, target))
    writer = writer.trigger(**trigger) if trigger else writer
    return writer.option("checkpointLocation", f"{folder}/checkpoint").start()


def apply(changes: DataFrame, target: str) -> None:
    """Add the versions of a batch, and end those before them. A truncate ends all versions from before it."""
    changes = changes.persist()
    try:
        rows = changes.where("_op <> 'truncate'")
        truncates = changes.where("_op = 'truncate'").selectExpr("_commit_lsn", "_ordinal", "unix_micros(_commit_time)")
        for lsn, ordinal, time in truncates.orderBy("_commit_lsn", "_ordinal").collect():
            add(rows.where(f"_commit_lsn < {lsn} or (_commit_lsn = {lsn} and _ordinal < {ordinal})"), target)
            changes.sparkSession.sql(
                f"update {target} set valid_to = timestamp_micros({time}) "
                f"where valid_to is null and (lsn < {lsn} or (lsn = {lsn} and ordinal < {ordinal}))"
            )
            rows = rows.where(f"_commit_lsn > {lsn} or (_commit_lsn = {lsn} and _ordinal > {ordinal})")
        add(rows, target)
    finally:
        changes.unpersist()


def add(changes: DataFrame, target: str) -> None:
    """Add the versions of changes without a truncate, and end those before them."""
    described = ("_op", "_commit_time as valid_from", "_commit_lsn as lsn", "_ordinal as ordinal")
    # An update of the key also ends the version of the old one.
    moved = changes.where("_old.id <> id").withColumn("_op", F.lit("delete")).selectExpr("_old.id", "price", *described)
    by_key = Window.partitionBy("id").orderBy("lsn", "ordinal")
    versions = (
        changes.selectExpr("id", "price", *described)
        .unionByName(moved)
        .withColumn("valid_to", F.lead("valid_from").over(by_key))
        .withColumn("is_first", F.row_number().over(by_key) == 1)
    )
    # Each change is a version to add, and the first of each key also ends the version that the table has.
    added = versions.withColumn("ends", F.lit(False))
    ending = versions.where("is_first").withColumn("ends", F.lit(True))
    added.unionByName(ending).createOrReplaceTempView("versions")
    changes.sparkSession.sql(
        f"""
        merge into {target} t using versions s
        on t.id = s.id and if(
            s.ends,
            t.valid_to is null and (t.lsn < s.lsn or (t.lsn = s.lsn and t.ordinal < s.ordinal)),
            t.lsn = s.lsn and t.ordinal = s.ordinal
        )
        when matched and s.ends then update set valid_to = s.valid_from
        when not matched and not s.ends and s._op <> 'delete'
        then insert (id, price, valid_from, valid_to, lsn, ordinal)
             values (s.id, s.price, s.valid_from, s.valid_to, s.lsn, s.ordinal)
        """
    )


if __name__ == "__main__":
    session = (
        SparkSession.builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .getOrCreate()
    )
    penstock.register(session)
    start(session, *sys.argv[1:3]).awaitTermination()
