"""Documents as an output of a stream: from nothing, and while the database changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from penstock import failpoints
from penstock.coordinator import Coordinator
from penstock.destinations.parquet import ParquetDestination
from penstock.documents.base import BatchStatistics, FailurePolicies, FailurePolicy, FlushReport, Observer, Rejection
from penstock.documents.output import DocumentsOutput, DocumentsSettings
from penstock.documents.relation_map import open_relation_map
from penstock.documents.sinks import MemorySink
from penstock.errors import (
    DocumentsRejected,
    PublicationChanged,
    SlotMissing,
    UnsupportedServer,
)
from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, SourceSettings, connect
from penstock.state import CommandKind, CommandStatus, IndexBuild, MemoryStore, open_store
from penstock.state.quarantine import open_quarantine
from penstock.stream import OnLostSlot
from penstock.tables import TablesOutput, TablesSettings
from penstock.testing.postgres import PostgresServer
from penstock.workers import Lifecycle
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.documents import ORDERS, PEOPLE, Site, run, specifications
from tests.e2e.support import current_position, wait_for
from tests.integration.documents import world


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Site:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection)
        world.fill(Random(1), connection)
    sink = MemorySink()
    return Site(database, tmp_path, specifications(people=PEOPLE, orders=ORDERS), sink, sink.documents)


def test_indexes_are_filled_and_then_follow(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        site.check()
        random = Random(2)
        with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
            for _ in range(30):
                world.random_transaction(random, connection, 5)
        site.wait_settled(output)
        site.check()


def test_an_emptied_table_builds_its_indexes_anew_and_no_others(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        before = output.indexes
        site.database.execute("truncate w.teams")
        site.wait_settled(output)
        assert output.indexes["people"].build != before["people"].build
        assert output.indexes["people"].reason == "one of its tables was truncated"
        assert output.indexes["orders"] == before["orders"]
        site.check()


def test_an_index_is_rebuilt_when_somebody_asks(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        before = output.indexes
        wrong = output.store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["nothing"]})
        right = output.store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["orders"]})
        other = output.store.add_command(CommandKind.RESYNC, ["w.orders"])
        wait_for(lambda: all(each.answered for each in output.store.get_commands()), "answers")
        answers = {each.number: each for each in output.store.get_commands()}
        assert answers[wrong.number].status is CommandStatus.REFUSED
        assert "no such index: nothing" in answers[wrong.number].reason
        assert answers[other.number].status is CommandStatus.REFUSED
        assert answers[right.number].status is CommandStatus.DONE
        site.wait_settled(output)
        assert output.indexes["orders"].build != before["orders"].build
        assert output.indexes["people"] == before["people"]
        site.check()


def test_a_second_process_goes_on_where_the_first_has_stopped(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
    random = Random(3)
    with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
        for _ in range(20):
            world.random_transaction(random, connection, 5, truncates=0)
    with run(output := site.output()):
        site.wait_settled(output)
        assert output.indexes == before, "nothing is built anew"
        site.check()


def test_another_specification_builds_its_index_anew(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
    site.specifications = specifications(people=PEOPLE.replace("text: name", "keyword: name"), orders=ORDERS)
    with run(output := site.output()):
        site.wait_settled(output)
        assert output.indexes["people"].reason == "its specification changed"
        assert output.indexes["orders"] == before["orders"]
        site.check()
    site.specifications = site.specifications[:1]
    with run(output := site.output()):
        site.wait_settled(output)
        assert output.indexes.keys() == {"people"}


OTHER_KEY = """
alter table w.tags add tenant int not null default 1;
alter table w.tags drop constraint tags_pkey cascade;
alter table w.tags add primary key (tenant, id);
insert into w.tags values (99, 'new', 2);
"""


@pytest.mark.parametrize("running", [False, True])
def test_another_primary_key_builds_the_indexes_that_it_names_anew(site: Site, running: bool) -> None:
    tags = "version: 1\nschema: w\ntable: tags\nfields: [{text: label}]\n"
    site.specifications = specifications(tags=tags, orders=ORDERS)
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
        if running:
            site.database.execute(OTHER_KEY)
            wait_for(lambda: output.indexes["tags"] != before["tags"], "the index to be wanted")
            site.wait_settled(output)
            site.check()
    if not running:
        site.database.execute(OTHER_KEY)
    with run(output := site.output()):
        site.wait_settled(output)
        assert output.indexes["tags"].build != before["tags"].build
        assert output.indexes["orders"] == before["orders"]
        assert "2:99" in site.read("tags")
        site.check()


@pytest.mark.trap(21)
def test_a_table_that_is_rewritten_while_it_is_read_is_read_anew(site: Site) -> None:
    ready, go_on = threading.Event(), threading.Event()

    class Slow(ProcessTasks):
        """Waits before the second range."""

        def run(self, items: Any, function: Any, *, description: str) -> Any:
            def slowly(item: Any) -> Any:
                if getattr(item, "part", 0) == 1 and not ready.is_set():
                    ready.set()
                    assert go_on.wait(60)
                return function(item)

            return super().run(items, slowly, description=description)

    site.database.execute(
        "insert into w.people (id, name, email) select n, repeat('x', 500), n::text from generate_series(100, 400) n"
    )
    site.specifications = site.specifications[:1]
    site.settings = DocumentsSettings(range_bytes=32768)
    with run(output := site.output(Slow())):
        assert ready.wait(60)
        first = output.indexes["people"].build
        site.database.execute("delete from w.people where id < 200")
        site.database.execute("vacuum full w.people")
        go_on.set()
        site.wait_settled(output)
        assert output.indexes["people"].build != first
        assert "was rewritten" in output.indexes["people"].reason
        site.check()


def test_ranges_that_are_done_are_not_read_again(site: Site) -> None:
    parts: list[int] = []

    class Noting(ProcessTasks):
        def run(self, items: Any, function: Any, *, description: str) -> Any:
            parts.extend(item.part for item in items if hasattr(item, "part"))
            return super().run(items, function, description=description)

    site.database.execute(
        "insert into w.people (id, name, email) select n, repeat('x', 500), n::text from generate_series(100, 700) n"
    )
    site.specifications = site.specifications[:1]
    site.settings = DocumentsSettings(range_bytes=32768)
    # The third note of what is done is lost.
    failpoints.arm("after_range=error:3")
    try:
        with run(output := site.output(Noting())):
            site.wait_settled(output)
            [build] = output.indexes.values()
            site.check()
    finally:
        failpoints.arm("")
    count = len(site.store.get_index_ranges("people", build.build))
    assert count > 8
    assert parts == [*range(12 if count > 12 else count), *range(8, count)]


@pytest.mark.trap(18)
def test_a_table_that_was_away_builds_its_indexes_anew(site: Site) -> None:
    site.stream["manage_publication"] = False
    site.database.execute("create publication e2e for tables in schema w")
    site.database.execute("drop publication e2e")
    tables = ", ".join(f"w.{name}" for name in world.COLUMNS)
    site.database.execute(f"create publication e2e for table {tables}")
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
    site.database.execute("alter publication e2e drop table w.orders")
    site.database.execute("update w.orders set person_id = person_id % 3 + 1")
    site.database.execute("alter publication e2e add table w.orders")
    with run(output := site.output()):
        site.wait_settled(output)
        assert output.indexes["people"].build != before["people"].build
        site.check()
        site.database.execute("update w.orders set person_id = person_id % 3 + 1")
        site.database.execute("delete from w.orders where id = 1")
        site.wait_settled(output)
        site.check()


def test_a_table_that_is_not_published_is_refused(site: Site) -> None:
    site.stream["tables"] = ("w.people", "w.orders", "w.lines")
    with pytest.raises(PublicationChanged, match=r"does not include w\.teams"), run(site.output()):
        pass


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ("w.people, w.teams, w.lines, w.orders where (id > 2)", "sends only some rows of w.orders"),
        ("w.people, w.teams, w.lines, w.orders (id, status)", "does not send person_id of w.orders"),
    ],
)
def test_a_table_that_is_sent_in_part_is_refused(site: Site, members: str, said: str) -> None:
    site.stream["manage_publication"] = False
    site.database.execute(f"create publication e2e for table {members}")
    with pytest.raises(PublicationChanged, match=said), run(site.output()):
        pass


def test_an_added_column_does_not_disturb_and_a_dropped_one_stops_the_index_that_reads_it(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("alter table w.people add extra int")
        site.database.execute("update w.people set extra = 1, name = 'changed' where id = 1")
        site.database.execute("alter table w.orders alter status type varchar(50)")
        site.database.execute("update w.orders set status = 'other' where id = 2")
        site.wait_settled(output)
        site.check()
        site.database.execute("alter table w.people drop name")
        site.database.execute("update w.people set extra = 2 where id = 1")
        wait_for(lambda: output.wait(0) or output.stopped, "the index to stop")
        assert "no column 'name'" in output.stopped["people"].message
        assert output.stopped.keys() == {"people"}
        site.database.execute("update w.orders set status = 'later' where id = 3")
        wait_for(lambda: output.wait(0) or site.read("orders")["3"]["status"] == "later", "the other index")


class Refusing(MemorySink):
    """Refuses what has a word in it."""

    word = "refused"

    def flush(self, caught_up: bool) -> FlushReport:
        kept, rejections = [], []
        for batch in self._waiting:
            rows = batch.to_pylist()
            bad = [row for row in rows if row["body"] is not None and self.word in row["body"]]
            rejections += [Rejection(row["index"], row["id"], "it has the word") for row in bad]
            kept.append(pa.Table.from_pylist([row for row in rows if row not in bad], batch.schema))
        self._waiting = kept
        super().flush(caught_up)
        return FlushReport(tuple(rejections))


@pytest.fixture
def refusing(site: Site) -> Site:
    sink = Refusing()
    site.sink, site.read = sink, sink.documents
    site.specifications = site.specifications[:1]
    return site


@pytest.mark.trap(46)
def test_a_refused_document_stops_it_and_nothing_is_acknowledged(refusing: Site) -> None:
    with run(output := refusing.output()):
        refusing.wait_settled(output)
        held = output.status.acknowledged
        refusing.database.execute("update w.people set name = 'refused' where id = 1")
        with pytest.raises(DocumentsRejected, match="it has the word"):
            wait_for(lambda: output.wait(0), "its end")
        stored = refusing.store.get_stored_progress()
        assert stored is not None
        assert not reaches(stored.position, current_position(refusing.database))
        assert reaches(stored.position, held)


def test_a_refused_document_is_set_aside_and_taken_back(refusing: Site) -> None:
    refusing.settings = DocumentsSettings(failure_policies=FailurePolicies(FailurePolicy.SKIP))
    quarantine = open_quarantine("memory:", "e2e")
    with closing(quarantine), run(output := refusing.output(quarantine=quarantine)):
        refusing.wait_settled(output)
        refusing.database.execute("update w.people set name = 'refused' where id in (1, 2)")
        refusing.wait_settled(output)
        assert sorted(each.id for each in quarantine.entries()) == ["1", "2"]
        refusing.database.execute("update w.people set name = 'fine' where id = 1")
        refusing.wait_settled(output)
        assert [each.id for each in quarantine.entries()] == ["2"]
        quarantine.retry("people")
        wait_for(lambda: quarantine.entries()[0].attempts == 2, "another attempt")
        refusing.sink.word = "nothing"
        quarantine.retry("people")
        wait_for(lambda: not quarantine.entries(), "it to be taken")
        refusing.check()


def test_tables_and_documents_come_from_one_slot(site: Site, tmp_path: Path) -> None:
    stream = site.stream_settings()
    values = {each.name: getattr(stream, each.name) for each in fields(stream)}
    output = TablesOutput(
        TablesSettings(**values), MemoryStore("e2e"), ParquetDestination(tmp_path / "lake"), ProcessTasks()
    )
    with Coordinator([output, site.definition()]) as coordinator:
        tables, documents = coordinator
        site.wait_settled(documents)
        with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
            for _ in range(10):
                world.random_transaction(Random(5), connection, 5, truncates=0)
        end = current_position(site.database)
        site.wait_settled(documents)
        wait_for(lambda: {phase.name for phase in tables.phases.values()} == {"ready"}, "tables")
        wait_for(lambda: reaches(tables.status.acknowledged, end), "tables to follow")
        [(slots,)] = site.database.execute(
            "select count(*) from pg_replication_slots where database = current_database()"
        )
        assert slots == 1
    site.check()
    assert tables.phases.keys() == {f"w.{name}" for name in world.COLUMNS}


def test_state_and_maps_may_be_in_the_database_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.store = open_store(site.database.dsn, "e2e:documents")
    monkeypatch.setattr(site, "relations", lambda: open_relation_map(site.database.dsn, "e2e:documents"))
    try:
        for seed in (1, 2):
            with run(output := site.output()):
                site.wait_settled(output)
                with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
                    for _ in range(10):
                        world.random_transaction(Random(seed), connection, 5, truncates=0.01)
                site.wait_settled(output)
                site.check()
    finally:
        site.store.close()


def test_a_partitioned_root_is_filled_and_followed(database: Any, tmp_path: Path) -> None:
    database.execute(
        """
        create schema w;
        create table w.people (id int, region text, name text, primary key (id, region)) partition by list (region);
        create table w.people_a partition of w.people for values in ('a');
        create table w.people_b (name text, region text not null, id int not null, primary key (id, region));
        alter table w.people attach partition w.people_b for values in ('b');
        create table w.notes (id int primary key, person_id int, region text, body text);
        insert into w.people select n, case n % 2 when 0 then 'a' else 'b' end, 'p' from generate_series(1, 50) n;
        insert into w.notes select n, n, case n % 2 when 0 then 'a' else 'b' end, 'n' from generate_series(1, 50) n;
        """
    )
    text = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - {has_many: notes, table: notes, foreign_key: [person_id, region], primary_key: id, fields: [{text: body}]}
"""
    sink = MemorySink()
    site = Site(database, tmp_path, specifications(people=text), sink, sink.documents)
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()
        assert len(site.read("people")) == 50
        database.execute("update w.people set region = 'b' where id = 2")
        database.execute("update w.people set name = 'changed' where id = 3")
        database.execute("delete from w.people where id = 4")
        database.execute("delete from w.notes where id = 5")
        database.execute("update w.notes set person_id = 7 where id = 6")
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(42)
def test_another_replica_identity_loses_no_deletes_and_no_moves(site: Site) -> None:
    site.database.execute("alter table w.orders replica identity full")
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("alter table w.orders replica identity default")
        site.database.execute("delete from w.orders where id = 1")
        site.database.execute("update w.orders set person_id = person_id % 3 + 1")
        site.wait_settled(output)
        site.check()
        site.database.execute("update w.orders set person_id = person_id % 3 + 1")
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(42)
def test_a_replica_identity_that_was_another_one_for_a_moment_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.coordinator.REFRESH_SECONDS", 3600.0)
    site.database.execute("alter table w.orders replica identity full")
    with run(output := site.output()):
        site.wait_settled(output)
        output.store.add_command(CommandKind.PAUSE)
        wait_for(lambda: output.paused, "it to pause")
        site.database.execute("alter table w.orders replica identity default")
        site.database.execute("update w.orders set person_id = person_id % 3 + 1")
        site.database.execute("alter table w.orders replica identity full")
        output.store.add_command(CommandKind.RESUME)
        site.wait_settled(output)
        site.check()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.coordinator.REFRESH_SECONDS", 0.2)


