"""Whose failure it is: of a row, an index, the sink or an output. Everything else goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.coordinator import Coordinator
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.documents.base import FailurePolicies, FailurePolicy, FlushReport, Rejection, Sink
from penstock.documents.builder import PostgresDocuments
from penstock.documents.fan_out import FanOuts
from penstock.documents.mapping import IndexMapping
from penstock.documents.output import DocumentsSettings, RunningDocuments
from penstock.documents.relation_map import open_relation_map
from penstock.documents.sinks import MemorySink
from penstock.errors import ConfigError, DestinationUnavailable, DocumentsRejected, QueryFailed, ServerUnavailable
from penstock.lsn import reaches
from penstock.source.connections import Role, SourceSettings, connect
from penstock.spool import Stopping
from penstock.state import IndexStatus, MemoryStore, WorkKind
from penstock.state.quarantine import open_quarantine
from penstock.tables import TablesOutput, TablesSettings
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.documents import Site, run, specifications
from tests.e2e.support import current_position, wait_for
from tests.support.readback import check_equal

TABLES = """
create schema w;
create table w.people (id int primary key, name text);
create table w.orders (id int primary key, person_id int, price numeric);
create index on w.orders (person_id);
insert into w.people select n, 'person ' || n from generate_series(1, 50) n;
insert into w.orders select n, n, n from generate_series(1, 50) n;
"""
PEOPLE = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - {avg: mean, table: orders, foreign_key: person_id, column: price}
"""
ORDERS = "version: 1\nschema: w\ntable: orders\nfields: [{integer: person_id}]\n"
TOO_LARGE = "update w.orders set price = 1e400 where id in (7, 8)"
SKIP = DocumentsSettings(failure_policies=FailurePolicies(FailurePolicy.SKIP))


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Site:
    database.execute(TABLES)
    sink = MemorySink()
    return Site(database, tmp_path, specifications(people=PEOPLE, orders=ORDERS), sink, sink.documents)


def with_sink(site: Site, sink: MemorySink) -> None:
    site.sink, site.read = sink, sink.documents


@pytest.mark.parametrize("when", ["changed", "filled"])
def test_a_row_that_cannot_be_built_quarantines_its_documents_only(site: Site, when: str) -> None:
    site.settings = SKIP
    with closing(open_quarantine("memory:", "e2e")) as quarantine, run(output := site.output(quarantine=quarantine)):
        if when == "filled":
            site.database.execute(TOO_LARGE)
        site.wait_settled(output)
        if when == "changed":
            site.database.execute(TOO_LARGE)
            site.database.execute("update w.people set name = 'changed' where id in (1, 7)")
            site.wait_settled(output)
        assert {(each.index, each.id) for each in quarantine.entries()} == {("people", "7"), ("people", "8")}
        assert "22003" in quarantine.entries()[0].reason
        assert len(site.read("people")) == (48 if when == "filled" else 50)
        site.database.execute("update w.orders set price = 1 where id = 7; delete from w.orders where id = 8")
        site.wait_settled(output)
        site.check()
        assert quarantine.entries() == []


@pytest.fixture
def tables(site: Site, tmp_path: Path) -> TablesOutput:
    names = ("id", "source", "publication", "slot", "spool", "tables")
    stream = {name: getattr(site.stream_settings(), name) for name in names}
    lake = ParquetDestination(str(tmp_path / "lake"))
    return TablesOutput(TablesSettings(**stream), MemoryStore("e2e:tables"), lake, ProcessTasks(), None)


def test_under_stop_such_a_row_ends_the_documents_and_no_tables(site: Site, tables: TablesOutput) -> None:
    for attempt in range(2):
        with Coordinator([tables, site.definition()]) as coordinator:
            lake, documents = coordinator
            if not attempt:
                wait_for(lambda: getattr(documents, "is_complete"), "the indexes")  # noqa: B009, B023
                site.database.execute(TOO_LARGE)
            wait_for(lambda: coordinator.errors, "the documents to stop")
            with pytest.raises(DocumentsRejected, match="cannot be built"):
                documents.wait(60)
            site.database.execute("update w.people set name = 'later' where id = 2")
            end = current_position(site.database)
            wait_for(lambda: reaches(lake.status.acknowledged, end), "the tables")  # noqa: B023
            assert lake.error is None


