"""OpenSearch does what every sink does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.documents.base import Sink
from penstock.sinks.opensearch import OpenSearchSink
from penstock.testing.sinks import SinkContract


class TestOpenSearchSink(SinkContract):
    @pytest.fixture(autouse=True)
    def on_server(self, make_sink: Callable[..., OpenSearchSink], index_name: str) -> None:
        self.make_sink = make_sink
        self.index = index_name

    def open(self) -> Sink:
        return self.make_sink()
