"""The contract of destinations, on a real broker."""

from __future__ import annotations

import pytest

from penstock.testing.destinations import DestinationContract
from tests.support.kafka import Kafka


class TestEnvelope(DestinationContract):
    @pytest.fixture
    def harness(self, kafka: Kafka) -> Kafka:
        return kafka
