"""A pipeline from a real Postgres into Snowflake: the emulator, by the real connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.destinations.snowflake import SnowflakeDestination
from penstock.testing.snowflake import EmulatedSnowflake, why_not
from tests.e2e.warehouses import follow_a_real_server


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatedSnowflake]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedSnowflake() as server:
        yield server


def test_snowflake_follows_a_real_server(database, emulator, tmp_path):
    destination = SnowflakeDestination(**emulator.options("MIRROR", commit_interval=0.5))
    destination.probe()

    def schema_of(table: str):
        with destination._connection.session() as session:
            records = destination._control.load(session).values()
        return next(each.layout.schema for each in records if each.source == table)

    follow_a_real_server(database, destination, tmp_path, schema_of)
