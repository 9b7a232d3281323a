"""Two outputs over one stream: one slot, one capture, one spool; each with its own copies, phases and positions."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.coordinator import Coordinator
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import DestinationUnavailable, SlotLost
from penstock.lsn import Lsn, reaches
from penstock.output import RunningOutput
from penstock.spark.tasks import SparkTasks
from penstock.state import CommandKind, MemoryStore, Store
from penstock.tables import OnLostSlot, TablesOutput
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import wait_for
from tests.e2e.test_spark_pipeline import (
    FEW,
    SHAPES,
    WAY,
    Shape,
    create_tables,
    current_position,
    pipeline_settings,
    table_names,
    writers,
)
from tests.support.readback import check_equal


@dataclass
class Site:
    """A database, and outputs with a lake each; their states outlive the pipelines."""

    database: Any
    folder: Path
    shapes: tuple[Shape, ...] = FEW
    stores: dict[str, Store] = field(default_factory=dict)

    def outputs(self, *names: str, tasks: Any = None, session: Any = None, **settings: Any) -> Coordinator:
        shared = replace(pipeline_settings(self.database, self.folder), **settings)
        pipelines: list[TablesOutput] = []
        for name in names:
            own = replace(shared, output=name)
            store = self.stores.setdefault(name, MemoryStore(own.output_id))
            destination = ParquetDestination(self.lake(name))
            pipelines.append(TablesOutput(own, store, destination, tasks or ProcessTasks(), lambda: session))
        return Coordinator(pipelines)

    def lake(self, output: str) -> Path:
        return self.folder / output

    def confirmed(self) -> Lsn:
        [(position,)] = self.database.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s",
            [pipeline_settings(self.database, self.folder).slot],
        )
        return Lsn.parse(position)

    def check_equal(self, *outputs: str) -> None:
        for name in outputs:
            check_equal(self.database.dsn, ParquetReader(self.lake(name)), table_names(self.shapes))

    def wait_reached(self, outputs: Coordinator) -> None:
        """All tables are ready, and have everything that is committed now."""
        end = current_position(self.database)
        wait_for(all_ready(outputs, self.shapes), "all tables to be ready")
        wait_for(lambda: all(reaches(acknowledged(each), end) for each in outputs), "both to reach the end")


def all_ready(outputs: Coordinator, shapes: tuple[Shape, ...]) -> Callable[[], bool]:
    def look() -> bool:
        outputs.wait(0)
        for pipeline in outputs:
            stopped = {name: phase for name, phase in pipeline.phases.items() if phase.name == "errored"}
            assert not stopped, stopped
        return all(
            len(pipeline.phases) == len(shapes) and {phase.name for phase in pipeline.phases.values()} == {"ready"}
            for pipeline in outputs
        )

    return look


def acknowledged(pipeline: RunningOutput) -> Lsn:
    return pipeline.status.acknowledged


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Site:
    create_tables(database, FEW)
    return Site(database, tmp_path)


@pytest.mark.trap(18, 22, 23, 24)
def test_two_outputs_follow_one_slot_and_one_may_be_paused(spark: Any, database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, SHAPES)
    create_tables(database, SHAPES)
    with site.outputs("tables", "second", tasks=SparkTasks(spark), session=spark) as outputs:
        first, second = outputs
        with writers(database, 4):
            wait_for(all_ready(outputs, SHAPES), "all tables of both to be ready")
            second.store.add_command(CommandKind.PAUSE)
            wait_for(lambda: second.paused, "the second to pause")
            held = second.status.applied
            batches = first.status.batches if first.status else 0
            wait_for(lambda: first.status.batches >= batches + 3, "the first to go on")
            assert not reaches(held, acknowledged(first))
        wait_for(lambda: reaches(acknowledged(first), current_position(database)), "the first to reach the end")
        assert reaches(held, site.confirmed())
        site.check_equal("tables")
        second.store.add_command(CommandKind.RESUME)
        site.wait_reached(outputs)
        site.check_equal("second")
        for pipeline in outputs:
            for table_id in pipeline.store.get_table_replication_states():
                history = [record.phase.name for record in pipeline.store.get_table_replication_history(table_id)]
                assert history == WAY
    assert not reaches(held, site.confirmed()), "the slot follows when the slowest has moved"


@pytest.mark.trap(18)
def test_an_output_that_is_left_out_for_a_while_misses_nothing(site: Site, caplog: Any) -> None:
    with site.outputs("tables", "second") as outputs, writers(site.database, 2, FEW):
        wait_for(all_ready(outputs, FEW), "all tables to be ready")
    with site.outputs("tables") as outputs:
        [first] = outputs
        held = site.confirmed()
        with writers(site.database, 2, FEW):
            before = first.status.batches if first.status else 0
            wait_for(lambda: first.status.batches >= before + 3, "the first to go on")
        site.wait_reached(outputs)
    assert "an output that does not run holds back the slot output=second" in caplog.text
    stored = site.stores["second"].get_stored_progress()
    assert stored is not None
    assert reaches(stored.position, site.confirmed())
    assert reaches(site.confirmed(), held)
    with site.outputs("tables", "second") as outputs:
        site.wait_reached(outputs)
    site.check_equal("tables", "second")


def test_an_output_whose_destination_is_away_at_the_start_starts_when_it_returns(site: Site) -> None:
    with site.outputs("tables", "second") as outputs:
        site.wait_reached(outputs)
    away = site.outputs("tables", "second")
    _, second = away._outputs
    second.destination.startup = refusing(second.destination.startup, is_away := threading.Event())
    is_away.set()
    with away as outputs, writers(site.database, 2, FEW):
        first = next(iter(outputs))
        assert {name: type(error) for name, error in outputs.errors.items()} == {"second": DestinationUnavailable}
        wait_for(lambda: first.status.batches >= 2, "the first to go on")
        is_away.clear()
        wait_for(lambda: not outputs.errors, "the second to start")
        late = list(outputs)[1]
        late.store.add_command(CommandKind.PAUSE)
        wait_for(lambda: late.paused, "the second to answer commands")
        late.store.add_command(CommandKind.RESUME)
        wait_for(lambda: late.status.batches >= 2, "the second to go on")
    with site.outputs("tables", "second") as outputs:
        site.wait_reached(outputs)
        assert [each.copies for each in outputs] == [{}, {}]
    site.check_equal("tables", "second")


def refusing(startup: Callable[[Any], None], is_away: threading.Event) -> Callable[[Any], None]:
    def start(context: Any) -> None:
        if is_away.is_set():
            raise DestinationUnavailable("the store is away")
        startup(context)

    return start


def test_an_output_joins_a_stream_that_has_run_for_long(site: Site) -> None:
    with site.outputs("tables") as outputs, writers(site.database, 2, FEW):
        wait_for(all_ready(outputs, FEW), "all tables to be ready")
    with site.outputs("tables", "second") as outputs, writers(site.database, 2, FEW):
        wait_for(all_ready(outputs, FEW), "the new output to copy")
    # It is known, and has stored nothing of its own yet, when it is started a second time.
    with site.outputs("tables", "second", "third"):
        pass
    with site.outputs("tables", "second", "third") as outputs:
        site.wait_reached(outputs)
    site.check_equal("tables", "second", "third")


@pytest.mark.trap(18, 30)
def test_an_output_that_the_slot_did_not_wait_for_is_not_continued(site: Site) -> None:
    with site.outputs("tables", "second") as outputs:
        site.wait_reached(outputs)
    # Whoever deletes the spool deletes the list of its readers, and with that what the slot waits for.
    shutil.rmtree(site.folder / "spool")
    with site.outputs("tables") as outputs, writers(site.database, 2, FEW):
        [first] = outputs
        wait_for(lambda: first.status.batches >= 2, "changes that the second does not get")
        end = acknowledged(first)
        wait_for(lambda: reaches(site.confirmed(), end), "the slot to move")
    with pytest.raises(SlotLost, match="'second' has changes only up to"):
        site.outputs("tables", "second").start()
    anew = site.outputs("tables", "second", on_lost_slot=OnLostSlot.RECREATE)
    with anew as outputs:
        site.wait_reached(outputs)
    site.check_equal("tables", "second")


@pytest.mark.trap(18, 30)
def test_a_slot_that_was_moved_past_the_spool_is_continued_by_a_new_copy(site: Site) -> None:
    with site.outputs("tables") as outputs:
        site.wait_reached(outputs)
    site.database.execute("select pg_logical_emit_message(true, 'test', 'a transaction that the pipeline misses')")
    slot = site.database.idle_slot(pipeline_settings(site.database, site.folder).slot)
    site.database.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
    with pytest.raises(SlotLost, match="'tables' has changes only up to"):
        site.outputs("tables").start()
    with site.outputs("tables", on_lost_slot=OnLostSlot.RECREATE) as outputs, writers(site.database, 2, FEW):
        wait_for(all_ready(outputs, FEW), "new copies")
    with site.outputs("tables") as outputs:
        site.wait_reached(outputs)
    site.check_equal("tables")


def test_outputs_of_a_stream_have_different_names(site: Site) -> None:
    with pytest.raises(ValueError, match="different names"):
        site.outputs("tables", "tables")
