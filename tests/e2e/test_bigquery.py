"""A pipeline from a real Postgres into BigQuery: the emulator, with the fake for change types and offsets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.destinations.bigquery import BigQueryDestination
from penstock.testing.bigquery import EmulatedBigQuery, why_not
from tests.e2e.warehouses import follow_a_real_server


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatedBigQuery]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedBigQuery() as server:
        yield server


def test_bigquery_follows_a_real_server(database, emulator, tmp_path):
    destination = BigQueryDestination(
        emulator.project,
        "shop",
        max_staleness="0s",
        endpoint=emulator.endpoint,
        storage_endpoint=emulator.storage_endpoint,
    )
    destination.probe()

    def schema_of(table: str):
        return next(each.layout.schema for each in destination._records.values() if each.source == table)

    follow_a_real_server(database, destination, tmp_path, schema_of)