def wait_rebuilt(site: Site, output: DocumentsOutput, before: IndexBuild) -> None:
    wait_for(lambda: output.wait(0) or output.indexes[before.index].build != before.build, "another build")
    site.wait_settled(output)


@pytest.mark.trap(18)
@pytest.mark.usefixtures("soon")
def test_a_table_that_another_one_has_taken_the_name_of_is_built_anew(site: Site) -> None:
    site.stream["manage_publication"] = False
    site.database.execute("create publication e2e for tables in schema w")
    site.database.execute("create table w.people_new (like w.people including all)")
    site.database.execute("insert into w.people_new (id, name, email) values (1, 'another', 'a'), (1000, 'new', 'b')")
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
        site.database.execute(
            "begin; alter table w.people rename to people_old; alter table w.people_new rename to people; commit"
        )
        wait_rebuilt(site, output, before["people"])
        assert output.indexes["orders"] == before["orders"]
        site.check()
        site.database.execute("update w.people set name = 'changed' where id = 1000")
        site.wait_settled(output)
        site.check()


EVENTS = """
version: 1
schema: w
table: events
fields:
  - {text: name}
  - {has_many: notes, table: notes, foreign_key: event_id, primary_key: id, fields: [{text: body}]}
"""


@pytest.fixture(params=[False, True], ids=["by partitions", "via root"])
def partitioned(request: pytest.FixtureRequest, database: Any, tmp_path: Path) -> Site:
    database.execute(
        f"""
        create schema w;
        create table w.events (id int primary key, name text) partition by range (id);
        create table w.events_1 partition of w.events for values from (0) to (10);
        create table w.events_2 partition of w.events for values from (10) to (20);
        create table w.notes (id int primary key, event_id int, body text) partition by range (id);
        create table w.notes_1 partition of w.notes for values from (0) to (10);
        create table w.notes_2 partition of w.notes for values from (10) to (20);
        insert into w.events select n, 'e' from generate_series(1, 15) n;
        insert into w.notes select n, n, 'n' from generate_series(1, 9) n;
        create publication e2e for table w.events, w.notes with (publish_via_partition_root = {request.param});
        """
    )
    sink = MemorySink()
    site = Site(database, tmp_path, specifications(events=EVENTS), sink, sink.documents)
    site.stream["manage_publication"] = False
    return site


