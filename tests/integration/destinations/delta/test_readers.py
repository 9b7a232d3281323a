"""Tables that we write, read by others: Spark's own reader judges; Polars, delta-rs, DuckDB and pyarrow agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import polars
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.destinations.delta.actions import CommitInfo, Metadata
from penstock.destinations.delta.files import now_milliseconds, write_data_file
from penstock.destinations.delta.log import DeltaLog, Lost
from penstock.destinations.delta.maintenance.cleanup import write_checkpoint
from penstock.destinations.delta.schema import protocol_for, schema_string, table_configuration
from penstock.destinations.delta.snapshot import Verdict
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.delta.vectors import Vector, write_vectors
from tests.integration.destinations.delta.machine import machine_with
from tests.integration.destinations.delta.readers import (
    read_with_delta_rs,
    read_with_duckdb,
    read_with_polars,
    read_with_pyarrow,
    read_with_spark,
)
from tests.unit.destinations.delta.lake import SCHEMA, LakeTable, make_rows

_ONLY_IF_IT_MATTERS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def _run(session: Any, examples: int, steps: int) -> None:
    machine = machine_with(lambda path, version: read_with_spark(session, path, version=version))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=_ONLY_IF_IT_MATTERS
        ),
    )


@pytest.fixture(scope="module")
def judge(delta_spark: Any) -> Iterator[Any]:
    """Spark, which interprets: to compile a query takes longer than to run it over a few rows."""
    interpreting = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    for name, value in interpreting.items():
        delta_spark.conf.set(name, value)
    yield delta_spark
    for name in interpreting:
        delta_spark.conf.unset(name)


@pytest.mark.trap(36, 37, 38, 39)
def test_whatever_happens_to_a_table_all_readers_see_its_rows(judge: Any) -> None:
    _run(judge, examples=5, steps=20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whatever_happens_to_a_table_for_long_all_readers_see_its_rows(judge: Any) -> None:
    _run(judge, examples=int(os.environ.get("PENSTOCK_SOAK_LAKES", "20")), steps=50)


@pytest.mark.trap(39)
def test_readers_with_filters_lose_no_row(judge: Any, tmp_path: Path) -> None:
    table = LakeTable(LocalStorage(tmp_path / "items"))
    table.create(range(100))
    table.append(range(100, 200))
    table.append(range(200, 300))
    table.delete([5, 99, 100, 150, 299])
    rows = make_rows(table.ids()).to_pylist()
    [row] = make_rows([217]).to_pylist()
    at = row["at"].strftime("%Y-%m-%d %H:%M:%S.%f")
    # Values at the ends of files, or that differ only behind what statistics say.
    filters = {
        "id >= 295": 4,
        f"name = '{row['name']}'": 1,
        f"name >= '{'ü' * 40}' and id > 250": sum(row["id"] > 250 and row["name"] is not None for row in rows),
        "amount >= cast('12345678901234567890123458.97' as decimal(30,2))": 2,
        f"local = timestamp_ntz'{at}'": 1,
        f"at >= timestamp'{at}'": 82,
        f"day = date'{row['day']}' and ratio > 0": 24,
    }
    found = {where: read_with_spark(judge, tmp_path / "items", where=where).num_rows for where in filters}
    assert found == filters
    for where in ("id >= 295", f"name = '{row['name']}'"):
        assert read_with_delta_rs(tmp_path / "items", where=where).num_rows == filters[where]
    for name in SCHEMA.names:
        assert read_with_polars(tmp_path / "items", polars.col(name) == row[name]).column("id").to_pylist() == (
            [217] if name != "day" else [each["id"] for each in rows if each["day"] == row["day"]]
        )


def test_vectors_in_the_log_are_read_by_all(judge: Any, tmp_path: Path) -> None:
    table = LakeTable(LocalStorage(tmp_path / "items"))
    table.create(range(70))
    [add] = table.snapshot.files.values()
    for dead in ([1], [1, 2, 60], range(10, 60)):
        [vector] = write_vectors(table.storage, [Vector.of(dead)], inline_bytes=1000)
        assert vector.storage_type == "i"
        live = table.snapshot.files[add.path]
        table.write(lambda _, live=live, vector=vector: [live.removed(now_milliseconds()), live.with_vector(vector)])
        expected = make_rows([each for each in range(70) if each not in dead])
        assert table.ids() == expected["id"].to_pylist()
        assert read_with_polars(tmp_path / "items").equals(expected)
        assert read_with_delta_rs(tmp_path / "items").equals(expected)
    assert read_with_spark(judge, tmp_path / "items").equals(expected)


def test_a_table_without_vectors_is_read_by_those_who_do_not_know_them(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "items")
    # Neither knows timestamps without a zone either.
    schema = pa.schema([field for field in SCHEMA if field.name != "local"])
    configuration = table_configuration("lake", deletion_vectors=False, log_retention_hours=1, file_retention_hours=1)
    adds = [write_data_file(storage, make_rows(ids).select(schema.names)) for ids in (range(50), range(50, 80))]
    protocol = protocol_for(schema, deletion_vectors=False)
    metadata = Metadata("00000000-0000-0000-0000-000000000001", schema_string(schema), configuration)
    info = CommitInfo(now_milliseconds(), "CREATE TABLE")
    DeltaLog(storage).commit(None, [info, protocol, metadata, *adds])
    write_checkpoint(storage)
    expected = make_rows(range(80)).select(schema.names)
    assert read_with_pyarrow(tmp_path / "items", schema).equals(expected)
    assert read_with_duckdb(tmp_path / "items", schema).equals(expected)


@pytest.mark.trap(39)
def test_readers_that_do_not_know_vectors_refuse_tables_with_them(tmp_path: Path) -> None:
    table = LakeTable(LocalStorage(tmp_path / "items"))
    table.create(range(10))
    table.delete([1])
    with pytest.raises(deltalake.exceptions.DeltaProtocolError, match="deletionVectors"):
        read_with_pyarrow(tmp_path / "items", SCHEMA)


def test_what_spark_writes_is_read_by_us_and_is_foreign(judge: Any, tmp_path: Path) -> None:
    table = LakeTable(LocalStorage(tmp_path / "items"))
    table.create(range(200))
    before = table.snapshot
    items = f"delta.`{tmp_path / 'items'}`"
    judge.sql(f"alter table {items} set tblproperties ('delta.checkpointInterval' = '2')")
    judge.sql(f"delete from {items} where id % 20 = 1")
    judge.sql(f"delete from {items} where id < 50")
    expected = [each for each in range(50, 200) if each % 20 != 1]
    assert [file.path for file in table.storage.list("_delta_log") if ".checkpoint" in file.path]
    fresh = LakeTable(table.storage)
    assert fresh.ids() == expected
    assert any(add.vector is not None for add in fresh.snapshot.files.values())
    answer = table.log.commit(before, table.head())
    assert isinstance(answer, Lost)
    assert answer.verdict(table.application) is Verdict.FOREIGN
