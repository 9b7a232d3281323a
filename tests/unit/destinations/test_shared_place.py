"""A destination that executors see differently is noticed before anything is committed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.parquet import ParquetDestination
from penstock.destinations.shared_place import Folder, Place, require_shared
from penstock.errors import ConfigError, DestinationUnavailable
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import ORDERS
from tests.unit.destinations.delta.orders import order


@dataclass
class OtherMachine:
    """Tasks on a machine that has another disk at a path."""

    path: Path
    disk: Path
    items_here: float = 0.5
    """Of the items of a job, the part that a machine with the driver's disk runs."""
    elsewhere: bool = True
    parallel: int = 1

    @contextmanager
    def _mounted(self) -> Iterator[None]:
        here = self.path.with_name("of the driver")
        self.disk.mkdir(exist_ok=True)
        self.path.rename(here)
        self.disk.rename(self.path)
        try:
            yield
        finally:
            self.path.rename(self.disk)
            here.rename(self.path)

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        here = items[: int(len(items) * self.items_here)]
        found = LocalTasks().run(here, function, description=description)
        with self._mounted():
            return found + LocalTasks().run(items[len(here) :], function, description=description)

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


def places(folder: Path) -> list[Place]:
    return [Folder(folder), LocalStorage(folder)]


@pytest.mark.parametrize("number", [0, 1])
def test_executors_that_see_the_destination_are_accepted_and_nothing_is_left_there(tmp_path: Path, number: int) -> None:
    place = places(tmp_path)[number]
    tasks = LocalTasks(elsewhere=True)
    require_shared(make_context(tasks=tasks), place)
    assert len(tasks.jobs) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_nothing_is_asked_if_tasks_run_on_this_machine(tmp_path: Path) -> None:
    tasks = LocalTasks()
    require_shared(make_context(tasks=tasks), Folder(tmp_path))
    assert tasks.jobs == []


@pytest.mark.parametrize("kind", [DeltaDestination, ParquetDestination])
@pytest.mark.parametrize("content", ["empty", "copied"])
def test_a_start_is_refused_if_an_executor_has_another_disk_there(tmp_path: Path, kind: Any, content: str) -> None:
    lake, disk = tmp_path / "lake", tmp_path / "other"
    destination = kind(lake)
    destination.startup(make_context())
    destination.shutdown()
    if content == "copied":
        shutil.copytree(lake, disk)
    with pytest.raises(ConfigError, match=f"does not see {lake}") as caught:
        kind(lake).startup(make_context(tasks=OtherMachine(lake, disk)))
    assert "mount a shared file system" in caught.value.hint


class ReadOnly(Folder):
    """For executors."""

    def put(self, path: str, content: bytes) -> None:
        if "-" in path:
            raise PermissionError(13, "Permission denied")
        Folder.put(self, path, content)


def test_an_executor_that_may_not_write_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Permission denied"):
        require_shared(make_context(tasks=LocalTasks(elsewhere=True)), ReadOnly(tmp_path))


@pytest.mark.parametrize("kind", [DeltaDestination, ParquetDestination])
def test_what_an_executor_that_joined_later_writes_elsewhere_is_not_committed(tmp_path: Path, kind: Any) -> None:
    lake, disk = tmp_path / "lake", tmp_path / "other"
    source = ScriptedSource(tmp_path / "segments")
    tasks = OtherMachine(lake, disk, items_here=1.0, elsewhere=False)
    destination = kind(lake)
    destination.startup(make_context(tasks=tasks))
    try:
        rows = source.copy(ORDERS, [order(1)])
        destination.drop_table_for_copy(ORDERS, rows.attempt)
        shutil.copytree(lake, disk)
        tasks.items_here = 0.0
        with pytest.raises(DestinationUnavailable, match="does not see a file"):
            destination.write_table_rows(ORDERS, rows)
        tasks.items_here = 1.0
        destination.write_table_rows(ORDERS, rows)
        shutil.rmtree(disk)
        shutil.copytree(lake, disk)
        tasks.items_here = 0.0
        for change in ("insert", "delete"):
            with source.transaction() as transaction:
                getattr(transaction, change)(ORDERS, order(1 if change == "delete" else 2))
            with pytest.raises(DestinationUnavailable, match="does not see a file"):
                destination.write_events(source.batch(begin=rows.position)).result()
    finally:
        destination.shutdown()
