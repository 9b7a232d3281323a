"""The examples of the spark destination, on Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.loading import load_config
from penstock.schema import Column, TableSchema
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, TEXT
from tests.integration.destinations.spark.started import copy, started

EXAMPLES = Path(__file__).parents[4] / "examples"
CUSTOMERS = TableSchema(
    17_000,
    "public",
    "customers",
    (
        Column("id", 1, INT8, identity=True, primary_key_position=1),
        Column("email", 2, TEXT),
        Column("country", 3, TEXT),
    ),
)
ADA = {"id": 1, "email": "Ada@example.com", "country": "GB"}


def test_the_function_appends_changes_to_delta(
    delta_spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("LAKE", str(tmp_path / "lake"))
    source = ScriptedSource(tmp_path / "segments")
    checkpoint = str(tmp_path / "checkpoint")
    destination = started(delta_spark, function="spark_function:write", checkpoint=checkpoint)
    copy(destination, source, CUSTOMERS, [ADA])
    with source.transaction() as transaction:
        transaction.delete(CUSTOMERS, {"id": 1})
    assert destination.write_events(source.batch()).result().tables[CUSTOMERS.table_id].error is None
    rows = delta_spark.read.format("delta").load(str(tmp_path / "lake/public.customers")).orderBy("batch").collect()
    assert [(row["_op"], row["id"], row["country"]) for row in rows] == [("copy", 1, "GB"), ("delete", 1, None)]


def test_the_transform_masks_addresses(delta_spark: Any, tmp_path: Path) -> None:
    config = load_config(
        EXAMPLES / "transform/penstock.toml",
        {"SOURCE_URL": "postgresql://h/d", "LAKE": str(tmp_path / "lake")},
    )
    options = {**config.outputs[0].destination_options, "checkpoint": str(tmp_path / "checkpoint")}
    transform = config.pipeline.transforms.statement_of(CUSTOMERS)
    source = ScriptedSource(tmp_path / "segments")
    destination = started(delta_spark, transform, **options)
    copy(destination, source, CUSTOMERS, [ADA])
    with source.transaction() as transaction:
        transaction.insert(CUSTOMERS, ADA | {"id": 2, "email": "ADA@example.com"})
    destination.write_events(source.batch()).result()
    rows = delta_spark.read.format("delta").load(str(tmp_path / "lake/public/customers")).collect()
    assert sorted(row["id"] for row in rows) == [1, 2]
    assert {row["country"] for row in rows} == {"GB"}
    assert len({row["email_hash"] for row in rows}) == 1
    assert "email" not in rows[0].asDict()
