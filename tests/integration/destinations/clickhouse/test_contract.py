"""The contract of destinations, on the real engine."""

from __future__ import annotations

import pytest

from penstock.testing.destinations import DestinationContract
from tests.support.clickhouse import ClickHouse


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, clickhouse: ClickHouse) -> ClickHouse:
        return clickhouse
