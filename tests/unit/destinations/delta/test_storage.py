"""Storage: whole files, for one caller, durable when it returns. Object stores have tests on a server."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.storage import LocalStorage, ObjectStorage, open_storage
from penstock.errors import ConfigError, DestinationUnavailable
from penstock.testing.destinations import make_context


def test_a_path_or_url_chooses_the_storage(tmp_path: Path) -> None:
    assert open_storage(tmp_path) == LocalStorage(tmp_path)
    assert open_storage(f"file://{tmp_path}") == LocalStorage(tmp_path)
    remote = open_storage("s3://bucket/lake/", {"aws_secret_access_key": "hidden"}).child("public/items")
    assert isinstance(remote, ObjectStorage)
    assert remote.url == "s3://bucket/lake/public/items"
    assert "hidden" not in repr(remote)
    assert pickle.loads(pickle.dumps(remote)) == remote


def test_what_cannot_work_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="options"):
        open_storage(tmp_path, {"aws_region": "x"})
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_storage("nowhere://lake").get("file")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        DeltaDestination(tmp_path / "file" / "below").startup(make_context())


def test_an_endpoint_without_tls_must_be_allowed() -> None:
    storage = open_storage("s3://lake/shop", {"aws_endpoint": "http://127.0.0.1:1", "aws_region": "eu-west-1"})
    with pytest.raises(ConfigError, match="no TLS") as refused:
        storage.get("x")
    assert 'aws_allow_http = "true"' in refused.value.hint


def test_a_store_out_of_reach_is_tried_again() -> None:
    options = {
        "aws_endpoint": "http://127.0.0.1:9",
        "allow_http": "true",
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "aws_region": "us-east-1",
    }
    with pytest.raises(DestinationUnavailable):
        ObjectStorage("s3://bucket/lake", options, retry_seconds=0.2).get("file")


def test_files_are_written_read_listed_and_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path).child("public/items")
    assert storage.get("a/b") is None
    assert storage.get_range("a/b", 0, 1) is None
    assert list(storage.list()) == []
    storage.put("a/b", b"0123456789")
    storage.put("a/b", b"012345678")
    assert storage.get("a/b") == b"012345678"
    assert storage.get_range("a/b", 3, 4) == b"3456"
    with storage.create("c") as file:
        file.write(b"x")
    assert {(file.path, file.bytes) for file in storage.list()} == {("a/b", 9), ("c", 1)}
    assert [file.path for file in storage.list(after="a/b")] == ["c"]
    storage.delete(["a/b", "a/none"])
    assert [file.path for file in storage.list()] == ["c"]
    with storage.open("c") as opened:
        assert opened.read() == b"x"
    with pytest.raises(FileNotFoundError):
        storage.open("none")


def test_a_file_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with pytest.raises(TypeError), storage.create("a") as file:
        file.writelines([b"half", None])
    assert list(storage.list()) == []


def test_an_existing_file_is_never_created_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"first")
    with pytest.raises(FileExistsError), storage.create("a") as file:
        file.write(b"second")
    assert storage.put_if_absent("a", b"third") is False
    assert storage.get("a") == b"first"
    assert [each.path for each in storage.list()] == ["a"]


def test_of_many_who_put_one_succeeds_and_nobody_reads_a_part(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    start = threading.Barrier(9)
    winners: list[int] = []
    torn: list[bytes] = []

    def put(number: int) -> None:
        start.wait()
        if storage.put_if_absent("log/1", bytes([number]) * 100_000):
            winners.append(number)

    def read() -> None:
        start.wait()
        while (content := storage.get("log/1")) is None:
            continue
        if len(content) != 100_000 or len(set(content)) != 1:
            torn.append(content)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(winners) == 1
    assert storage.get("log/1") == bytes(winners) * 100_000
    assert not torn
    assert [each.path for each in storage.list()] == ["log/1"]


@pytest.mark.trap(40)
def test_files_and_their_folders_are_synced_before_a_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, os.fstat(descriptor).st_size if os.path.isfile(path) else -1))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    storage = LocalStorage(tmp_path / "lake")
    with storage.create("data/part") as file:
        file.write(b"rows")
    folders = [path for path, size in synced if size == -1]
    assert synced[-2:] == [(str(tmp_path / "lake/data/part"), 4), (str(tmp_path / "lake/data"), -1)]
    assert folders[:2] == [str(tmp_path / "lake"), str(tmp_path)]
    synced.clear()
    storage.put_if_absent("_delta_log/0", b"commit")
    assert [size for _, size in synced[-2:]] == [6, -1]
    assert synced[-1][0] == str(tmp_path / "lake/_delta_log")


def test_a_storage_answers_for_local_paths_only_where_there_are_some(tmp_path: Path) -> None:
    places: list[Any] = [LocalStorage(tmp_path).local_path("a"), ObjectStorage("s3://b/c").local_path("a")]
    assert places == [tmp_path / "a", None]
