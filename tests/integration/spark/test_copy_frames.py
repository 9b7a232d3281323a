"""Copies read by Spark: as tasks, and as a data frame."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException

from penstock.changes import frames
from penstock.changes.segment import UNREPRESENTABLE
from penstock.copy import CopyRange, CopyRows, CopySettings, RangeReader, prepare_copy
from penstock.copy.progress import CopyCounter, RangeRead
from penstock.errors import SnapshotLost, TableRewritten
from penstock.observe.reports import listening
from penstock.source import SourceSettings
from penstock.source.snapshots import Snapshot, take_snapshot
from penstock.spark.tasks import SparkTasks


@pytest.fixture
def snapshot(database: Any) -> Iterator[Snapshot]:
    database.execute(
        """
        create table t as
        select i as id, repeat(md5(i::text), 3) as word, i % 2 = 0 as even, (i / 100.0)::numeric(12, 2) as amount,
               timestamptz '2024-01-01 00:00:00+00' + i * interval '1 second' as at,
               timestamp '2024-01-01' + i * interval '1 second' as local,
               time '00:00' + i * interval '1 second' as clock, array[i, null, -i] as numbers,
               case when i % 1000 = 0 then date 'infinity' else date '2024-01-01' + i % 100 end as day,
               decode(md5(i::text), 'hex') as bytes, i::float4 as small, i::int2 as tiny,
               array['12:00:00.5'::time] as clocks
        from generate_series(1, 20000) i
        """
    )
    database.execute("create publication pub for table t")
    with take_snapshot(SourceSettings(database.dsn)) as snapshot:
        yield snapshot


@pytest.fixture
def rows(database: Any, snapshot: Snapshot) -> CopyRows:
    oid = database.execute("select 't'::regclass::oid::int8")[0][0]
    settings = CopySettings(range_bytes=512 << 10, chunk_bytes=100_000)
    return prepare_copy(snapshot, SourceSettings(database.dsn), "pub", oid, settings=settings)


def write_range(reader: RangeReader, folder: str, part: CopyRange) -> tuple[str, int]:
    path = f"{folder}/{part.index}.parquet"
    with pq.ParquetWriter(path, reader.arrow_schema) as writer:
        for batch in reader.read(part):
            writer.write_batch(batch)
    return path, pq.read_metadata(path).num_rows


@pytest.mark.trap(50, 52)
def test_ranges_are_read_by_tasks(spark: Any, rows: CopyRows, tmp_path: Path) -> None:
    assert len(rows.ranges) > 4
    tasks = SparkTasks(spark, copy_tasks=2)
    with tasks.copying():
        written = tasks.run(rows.ranges, partial(write_range, rows.reader, str(tmp_path)), description="copy t")
    assert sum(count for _, count in written) == 20_000
    table = pa.concat_tables([pq.read_table(path) for path, _ in written]).sort_by("id")
    assert table.equals(pa.Table.from_batches(rows.arrow(), rows.arrow_schema).sort_by("id"))
    if frames.has_time_type(spark.version):
        # Spark's own reader takes the files, times included.
        frame = spark.read.parquet(str(tmp_path))
        assert frame.where("clock = time'00:00:05'").select("id").collect()[0].id == 5


def test_ranges_that_tasks_have_read_are_told_before_the_copy_ends(spark: Any, rows: CopyRows, tmp_path: Path) -> None:
    counter = CopyCounter(rows)
    files_then: list[int] = []

    def take(read: RangeRead) -> None:
        counter.take(read)
        files_then.append(len(list(tmp_path.iterdir())))

    tasks = SparkTasks(spark, copy_tasks=1)
    with tasks.copying(), listening(take):
        written = tasks.run(rows.ranges, partial(write_range, rows.reader, str(tmp_path)), description="copy t")
    progress = counter.progress
    assert progress.rows_done == sum(count for _, count in written) == 20_000
    assert (progress.ranges_done, progress.bytes_done) == (len(rows.ranges), rows.estimated_bytes)
    assert files_then[0] < files_then[-1] == len(rows.ranges)


@pytest.mark.parametrize("has_times", [True, False], ids=["times", "texts"])
def test_a_frame_has_the_rows_with_their_types(
    spark: Any, rows: CopyRows, has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_times and not frames.has_time_type(spark.version):
        pytest.skip("this Spark has no type for times")
    monkeypatch.setattr(frames, "has_time_type", lambda version: has_times)
    time_name = "time(6)" if has_times else "string"
    frame = rows.frame(spark)
    assert frame.rdd.getNumPartitions() == 1
    assert dict(frame.dtypes) == {
        "id": "int",
        "word": "string",
        "even": "boolean",
        "amount": "decimal(12,2)",
        "at": "timestamp",
        "local": "timestamp_ntz",
        "clock": time_name,
        "numbers": "array<int>",
        "day": "date",
        "bytes": "binary",
        "small": "float",
        "tiny": "smallint",
        "clocks": f"array<{time_name}>",
        UNREPRESENTABLE: "map<string,string>",
    }
    found = frame.selectExpr(
        "count(*) n",
        "sum(amount) amount",
        "count(distinct word) words",
        "min(at) first",
        f"count({UNREPRESENTABLE}) kept",
    ).collect()[0]
    assert (found.n, str(found.amount), found.words, found.kept) == (20_000, "2000100.00", 20_000, 20)
    kept = frame.where("id = 1000").select(UNREPRESENTABLE, "day").collect()[0]
    assert (kept[0], kept[1]) == ({"day": "infinity"}, None)
    clocks = frame.where("id = 5").selectExpr("cast(clock as string)", "cast(clocks[0] as string)").collect()[0]
    assert tuple(clocks) == ("00:00:05", "12:00:00.5")
    assert rows.frame(spark, partitions=3).select("id").distinct().count() == 20_000


def test_an_empty_copy_is_an_empty_frame(spark: Any, rows: CopyRows) -> None:
    empty = CopyRows(rows.reader, rows.attempt, rows.position, ())
    frame = empty.frame(spark)
    assert (frame.count(), frame.columns) == (0, rows.arrow_schema.names)


@pytest.mark.trap(53)
def test_a_frame_that_outlives_its_snapshot_is_the_same_again_or_an_error(
    spark: Any, database: Any, snapshot: Snapshot, rows: CopyRows
) -> None:
    frame = rows.frame(spark, partitions=2).select("id")
    before = frame.count()
    database.execute("insert into t select * from t where id <= 100")
    assert frame.count() == before == 20_000, "partitions are planned once, and read anew each time"
    snapshot.close()
    with pytest.raises(PythonException, match=SnapshotLost.__name__):
        frame.count()


@pytest.mark.trap(21)
def test_a_rewrite_in_the_middle_reaches_the_driver_as_what_it_is(
    spark: Any, database: Any, rows: CopyRows, tmp_path: Path
) -> None:
    tasks = SparkTasks(spark)
    with tasks.copying():
        tasks.run(rows.ranges[:1], partial(write_range, rows.reader, str(tmp_path)), description="copy t")
        database.execute("vacuum full t")
        with pytest.raises(TableRewritten):
            tasks.run(rows.ranges[1:], partial(write_range, rows.reader, str(tmp_path)), description="copy t")
