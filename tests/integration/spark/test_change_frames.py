"""Changes of a batch as a data frame that Spark's own readers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.capture import CaptureSettings
from penstock.changes import frames
from penstock.changes.batch import EventBatch, Rows, build_batch
from penstock.changes.segment import UNREPRESENTABLE
from penstock.lsn import Lsn
from penstock.source import SourceSettings
from penstock.source.slots import create_slot
from penstock.spool import SpoolReader, SpoolSettings
from tests.support.oracle import capture_until, current_position

HEAD = ["_op", "_commit_lsn", "_ordinal", "_commit_time", "_xid"]


@pytest.fixture
def batch(database: Any, tmp_path: Path) -> EventBatch:
    """Three entries of the spool; the first row is cut off at the beginning, and the last one at the end."""
    database.execute(
        """
        create table t (id int primary key, "a.b {x}" text, amount numeric(12,2), wide numeric, at timestamptz,
          local timestamp, clock time, day date, numbers int[], clocks time[], bytes bytea, small float4, flag bool,
          "_op" text);
        create publication pub for table t
        """
    )
    spool = SpoolSettings(tmp_path / "spool", min_free_bytes=0)
    settings = CaptureSettings(SourceSettings(database.dsn), f"frames_{database.name[-12:]}", "pub", spool)
    boundaries: list[Lsn] = []
    with database.connect() as connection:
        begin = create_slot(connection, settings.slot).confirmed_flush_lsn
        for round_, day in enumerate(["null", "'infinity'", "null"]):
            for statement in (
                f"""insert into t select i, 'w' || i, i / 4.0, 1e40, '2024-01-01 00:00+00', '0100-02-03 04:05:06.789',
                  '23:59:59.999999', date '1500-02-28' + i, array[i, null], array['12:00:00.5'::time], '\\x00ff',
                  i / 3.0, null, 'mine' from generate_series({round_ * 10}, {round_ * 10 + 4}) i""",
                f"update t set id = id + 1000, day = {day} where id = {round_ * 10}",
                f"delete from t where id = {round_ * 10 + 1}",
            ):
                connection.execute(statement)
                boundaries.append(current_position(connection))
            capture_until(settings, boundaries[-1])
    reader = SpoolReader(spool.path)
    entries = reader.entries(begin)
    table_id = next(step.table_id for entry in entries for step in entry.steps)
    return build_batch(
        entries,
        begin=boundaries[0],
        end=boundaries[-2],
        positions={table_id: boundaries[0]},
        schemas={},
        schema_of=reader.load_schema,
    )


def test_a_frame_has_the_changes_between_the_boundaries_with_their_types(spark: Any, batch: EventBatch) -> None:
    if not frames.has_time_type(spark.version):
        pytest.skip("this Spark has no type for times")
    (rows,) = [step for step in batch.tables[0].steps if isinstance(step, Rows)]
    assert len(rows.segments) >= 3
    assert {(segment.after is None, segment.until is None) for segment in rows.segments} >= {
        (False, True),
        (True, True),
        (True, False),
    }
    frame = rows.frame(spark)
    expected = pa.concat_tables(rows.arrow(), promote_options="permissive")
    # Without the first insert and the last delete.
    assert expected.num_rows == 3 * 7 - 5 - 1
    types = dict(frame.dtypes)
    assert (types["clock"], types["clocks"], types["local"], types["at"]) == (
        "time(6)",
        "array<time(6)>",
        "timestamp_ntz",
        "timestamp",
    )
    assert types["_old"] == "struct<id:int>"
    assert frame.columns == [*(name for name in expected.column_names if name != UNREPRESENTABLE), UNREPRESENTABLE]
    ordered = frame.orderBy("_commit_lsn", "_ordinal").toArrow()
    expected = expected.select(ordered.column_names).sort_by([("_commit_lsn", "ascending"), ("_ordinal", "ascending")])
    assert ordered.select(HEAD).to_pylist() == expected.select(HEAD).to_pylist()
    for name in expected.column_names:
        assert ordered[name].to_pylist() == expected[name].to_pylist(), name
    # It is lazy, and the JVM reads the files: no task of Python.
    plan = frame.select("id")._jdf.queryExecution().executedPlan().toString()
    assert "FileScan parquet" in plan
    assert "Python" not in plan


def test_a_frame_of_a_spark_without_times_has_the_same_changes(
    spark: Any, batch: EventBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "has_time_type", lambda version: False)
    (rows,) = [step for step in batch.tables[0].steps if isinstance(step, Rows)]
    frame = rows.frame(spark)
    types = dict(frame.dtypes)
    assert (types["clock"], types["clocks"], types["local"], types["_old"]) == (
        "string",
        "array<string>",
        "timestamp_ntz",
        "struct<id:int>",
    )
    ordered = frame.orderBy("_commit_lsn", "_ordinal").toArrow()
    expected = pa.concat_tables(rows.arrow(), promote_options="permissive").select(ordered.column_names)
    expected = expected.sort_by([("_commit_lsn", "ascending"), ("_ordinal", "ascending")])
    assert UNREPRESENTABLE in ordered.column_names
    for name in expected.column_names:
        if name not in ("clock", "clocks"):
            assert ordered[name].to_pylist() == expected[name].to_pylist(), name
    assert set(ordered["clock"].to_pylist()) == {"23:59:59.999999", None}
    assert next(each for each in ordered["clocks"].to_pylist() if each is not None) == ["12:00:00.5"]
    assert (ordered["clock"].null_count, ordered["clocks"].null_count) == (
        expected["clock"].null_count,
        expected["clocks"].null_count,
    )


def test_only_the_columns_that_are_asked_for_are_read(spark: Any, batch: EventBatch) -> None:
    (rows,) = [step for step in batch.tables[0].steps if isinstance(step, Rows)]
    frame = rows.frame(spark).groupBy("_op").count()
    assert {row[0]: row[1] for row in frame.collect()} == {1: 10, 2: 3, 3: 2}
    assert sum(pq.read_metadata(segment.path).num_rows for segment in rows.segments) == 21
