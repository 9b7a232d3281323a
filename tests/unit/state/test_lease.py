"""Leases and caches when the database does not answer, or answers and is not heard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from penstock.errors import LeaseLost, StateUnusable
from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry
from penstock.state import Init, MemoryState, MemoryStore
from penstock.state.lease import is_gone, this_process
from penstock.state.memory import MemoryDatabase
from penstock.state.store import Store
from penstock.testing.stores import LINEAGE

PATIENCE = 30.0


class Flaky:
    """A database that can be out of reach, or lose its answers after the commit."""

    def __init__(self, database: MemoryDatabase, trouble: dict[str, bool]) -> None:
        self.pipeline_id = database.pipeline_id
        self._database = database
        self._trouble = trouble

    def run(self, work, *, writing=True):
        if self._trouble.get("unreachable"):
            raise StateUnusable("out of reach")
        result = self._database.run(work, writing=writing)
        if writing and self._trouble.get("deaf"):
            raise StateUnusable("no answer")
        return result

    def another(self):
        return Flaky(self._database.another(), {} if self._trouble.get("lease survives") else self._trouble)

    def close(self):
        pass


def flaky_store(**trouble: bool) -> tuple[Store, dict[str, bool]]:
    settings = {key.replace("_", " "): value for key, value in trouble.items()}
    return Store(Flaky(MemoryDatabase("p", MemoryState()), settings)), settings


def test_a_lease_that_cannot_be_renewed_stops_all_writing() -> None:
    store, trouble = flaky_store()
    noticed = threading.Event()
    lease = store.acquire_lease(ttl=0.3, on_lost=lambda _: noticed.set())
    trouble["unreachable"] = True
    assert noticed.wait(PATIENCE)
    trouble.clear()
    assert lease.lost
    with pytest.raises(LeaseLost, match="not be renewed"):
        store.update_table_replication_state(1, Init())
    store.close()


def test_a_short_silence_is_survived() -> None:
    store, trouble = flaky_store()
    lease = store.acquire_lease(ttl=PATIENCE)
    trouble["unreachable"] = True
    lease._wanted.set()
    with pytest.raises(StateUnusable):
        store.update_table_replication_state(1, Init())
    trouble.clear()
    store.update_table_replication_state(1, Init())
    lease.check()
    store.close()


def test_a_lease_that_is_late_is_renewed_before_it_counts_as_lost() -> None:
    with MemoryStore("p") as store:
        lease = store.acquire_lease(ttl=PATIENCE)
        lease._deadline = 0.0  # as after a sleep of the machine
        lease.check()
        store.update_table_replication_state(1, Init())


def test_after_a_write_without_an_answer_the_cache_is_not_believed() -> None:
    store, trouble = flaky_store(lease_survives=True)
    store.acquire_lease()
    store.use_lineage(Ancestry(LINEAGE))
    assert store.get_table_replication_states() == {}
    trouble["deaf"] = True
    with pytest.raises(StateUnusable):
        store.update_table_replication_state(1, Init())
    with pytest.raises(StateUnusable):
        store.upsert_replication_progress(Lsn(7))
    trouble["deaf"] = False
    assert store.get_table_replication_state(1) == Init()
    assert store.get_replication_progress() == 7
    store.update_table_replication_state(1, Init())
    store.close()


def test_readers_do_not_wait_for_a_write() -> None:
    state = MemoryState()
    with MemoryStore("p", state) as store:
        store.acquire_lease()
        store.update_table_replication_state(1, Init())
        store.load_table_replication_states()
        with state.lock:  # a write elsewhere takes long
            seen: list[object] = []
            reader = threading.Thread(target=lambda: seen.append(store.get_table_replication_state(1)))
            reader.start()
            reader.join(PATIENCE)
        assert seen == [Init()]


def test_who_is_gone_is_only_said_when_it_is_certain() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(replace(me, started="1"))
    assert not is_gone(replace(me, pid=os.getppid(), started=""))
    assert not is_gone(replace(me, machine="another boot", started="1"))
    assert not is_gone(replace(me, machine="", started="1"))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    assert is_gone(replace(me, pid=int(ended.stdout)))
