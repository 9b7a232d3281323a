"""Segments where tasks run: the driver's file if it is the same, otherwise its bytes from the driver."""

from __future__ import annotations

import http.client
import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.changes import segment_files
from penstock.changes.segment import COMMIT_LSN
from penstock.changes.segment_files import PROOF, Origin, SegmentServer, origin_of
from penstock.changes.steps import Segment
from penstock.destinations.batch_events import read_segment
from penstock.errors import DestinationUnavailable
from penstock.lsn import Lsn, OrderKey

KEY = OrderKey(Lsn(1), 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    with SegmentServer(tmp_path / "spool", host="127.0.0.1") as running:
        yield running


def write_segment(origin: Origin, rows: int = 3, name: str = "a b.parquet") -> Segment:
    """Of about 40 bytes per row."""
    path = Path(origin.root) / "segments" / "000000000001" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {COMMIT_LSN: pa.array(range(rows), pa.int64()), "text": [f"{number:032x}" for number in range(rows)]}
    )
    pq.write_table(table, path, compression="none", use_dictionary=False)
    return Segment(1, "public.t", "v", str(path), rows, path.stat().st_size, KEY, KEY, origin=origin)


def elsewhere(server: SegmentServer) -> None:
    """Let this process be on a machine that does not see the spool."""
    (Path(server.origin.root) / PROOF).write_text("of another driver")


def get(origin: Origin, path: str, token: str | None = None, span: str = "bytes=0-0") -> int:
    link = http.client.HTTPConnection(origin.host, origin.port, timeout=30)
    try:
        link.putrequest("GET", path, skip_host=True)
        link.putheader("Authorization", f"Bearer {origin.token if token is None else token}")
        link.putheader("Range", span)
        link.endheaders()
        return link.getresponse().status
    finally:
        link.close()


def test_a_task_that_sees_the_drivers_file_reads_it_itself(server: SegmentServer) -> None:
    segment = pickle.loads(pickle.dumps(write_segment(server.origin)))
    assert segment.read().num_rows == 3
    assert server.bytes_sent == 0


def test_a_task_elsewhere_reads_from_the_driver(server: SegmentServer) -> None:
    segment = pickle.loads(pickle.dumps(write_segment(server.origin)))
    elsewhere(server)
    assert segment.read().column("text").to_pylist() == [f"{number:032x}" for number in range(3)]
    assert segment.arrow_schema().names == [COMMIT_LSN, "text"]
    assert server.bytes_sent == 2 * segment.bytes


def test_an_equal_path_with_another_file_is_not_the_drivers_file(server: SegmentServer, tmp_path: Path) -> None:
    segment = write_segment(server.origin, rows=5)
    # Another machine has the same paths, with another spool.
    other = tmp_path / "other"
    (Path(server.origin.root)).rename(other)
    foreign = write_segment(server.origin, rows=2)
    (Path(server.origin.root) / PROOF).write_text(server.origin.proof)
    assert foreign.path == segment.path
    server._server.folder = other / "segments"
    # Its number is right, as in a copy of the disk, but the file is not.
    assert segment.read().num_rows == 5
    (Path(server.origin.root) / PROOF).unlink()
    assert segment.read().num_rows == 5


