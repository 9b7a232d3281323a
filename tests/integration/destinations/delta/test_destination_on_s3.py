"""The Delta destination on an object store (an emulator): the whole contract, and two drivers that race for a table."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.schema import TableSchema
from penstock.testing.s3 import S3Emulator
from tests.unit.destinations.delta.reading import rows_of
from tests.unit.destinations.delta.test_destination import DeltaContract


@pytest.fixture(scope="module")
def emulator() -> Iterator[S3Emulator]:
    with S3Emulator() as emulator:
        emulator.create_bucket("lake")
        yield emulator


class StoreHarness:
    def __init__(self, emulator: S3Emulator) -> None:
        self._url = f"s3://lake/{uuid.uuid4().hex}"
        self._options = emulator.options

    def open(self) -> Destination:
        return DeltaDestination(self._url, storage_options=self._options, maintenance=False)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        reader = DeltaReader(self._url, self._options)
        if str(schema) not in reader.tables():
            return None
        return rows_of(reader.read_table(str(schema)), reader.schema(str(schema)))


class TestOnS3(DeltaContract):
    @pytest.fixture
    def harness(self, emulator: S3Emulator) -> StoreHarness:
        return StoreHarness(emulator)
