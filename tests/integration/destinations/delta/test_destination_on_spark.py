"""The Delta destination with real Spark tasks and a real copy; Spark's own reader of Delta is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.copy import CopySettings, prepare_copy
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.mirror import MirrorTable
from penstock.source import SourceSettings
from penstock.source.snapshots import take_snapshot
from penstock.spark.tasks import SparkTasks
from penstock.testing.destinations import ScriptedSource, make_context
from tests.integration.destinations.one_bad_table import check_one_bad_table
from tests.unit.changes.random_changes import COMPOSITE, KEYLESS, RandomTable

ROWS = 5_000


@pytest.fixture
def destination(spark: Any, tmp_path: Path) -> Iterator[DeltaDestination]:
    destination = DeltaDestination(tmp_path / "lake", maintenance=False)
    destination.startup(make_context(tasks=SparkTasks(spark, copy_tasks=1)))
    yield destination
    destination.shutdown()


@pytest.mark.trap(39, 50, 52)
def test_a_table_of_postgres_is_copied_by_tasks(
    delta_spark: Any, database: Any, destination: DeltaDestination, tmp_path: Path
) -> None:
    database.execute(
        f"""
        create table t (id int8 primary key, word text, amount numeric(12, 2), day date, numbers int4[], at time);
        insert into t select i, repeat(md5(i::text), 4), i / 100.0,
          case when i % 1000 = 0 then date 'infinity' else date '2024-01-01' + i % 100 end, array[i, null],
          time '12:00' + i * interval '1.5 s'
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
    frame = delta_spark.read.format("delta").load(DeltaReader(tmp_path / "lake").folder("public.t"))
    assert frame.count() == ROWS
    judged = frame.selectExpr("sum(amount)", "sum(length(word))", "max(at)", "sum(numbers[0])").collect()[0]
    expected = database.execute("select sum(amount), sum(length(word)), max(at)::text, sum(numbers[1]) from t")[0]
    assert tuple(judged) == expected
    assert frame.where("id = 1000").collect()[0]["_unrepresentable"] == {"day": "infinity"}
    # By statistics other files are skipped, and no row is.
    assert frame.where("amount between 10.01 and 10.50 and word is not null").count() == 50


@pytest.mark.trap(33, 51)
def test_many_tables_are_one_job_and_a_bad_one_does_not_stop_the_others(
    spark: Any, destination: DeltaDestination, tmp_path: Path
) -> None:
    reader = DeltaReader(tmp_path / "lake")
    check_one_bad_table(spark, destination, tmp_path, lambda schema: reader.read_table(str(schema)).num_rows)


@pytest.mark.trap(39)
def test_spark_reads_what_the_changes_say(delta_spark: Any, destination: DeltaDestination, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    tables = [RandomTable(schema, Random(number)) for number, schema in enumerate((COMPOSITE, KEYLESS))]
    for table in tables:
        first = table.fill(10)
        destination.drop_table_for_copy(table.schema, "attempt-1")
        destination.write_table_rows(table.schema, source.copy(table.schema, first, ranges=2))
    reader = DeltaReader(tmp_path / "lake")
    for _ in range(4):
        for table in tables:
            table.transact(source, 12)
        assert destination.write_events(source.batch()).result().tables == {}
    for table in tables:
        frame = delta_spark.read.format("delta").load(reader.folder(str(table.schema)))
        judged = [
            {column.name: row[column.name] for column in table.schema.columns}
            | dict(row["_unrepresentable"] or {} if "_unrepresentable" in frame.columns else {})
            for row in frame.collect()
        ]
        rows = MirrorTable(table.schema, table.rows).arrow().to_pylist()
        expected = [
            {name: cell for name, cell in row.items() if name != "_unrepresentable"}
            | dict(row.get("_unrepresentable") or ())
            for row in rows
        ]
        assert sorted(map(repr, judged)) == sorted(map(repr, expected))
