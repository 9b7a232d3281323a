"""Running tables, without a server: what commands and the publication do to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.errors import Retry
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.source.lineage import Ancestry, Lineage
from penstock.source.membership import Membership, RowVersion
from penstock.spool import SpoolSettings
from penstock.state import (
    CommandKind,
    CommandStatus,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    MemoryStore,
    Ready,
    RetryPolicy,
    SyncDone,
)
from penstock.state.transitions import fail
from penstock.stream import Published
from penstock.tables import RunningTables, TablesOutput, TablesSettings
from penstock.workers import Lifecycle
from penstock.workers.process_tasks import ProcessTasks

A, B = 1, 2
PUBLISHED = Published(
    Membership(RowVersion(1, "1"), {A: frozenset(), B: frozenset()}, {A: "public.a", B: "public.b"}),
    {A: "public.a", B: "public.b"},
    {},
)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore("test")
    made.acquire_lease()
    made.use_lineage(Ancestry(Lineage("7000000000000000001", 1, "postgres", "penstock")))
    for table in (A, B):
        for phase in (Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(100)), Ready()):
            made.update_table_replication_state(table, phase)
    yield made
    made.close()


def make(store: MemoryStore, folder: Path) -> RunningTables:
    settings = TablesSettings(
        id="test",
        source=SourceSettings("postgresql://nowhere/none"),
        publication="p",
        slot="s",
        spool=SpoolSettings(folder / "spool", min_free_bytes=0),
    )
    output = TablesOutput(settings, store, MemoryDestination(), ProcessTasks())
    return RunningTables(output, Lifecycle("tables"), Lsn(100), PUBLISHED)


@pytest.fixture
def tables(store: MemoryStore, tmp_path: Path) -> RunningTables:
    return make(store, tmp_path)


def ask(tables: RunningTables, kind: CommandKind, *names: str, **options: Any) -> Any:
    asked = tables.store.add_command(kind, names, options=options)
    tables.answer_commands()
    return tables.store.get_command(asked.number)


def phases(tables: RunningTables) -> dict[str, str]:
    assert {tables._name_of(each): phase for each, phase in tables.store.get_table_replication_states().items()} == (
        tables.phases
    )
    return {name: phase.name for name, phase in tables.phases.items()}


def stop_table(store: MemoryStore, table: int, *, lost: bool = False) -> Errored:
    policy = RetryPolicy(Retry.OPERATOR)
    failed = fail(Ready(), reason="x", solution=None, retry_policy=policy, at=datetime.now(UTC), position=Lsn(100))
    store.update_table_replication_state(table, failed)
    if lost:
        from penstock.state.transitions import lose_position

        failed = lose_position(failed)
        store.update_table_replication_state(table, failed)
    return failed


def test_a_resync_of_a_table_that_is_being_copied_changes_no_other(tables: RunningTables) -> None:
    tables._board.set_phase(B, Init())
    tables._board.claim(B, "attempt")
    answer = ask(tables, CommandKind.RESYNC, "public.a", "public.b")
    assert answer.status is CommandStatus.REFUSED
    assert "public.b" in answer.reason
    assert phases(tables) == {"public.a": "ready", "public.b": "init"}
    tables._board.leave(B, "attempt")
    assert ask(tables, CommandKind.RESYNC, "public.a", "public.b").status is CommandStatus.DONE
    assert phases(tables) == {"public.a": "init", "public.b": "init"}


def test_a_resync_without_names_is_for_all_tables(tables: RunningTables) -> None:
    assert ask(tables, CommandKind.RESYNC).status is CommandStatus.DONE
    assert phases(tables) == {"public.a": "init", "public.b": "init"}


def test_a_resync_with_an_unknown_name_changes_nothing(tables: RunningTables) -> None:
    answer = ask(tables, CommandKind.RESYNC, "public.a", "public.nothing")
    assert (answer.status, "public.nothing" in answer.reason) == (CommandStatus.REFUSED, True)
    assert phases(tables) == {"public.a": "ready", "public.b": "ready"}


@pytest.mark.parametrize("other", ["ready", "lost"])
def test_a_rollback_of_a_table_that_cannot_changes_no_other(store: MemoryStore, tmp_path: Path, other: str) -> None:
    stop_table(store, A)
    if other == "lost":
        stop_table(store, B, lost=True)
    tables = make(store, tmp_path)
    before = phases(tables)
    assert ask(tables, CommandKind.ROLLBACK, "public.a", "public.b").status is CommandStatus.REFUSED
    assert phases(tables) == before
    assert ask(tables, CommandKind.ROLLBACK, "public.a").status is CommandStatus.DONE
    assert tables.phases["public.a"] == SyncDone(Lsn(100))


def test_a_rollback_without_names_is_for_all_errored_tables(store: MemoryStore, tmp_path: Path) -> None:
    stop_table(store, A)
    tables = make(store, tmp_path)
    assert ask(tables, CommandKind.ROLLBACK).status is CommandStatus.DONE
    assert phases(tables) == {"public.a": "sync_done", "public.b": "ready"}


@pytest.mark.parametrize("options", [{}, {"step": "leap"}, {"step": "advance", "position": "nowhere"}])
def test_a_command_that_makes_no_sense_is_refused(tables: RunningTables, options: dict[str, str]) -> None:
    assert ask(tables, CommandKind.VERIFY, **options).status is CommandStatus.REFUSED
    assert ask(tables, CommandKind.REBUILD_INDEX).status is CommandStatus.REFUSED


def test_no_copy_of_a_table_begins_while_its_changes_are_written(tables: RunningTables) -> None:
    with tables._board.batch() as positions:
        assert positions.keys() == {A, B}
        assert ask(tables, CommandKind.RESYNC, "public.a").status is CommandStatus.DONE
        assert tables._board.to_copy() == []
        # What the batch did to it does not count any more.
        tables._board.record_progress(Lsn(200), {A: Lsn(200), B: Lsn(200)})
        assert tables._board.positions() == {B: Lsn(200)}
    assert tables._board.to_copy() == [A]
    assert tables.store.get_table_position(A) is None


def test_a_copy_that_has_ended_leaves_nothing_but_its_progress(tables: RunningTables) -> None:
    """Workers have all entries of the spool since their snapshot."""
    worker = weakref.ref(tables._worker(A))
    gc.collect()
    assert worker() is None
    assert (tables.copies, tables.waits) == ({}, {})
