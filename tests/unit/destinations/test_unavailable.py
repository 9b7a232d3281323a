"""A destination that cannot be written: the whole batch fails and is tried again; no table is blamed for it."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import Destination, WriteResult
from penstock.destinations.delta import destination as delta
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.http import HttpDestination
from penstock.destinations.parquet import destination as parquet
from penstock.destinations.parquet import folder as parquet_folder
from penstock.destinations.parquet import tasks as parquet_tasks
from penstock.errors import ConfigError, DestinationUnavailable, PenstockError, Retry, TableBusy, TableRejected
from penstock.state import DataSync, FinishedCopy, Init, Ready, SyncDone
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import ITEMS, ORDERS
from penstock.workers.failures import as_error
from tests.unit.destinations.receiver import Receiver

Open = Callable[[], Destination]


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/lake/file")


def away(*_: object, **__: object) -> None:
    raise DestinationUnavailable("the store is unreachable")


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


@pytest.fixture(params=[delta.DeltaDestination, parquet.ParquetDestination], ids=["delta", "parquet"])
def open_destination(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    def make() -> Destination:
        destination = request.param(tmp_path / "lake")
        destination.startup(make_context())
        return destination

    return make


def copied(destination: Destination, source: ScriptedSource) -> Destination:
    for schema in (ORDERS, ITEMS):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, [], attempt="attempt-1"))
    return destination


def change_both(source: ScriptedSource) -> None:
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 1, "note": "n", "due": None})
        transaction.insert(
            ITEMS, {column.name: 1 if column.type.name.startswith("int") else None for column in ITEMS.columns}
        )


PLACES = [
    ("delta", DeltaLog, "refresh", away),
    ("delta", LocalStorage, "create", full),
    ("delta", LocalStorage, "put_if_absent", full),
    ("parquet", parquet_tasks, "sync_folder", full),
    ("parquet", parquet_folder, "put_if_absent", full),
]


@pytest.mark.parametrize(("kind", "owner", "name", "fault"), PLACES, ids=[f"{each[0]} {each[2]}" for each in PLACES])
def test_a_full_or_unreachable_store_fails_the_batch_and_it_is_written_when_that_is_over(
    kind: str, owner: object, name: str, fault: Callable[..., None], tmp_path: Path, source: ScriptedSource
) -> None:
    make = delta.DeltaDestination if kind == "delta" else parquet.ParquetDestination
    destination = make(tmp_path / "lake")
    destination.startup(make_context())
    copied(destination, source)
    change_both(source)
    batch = source.batch()
    before = {schema: destination.position(schema.table_id) for schema in (ORDERS, ITEMS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fault)
        with pytest.raises(DestinationUnavailable) as caught:
            destination.write_events(batch).result()
    assert caught.value.retry is Retry.TIMED
    assert {schema: destination.position(schema.table_id) for schema in (ORDERS, ITEMS)} == before
    assert destination.write_events(batch).result().tables == {}
    assert destination.position(ORDERS.table_id) == destination.position(ITEMS.table_id) == batch.end


def test_a_folder_that_is_not_mounted_is_waited_for(
    open_destination: Open, tmp_path: Path, source: ScriptedSource
) -> None:
    destination = copied(open_destination(), source)
    change_both(source)
    batch = source.batch()
    (tmp_path / "lake").rename(tmp_path / "elsewhere")
    with pytest.raises(DestinationUnavailable, match="mounted"):
        destination.write_events(batch).result()
    with pytest.raises(DestinationUnavailable, match="mounted"):
        destination.drop_table_for_copy(ORDERS, "attempt-2")
    assert not (tmp_path / "lake").exists(), "nothing is written to the mount point"
    (tmp_path / "elsewhere").rename(tmp_path / "lake")
    assert destination.write_events(batch).result().tables == {}


@pytest.mark.parametrize("moment", ["before the plan", "before the tasks", "before the commit"])
def test_a_disk_that_is_unmounted_during_a_batch_is_waited_for(
    open_destination: Open, tmp_path: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """No table is blamed, nothing is written to the mount point, and no change is taken for durable."""
    copied(open_destination(), source)
    destination = open_destination()
    change_both(source)
    batch = source.batch()
    lake, elsewhere = tmp_path / "lake", tmp_path / "elsewhere"
    run = LocalTasks.run

    def unmount() -> None:
        if lake.exists():
            lake.rename(elsewhere)
            lake.mkdir()

    def unmounted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: Any, **named: Any) -> object:
            unmount()
            return function(*arguments, **named)

        return call

    def run_then_unmount(self: LocalTasks, *arguments: Any, **named: Any) -> list[Any]:
        results = run(self, *arguments, **named)
        unmount()
        return results

    with monkeypatch.context() as patch:
        match moment:
            case "before the plan":
                patch.setattr(destination, "_plan", unmounted(destination._plan))
            case "before the tasks":
                patch.setattr(LocalTasks, "run", unmounted(run))
            case _:
                patch.setattr(LocalTasks, "run", run_then_unmount)
        with pytest.raises(DestinationUnavailable, match="mounted"):
            destination.write_events(batch).result()
    assert not list(lake.rglob("*"))
    lake.rmdir()
    elsewhere.rename(lake)
    assert destination.write_events(batch).result().tables == {}
    fresh = open_destination()
    assert fresh.position(ORDERS.table_id) == fresh.position(ITEMS.table_id) == batch.end


def test_a_start_waits_for_the_disk_that_has_the_tables(
    open_destination: Open, tmp_path: Path, source: ScriptedSource
) -> None:
    destination = copied(open_destination(), source)
    context = make_context()
    context.store.acquire_lease()
    for phase in (Init(), DataSync(), FinishedCopy(), SyncDone(source.position), Ready()):
        context.store.update_table_replication_state(ORDERS.table_id, phase)
    (tmp_path / "lake").rename(tmp_path / "elsewhere")
    with pytest.raises(DestinationUnavailable, match="mounted") as caught:
        type(destination)(tmp_path / "lake").startup(context)
    assert not (tmp_path / "lake").exists()
    # What the error says if the tables were deleted on purpose.
    command = caught.value.hint.partition(": ")[2].partition(", then")[0]
    subprocess.run(command, shell=True, check=True)
    again = type(destination)(tmp_path / "lake")
    again.startup(context)
    copied(again, source)
    assert again.position(ORDERS.table_id) is not None


def test_a_folder_that_may_not_be_written_is_waited_for(
    open_destination: Open, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = copied(open_destination(), source)
    change_both(source)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/lake/file")

    monkeypatch.setattr(LocalStorage, "create", denied)
    monkeypatch.setattr(parquet_folder, "put_if_absent", denied)
    with pytest.raises(DestinationUnavailable, match="Permission denied"):
        destination.write_events(source.batch()).result()


def test_a_receiver_that_does_not_answer_fails_the_batch(source: ScriptedSource) -> None:
    with closing(Receiver()) as receiver:
        destination = HttpDestination(receiver.url, retry_seconds=0.1)
        destination.startup(make_context())
        copied(destination, source)
        change_both(source)
    with pytest.raises(DestinationUnavailable, match="unreachable"):
        destination.write_events(source.batch()).result()


def test_what_concerns_all_tables_cannot_be_returned_as_the_error_of_one() -> None:
    rejected = TableRejected("no", table="t")
    for error in (DestinationUnavailable("away"), ConfigError("access denied")):
        with pytest.raises(type(error)):
            WriteResult.failures({1: rejected, 2: error})
    for mine in (rejected, TableBusy("others"), PenstockError("unknown")):
        assert WriteResult.failures({1: mine}).of(1).error is mine
        assert WriteResult.failures({1: mine}).of(2).error is None


def test_a_disk_that_is_full_when_a_copy_begins_is_tried_again(
    open_destination: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = open_destination()
    monkeypatch.setattr(LocalStorage, "put_if_absent", full)
    monkeypatch.setattr(parquet_folder, "put_if_absent", full)
    with pytest.raises(OSError, match="No space left") as caught:
        destination.drop_table_for_copy(ORDERS, "attempt-1")
    error = as_error(caught.value)
    assert error.retry is Retry.TIMED
    assert "No space left on device (/lake/file)" in error.message
