"""The spark destination under the contract of destinations, in each of its ways of writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE, field_names
from penstock.destinations.base import Destination
from penstock.destinations.batch_events import copied_rows
from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract
from tests.integration.destinations.spark import folder_writer
from tests.integration.destinations.spark.replaying import replay
from tests.integration.destinations.spark.started import on
from tests.support.delta_jars import jdbc_url


class FunctionHarness:
    def __init__(self, session: Any, folder: Path) -> None:
        self._session = session
        self._folder = folder
        folder_writer.FOLDER = folder / "written"

    def open(self) -> Destination:
        function, checkpoint = f"{folder_writer.__name__}:write", str(self._folder / "checkpoint")
        return on(self._session, function=function, checkpoint=checkpoint)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        return replay(self._folder / "written", schema)


class TestFunction(DestinationContract):
    @pytest.fixture
    def harness(self, spark: Any, tmp_path: Path) -> FunctionHarness:
        return FunctionHarness(spark, tmp_path)


class DeltaHarness:
    def __init__(self, session: Any, folder: Path) -> None:
        self._session = session
        self._folder = folder

    def open(self) -> Destination:
        path, checkpoint = str(self._folder / "lake"), str(self._folder / "checkpoint")
        return on(self._session, format="delta", mode="upsert", path=path, checkpoint=checkpoint)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        folder = self._folder / "lake" / FOLDERS.table(schema)
        if not (folder / "_delta_log").exists():
            return None
        frame = self._session.read.format("delta").load(str(folder))
        return [dict(row) for row in copied_rows(frame.toArrow(), schema)]


class PostgresHarness:
    def __init__(self, session: Any, database: Any, folder: Path) -> None:
        self._session = session
        self._database = database

    def open(self) -> Destination:
        options = {"url": jdbc_url(self._database.dsn)}
        return on(self._session, format="jdbc", mode="upsert", table="copy_of_{schema}.{table}", options=options)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        target = f'"copy_of_{schema.namespace}"."{schema.name}"'
        if self._database.execute("select to_regclass(%s)", [target]) == [(None,)]:
            return None
        names = ", ".join(f'"{name}"' for name in (*field_names(schema), UNREPRESENTABLE))
        rows: list[dict[str, Any]] = []
        for *cells, texts in self._database.execute(f"select {names} from {target}"):
            row = dict(zip((column.name for column in schema.columns), cells, strict=True))
            rows.append(row | {name: Unrepresentable(text) for name, text in json.loads(texts or "{}").items()})
        return rows


class TestPostgresUpserts(DestinationContract):
    @pytest.fixture
    def harness(self, jdbc_spark: Any, database: Any, tmp_path: Path) -> PostgresHarness:
        return PostgresHarness(jdbc_spark, database, tmp_path)


@pytest.mark.soak
class TestDeltaUpserts(DestinationContract):
    """Takes five minutes: each change is a MERGE of Spark."""

    @pytest.fixture
    def harness(self, delta_spark: Any, tmp_path: Path) -> DeltaHarness:
        return DeltaHarness(delta_spark, tmp_path)