@pytest.mark.trap(17)
@pytest.mark.usefixtures("soon")
def test_partitions_come_and_go(partitioned: Site) -> None:
    site, database = partitioned, partitioned.database
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes["events"]
        database.execute(
            "begin; create table w.events_3 partition of w.events for values from (20) to (30);"
            " insert into w.events values (25, 'in a new one'); commit"
        )
        wait_rebuilt(site, output, before)
        site.check()
        for statement in (
            "drop table w.events_1",
            "alter table w.events detach partition w.events_2",
            "alter table w.events attach partition w.events_2 for values from (10) to (20)",
            "alter table w.notes detach partition w.notes_1",
            "alter table w.notes attach partition w.notes_1 for values from (0) to (10)",
        ):
            before = output.indexes["events"]
            database.execute(statement)
            wait_rebuilt(site, output, before)
            site.check()
        database.execute("update w.notes set event_id = 25 where id = 3")
        database.execute("delete from w.events where id = 11")
        site.wait_settled(output)
        site.check()
    before = output.indexes["events"]
    database.execute("drop table w.events_3")
    with run(output := site.output()):
        wait_rebuilt(site, output, before)
        site.check()


@pytest.mark.trap(17)
@pytest.mark.usefixtures("soon")
def test_an_empty_partition_that_comes_builds_nothing_anew(partitioned: Site) -> None:
    site, database = partitioned, partitioned.database
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
        database.execute("create table w.events_3 partition of w.events for values from (20) to (30)")

        def is_noticed() -> bool:
            output.wait(0)
            seen = site.store.get_publication_membership("e2e")
            return seen is not None and len(seen.heaps["w.events"]) == 3

        wait_for(is_noticed, "the partition to be noticed")
        database.execute("insert into w.events values (25, 'in a new one')")
        site.wait_settled(output)
        site.check()
        assert output.indexes == before


