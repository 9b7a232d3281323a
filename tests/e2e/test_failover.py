"""Failover to a physical standby: with its slot it costs nothing; without, the remedy that the error names works."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import penstock
from penstock.capture import CaptureProcess
from penstock.coordinator import Coordinator
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.memory import MemoryDestination
from penstock.documents.output import DocumentsOutput, RunningDocuments
from penstock.documents.relation_map import open_relation_map
from penstock.documents.sinks import MemorySink
from penstock.errors import LineageChanged, ServerUnavailable, SlotMissing
from penstock.lsn import Lsn, reaches
from penstock.source.preflight import Request, run_preflight
from penstock.state import MemoryStore, Ready, Store
from penstock.tables import OnLostSlot, TablesOutput
from penstock.testing.postgres import PostgresServer, execute_on
from penstock.testing.server import free_port
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.documents import documents_of, specifications
from tests.e2e.support import Alone, Background, current_position, tables_alone, tables_settings, wait_for
from tests.support.readback import MemoryReadBack, check_equal
from tests.support.spark_stream import Collected

NOTES = "{version: 1, schema: public, table: busy, fields: [{text: note}]}"
STANDBY = "standby"

pytestmark = [pytest.mark.trap(10), pytest.mark.trap(44)]


@dataclass
class Site:
    """A primary and its standby on two ports, and a pipeline that finds the one that writes."""

    primary: PostgresServer
    ports: tuple[int, int]
    folder: Path
    stack: ExitStack
    name: str = "shop"
    standby: PostgresServer | None = None
    sink: MemorySink = field(default_factory=MemorySink)
    stores: dict[str, Store] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tables: tuple[str, ...] = ("busy", "quiet")

    @property
    def dsn(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        login = f"{self.primary.user}:{self.primary.password}"
        return f"postgresql://{login}@{hosts}/{self.name}?target_session_attrs=read-write&connect_timeout=5"

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, autocommit=True)

    def execute(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return execute_on(connection, query, parameters)

    def settings(self) -> Any:
        return replace(tables_settings(self, self.folder), **self.options)

    def outputs(self) -> Coordinator:
        settings = self.settings()
        stores = [self.stores.setdefault(each, MemoryStore(f"e2e:{each}")) for each in ("tables", "documents")]
        tables = TablesOutput(settings, stores[0], DeltaDestination(self.folder / "lake"), ProcessTasks())
        documents = DocumentsOutput(
            settings,
            stores[1],
            specifications(notes=NOTES),
            self.sink,
            ProcessTasks(),
            relations=lambda: open_relation_map(f"sqlite:///{self.folder}/state.db", "e2e:documents"),
        )
        return Coordinator([tables, documents])

    def add_standby(self, *, waits: bool = True, synced: bool = True) -> PostgresServer:
        """Make a standby on the other port, while the pipeline runs; with `waits`, capture never gets ahead of it."""
        other = next(port for port in self.ports if port != self.primary.port)
        made = self.standby = self.stack.enter_context(closing(self.primary.standby(STANDBY, port=other)))
        made.start()
        if waits:
            self.primary.execute(f"alter system set synchronized_standby_slots = '{STANDBY}'")
            self.primary.execute("select pg_reload_conf()")
        if synced:
            made.sync_slots(self.settings().slot)
        return made

    def fail_over(self, end: Callable[[], None], standby: PostgresServer | None = None) -> None:
        """End the primary and promote the standby."""
        self.standby = standby or self.standby
        assert self.standby is not None
        end()
        self.standby.execute("select pg_promote()")
        self.primary.close()
        self.primary, self.standby = self.standby, None

    def write(self, number: int) -> None:
        self.execute(f"insert into busy select id, 'note' from generate_series({number * 100}, {number * 100 + 40}) id")
        self.execute(f"update busy set note = '{number}' where id % 3 = 0; delete from busy where id % 7 = {number}")

    def wait_equal(self, outputs: Coordinator) -> None:
        """Everything that is committed now is in tables and documents."""
        end = current_position(self)
        tables, documents = outputs

        def has_arrived() -> bool:
            outputs.check()
            arrived = all(reaches(each.status.acknowledged, end) for each in outputs)
            assert isinstance(documents, RunningDocuments)
            return arrived and {type(each) for each in tables.phases.values()} == {Ready} and documents.is_complete

        wait_for(has_arrived, f"all outputs to reach {end}")
        check_equal(self.dsn, DeltaReader(self.folder / "lake"), list(self.tables))
        [(_, wanted)] = documents_of(self.dsn, specifications(notes=NOTES)).items()
        assert self.sink.documents("notes") == wanted

    def failover_check(self) -> str:
        report = run_preflight(self.settings().source, Request(slot=self.settings().slot))
        [found] = [each for each in report.checks if each.id == "slot_failover"]
        return f"{found.status.value}: {found.what} {found.remedy}"


@pytest.fixture
def site(make_server: Callable[..., PostgresServer], tmp_path: Path) -> Iterator[Site]:
    primary = make_server()
    with ExitStack() as stack:
        made = Site(primary, (primary.port, free_port()), tmp_path, stack)
        primary.create_database(made.name)
        made.execute("create table busy (id int primary key, note text); create table quiet (id int primary key)")
        made.execute("insert into quiet select generate_series(1, 30)")
        made.write(0)
        yield made


def test_a_failover_with_its_slot_copies_nothing_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promoted while the pipeline runs, while it is stopped, and while it starts; back on the first machine, too."""
    with site.outputs() as outputs:
        site.wait_equal(outputs)
        assert "no standby" in site.failover_check()
        site.add_standby()
        assert site.failover_check().startswith("passed")
        tables, documents = outputs
        copies, built = attempts(tables), documents.indexes["notes"].build
        site.write(1)
        site.fail_over(site.primary.kill)
        site.write(2)
        site.wait_equal(outputs)
        assert attempts(tables) == copies
        assert documents.indexes["notes"].build != built
        assert documents.indexes["notes"].reason == "another server took over"
        site.add_standby()
        site.write(3)
    built = documents.indexes["notes"].build
    site.write(4)
    site.fail_over(site.primary.stop)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.stream._Opening._prepare_slot", broken)
        with pytest.raises(InterruptedError), site.outputs():
            pass
    with site.outputs() as outputs:
        site.write(5)
        site.wait_equal(outputs)
        tables, documents = outputs
        assert tables.copies == {}
        assert documents.indexes["notes"].reason == "another server took over"
        site.add_standby()
        site.wait_equal(outputs)
        built = documents.indexes["notes"].build
    start = CaptureProcess.start

    def fail_over_first(self: CaptureProcess) -> None:
        site.fail_over(site.primary.kill)
        start(self)

    monkeypatch.setattr(CaptureProcess, "start", fail_over_first)
    with site.outputs() as outputs:
        monkeypatch.undo()
        site.write(6)
        site.wait_equal(outputs)
        tables, documents = outputs
        assert tables.copies == {}
        assert documents.indexes["notes"].build != built
        built = documents.indexes["notes"].build
    with site.outputs() as outputs:
        site.execute("insert into quiet values (0)")
        site.wait_equal(outputs)
        tables, documents = outputs
        assert tables.copies == {}
        assert documents.indexes["notes"].build == built, "one rebuild per failover is enough"
        assert {each.lineage.timeline for each in tables.store.get_stored_positions()} == {4}