def test_a_large_segment_is_read_in_parts(server: SegmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = write_segment(server.origin, rows=200_000)
    assert segment.bytes > 4 * segment_files._WHOLE_BYTES
    elsewhere(server)
    lengths: list[int] = []
    fetch = segment_files._fetch
    monkeypatch.setattr(segment_files, "_fetch", lambda *arguments: lengths.append(arguments[3]) or fetch(*arguments))
    assert segment.read([COMMIT_LSN]).num_rows == 200_000
    assert sum(lengths) < segment.bytes / 2
    assert segment.read().equals(pq.read_table(segment.path))


def test_a_deleted_segment_is_not_found(server: SegmentServer) -> None:
    segment = write_segment(server.origin)
    elsewhere(server)
    Path(segment.path).unlink()
    with pytest.raises(FileNotFoundError):
        segment.read()


def test_a_segment_that_is_deleted_while_it_is_sent_arrives_whole(
    server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "_WHOLE_BYTES", 1 << 30)
    segment = write_segment(server.origin, rows=200_000)
    expected = pq.read_table(segment.path)
    elsewhere(server)
    opened = threading.Event()

    class Deleting(segment_files._Handler):
        def end_headers(self) -> None:
            Path(segment.path).unlink()
            opened.set()
            super().end_headers()

    server._server.RequestHandlerClass = Deleting
    assert segment.read().equals(expected)
    assert opened.is_set()


@pytest.mark.parametrize(
    "path",
    ["/lineage.json", "/segments/x/../../lineage.json", "/segments/%2e%2e/lineage.json", "/segments//lineage.json",
     "/segments/000000000001/link", "//etc/passwd"],
)  # fmt: skip
def test_only_segments_are_served(server: SegmentServer, path: str) -> None:
    segment = write_segment(server.origin)
    secret = Path(server.origin.root) / "lineage.json"
    secret.write_text("secret")
    (Path(segment.path).parent / "link").symlink_to(secret)
    assert get(server.origin, path) == 404


def test_nothing_is_served_without_the_token(server: SegmentServer) -> None:
    write_segment(server.origin, name="a.parquet")
    path = "/segments/000000000001/a.parquet"
    assert get(server.origin, path) == 206
    assert get(server.origin, path, token="") == 403
    assert get(server.origin, path, token="é") == 403
    assert get(server.origin, path, token=server.origin.token[:-1]) == 403
    for span in ("bytes=0-", "bytes=5-1", "bytes=0-99999999999", ""):
        assert get(server.origin, path, span=span) in (400, 416)


def test_the_token_is_in_no_text_log_or_file(server: SegmentServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    segment = write_segment(server.origin)
    elsewhere(server)
    segment.read()
    with pytest.raises(DestinationUnavailable) as caught:
        replace(segment, origin=replace(server.origin, token="wrong")).read()
    texts = [repr(segment), str(server.origin), caplog.text, str(caught.value), caught.value.hint]
    texts += [path.read_bytes().decode("latin-1") for path in Path(server.origin.root).rglob("*") if path.is_file()]
    assert all(server.origin.token not in text for text in texts)


@pytest.mark.parametrize("rows", [3, 200_000])
def test_a_driver_that_cannot_be_reached_is_named_and_retried(server: SegmentServer, rows: int) -> None:
    segment = write_segment(server.origin, rows)
    server.origin.reach()
    elsewhere(server)
    server.origin.reach()
    server.close()
    with pytest.raises(DestinationUnavailable, match=rf"127\.0\.0\.1:{server.origin.port}") as caught:
        read_segment(segment)
    assert "segment_port" in caught.value.hint
    with pytest.raises(DestinationUnavailable):
        server.origin.reach()


def test_a_large_segment_that_is_deleted_between_two_reads_is_not_found(server: SegmentServer) -> None:
    segment = write_segment(server.origin, 200_000)
    elsewhere(server)
    with segment.open() as file:
        assert file.read(4) == b"PAR1"
        Path(segment.path).unlink()
        with pytest.raises(FileNotFoundError):
            file.read(4)


def test_a_connection_that_breaks_is_made_again(server: SegmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = write_segment(server.origin)
    elsewhere(server)
    process_request, broken = server._server.process_request, []

    def process(request: socket.socket, address: object) -> None:
        if len(broken) < 2:
            broken.append(address)
            raise RuntimeError("can't start new thread")
        process_request(request, address)

    monkeypatch.setattr(server._server, "process_request", process)
    assert segment.read().num_rows == 3
    assert len(broken) == 2


def test_readers_of_a_served_spool_give_segments_its_origin(server: SegmentServer) -> None:
    assert origin_of(Path(server.origin.root)) == server.origin
    server.close()
    assert origin_of(Path(server.origin.root)) is None


def test_another_process_reads_what_it_is_sent(server: SegmentServer, tmp_path: Path) -> None:
    segment = write_segment(server.origin)
    elsewhere(server)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read().num_rows)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(segment), capture_output=True, check=True)
    assert done.stdout == b"3\n"
