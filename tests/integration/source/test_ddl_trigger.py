"""The record of DDL on real servers: what is sent, when, and who may make it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.capture import CaptureSettings
from penstock.capture.assembler import AssemblerSettings
from penstock.capture.messages import parse_logical_message
from penstock.changes.steps import Segment
from penstock.errors import DecodeError, PermissionDenied
from penstock.source import Role, SourceSettings, connect
from penstock.source.catalog import load_table
from penstock.source.columns import CatalogTable
from penstock.source.ddl_trigger import SCHEMA, DdlTrigger, parse_announcement, parse_rewrite
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
            assembler=AssemblerSettings(ddl_prefix=trigger.prefix if recorded else None),
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
