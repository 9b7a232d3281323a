"""The engine on a real database: what it writes equals what a full build gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from penstock.changes.segment import Operation
from penstock.documents.base import Change, ChangeCapture, SnapshotTable
from penstock.documents.builder import PostgresDocuments
from penstock.documents.engine import Engine
from penstock.documents.images import Cells, Changes, RowChanges
from penstock.documents.relation_map import RelationMap
from penstock.documents.side_tables import PostgresTables
from penstock.documents.sinks import MemorySink
from penstock.documents.statements import wait_until_visible
from penstock.errors import SnapshotBlocked
from penstock.lsn import Lsn
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import parse_specification
from penstock.testing.postgres import PostgresServer
from tests.conftest import Database
from tests.integration.documents import world

PEOPLE = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - {has_many: orders, table: orders, foreign_key: person_id, primary_key: id, fields: [{long: id}]}
"""


BY_EMAIL = """
version: 1
schema: w
table: people
doc_id: email
fields:
  - {text: name}
  - {has_many: team, table: people, foreign_key: boss_id, primary_key: id, fields: [{text: name}]}
"""


class Confirmed:
    def __init__(self) -> None:
        self.count = 0

    def confirm(self) -> None:
        self.count += 1


class TriggerCapture(ChangeCapture):
    """Changes as triggers wrote them down; runs statements when asked for more, and then ends."""

    def __init__(self, connection: psycopg.Connection[Any], wanted: dict, transactions: Sequence[str]) -> None:
        self._connection = connection
        self._wanted = wanted
        self._transactions = transactions
        self.ack = Confirmed()

    def live(self) -> Iterator[Change]:
        for statement in self._transactions:
            self._connection.execute(statement)
            yield Change(world.as_sent(world.take_recorded(self._connection), {}, self._wanted), self.ack)

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        for each in tables:
            rows = self._connection.execute(f"select {', '.join(each.columns)} from {each.table}").fetchall()
            count = len(rows)
            cells = {
                name: Cells(pa.array([str(value) for value in values], pa.string()), np.ones(count, np.bool_))
                for name, values in zip(each.columns, zip(*rows, strict=True), strict=True)
            }
            zeros = np.zeros(count, np.int64)
            absent = dict.fromkeys(each.columns, Cells.absent(count))
            operations = np.full(count, Operation.INSERT, np.int8)
            rows_of_table = RowChanges(each.table, operations, zeros, zeros, absent, cells)
            yield Change(Changes((rows_of_table,), is_snapshot=True), self.ack)


def test_seeding_and_following_give_the_documents_of_the_database(database: Database) -> None:
    settings = SourceSettings(database.dsn)
    with (
        connect(settings, Role.CATALOG) as source,
        connect(settings, Role.CATALOG) as resolving,
        connect(settings, Role.CATALOG) as building,
        connect(settings, Role.STATE) as state,
    ):
        world.create(source)
        source.execute("insert into w.people (id, name, email) select n, 'p', n::text from generate_series(1, 9) n")
        source.execute("insert into w.orders select n, n from generate_series(1, 9) n")
        relations = RelationMap(PostgresTables(lambda: state), "engine")
        specifications = [parse_specification(PEOPLE, "people"), parse_specification(BY_EMAIL, "by_email")]
        documents = PostgresDocuments(resolving, building, specifications, relations, chunk=4)
        for table in relations.prepare(documents.resolver.tracked):
            relations.seed(source, table, Lsn(0))
        world.take_recorded(source)
        transactions = [
            "update w.people set name = 'changed' where id = 1",
            "delete from w.orders where id = 2",
            "update w.orders set person_id = 5 where id = 3",
            "delete from w.people where id = 6",
            "update w.people set id = 70 where id = 7",
            "update w.people set email = 'new', boss_id = 4 where id = 8",
            "truncate w.orders cascade",
            "insert into w.orders values (50, 1)",
        ]
        capture = TriggerCapture(source, documents.resolver.wanted, transactions)
        sink = MemorySink()
        Engine(capture, documents, sink).run()

        for index in ("by_email", "people"):
            wanted = {}
            for keys in documents.every_key(index):
                for row in documents.build(keys).to_pylist():
                    wanted[row["id"]] = json.loads(row["body"])
            assert sink.documents(index) == wanted
        assert set(wanted) == {"1", "2", "3", "4", "5", "8", "9", "70"}
        assert wanted["1"] == {"name": "changed", "orders": [{"id": 50}]}
        assert capture.ack.count == len(transactions) + len(specifications), "a snapshot for each index"


@pytest.mark.trap(41)
def test_a_commit_that_was_decoded_and_is_not_visible_is_waited_for(make_server: Callable[..., PostgresServer]) -> None:
    server = make_server(settings={"synchronous_standby_names": "nobody"})
    with server.connect() as setup:
        setup.execute("set synchronous_commit = local")
        setup.execute("create table t (id int primary key)")
        setup.execute("create publication p for table t")
        setup.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    reader = connect(SourceSettings(server.dsn()), Role.CATALOG)
    xids: list[int] = []
    started = threading.Event()

    def insert() -> None:
        with server.connect(autocommit=False) as writer:
            writer.execute("insert into t values (1)")
            xids.append(int(writer.execute("select pg_current_xact_id()::text").fetchone()[0]) & 0xFFFFFFFF)
            started.set()
            writer.commit()

    thread = threading.Thread(target=insert)
    thread.start()
    assert started.wait(30)
    with reader:
        waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        deadline = time.monotonic() + 30
        while reader.execute(waiting).fetchone()[0] == 0:
            assert time.monotonic() < deadline
        decoded = reader.execute(
            "select count(*) from pg_logical_slot_peek_binary_changes('s', null, null, 'proto_version', '1',"
            " 'publication_names', 'p')"
        ).fetchone()
        assert decoded[0] >= 3, "begin, insert, commit: the stream has it"
        assert reader.execute("select count(*) from public.t").fetchone() == (0,), "a query does not"
        with pytest.raises(SnapshotBlocked, match="1 received transactions are still not visible"):
            wait_until_visible(reader, xids, timeout=0.05)

        def release(_: float) -> None:
            with server.connect() as operator:
                operator.execute("alter system reset synchronous_standby_names")
                operator.execute("alter system set synchronous_standby_names = ''")
                operator.execute("select pg_reload_conf()")
            thread.join(30)

        wait_until_visible(reader, xids, pause=release)
        assert reader.execute("select count(*) from public.t").fetchone() == (1,)
        wait_until_visible(reader, [])
    assert not thread.is_alive()