FAULTS = {
    "outage": DestinationUnavailable("it is away"),
    "poison": DocumentsRejected("it rejects every change"),
    "kill": KeyboardInterrupt("its thread is killed"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("failing", ["documents", "tables"])
def test_each_output_goes_on_while_the_other_one_fails_as_the_lags_of_both_show(
    site: Site, tables: TablesOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, fault: str
) -> None:
    def fail(*_: Any) -> Any:
        failed.set()
        raise FAULTS[fault]

    failed = threading.Event()
    writes = {"documents": (site.sink, "write"), "tables": (tables.destination, "write_events")}
    with Coordinator([tables, site.definition()]) as coordinator:
        outputs: dict[str, Any] = {each.output: each for each in coordinator}
        healthy, broken = (outputs[each] for each in sorted(outputs, key=lambda name: name == failing))
        wait_for(lambda: outputs["documents"].is_complete, "the indexes")
        wait_for(lambda: {each.name for each in outputs["tables"].phases.values()} == {"ready"}, "the tables")
        with monkeypatch.context() as patch:
            patch.setattr(*writes[failing], fail)
            for number in range(3):
                site.database.execute(f"update w.people set name = 'changed {number}'")
                end = current_position(site.database)
                wait_for(lambda: reaches(healthy.status.acknowledged, end), "the other output")  # noqa: B023
            assert failed.wait(60)
            assert healthy.error is None
            assert not reaches(broken.status.acknowledged, end), "the one that fails has acknowledged nothing"
    with Coordinator([tables, site.definition()]) as coordinator:
        for each in coordinator:
            wait_for(lambda: reaches(each.status.acknowledged, end), each.output)  # noqa: B023
        site.check()
        check_equal(site.database.dsn, ParquetReader(tmp_path / "lake"), ["people", "orders"])


def test_an_output_that_has_run_before_and_cannot_start_now_fails_alone(site: Site, tables: TablesOutput) -> None:
    with Coordinator([tables, site.definition()]) as coordinator:
        wait_for(lambda: all(getattr(each, "is_complete", True) for each in coordinator), "the indexes")
    site.database.execute("alter table w.people drop name; alter table w.orders drop person_id")
    with Coordinator([tables, site.definition()]) as coordinator:
        assert {name: type(error) for name, error in coordinator.errors.items()} == {"documents": ConfigError}
        lake = next(iter(coordinator))
        site.database.execute("delete from w.people where id = 2")
        end = current_position(site.database)
        wait_for(lambda: reaches(lake.status.acknowledged, end), "the tables")
    with pytest.raises(ConfigError, match="no column 'name'"), run(site.output()):
        pass


RENAMES = {
    "a field": ("{text: name}", "alter table w.people rename name to surname", "has no column 'name'"),
    "an expression": ("{text: name, expression: upper(name)}", "alter table w.people drop name", "name"),
}


@pytest.mark.parametrize("renamed", RENAMES)
@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is down"])
def test_an_index_that_no_longer_fits_stops_alone_and_is_rebuilt_once_it_fits(
    site: Site, monkeypatch: pytest.MonkeyPatch, renamed: str, running: bool
) -> None:
    monkeypatch.setattr("penstock.coordinator.REFRESH_SECONDS", 0.2)
    field, statement, reason = RENAMES[renamed]
    site.specifications = specifications(
        people=f"version: 1\nschema: w\ntable: people\nfields: [{field}]", orders=ORDERS
    )
    with run(output := site.output()):
        site.wait_settled(output)
        former = output.indexes["people"].build
        if running:
            site.database.execute(statement)
            wait_for(lambda: output.wait(0) or output.stopped, "the index to stop")
    if not running:
        site.database.execute(statement)
    with run(output := site.output()):
        site.database.execute("insert into w.orders values (51, 1, 1); insert into w.people (id) values (51)")
        wait_for(lambda: output.wait(0) or "51" in site.read("orders"), "the other index")
        assert reason in output.stopped["people"].message
        assert "51" not in site.read("people")
        assert output.is_complete, "a run with --once ends"
        stored = site.store.get_index_builds()["people"]
        assert (stored.status, stored.build != former, reason in stored.reason) == (IndexStatus.WANTED, True, True)
        undone = "rename surname to name" if "rename" in statement else "add name text"
        site.database.execute(f"alter table w.people {undone}")
        wait_for(lambda: output.wait(0) or not output.stopped, "the index to fit")
        site.wait_settled(output)
        site.check()


def test_a_new_index_that_does_not_fit_is_refused(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
    wrong = PEOPLE.replace("{text: name}", "{text: nam}")
    site.specifications = specifications(people=wrong, orders=ORDERS)
    with pytest.raises(ConfigError, match="no column 'nam'"), run(site.output()):
        pass


def test_a_server_that_is_away_when_the_catalog_is_looked_at_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, faults = RunningDocuments._round, ["a statement", "the connection"]

    def failing_round(running: RunningDocuments) -> None:
        if running.is_complete and faults == ["a statement", "the connection"]:
            faults.pop(0)
            raise QueryFailed("a statement failed")
        step(running)

    def failing_connect(*arguments: Any, **options: Any) -> Any:
        if faults == ["the connection"]:
            faults.pop(0)
            raise ServerUnavailable("the server is away")
        return connect(*arguments, **options)

    monkeypatch.setattr(RunningDocuments, "_round", failing_round)
    monkeypatch.setattr("penstock.documents.output.connect", failing_connect)
    with run(output := site.output()):
        wait_for(lambda: output.wait(0) or not faults, "the faults")
        site.database.execute("update w.people set name = 'changed' where id = 1")
        site.wait_settled(output)
        site.check()


def test_a_build_that_an_earlier_version_began_starts_again(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
    build = site.store.get_index_builds()["people"]
    site.sink.reindex(IndexMapping("people", build.fingerprint, {}, {}, site.store.pipeline_id))
    source = SourceSettings(site.database.dsn)
    with connect(source, Role.CATALOG) as one, closing(open_relation_map("memory:", "ranges")) as relations:
        ranges = PostgresDocuments(one, one, site.specifications, relations, source=source).ranges("people")
    plan = {"generation": site.sink.facts("people").filling, "ranges": ranges}
    site.store.acquire_lease()
    site.store.store_index_build(replace(build, status=IndexStatus.FILLING, plan=plan))
    # What an earlier version stored of removed documents: their keys.
    site.store.add_index_work("people", WorkKind.REMOVAL, [{"keys": [["1"]]}])
    site.store.release_lease()
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()
        assert output.indexes["people"].reason == "an earlier version of Penstock began to build it"


def test_an_index_that_is_never_complete_holds_back_no_other(site: Site) -> None:
    class Miscounting(MemorySink):
        def count(self, index: str) -> int | None:
            return -1 if index == "orders" else super().count(index)

    with_sink(site, Miscounting())
    with run(output := site.output()):
        wait_for(lambda: output.wait(0) or output.indexes["people"].status is IndexStatus.SEEDED, "the other index")
        assert output.indexes["orders"].status is not IndexStatus.SEEDED


@pytest.mark.remedy("IndexIncomplete")
def test_an_index_from_which_another_program_deletes_is_rebuilt_until_nobody_does(site: Site) -> None:
    class Robbed(MemorySink):
        rounds = 2

        def count(self, index: str) -> int | None:
            found = super().count(index)
            if index != "orders" or found is None or not Robbed.rounds:
                return found
            # The sink is copied to fill an index.
            Robbed.rounds -= 1
            return found - 1

    with_sink(site, Robbed())
    with run(output := site.output()):
        site.wait_settled(output)
        assert Robbed.rounds == 0
        assert "should have 50 documents" in (output.indexes["orders"].reason or "")
        site.check()


def test_a_sink_that_is_away_at_the_start_is_waited_for(site: Site) -> None:
    class Away(MemorySink):
        attempts = 0

        def ensure_index(self, mapping: IndexMapping) -> None:
            self.attempts += 1
            if self.attempts < 3:
                raise DestinationUnavailable("the sink is away")
            super().ensure_index(mapping)

    with_sink(site, Away())
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()


def test_a_retry_of_ids_that_no_document_can_have_ends_nothing(site: Site) -> None:
    site.settings = SKIP
    site.database.execute(TOO_LARGE)
    earlier = "0d9d6f0c-8c0d-4f0b-9b3c-2f1f5f1d7a11"
    with closing(open_quarantine("memory:", "e2e")) as quarantine, run(output := site.output(quarantine=quarantine)):
        site.wait_settled(output)
        quarantine.add([Rejection("people", each, "of an earlier key") for each in (earlier, "0042", "9")], None)
        quarantine.retry("people")
        wait_for(lambda: output.wait(0) or not quarantine.wanted("people"), "the attempts")
        left = {each.id: (each.attempts, each.reason[-15:-1]) for each in quarantine.entries()}
        assert left == {"7": (2, "SQLSTATE 22003"), "8": (2, "SQLSTATE 22003"), earlier: (2, "SQLSTATE 22P02")}
        site.database.execute("update w.people set name = 'changed' where id = 1")
        site.wait_settled(output)


class Elsewhere:
    """Tasks that run elsewhere, where a sink in memory is another one."""

    def run(self, items: Any, function: Any, *, description: str) -> Any:
        raise AssertionError(f"nothing may run elsewhere: {description}")

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield


def test_a_sink_of_this_process_is_filled_by_this_process(site: Site) -> None:
    site.settings = DocumentsSettings(local_documents=0)
    with run(output := site.output(Elsewhere())):
        site.wait_settled(output)
        site.database.execute("update w.people set name = 'changed'")
        site.wait_settled(output)
        site.check()


def test_a_backfill_whose_requests_are_slow_holds_back_neither_changes_nor_ddl(site: Site) -> None:
    held, go_on = threading.Event(), threading.Event()

    class Slow(MemorySink):
        """The sink of a backfill: waits before it takes anything."""

        def flush(self, caught_up: bool) -> FlushReport:
            held.set()
            assert go_on.wait(60)
            return super().flush(caught_up)

    class Filled(MemorySink):
        def filling(self, index: str) -> Sink:
            sink = super().filling(index)
            sink.__class__ = Slow
            return sink

    sink = Filled()
    with_sink(site, sink)
    site.specifications = site.specifications[:1]
    with run(output := site.output()):
        try:
            assert held.wait(60)
            site.database.execute("set lock_timeout = '5s'; alter table w.people add extra int")
            site.database.execute("update w.people set name = 'changed' where id = 1")
            end = current_position(site.database)
            wait_for(lambda: output.wait(0) or reaches(output.status.acknowledged, end), "the change", 20)
            filling = sink.facts("people").filling
            assert filling is not None
            assert sink._generations[filling]["1"][1] == '{"name":"changed","mean":1}'
        finally:
            go_on.set()
        site.wait_settled(output)
        site.check()


def test_an_expression_that_fails_for_a_row_quarantines_its_document_only(site: Site) -> None:
    site.database.execute("""
        create domain w.short as text check (length(value) < 20);
        create function w.checked(name text) returns text immutable language plpgsql as
            $$ begin if name like 'bad%' then raise exception 'bad: %', name; end if; return name; end $$;
        update w.people set name = 'bad person' where id = 1;
        update w.people set name = 'one,two' where id = 2;
    """)
    fields = """
      - {keyword: name}
      - {keyword: checked, expression: w.checked(name)}
      - {keyword: first, expression: "(select t from unnest(string_to_array(name, ',')) t)"}
      - {keyword: short, expression: "name::w.short"}
    """
    site.specifications = specifications(people=f"version: 1\nschema: w\ntable: people\nfields:{fields}")
    site.settings = SKIP
    with closing(open_quarantine("memory:", "e2e")) as quarantine, run(output := site.output(quarantine=quarantine)):
        site.wait_settled(output)
        assert {each.id: each.reason[-6:-1] for each in quarantine.entries()} == {"1": "P0001", "2": "21000"}
        site.database.execute("update w.people set name = repeat('long', 9) where id in (1, 3)")
        site.wait_settled(output)
        assert {each.id: each.reason[-6:-1] for each in quarantine.entries()} == {
            "1": "23514",
            "2": "21000",
            "3": "23514",
        }
        site.database.execute("update w.people set name = 'good' where id < 4")
        site.wait_settled(output)
        assert quarantine.entries() == []
        site.check()


def test_a_fan_out_that_waits_while_a_key_gets_another_type_does_not_stop_the_output(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.database.execute("""
        create table w.teams (code text primary key, label text);
        insert into w.teams values ('C1', 'one'), ('C2', 'two');
        alter table w.people add team text default 'C1';
    """)
    team = "{belongs_to: team, column: team, table: teams, primary_key: code, fields: [{text: label}]}"
    site.specifications = specifications(people=f"version: 1\nschema: w\ntable: people\nfields: [{team}]")
    site.settings = DocumentsSettings(fan_out_documents=0)
    with monkeypatch.context() as patched, run(output := site.output()):
        patched.setattr(FanOuts, "_answer", _stop)
        site.wait_settled(output)
        site.database.execute("update w.teams set label = 'changed'")
        wait_for(lambda: site.store.get_index_work("people", WorkKind.FAN_OUT), "the fan-out to be stored")
    site.database.execute("""
        alter table w.teams alter code type int using substr(code, 2)::int;
        alter table w.people alter team drop default, alter team type int using substr(team, 2)::int;
    """)
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()


def _stop(*_: object) -> None:
    raise Stopping
