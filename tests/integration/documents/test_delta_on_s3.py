"""Documents as a Delta table in an object store do what every sink does. An emulator; in `make soak` a real server."""

from __future__ import annotations

import uuid

import pytest

from penstock.documents.base import Sink
from penstock.sinks.delta import DeltaSink
from penstock.testing.sinks import SinkContract
from tests.support.s3 import S3Server


class TestDeltaSinkOnS3(SinkContract):
    @pytest.fixture(autouse=True)
    def in_bucket(self, s3: S3Server) -> None:
        self.url, self.options = f"s3://lake/{uuid.uuid4().hex}", s3.options

    def open(self) -> Sink:
        return DeltaSink(self.url, storage_options=self.options)
