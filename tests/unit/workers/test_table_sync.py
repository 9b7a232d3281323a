"""Table sync workers, as far as they need no server; whole copies are in tests/e2e."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.transform import Transforms
from penstock.copy import CopySettings
from penstock.destinations.memory import MemoryDestination
from penstock.lsn import Lsn
from penstock.source import SourceSettings
from penstock.spool import Stopping
from penstock.state import Init, MemoryStore
from penstock.values import TypeSettings
from penstock.workers import BatchSettings, Board, SchemaChanges, SyncPool, TableSync
from penstock.workers.process_tasks import ProcessTasks

TABLE = 7


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def worker(tmp_path: Path, stop: threading.Event) -> TableSync:
    store = MemoryStore("p")
    store.acquire_lease()
    store.update_table_replication_state(TABLE, Init())
    return TableSync(
        TABLE,
        reader="tables",
        source=SourceSettings("postgresql://127.0.0.1:1/none"),
        publication="p",
        spool=tmp_path,
        board=Board(store, Lsn(1), lambda _: None),
        store=store,
        destination=MemoryDestination(),
        tasks=ProcessTasks(),
        stop=stop,
        batches=BatchSettings(),
        copy=CopySettings(),
        types=TypeSettings(),
        transforms=Transforms(),
        schema_changes=SchemaChanges(),
        known_as=None,
    )


def test_a_copy_that_starts_when_the_output_stops_asks_neither_source_nor_destination(
    worker: TableSync, stop: threading.Event
) -> None:
    stop.set()
    with pytest.raises(Stopping):
        worker.run(SyncPool(1))


def test_a_copy_goes_no_further_when_the_output_stops_meanwhile(
    worker: TableSync, stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(_: Any) -> tuple[None, int]:
        stop.set()
        return None, 0

    monkeypatch.setattr(TableSync, "_describe", describe)
    # The destination would refuse to drop None.
    with pytest.raises(Stopping):
        worker.run(SyncPool(1))
