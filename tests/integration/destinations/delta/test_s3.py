"""Tables in an object store: an emulator, which has conditional puts but is no proof; in `make soak` a real server."""

from __future__ import annotations

import pickle
import threading
import time
import uuid

import deltalake
import pyarrow as pa
import pytest

from penstock.changes.keys import row_keys
from penstock.destinations.delta.files import write_data_file
from penstock.destinations.delta.index import IndexFolder, build_index
from penstock.destinations.delta.log import DeltaLog, Lost
from penstock.destinations.delta.maintenance.cleanup import Vacuum, vacuum, write_checkpoint
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.maintenance.pins import pin_version, read_pins, release_pin
from penstock.destinations.delta.snapshot import Verdict
from penstock.destinations.delta.storage import Storage, open_storage
from penstock.errors import ConfigError
from penstock.testing.destinations import LocalTasks
from tests.support.s3 import S3Server
from tests.unit.destinations.delta.lake import LakeTable, make_rows


@pytest.fixture
def storage(s3: S3Server) -> Storage:
    return open_storage("s3://lake", s3.options).child(f"public/{uuid.uuid4().hex}")


def test_files_are_written_read_listed_and_deleted(storage: Storage) -> None:
    storage = pickle.loads(pickle.dumps(storage))
    assert storage.get("a/b") is None
    assert storage.get_range("a/b", 0, 4) is None
    storage.put("a/b", b"0123456789")
    assert storage.get_range("a/b", 3, 4) == b"3456"
    with storage.create("c") as file:
        file.write(b"x")
    assert {(file.path, file.bytes) for file in storage.list()} == {("a/b", 10), ("c", 1)}
    assert all(abs(file.modified - time.time()) < 600 for file in storage.list())
    assert [file.path for file in storage.list(after="a/b")] == ["c"]
    with storage.open("c") as opened:
        assert bytes(opened.read()) == b"x"
    with pytest.raises(FileNotFoundError):
        storage.open("none")
    storage.delete(["a/b", "a/none"])
    assert [file.path for file in storage.list()] == ["c"]


def test_options_come_from_the_environment_too(s3: S3Server, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a", b"x")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    assert open_storage(storage.url).get("a") == b"x"


def test_a_bucket_that_is_not_there_is_a_clear_error(s3: S3Server) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        open_storage("s3://nowhere/lake", s3.options).put("a", b"x")


def test_conditional_puts_that_are_switched_off_are_a_clear_error(s3: S3Server) -> None:
    with pytest.raises(ConfigError, match="only if it is absent"):
        open_storage("s3://lake", {**s3.options, "aws_conditional_put": "disabled"}).put_if_absent("a", b"x")


def test_an_index_that_is_none_is_made_anew(storage: Storage) -> None:
    keys = row_keys([pa.array([5, 6, 7], pa.int64())])
    folder = IndexFolder.of(storage, [pa.field("id", pa.int64())])
    storage.put(folder.path("data.parquet"), b"what an older version has left there, or half of an index")
    found = folder.open("data.parquet", lambda: build_index(keys))
    assert found.row_count == 3
    assert storage.get(folder.path("data.parquet")) == build_index(keys)


def test_of_many_who_put_one_succeeds(storage: Storage) -> None:
    start = threading.Barrier(6)
    winners: list[tuple[int, int]] = []

    def put(number: int) -> None:
        start.wait()
        winners.extend(
            (turn, number) for turn in range(20) if storage.put_if_absent(f"log/{turn}", bytes([number]) * 1000)
        )

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(turn for turn, _ in winners) == list(range(20))
    assert all(storage.get(f"log/{turn}") == bytes([number]) * 1000 for turn, number in winners)


def test_no_commit_of_racing_writers_is_lost_or_doubled(storage: Storage) -> None:
    table = LakeTable(storage)
    table.create(range(20))
    writers = [LakeTable(storage) for _ in range(3)]
    start = threading.Barrier(len(writers))

    def append(number: int) -> None:
        writer = writers[number]
        start.wait()
        for count in range(4):
            add = write_data_file(storage, make_rows([100 * (number + 1) + count]))
            snapshot = writer.snapshot
            while isinstance(answer := writer.log.commit(snapshot, [*writer.head(), add]), Lost):
                assert answer.verdict(writer.application) is Verdict.OWN_POSITION
                snapshot = answer.snapshot

    threads = [threading.Thread(target=append, args=(number,)) for number in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert table.snapshot.version == 12
    assert table.ids() == [*range(20), *(100 * (number + 1) + count for number in range(3) for count in range(4))]


@pytest.mark.trap(34)
def test_a_zombie_that_continues_after_a_new_copy_changes_nothing(storage: Storage) -> None:
    table = LakeTable(storage)
    table.create(range(20))
    zombie = LakeTable(storage)
    before = zombie.snapshot
    actions = [*zombie.head(), *zombie.delete_actions(before, [3]), write_data_file(storage, make_rows([999]))]
    table.copy([1, 2], attempt="2")
    answer = zombie.log.commit(before, actions)
    assert isinstance(answer, Lost)
    assert answer.verdict(zombie.application) is Verdict.SUPERSEDED
    assert table.ids() == [1, 2]


def test_maintenance_works_in_a_bucket_and_others_read_the_table(storage: Storage) -> None:
    table = LakeTable(storage)
    table.create(range(50))
    for number in range(4):
        table.append([100 + number])
    table.delete([7, 101])
    expected = table.ids()
    assert write_checkpoint(storage) == table.snapshot.version
    assert DeltaLog(storage).refresh() == table.snapshot
    pin = pin_version(storage, table.snapshot.version, seconds=60, reason="test")
    assert read_pins(storage) == [pin]
    assert compact(table.log, LocalTasks(), CompactionSettings(min_files=2)) is not None
    vacuum(Vacuum(storage, 0, time.time() + 60))
    assert table.ids(table.log.read_at(pin.version)) == expected
    release_pin(storage, pin)
    assert vacuum(Vacuum(storage, 0, time.time() + 60)).files > 0
    table.delete([8])
    delta = deltalake.DeltaTable(storage.url, storage_options=dict(storage.options))
    found = deltalake.QueryBuilder().register("t", delta).execute("select id from t order by id").read_all()
    assert found["id"].to_pylist() == [each for each in expected if each != 8] == table.ids()
