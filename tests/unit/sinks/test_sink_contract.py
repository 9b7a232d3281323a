"""Sinks that need no server do what every sink does."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.documents.base import Sink
from penstock.documents.sinks import MemorySink
from penstock.sinks.delta import DeltaSink
from penstock.sinks.files import NdjsonSink, ParquetSink
from penstock.testing.sinks import SinkContract
from tests.support.document_sink import FileSink


class TestMemorySink(SinkContract):
    shared = False

    def open(self) -> Sink:
        return MemorySink()


class TestFileSink(SinkContract):
    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "documents.db"

    def open(self) -> Sink:
        return FileSink(self.path)


class TestNdjsonSink(SinkContract):
    kind = NdjsonSink

    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open(self) -> Sink:
        return self.kind(str(self.path))


class TestParquetSink(TestNdjsonSink):
    kind = ParquetSink


class TestDeltaSink(TestNdjsonSink):
    kind = DeltaSink


class TestDeltaSinkWithoutVectors(TestNdjsonSink):
    def open(self) -> Sink:
        return DeltaSink(str(self.path), deletion_vectors=False)
