"""The parquet destination with real Spark tasks, a real copy, and many tables in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.copy import CopySettings, prepare_copy
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.source import SourceSettings
from penstock.source.snapshots import take_snapshot
from penstock.spark.tasks import SparkTasks
from penstock.testing.destinations import make_context
from tests.integration.destinations.one_bad_table import check_one_bad_table

ROWS = 5_000


@pytest.fixture
def destination(spark: Any, tmp_path: Path) -> Iterator[ParquetDestination]:
    destination = ParquetDestination(tmp_path / "lake")
    destination.startup(make_context(tasks=SparkTasks(spark, copy_tasks=1)))
    yield destination
    destination.shutdown()


@pytest.mark.trap(50, 52)
def test_a_table_of_postgres_is_copied_by_tasks(
    spark: Any, database: Any, destination: ParquetDestination, tmp_path: Path
) -> None:
    database.execute(
        f"""
        create table t (id int8 primary key, word text, amount numeric(12, 2), day date, numbers int4[]);
        insert into t select i, repeat(md5(i::text), 4), i / 100.0,
          case when i % 1000 = 0 then date 'infinity' else date '2024-01-01' + i % 100 end, array[i, null]
        from generate_series(1, {ROWS}) i;
        create publication pub for table t;
        """
    )
    table_id = database.execute("select 't'::regclass::oid::int8")[0][0]
    settings = CopySettings(range_bytes=256 << 10, chunk_bytes=50_000)
    with take_snapshot(SourceSettings(database.dsn)) as snapshot:
        rows = prepare_copy(snapshot, SourceSettings(database.dsn), "pub", table_id, settings=settings)
        assert len(rows.ranges) > 2
        destination.drop_table_for_copy(rows.schema, rows.attempt)
        destination.write_table_rows(rows.schema, rows)
    assert destination.position(table_id) == rows.position
    reader = ParquetReader(tmp_path / "lake")
    copied = {row["id"]: row for row in reader.read_table("public.t").to_pylist()}
    assert len(copied) == ROWS
    assert dict(copied[1000]["_unrepresentable"]) == {"day": "infinity"}
    expected = database.execute("select sum(amount)::text, sum(length(word)) from t")[0]
    assert expected == (
        str(sum(row["amount"] for row in copied.values())),
        sum(len(row["word"]) for row in copied.values()),
    )
    # Others read the files that count as they are.
    frame = spark.read.parquet(*map(str, reader.files("public.t")))
    assert frame.where("_op = 0 and id = 17").select("word").collect()[0].word == copied[17]["word"]
    assert frame.count() == ROWS


@pytest.mark.trap(33, 51)
def test_many_tables_are_one_job_and_a_bad_one_does_not_stop_the_others(
    spark: Any, destination: ParquetDestination, tmp_path: Path
) -> None:
    reader = ParquetReader(tmp_path / "lake")
    check_one_bad_table(spark, destination, tmp_path, lambda schema: len(reader.mirror(str(schema)).rows()))