def test_a_former_primary_that_is_started_next_to_the_new_one_is_not_followed(site: Site, caplog: Any) -> None:
    """The address names it first, so all new connections lead to it. Not even with `recreate`: it lost nothing."""
    site.options["on_lost_slot"] = OnLostSlot.RECREATE
    caplog.set_level(logging.INFO, "penstock")
    with site.outputs() as outputs:
        site.wait_equal(outputs)
        former, new = site.primary, site.add_standby()
        former.kill()
        new.execute("select pg_promote()")
        site.wait_equal(outputs)
        site.execute("create table later (id int primary key); insert into later values (1)")
        site.tables += ("later",)
        tables, _ = outputs
        wait_for(lambda: isinstance(tables.phases.get("public.later"), Ready), "the copy of the new table")
        copies = attempts(tables)
        former.start()
        told = "the server is on timeline 1, but another one took over and is on 2"
        wait_for(lambda: told in caplog.text, "the catalog of the former primary to be refused")
        assert isinstance(tables.phases["public.later"], Ready)
        refused = re.compile("capture failed, retrying .*" + told)

        def is_refused() -> bool:
            new.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
            return refused.search(caplog.text) is not None

        wait_for(is_refused, "capture to refuse it")
        former.stop()
        new.execute("insert into later values (2)", database=site.name)
        site.wait_equal(outputs)
        assert attempts(tables) == copies
    former.start()
    publications = "select pubname, puballtables from pg_publication"
    before = former.execute(publications, database=site.name)
    with pytest.raises(ServerUnavailable, match=told), site.outputs():
        pass
    assert former.execute(publications, database=site.name) == before
    former.stop()
    with site.outputs() as outputs:
        tables, _ = outputs
        site.wait_equal(outputs)
        assert tables.copies == {}


