"""What the catalog shows and the stream does not, against copies that end at the same time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from penstock.changes.transform import Transforms
from penstock.copy import CopySettings
from penstock.destinations.memory import MemoryDestination
from penstock.source.shapes import HeapShape, TableShape
from penstock.state import Init, MemoryStore, Ready, TableReplicationPhase
from penstock.values import TypeSettings
from penstock.workers.catalog_changes import CatalogChanges, CatalogSettings
from penstock.workers.failures import SchemaChanges

TABLE = 16384


class EndingCopy:
    """A board on which a copy ends while its phases are being read."""

    def __init__(self, store: MemoryStore, copied: TableShape) -> None:
        self._store = store
        self._copied = copied
        self.phase_set: TableReplicationPhase | None = None

    def phases(self) -> Mapping[int, TableReplicationPhase]:
        self._store.store_table_shapes({TABLE: self._copied})
        return {TABLE: Ready()}

    def phase(self, table_id: int) -> TableReplicationPhase:
        return Ready()

    def name_of(self, table_id: int) -> str:
        return "public.parted"

    def set_phase(self, table_id: int, phase: TableReplicationPhase) -> None:
        self.phase_set = phase


def heap(name: str, *, born: bool) -> HeapShape:
    return HeapShape("1", "p", " 700", born, "1:700", name)


def test_a_partition_that_was_attached_during_a_copy_is_noticed_when_the_copy_ends(monkeypatch: Any) -> None:
    before = TableShape({1: heap("public.low", born=True)}, {1: "id"}, is_partitioned=True)
    now = TableShape({**before.heaps, 2: heap("public.high", born=False)}, {1: "id"}, is_partitioned=True)
    store = MemoryStore("parted")
    store.acquire_lease()
    board = EndingCopy(store, before)
    nothing: Any = None
    settings = CatalogSettings(nothing, "pub", CopySettings(), TypeSettings(), records_ddl=False)
    changes = CatalogChanges(
        *(settings, nothing, board, store, MemoryDestination(), nothing, threading.Event()),  # pyright: ignore
        transforms=Transforms(),
        policy_of=lambda _: SchemaChanges(),
        known_as=lambda _: None,
    )
    monkeypatch.setattr(changes, "_brings_rows", lambda heap: True)
    changes.notice({TABLE: now}, {})
    assert isinstance(board.phase_set, Init)
    assert "public.high was attached" in (board.phase_set.reason or "")
