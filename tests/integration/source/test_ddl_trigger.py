"""The record of DDL on real servers: what is sent, when, and who may make it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from penstock.capture import CaptureSettings
from penstock.capture.assembler import AssemblerSettings
from penstock.capture.messages import parse_logical_message
from penstock.changes.steps import Message, Segment
from penstock.errors import DecodeError, PermissionDenied, Retry, StatementInterrupted
from penstock.lsn import Lsn
from penstock.source import Role, SourceSettings, connect, ddl_messages
from penstock.source.catalog import load_table
from penstock.source.columns import CatalogTable
from penstock.source.ddl_messages import parse_announcement, parse_rewrite
from penstock.source.ddl_trigger import SCHEMA, DdlTrigger
from penstock.source.membership import load_membership
from penstock.source.publications import find_tables, published_tables
from penstock.source.slots import create_slot, drop_slot
from penstock.spool import SpoolReader, SpoolSettings
from tests.support.oracle import capture_until, current_position

TABLE = "create table t (id int primary key, a text, b int)"


@pytest.fixture
def connection(any_database: Any) -> Iterator[psycopg.Connection[Any]]:
    any_database.execute(TABLE)
    any_database.execute("create publication pub for table t")
    with connect(SourceSettings(any_database.dsn), Role.SLOT) as connection:
        yield connection
        drop_slot(connection, f"s_{any_database.name}")


@pytest.fixture
def trigger(any_database: Any, connection: psycopg.Connection[Any]) -> DdlTrigger:
    made = DdlTrigger(f"s_{any_database.name}", "pub")
    made.create(connection)
    create_slot(connection, made.slot)
    return made


def announced(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> list[CatalogTable]:
    """What the slot has got of it, and not sent before."""
    rows = connection.execute(
        "select data from pg_logical_slot_get_binary_changes(%s, null, null, 'proto_version', '1', "
        "'publication_names', 'pub', 'messages', 'true')",
        [trigger.slot],
    ).fetchall()
    messages = [parse_logical_message(bytes(data)) for (data,) in rows if bytes(data[:1]) == b"M"]
    assert all(message.transactional for message in messages)
    return [parse_announcement(message.content) for message in messages if message.prefix == trigger.prefix]


def described(connection: psycopg.Connection[Any], name: str) -> CatalogTable:
    (oid,) = connection.execute("select %s::regclass::oid::int8", [name]).fetchone() or (0,)
    table = load_table(connection, oid)
    assert table is not None
    return table


def check_same(sent: CatalogTable, known: CatalogTable) -> None:
    for name in ("oid", "namespace", "name", "replica_identity", "identity_attnums", "primary_key_attnums"):
        assert getattr(sent, name) == getattr(known, name), name
    assert [attribute for attribute in sent.attributes if not attribute.dropped] == list(known.live_attributes)
    assert [a.attnum for a in sent.attributes if a.dropped] == [a.attnum for a in known.attributes if a.dropped]


@pytest.mark.trap(15)
@pytest.mark.parametrize(
    "statement",
    [
        "alter table public.t add column c int",
        "alter table public.t drop column a",
        "alter table public.t rename column a to z",
        "alter table public.t alter column b type bigint",
        "alter table public.t replica identity full",
        "alter table public.t drop constraint t_pkey",
        "alter table public.t rename to u",
        "alter table public.t set schema other",
    ],
)
def test_ddl_on_a_published_table_is_recorded(
    connection: psycopg.Connection[Any], trigger: DdlTrigger, statement: str
) -> None:
    connection.execute("create schema other")
    known = described(connection, "public.t")
    connection.execute(statement)
    (sent,) = announced(connection, trigger)
    after = load_table(connection, known.oid)
    assert after is not None
    check_same(sent, after)


def test_ddl_of_sessions_with_the_replica_role_is_recorded(
    connection: psycopg.Connection[Any], trigger: DdlTrigger
) -> None:
    connection.execute("set session_replication_role = replica")
    connection.execute("alter table public.t drop column b, add column b int")
    (sent,) = announced(connection, trigger)
    check_same(sent, described(connection, "public.t"))


def rewritten(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> list[str]:
    """The tables whose rows were rewritten, as the slot got it."""
    rows = connection.execute(
        "select data from pg_logical_slot_get_binary_changes(%s, null, null, 'proto_version', '1', "
        "'publication_names', 'pub', 'messages', 'true')",
        [trigger.slot],
    ).fetchall()
    messages = [parse_logical_message(bytes(data)) for (data,) in rows if bytes(data[:1]) == b"M"]
    assert all(message.transactional for message in messages)
    return [parse_rewrite(message.content)[1] for message in messages if message.prefix == trigger.rewrite_prefix]


@pytest.mark.trap(17)
@pytest.mark.parametrize(
    ("statement", "is_noticed"),
    [
        ("alter table public.t alter b type int using b + 1", True),
        ("alter table public.t alter b type bigint", True),
        ("alter table public.t add c uuid default gen_random_uuid()", True),
        ("alter table public.t add c int default 5", False),
        ("alter table public.t rename b to c", False),
        ("vacuum full public.t", False),
        ("cluster public.t using t_pkey", False),
    ],
)
def test_values_that_are_computed_again_are_recorded(
    connection: psycopg.Connection[Any], trigger: DdlTrigger, statement: str, is_noticed: bool
) -> None:
    connection.execute("insert into public.t (id, b) values (1, 1)")
    connection.execute(statement.encode())
    assert rewritten(connection, trigger) == (["public.t"] if is_noticed else [])


def test_a_rewritten_partition_is_recorded_for_the_published_table(
    connection: psycopg.Connection[Any], trigger: DdlTrigger
) -> None:
    connection.execute("create table public.parts (id int, b int) partition by range (id)")
    connection.execute("create table public.part partition of public.parts for values from (0) to (10)")
    connection.execute("create table public.private (id int, b int)")
    connection.execute("alter publication pub add table public.parts")
    connection.execute("alter publication pub set (publish_via_partition_root = true)")
    connection.execute("alter table public.parts alter b type int using b + 1")
    connection.execute("alter table public.private alter b type int using b + 1")
    assert set(rewritten(connection, trigger)) == {"public.parts"}


def test_what_is_rolled_back_or_not_published_is_not_recorded(
    connection: psycopg.Connection[Any], trigger: DdlTrigger
) -> None:
    connection.execute("create table public.private (id int)")
    connection.execute("alter table public.private add column a int")
    connection.execute("create temporary table t2 (id int)")
    with connection.transaction(force_rollback=True):
        connection.execute("alter table public.t add column c int")
    connection.execute("create index on public.t (b)")
    connection.execute("analyze public.t")
    assert announced(connection, trigger) == []
    connection.execute("alter publication pub add table public.private")
    assert sorted(table.name for table in announced(connection, trigger)) == ["private", "t"]


@pytest.mark.trap(17)
@pytest.mark.parametrize("via_root", [True, False])
def test_ddl_on_a_partitioned_table_is_recorded_for_its_partitions(
    connection: psycopg.Connection[Any], trigger: DdlTrigger, via_root: bool
) -> None:
    connection.execute("create table public.parted (id int primary key, a int) partition by range (id)")
    connection.execute("create table public.leaf partition of public.parted default")
    connection.execute("alter publication pub add table public.parted")
    connection.execute(f"alter publication pub set (publish_via_partition_root = {via_root})")
    announced(connection, trigger)
    connection.execute("alter table public.parted add column c int")
    sent = {table.name: table for table in announced(connection, trigger)}
    # Those that the stream may speak of, at least.
    assert sent.keys() == ({"parted", "leaf"} if via_root else {"leaf"})
    for name, table in sent.items():
        check_same(table, described(connection, f"public.{name}"))


def test_all_tables_are_announced_at_a_start(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> None:
    trigger.announce(connection)
    (sent,) = announced(connection, trigger)
    check_same(sent, described(connection, "public.t"))


def test_it_is_made_once_and_leaves_nothing_behind(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> None:
    trigger.create(connection)
    assert trigger.exists(connection)
    other = DdlTrigger("x" * 60, "pub")
    other.create(connection)
    assert other.name != other.emit_name
    connection.execute("alter table public.t add column c int")
    assert len(announced(connection, trigger)) == 1
    assert trigger.drop(connection)
    assert not trigger.exists(connection)
    assert not trigger.drop(connection)
    assert other.exists(connection)
    assert other.drop(connection)
    assert connection.execute("select from pg_namespace where nspname = %s", [SCHEMA]).fetchone() is None
    assert connection.execute("select from pg_event_trigger").fetchone() is None


def test_ddl_never_fails_because_of_it(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> None:
    connection.execute("drop publication pub")
    connection.execute("alter table public.t add column c int")
    connection.execute("create publication pub for table public.t")
    connection.execute(f"drop function {SCHEMA}.{trigger.emit_name}(oid)")
    connection.execute("alter table public.t add column d int")
    # And it is mended.
    trigger.create(connection)
    announced(connection, trigger)
    connection.execute("alter table public.t add column e int")
    assert len(announced(connection, trigger)) == 1


def test_roles_without_the_privilege_are_told_and_can_use_what_is_there(
    any_database: Any, connection: psycopg.Connection[Any]
) -> None:
    trigger = DdlTrigger(f"s_{any_database.name}", "pub")
    role = f"plain_{any_database.name}"
    connection.execute(f"create role {role}")
    try:
        connection.execute(f"grant create on database {any_database.name} to {role}")
        connection.execute(f"set role {role}")
        with pytest.raises(PermissionDenied) as denied:
            trigger.create(connection)
        assert "ddl_trigger = false" in denied.value.hint
        connection.execute("reset role")
        assert connection.execute("select from pg_namespace where nspname = %s", [SCHEMA]).fetchone() is None
        trigger.create(connection)
        connection.execute(f"set role {role}")
        trigger.create(connection)
        trigger.announce(connection)
        connection.execute("reset role")
        trigger.drop(connection)
    finally:
        connection.execute("reset role")
        connection.execute(f"drop owned by {role}; drop role {role}")


def test_a_record_that_cannot_be_understood_is_an_error_without_its_content() -> None:
    for content in (b"", b"secret", b"{}", b'{"table": "secret"}'):
        with pytest.raises(DecodeError) as raised:
            parse_announcement(content)
        assert "secret" not in str(raised.value)


@contextmanager
def plain_role(database: Any) -> Iterator[psycopg.Connection[Any]]:
    """A connection of a role that may only log in and create schemas."""
    role = f"mallory_{database.name[-12:]}"
    database.execute(f"create role {role} login password 'mallory'; grant create on database {database.name} to {role}")
    try:
        with psycopg.connect(database.dsn, user=role, password="mallory", autocommit=True) as mallory:
            yield mallory
    finally:
        database.execute(f"drop owned by {role} cascade; drop role {role}")


FORGED = "select pg_logical_emit_message(true, %s, %s)"


def test_messages_that_others_send_change_nothing(
    any_database: Any,
    connection: psycopg.Connection[Any],
    trigger: DdlTrigger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trigger.announce(connection)
    genuine = connection.execute(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1', "
        "'publication_names', 'pub', 'messages', 'true')",
        [trigger.slot],
    ).fetchall()
    (message,) = [parse_logical_message(bytes(data)) for (data,) in genuine if bytes(data[:1]) == b"M"]
    connection.execute("alter table public.t drop column b, add column b int")
    oid = described(connection, "public.t").oid
    with plain_role(any_database) as mallory:
        for prefix in (trigger.prefix, trigger.rewrite_prefix):
            for content in (b"", b"x", b"\xff\x00", b"[" * 100_000, b"{}"):
                mallory.execute(FORGED, [prefix, content])
        mallory.execute(FORGED, [trigger.prefix, message.content])
        mallory.execute(FORGED, [trigger.rewrite_prefix, f'{{"table": {oid}, "name": "public.t"}}'.encode()])
        schema, ledger = trigger.ledger
        for attempt in (
            f"select {SCHEMA}.{trigger.emit_name}({oid})",
            f"select {SCHEMA}.{trigger.send_name}('{trigger.prefix}', 'x')",
            f"select {SCHEMA}.{trigger.announce_name}()",
            f"insert into {schema}.{ledger} values (pg_current_xact_id(), 'x', '0/0')",
            f"delete from {schema}.{ledger}",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                mallory.execute(attempt)
    connection.execute("insert into public.t values (1, 'first', 1)")
    stream = Captured(any_database, tmp_path, trigger, recorded=True)
    stream.catch_up()
    assert set(stream.numbers_of("b")) == {4}
    reader = SpoolReader(stream.path)
    assert reader.begin is not None
    steps = [step for entry in reader.entries(reader.begin) for step in entry.steps]
    # ALTER TABLE rewrote nothing, so the only message about that was the forged one.
    assert not [step for step in steps if isinstance(step, Message)]
    (warning,) = [each for each in caplog.records if each.name == "penstock.source.ddl_messages"]
    assert "did not send" in warning.message


def test_messages_from_before_the_ledger_count_and_rows_of_other_servers_do_not(
    any_database: Any, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    trigger = DdlTrigger(f"s_{any_database.name}", "pub")
    create_slot(connection, trigger.slot)
    # As sent by the trigger of an earlier version, at a time when `b` had another number.
    attributes = '[1,"id",23,-1,false,"",true,false],[2,"a",25,-1,false,"",false,false]'
    old = (
        f'{{"table": {described(connection, "public.t").oid}, "namespace": "public", "name": "t", "kind": "r", '
        '"persistence": "p", "identity": "d", "partition": false, "primary_key": [1], "deferrable": false, '
        f'"identity_key": [1], "attributes": [{attributes},[7,"b",23,-1,false,"",false,false]]}}'
    )
    connection.execute(FORGED, [trigger.prefix, old.encode()])
    connection.execute("insert into public.t values (1, 'before', 1)")
    trigger.create(connection)
    connection.execute(
        sql.SQL("insert into {} values ('99999999', 'x', '0/1'), ('1', '', 'FFFF/0')").format(
            sql.Identifier(*trigger.ledger)
        )
    )
    trigger.announce(connection)
    rows = connection.execute(sql.SQL("select xid::text from {}").format(sql.Identifier(*trigger.ledger))).fetchall()
    assert {("99999999",), ("1",)}.isdisjoint(rows)
    connection.execute("alter table public.t add column c int")
    connection.execute(FORGED, [trigger.prefix, old.encode()])
    connection.execute("insert into public.t values (2, 'after', 1)")
    stream = Captured(any_database, tmp_path, trigger, recorded=True)
    stream.catch_up()
    assert stream.numbers_of("b")[0] == 7
    assert set(stream.numbers_of("b")[1:]) == {3}


@pytest.mark.trap(41)
def test_a_transaction_that_queries_do_not_see_yet_is_waited_for(
    any_database: Any, connection: psycopg.Connection[Any], trigger: DdlTrigger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddl_messages, "VISIBLE_SECONDS", 0.0)
    ledger = ddl_messages.Ledger(connection, trigger.ledger)
    send = sql.SQL("select {}('a', 'b'), pg_current_xact_id()::text::int8 & 4294967295").format(
        sql.Identifier(SCHEMA, trigger.send_name)
    )
    with any_database.connect(autocommit=False) as other:
        ((_, xid),) = other.execute(send).fetchall()
        with pytest.raises(StatementInterrupted) as early:
            ledger.has("a", b"b", Lsn(1 << 40), xid)
        assert early.value.retry is Retry.TIMED
        other.commit()
        assert ledger.has("a", b"b", Lsn(1 << 40), xid)
        assert not ledger.has("a", b"c", Lsn(1 << 40), xid)
        assert not ledger.has("b", b"b", Lsn(1 << 40), xid)
        assert not ledger.has("a", b"b", Lsn(1 << 40), xid - 1)


def test_a_schema_that_another_role_created_is_refused(any_database: Any, connection: psycopg.Connection[Any]) -> None:
    trigger = DdlTrigger(f"s_{any_database.name}", "pub")
    with plain_role(any_database) as mallory:
        mallory.execute(f"create schema {SCHEMA}")
        mallory.execute(f"create function {SCHEMA}.{trigger.send_name}(text, text) returns void return null")
        with pytest.raises(PermissionDenied, match="mallory") as refused:
            trigger.create(connection)
        remedy = re.search(r"run: (.*?);", refused.value.hint)
        assert remedy is not None
        connection.execute(remedy[1].encode())
        trigger.create(connection)
    trigger.drop(connection)


def test_the_ledger_is_never_replicated(connection: psycopg.Connection[Any], trigger: DdlTrigger) -> None:
    connection.execute("create publication everything for all tables")
    assert list(load_membership(connection, "everything").names.values()) == ["public.t"]
    assert [str(table) for table in find_tables(connection, ["*"])] == ["public.t"]
    assert [table.name for table in published_tables(connection, "everything")] == ["t"]


class Captured:
    """A stream whose capture is behind."""

    def __init__(self, database: Any, folder: Path, trigger: DdlTrigger, *, recorded: bool) -> None:
        self.database = database
        self.path = folder / "spool"
        self._settings = CaptureSettings(
            source=SourceSettings(database.dsn),
            slot=trigger.slot,
            publication="pub",
            spool=SpoolSettings(self.path, min_free_bytes=0),
            assembler=AssemblerSettings(ddl_trigger=trigger if recorded else None),
        )

    def catch_up(self) -> None:
        with self.database.connect() as connection:
            end = current_position(connection)
            connection.execute("insert into t (id) select max(id) + 1 from t")
        capture_until(self._settings, end)

    def numbers_of(self, name: str) -> list[int | None]:
        """The attribute number of a column in each of the segments, in order."""
        reader = SpoolReader(self.path)
        assert reader.begin is not None
        segments = [step for entry in reader.entries(reader.begin) for step in entry.steps if isinstance(step, Segment)]
        schemas = [reader.schema(segment) for segment in segments]
        return [next((c.attnum for c in schema.columns if c.name == name), None) for schema in schemas]


@pytest.mark.trap(15)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_column_that_came_back_while_capture_was_behind(
    any_database: Any, connection: psycopg.Connection[Any], trigger: DdlTrigger, tmp_path: Path, recorded: bool
) -> None:
    trigger.announce(connection)
    connection.execute("insert into public.t values (1, 'first', 1)")
    connection.execute("alter table public.t drop column b")
    connection.execute("insert into public.t values (2, 'second')")
    connection.execute("alter table public.t add column b int")
    connection.execute("insert into public.t values (3, 'third', 3)")
    stream = Captured(any_database, tmp_path, trigger, recorded=recorded)
    stream.catch_up()
    # Without the record the catalog of now decides: the column looks as if it had always been the new one.
    assert stream.numbers_of("b")[:3] == ([3, None, 4] if recorded else [4, None, 4])


@pytest.mark.trap(14, 15)
def test_what_was_recorded_before_a_restart_holds_after_it(
    any_database: Any, connection: psycopg.Connection[Any], trigger: DdlTrigger, tmp_path: Path
) -> None:
    trigger.announce(connection)
    stream = Captured(any_database, tmp_path, trigger, recorded=True)
    connection.execute("insert into public.t values (1, 'first', 1)")
    stream.catch_up()
    # The record of this comes before the restart, and the rows after it.
    connection.execute("alter table public.t drop column b, add column b int")
    capture_until(stream._settings, current_position(connection))
    connection.execute("insert into public.t values (10, 'second', 2)")
    connection.execute("alter table public.t drop column b, add column b int")
    stream.catch_up()
    numbers = stream.numbers_of("b")
    assert numbers[0] == 3
    assert 4 in numbers
    assert numbers[-1] == 5
    assert numbers == sorted(numbers)
