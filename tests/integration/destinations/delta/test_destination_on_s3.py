"""The Delta destination on an object store: the whole contract. An emulator; in `make soak` a real server."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.index import IndexFolder, build_index
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.delta.storage import open_storage
from penstock.schema import TableSchema
from penstock.testing.s3 import S3Server
from tests.unit.destinations.delta.reading import rows_of
from tests.unit.destinations.delta.test_destination import DeltaContract


class StoreHarness:
    def __init__(self, s3: S3Server) -> None:
        self._url = f"s3://lake/{uuid.uuid4().hex}"
        self._options = s3.options

    def open(self) -> Destination:
        return DeltaDestination(self._url, storage_options=self._options, maintenance=False)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        reader = DeltaReader(self._url, self._options)
        if str(schema) not in reader.tables():
            return None
        return rows_of(reader.read_table(str(schema)), reader.schema(str(schema)))


class TestOnS3(DeltaContract):
    @pytest.fixture
    def harness(self, s3: S3Server) -> StoreHarness:
        return StoreHarness(s3)


def test_copies_of_indexes_do_not_pile_up(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine; in the store they go with their files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = IndexFolder(open_storage("s3://lake/indexed", s3.options), "digest")
    content = build_index(pa.array([1, 2, 3]))
    for number in range(100):
        folder.write(f"file-{number}", content)
    copies = list(tmp_path.rglob("*.digest"))
    assert len(copies) == 100
    folder.tidy(["file-1", "file-2"])
    assert sorted(path.name for path in tmp_path.rglob("*.digest")) == ["file-1.digest", "file-2.digest"]
    index = folder.open("file-50", lambda: pytest.fail("the store has it"))
    assert index.row_count == 3
