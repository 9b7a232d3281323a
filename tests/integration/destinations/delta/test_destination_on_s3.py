"""The Delta destination on an object store: the whole contract. An emulator; in `make soak` a real server."""

from __future__ import annotations

import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta import index, split, tasks
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.index import IndexFolder, build_index
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.delta.storage import open_storage
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import FOLDERS
from penstock.errors import ConfigError
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract, LocalTasks, ScriptedSource, make_context
from tests.support.s3 import S3Server
from tests.unit.changes.random_changes import KEYED, RandomTable
from tests.unit.destinations.delta.following import frozen
from tests.unit.destinations.delta.reading import rows_of


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


class TestOnS3(DestinationContract):
    @pytest.fixture
    def harness(self, s3: S3Server) -> StoreHarness:
        return StoreHarness(s3)


@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_a_part_that_is_split_over_tasks(
    mode: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes that tasks leave for each other are in the store, and are deleted."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 5)
    monkeypatch.setattr(split, "GROUP_BYTES", 1)
    monkeypatch.setattr(split, "PATIENCE", 0)
    url, running = f"s3://lake/{uuid.uuid4().hex}", LocalTasks(parallel=3)
    destination = DeltaDestination(url, storage_options=s3.options, maintenance=False, mode=mode)
    destination.startup(make_context(tasks=running))
    source = ScriptedSource(tmp_path / "segments", segment_rows=3)
    table = RandomTable(KEYED, Random(7))
    destination.drop_table_for_copy(KEYED, "attempt-1")
    destination.write_table_rows(KEYED, source.copy(KEYED, table.fill(10)))
    reader = DeltaReader(url, s3.options)
    for _ in range(8):
        table.transact(source, 12)
        assert destination.write_events(source.batch()).result().tables == {}
        rows = rows_of(reader.read_table(str(KEYED)), reader.schema(str(KEYED)))
        assert frozen(rows) == frozen(MirrorTable(KEYED, table.rows).rows())
    assert any(job.startswith("unite") for job in running.jobs)
    left = open_storage(url, s3.options).child(FOLDERS.table(KEYED)).list(split.NOTES_FOLDER)
    assert [file.path for file in left] == []


def test_copies_of_indexes_do_not_pile_up(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine; in the store they go with their files."""
    monkeypatch.setattr(index, "cache_folder", lambda: tmp_path)
    folder = IndexFolder(open_storage("s3://lake/indexed", s3.options), "digest")
    content = build_index(pa.array([1, 2, 3]))
    for number in range(100):
        folder.write(f"file-{number}", content)
    copies = list(tmp_path.rglob("*.digest"))
    assert len(copies) == 100
    folder.tidy(["file-1", "file-2"])
    assert sorted(path.name for path in tmp_path.rglob("*.digest")) == ["file-1.digest", "file-2.digest"]
    found = folder.open("file-50", lambda: pytest.fail("the store has it"))
    assert found.row_count == 3


class CarelessStore(BaseHTTPRequestHandler):
    """Keeps objects, and takes no notice of conditions."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {"ETag": '"1"'})

    def do_GET(self) -> None:
        found = self.objects.get(self.path)
        self._answer(404 if found is None else 200, {"ETag": '"1"', "Last-Modified": self.date_time_string()}, found)

    def log_message(self, *arguments: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nobody wants to read it."""

    def _answer(self, status: int, headers: dict[str, str], body: bytes | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body or b""))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body or b"")


@pytest.mark.trap(34)
def test_a_store_without_conditional_puts_is_refused() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), CarelessStore) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            options = {"aws_endpoint": f"http://127.0.0.1:{server.server_port}", "aws_allow_http": "true"}
            keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "aws_region": "us-east-1"}
            for _ in range(2):
                destination = DeltaDestination("s3://lake/careless", storage_options=options | keys, maintenance=False)
                with pytest.raises(ConfigError, match="overwrites existing objects"):
                    destination.startup(make_context())
        finally:
            server.shutdown()