@pytest.mark.trap(10)
def test_a_lost_slot_is_an_error_or_a_new_beginning(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
    site.database.execute("select pg_drop_replication_slot(%s)", [site.database.idle_slot(site.stream_settings().slot)])
    site.database.execute("delete from w.orders where id = 1")
    site.database.execute("update w.orders set person_id = 3 where id = 2")
    with pytest.raises(SlotMissing), run(site.output()):
        pass
    site.stream["on_lost_slot"] = OnLostSlot.RECREATE
    with run(output := site.output()):
        site.wait_settled(output)
        assert {name: build.build for name, build in output.indexes.items()} != {
            name: build.build for name, build in before.items()
        }
        site.check()
        site.database.execute("delete from w.orders where id = 2")
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(44)
def test_a_standby_is_refused(make_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    server = make_server()
    server.stop()
    server.write_file("standby.signal", "")
    server.start()
    sink = MemorySink()
    database = SimpleNamespace(dsn=server.dsn(), name="in_recovery")
    output = Site(database, tmp_path, specifications(people=PEOPLE), sink, sink.documents).output()
    stream: Any = SimpleNamespace(start_of=lambda _: Lsn(0))
    opened = output.definition.opened(stream, Lifecycle("documents"), 1, stream)
    with pytest.raises(UnsupportedServer, match="documents cannot be built from a standby"), opened:
        pass


class Heard(Observer):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lag: int | None = None
        self.changes = 0
        self.documents: Counter[str] = Counter()

    def on_indexes_ensured(self, count: int) -> None:
        self.events.append(f"ensured {count}")

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        self.events.append(f"filling {', '.join(indexes)}")

    def on_index_seeded(self, index: str) -> None:
        self.events.append(f"seeded {index}")

    def on_backfill_completed(self) -> None:
        self.events.append("filled")

    def on_live_started(self) -> None:
        self.events.append("live")

    def on_changes_captured(self, count: int) -> None:
        self.changes += count

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        self.documents += Counter(statistics.documents)

    def on_slot_lag(self, lag: int) -> None:
        self.lag = lag


def test_an_observer_hears_what_happens(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.documents.output.LAG_SECONDS", 0.1)
    heard = Heard()
    with run(output := site.output(observer=heard)):
        site.wait_settled(output)
        site.database.execute("update w.people set name = 'changed' where id in (1, 2)")
        site.wait_settled(output)
        wait_for(lambda: heard.lag is not None, "the lag")
    assert sorted(heard.events) == [
        "ensured 2",
        "filled",
        "filling orders, people",
        "live",
        "seeded orders",
        "seeded people",
    ]
    assert (heard.changes, heard.documents["people"]) == (2, 2)


def test_a_lock_on_a_table_that_no_index_uses_does_not_keep_documents_from_starting(site: Site) -> None:
    site.database.execute("create table w.other (id int primary key)")
    with run(site.output()) as output:
        site.wait_settled(output)
    with site.database.connect() as locking, locking.transaction():
        locking.execute("lock table w.other in access exclusive mode")
        with run(site.output()) as output:
            site.database.execute("update w.people set name = name || '!'")
            site.wait_settled(output)
    site.check()
