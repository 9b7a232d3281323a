"""A slot from which the server cannot decode its own log: dropped if nobody depends on it, kept otherwise.

The server's defect comes once in fifty starts under truncates, so what capture would say of it is said in its stead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.capture import CaptureProcess
from penstock.copy import CopySettings
from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import SlotDiscarded, SlotUndecodable
from penstock.operations.supervision import START_AGAIN, exit_status
from penstock.state import MemoryStore, Store
from penstock.stream import OnLostSlot
from penstock.testing.destinations.script import LocalTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied, wait_ready
from tests.support.readback import check_equal


class Site:
    """A table, and pipelines over it that have the same state."""

    def __init__(self, database: Any, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.store: Store = MemoryStore("e2e")
        self.on_lost_slot = OnLostSlot.ERROR
        database.execute("create table t (id int primary key)")
        database.execute("insert into t select generate_series(1, 200)")

    def pipeline(self, **copy: Any) -> Alone:
        settings = tables_settings(
            self.database, self.folder, interval=0.1, copy=CopySettings(**copy), on_lost_slot=self.on_lost_slot
        )
        return tables_alone(settings, self.store, DeltaDestination(self.folder / "lake"), LocalTasks())

    def slots(self) -> list[Any]:
        return self.database.execute(
            "select slot_name from pg_replication_slots where database = current_database() and not temporary"
        )


def undecodable(self: CaptureProcess) -> None:
    raise SlotUndecodable("could not map filenumber to relation OID")


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Site:
    return Site(database, tmp_path)


def end_undecodable(pipeline: Alone, monkeypatch: pytest.MonkeyPatch) -> SlotUndecodable:
    with monkeypatch.context() as patched:
        patched.setattr(CaptureProcess, "check", undecodable)
        with pytest.raises(SlotUndecodable) as caught:
            wait_for(lambda: pipeline.wait(0), "the pipeline to end")
        pipeline.shutdown()
    return caught.value


@pytest.mark.remedy("SlotDiscarded")
def test_a_new_slot_of_no_use_is_dropped_and_the_next_start_goes_well(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So slow that nothing is copied when it comes out.
    with site.pipeline(max_bytes_per_second=1000) as pipeline:
        assert site.slots()
        error = end_undecodable(pipeline, monkeypatch)
    # A supervisor starts it again at once.
    assert (type(error), exit_status(error, OnLostSlot.ERROR)) == (SlotDiscarded, START_AGAIN)
    assert site.slots() == []
    with site.pipeline() as pipeline:
        wait_ready(pipeline, 1)
        site.database.execute("insert into t values (1000)")
        wait_applied(pipeline, site.database)
    check_equal(site.database.dsn, LakeReadBack(site.folder / "lake"), ["t"])


@pytest.mark.remedy("SlotUndecodable")
def test_a_slot_that_a_table_depends_on_is_kept_unless_tables_may_be_copied_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.pipeline() as pipeline:
        wait_ready(pipeline, 1)
        error = end_undecodable(pipeline, monkeypatch)
    assert (type(error), exit_status(error, OnLostSlot.ERROR)) == (SlotUndecodable, 1)
    assert site.slots()
    # The remedy.
    assert 'set on_lost_slot = "recreate"' in error.hint
    site.on_lost_slot = OnLostSlot.RECREATE
    with site.pipeline() as pipeline:
        error = end_undecodable(pipeline, monkeypatch)
    assert (type(error), exit_status(error, OnLostSlot.RECREATE)) == (SlotDiscarded, START_AGAIN)
    assert site.slots() == []
    site.database.execute("insert into t values (1000)")
    with site.pipeline() as pipeline:
        wait_ready(pipeline, 1)
        wait_applied(pipeline, site.database)
    check_equal(site.database.dsn, LakeReadBack(site.folder / "lake"), ["t"])
