"""Keep a Delta table equal to a Postgres table, with your own MERGE.

    spark-submit --packages io.delta:delta-spark_4.1_2.13:4.4.0 examples/spark/upsert.py postgresql://… /lake/customers

The table is `public.customers (id, name, email, notes)`. The copy comes first, then every change. A batch may come
twice after a crash; applying it again changes nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 (as Spark's users write it)

import penstock

KEY = "id"


def start(spark: SparkSession, url: str, folder: str, table: str = "public.customers", **options: str) -> Any:
    """Start the query; return it."""
    changes = (
        spark.readStream.format("penstock")
        .option("url", url)
        .option("table", table)
        .option("slot", "customers_to_delta")
        .option("startingPosition", "snapshot")
        .options(**options)
        .load()
    )
    columns = [field for field in changes.schema if not field.name.startswith("_")]
    described = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in columns)
    spark.sql(f"create table if not exists delta.`{folder}/table` ({described}) using delta")
    names = [field.name for field in columns if field.name != KEY]
    return (
        changes.writeStream.foreachBatch(lambda batch, number: apply(batch, f"delta.`{folder}/table`", names))
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )


def apply(changes: DataFrame, target: str, names: list[str]) -> None:
    """Apply a batch: of each key only its last change counts."""
    spark = changes.sparkSession
    changes = changes.persist()
    try:
        [[last]] = changes.where("_op = 'truncate'").select(F.max(F.struct("_commit_lsn", "_ordinal"))).collect()
        rows = changes.where("_op <> 'truncate'")
        if last is not None:
            spark.sql(f"delete from {target}")
            rows = rows.where(f"_commit_lsn > {last[0]} or (_commit_lsn = {last[0]} and _ordinal > {last[1]})")
        merge(newest(rows, names), target, names)
    finally:
        changes.unpersist()


def newest(rows: DataFrame, names: list[str]) -> DataFrame:
    """Return the last change of each key, each value in a struct; no struct if the server omitted the value.

    An update of the key is a delete of the old one and an insert. The server omits large values that did not change. If
    keys of rows with such values change, the table needs REPLICA IDENTITY FULL; then `_old` has the values. Without it
    they are not known, and `merge` raises an error.
    """
    kept = rows.select(KEY, *names, "_op", "_commit_lsn", "_ordinal", "_unchanged", "_old")
    fields = rows.schema["_old"].dataType.fieldNames()
    is_moved = F.expr(f"_old.{KEY} <> {KEY}")
    moved = rows.where(is_moved).select(
        F.col(f"_old.{KEY}").alias(KEY), F.lit("delete").alias("_op"), "_commit_lsn", "_ordinal"
    )
    rows = kept.unionByName(moved, allowMissingColumns=True)
    by_key = Window.partitionBy(KEY).orderBy("_commit_lsn", "_ordinal")
    for name in names:
        sent = F.when(~F.array_contains("_unchanged", name), F.struct(F.lit(True).alias("_known"), name))
        if name in fields:
            # What is omitted is never NULL, so NULL means that the old row was not sent.
            old = F.col(f"_old.{name}")
            sent = sent.when(old.isNotNull(), F.struct(F.lit(True).alias("_known"), old.alias(name)))
        # Not the value that another row had under this key.
        nothing = F.lit(None).cast(rows.schema[name].dataType).alias(name)
        sent = sent.when(is_moved, F.struct(F.lit(False).alias("_known"), nothing))
        rows = rows.withColumn(f"new_{name}", F.last(sent, ignorenulls=True).over(by_key))
    latest = Window.partitionBy(KEY).orderBy(F.desc("_commit_lsn"), F.desc("_ordinal"))
    return rows.withColumn("_rank", F.row_number().over(latest)).where("_rank = 1")


def merge(rows: DataFrame, target: str, names: list[str]) -> None:
    """Write the last change of each key."""
    missing = "raise_error('a key changed, and the server omitted a value of the row: set REPLICA IDENTITY FULL')"
    cells = {name: f"if(s.`new_{name}`._known, s.`new_{name}`.`{name}`, {missing})" for name in names}
    updates = ", ".join(f"t.`{name}` = if(s.`new_{name}` is null, t.`{name}`, {cell})" for name, cell in cells.items())
    columns = ", ".join(f"`{name}`" for name in (KEY, *names))
    inserts = ", ".join((f"s.`{KEY}`", *(f"if(s.`new_{name}` is null, null, {cell})" for name, cell in cells.items())))
    rows.createOrReplaceTempView("newest")
    rows.sparkSession.sql(
        f"""
        merge into {target} t using newest s on t.{KEY} = s.{KEY}
        when matched and s._op = 'delete' then delete
        when matched then update set {updates}
        when not matched and s._op <> 'delete' then insert ({columns}) values ({inserts})
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