@pytest.mark.remedy("LostInFailover")
def test_changes_and_slots_that_a_standby_lacks_are_refused_or_copied_again(site: Site) -> None:
    with site.outputs() as outputs:
        site.wait_equal(outputs)
        standby = site.add_standby(waits=False)
        assert "synchronized_standby_slots" in site.failover_check()
        standby.stop()
        site.write(1)
        site.wait_equal(outputs)
        site.primary.kill()
        standby.start()
        site.fail_over(lambda: None)
        wait_for(lambda: len(outputs.errors) == 2, "capture to refuse the server")
        for error in outputs.errors.values():
            assert isinstance(error, LineageChanged)
            assert "lost in a failover" in error.message
            assert 'on_lost_slot = "recreate"' in str(error.hint)
    with pytest.raises(LineageChanged, match="lost in a failover"), site.outputs():
        pass
    site.options["on_lost_slot"] = OnLostSlot.RECREATE
    site.options["failover_slot"] = False
    with site.outputs() as outputs:
        site.write(2)
        site.wait_equal(outputs)
        site.add_standby(waits=False, synced=False)
        assert "failover_slot = true" in site.failover_check()
        site.wait_equal(outputs)
        flushed = current_position(site)
        assert site.standby is not None
        wait_for(lambda: reaches(replayed(site.standby), flushed), "the standby")
    site.fail_over(site.primary.stop)
    site.options["on_lost_slot"] = OnLostSlot.ERROR
    with pytest.raises(SlotMissing) as missing, site.outputs():
        pass
    assert 'on_lost_slot = "recreate"' in str(missing.value.hint)
    site.options["on_lost_slot"] = OnLostSlot.RECREATE
    with site.outputs() as outputs:
        site.write(3)
        site.wait_equal(outputs)


def test_a_standby_that_is_promoted_while_it_is_the_source_keeps_its_positions(site: Site) -> None:
    """Its connections survive the promotion, so capture learns of it only by asking."""
    site.execute("create publication e2e for table busy, quiet")
    primary = site.primary
    standby = site.stack.enter_context(closing(primary.standby(STANDBY, port=site.ports[1])))
    standby.start()
    source = SimpleNamespace(dsn=standby.dsn(site.name), name=site.name)
    settings = tables_settings(source, site.folder, manage_publication=False)
    store, destination = MemoryStore("e2e"), MemoryDestination()

    def output() -> Alone:
        return tables_alone(settings, store, destination, ProcessTasks())

    # A slot or snapshot on a standby waits until the primary logs its running transactions.
    with Background(primary, lambda connection: connection.execute("select pg_log_standby_snapshot()"), 0.1):
        running = output()
        running.start()
        wait_for(lambda: {type(each) for each in running.phases.values()} == {Ready}, "the copies")
    try:
        pid = standby.execute("select active_pid from pg_replication_slots where active")
        site.fail_over(lambda: None, standby)
        site.write(1)
        wait_for(lambda: reaches(running.status.acknowledged, current_position(site)), "the changes")
        assert standby.execute("select active_pid from pg_replication_slots where active") == pid
    finally:
        running.shutdown()
    with output() as running:
        site.write(2)
        wait_for(lambda: reaches(running.status.acknowledged, current_position(site)), "the changes")
        assert running.copies == {}
        check_equal(source.dsn, MemoryReadBack(destination), ["busy", "quiet"])


def test_a_streaming_query_goes_on_after_a_failover_with_its_slot(site: Site, spark: Any) -> None:
    """Promoted while the query runs, and while it is stopped."""
    penstock.register(spark)
    options: dict[str, Any] = {"table": "busy", "slot": site.settings().slot}

    def add_standby() -> None:
        """While the log grows without transactions: the query acknowledges it, and the standby does not get ahead."""
        grow = "select pg_logical_emit_message(false, 'test', repeat('x', 20000000))"
        with Background(site, lambda connection: connection.execute(grow), 0.5):
            site.add_standby()

    def inserted(query: Collected) -> list[int]:
        return [row.id for row in query.rows if row["_op"] == "insert"]

    def insert(query: Collected, number: int) -> None:
        site.execute(f"insert into busy values ({number})")
        wait_for(lambda: query.wait_batches(0) is not None and number in inserted(query), "the row")

    with Collected(spark, site.folder, site.dsn, **options) as query:
        query.wait_slot(site)
        add_standby()
        insert(query, 10001)
        site.fail_over(site.primary.kill)
        insert(query, 10002)
        add_standby()
    site.execute("insert into busy values (10003)")
    site.fail_over(site.primary.stop)
    with Collected(spark, site.folder, site.dsn, **options) as again:
        insert(again, 10004)
    assert [*inserted(query), *inserted(again)] == [10001, 10002, 10003, 10004]


def attempts(tables: Any) -> dict[str, str]:
    return {name: copy.attempt for name, copy in tables.copies.items()}


def broken(*_: object) -> None:
    raise InterruptedError


def replayed(server: Any) -> Lsn:
    return Lsn.parse(server.execute("select pg_last_wal_replay_lsn()::text")[0][0])
