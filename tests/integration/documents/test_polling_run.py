"""A pipeline that polls, run from its config: what it waits for, and what it fills again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load_config
from penstock.documents.polling import open_positions
from penstock.operations.polling import run_polling
from penstock.operations.running import say_nothing, started
from penstock.operations.signals import Ending
from penstock.state import CommandKind, CommandStatus
from penstock.state.quarantine import Quarantine
from tests.conftest import Database
from tests.e2e.support import wait_for
from tests.support.document_sink import FileSink

CONFIG = """
[pipeline]
id = "shop"
[source]
url = "${SOURCE_URL}"
[polling]
interval = "50ms"
[[index]]
specification = "people.schema.yml"
failure_policy = "skip"
[sink]
type = "tests.support.document_sink:FileSink"
path = "${SINK}"
"""
PEOPLE = """
version: 1
table: people
fields:
  - {text: name}
  - {avg: mean, table: orders, foreign_key: person_id, column: price}
"""
TABLES = """
create table people (id int primary key, name text);
create table orders (id int primary key, person_id int, price numeric);
insert into people select n, 'person ' || n from generate_series(1, 20) n;
insert into orders select n, n, n from generate_series(1, 20) n;
"""


class Polled:
    def __init__(self, database: Database, folder: Path) -> None:
        database.execute(TABLES)
        (folder / "penstock.toml").write_text(CONFIG)
        (folder / "people.schema.yml").write_text(PEOPLE)
        self.database = database
        self.sink = FileSink(folder / "sink.db")
        self.config = load_config(
            folder / "penstock.toml", {"SOURCE_URL": database.dsn, "SINK": str(folder / "sink.db")}
        )
        self.owner = self.config.indexes.settings.output_id

    @contextmanager
    def running(self) -> Iterator[None]:
        polling = self.config.indexes.polling
        assert polling is not None
        ending = Ending()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                run_polling(self.config, polling, ending, say_nothing, once=False)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
            assert not failed, failed
        finally:
            ending.stop.set()
            thread.join(60)

    def wait_for(self, look: Callable[[dict[str, Any]], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while not look(self.sink.documents("people")):
            assert time.monotonic() < deadline, what
            time.sleep(0.02)


@pytest.fixture
def polled(database: Database, tmp_path: Path) -> Polled:
    return Polled(database, tmp_path)


def test_connections_that_are_cut_are_opened_again(polled: Polled) -> None:
    with polled.running():
        polled.wait_for(lambda found: len(found) == 20, "the backfill")
        for number in range(2):
            polled.database.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            polled.database.execute(f"update people set name = 'changed {number}' where id = 1")
            polled.wait_for(lambda found, n=number: found["1"]["name"] == f"changed {n}", "the change")


def test_without_a_position_an_index_that_was_filled_has_a_gap_and_is_filled_again(polled: Polled) -> None:
    with polled.running():
        polled.wait_for(lambda found: len(found) == 20, "the backfill")
    with closing(open_positions(polled.config.state_url, polled.owner)) as positions:
        positions.forget()
    polled.database.execute("update people set name = 'missed' where id = 1; delete from people where id = 2")
    polled.database.execute("update orders set person_id = 5 where id = 6")
    with polled.running():
        polled.wait_for(lambda found: found["1"]["name"] == "missed" and "2" not in found, "what was missed")
        polled.database.execute("update orders set person_id = 7 where id = 6")
        polled.wait_for(lambda found: found["7"]["mean"] == 6.5, "the order's new person")
        polled.wait_for(lambda found: found["5"]["mean"] == 5, "the person that had it since the gap")


def test_an_index_is_rebuilt_while_it_polls_when_somebody_asks(polled: Polled) -> None:
    def answers() -> dict[int, Any]:
        return {each.number: (each.status, each.reason) for each in store.get_commands()}

    with polled.config.open_store(polled.config.indexes) as store, polled.running():
        polled.wait_for(lambda found: len(found) == 20, "the backfill")
        polled.database.execute("delete from people where id = 2")
        store.add_command(CommandKind.REBUILD_INDEX)
        polled.wait_for(lambda found: "2" not in found, "all indexes to be rebuilt")
        polled.database.execute("delete from people where id = 3")
        store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["people"]})
        polled.wait_for(lambda found: "3" not in found, "the named index to be rebuilt")
        unknown = store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["nobody"]})
        pause = store.add_command(CommandKind.PAUSE)
        polled.wait_for(lambda _: answers()[pause.number][0] is CommandStatus.REFUSED, "the answers")
        assert answers()[unknown.number] == (CommandStatus.REFUSED, "no such index: nobody")


def test_quarantined_documents_are_retried_and_leave(polled: Polled) -> None:
    polled.database.execute("update orders set price = 1e400 where id in (3, 4)")
    with polled.config.open_store(polled.config.indexes) as store, polled.running():
        quarantine = Quarantine(store.database)
        polled.wait_for(lambda found: len(found) == 18, "the backfill")
        polled.wait_for(lambda _: len(quarantine.entries()) == 2, "the quarantine")
        quarantine.add([], None)
        quarantine.retry("people", ["3"])
        polled.wait_for(
            lambda _: {each.id: each.attempts for each in quarantine.entries()} == {"3": 2, "4": 1}, "a retry"
        )
        polled.database.execute("update orders set price = 3 where id = 3")
        polled.wait_for(lambda found: "3" in found, "the document")
        polled.wait_for(lambda _: [each.id for each in quarantine.entries()] == ["4"], "it to leave")


def test_logical_replication_after_polling_does_not_trust_the_maps_that_polling_wrote(
    database: Database, tmp_path: Path
) -> None:
    database.execute(TABLES)
    count = "version: 1\ntable: people\nfields: [{count: orders, table: orders, foreign_key: person_id}]\n"
    (tmp_path / "people.schema.yml").write_text(count)
    sink = FileSink(tmp_path / "sink.db")
    names = {"SOURCE_URL": database.dsn, "SINK": str(tmp_path / "sink.db")}

    def run(*, is_polling: bool, statement: str = "select") -> dict[str, int]:
        slot = f'url = "${{SOURCE_URL}}"\nslot = "switch_{database.name[-12:]}"'
        text = CONFIG.replace('url = "${SOURCE_URL}"', slot)
        if not is_polling:
            text = text.replace('[polling]\ninterval = "50ms"', '[spark]\nmaster = "none"')
        (tmp_path / "penstock.toml").write_text(text)
        config = load_config(tmp_path / "penstock.toml", names)
        if is_polling:
            database.execute(statement)
            assert config.indexes.polling is not None
            run_polling(config, config.indexes.polling, Ending(), say_nothing, once=True)
        else:
            with started(config) as running:
                wait_for(lambda: running.check() or running.is_ready(), "the indexes")
                database.execute(statement)
                end = running.current_position()
                wait_for(lambda: running.check() or running.has_reached(end), "the changes")
        return {id_: each["orders"] for id_, each in sink.documents("people").items() if each["orders"] != 1}

    assert run(is_polling=False, statement="update orders set person_id = 2 where id = 1") == {"1": 0, "2": 2}
    assert run(is_polling=True) == {"1": 0, "2": 2}
    assert run(is_polling=True, statement="update orders set person_id = 3 where id = 1") == {"1": 0, "3": 2}
    # The map has the order of this row from polling, which no position of the stream reaches.
    assert run(is_polling=False, statement="update orders set person_id = 4 where id = 1") == {"1": 0, "4": 2}
    assert run(is_polling=False, statement="update orders set person_id = 5 where id = 1") == {"1": 0, "5": 2}
    assert run(is_polling=True, statement="update orders set person_id = 6 where id = 1") == {"1": 0, "6": 2}
