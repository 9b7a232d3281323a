"""Preflight checks on real servers: every fault is found, and none hides another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.changes.column_rules import ColumnRule
from penstock.changes.transform import RulesInForce, TableRules, Transforms
from penstock.source import Role, SourceSettings, connect
from penstock.source.connections import connect_replication
from penstock.source.preflight import Check, Report, Request, Severity, Status, run_preflight
from penstock.source.preflight.context import Context
from penstock.source.preflight.run import ALL_CHECKS
from penstock.source.slots import create_slot
from penstock.testing.postgres import PostgresServer
from penstock.values import NumericPolicy, OutOfRange, TypeOverride, TypeSettings

MakeServer = Callable[..., PostgresServer]


def look(database: Any, **request: Any) -> Report:
    return run_preflight(SourceSettings(database.dsn), Request(**request))


def finding(report: Report, id_: str) -> Check:
    check = report.find(id_)
    assert check is not None, f"{id_} did not run"
    return check


def state(report: Report, id_: str) -> tuple[Status, Severity]:
    check = finding(report, id_)
    return check.status, check.severity


CRITICAL = (Status.FAILED, Severity.CRITICAL)
WARNING = (Status.FAILED, Severity.WARNING)
INFO = (Status.FAILED, Severity.INFO)
PASSED = (Status.PASSED, Severity.INFO)


def test_a_good_source_is_ready(any_database: Any) -> None:
    any_database.execute("create table t (id int primary key, x text); create publication pub for table t")
    report = look(any_database, publication="pub", slot="not_yet", patterns=("public.t",))
    assert report.ready
    assert not [check for check in report.checks if check.status is Status.UNKNOWN]
    for id_ in ("connection", "server_version", "wal_level", "replication_connection", "publication", "slot"):
        assert state(report, id_) == PASSED
    assert finding(report, "publication").subjects == ("public.t",)
    assert report.to_dict()["ready"] is True


def test_an_unreachable_server_is_one_finding() -> None:
    report = run_preflight(SourceSettings("postgresql://me:s3cret-pa55@127.0.0.1:1/d"))
    assert [check.id for check in report.checks] == ["connection"]
    assert not report.ready
    assert "s3cret" not in str(report)


def test_a_missing_and_an_empty_publication(any_database: Any) -> None:
    any_database.execute('create table "T" (id int primary key); create publication "Empty"')
    missing = look(any_database, publication="no pe", patterns=("public.*",))
    assert state(missing, "publication") == CRITICAL
    assert 'create publication "no pe" for table public."T";' in finding(missing, "publication").remedy
    managed = look(any_database, publication="nope", manage_publication=True)
    assert state(managed, "publication") == PASSED
    assert state(look(any_database, publication="Empty"), "publication") == CRITICAL
    assert state(look(any_database, publication="Empty", patterns=("T",)), "table_patterns") == CRITICAL


def test_operations_that_are_left_out(any_database: Any) -> None:
    any_database.execute(
        "create table t (id int); create publication pub for table t with (publish = 'insert, update')"
    )
    check = finding(look(any_database, publication="pub"), "publication_operations")
    assert (check.status, check.subjects) == (Status.FAILED, ("delete", "truncate"))
    any_database.execute("alter publication pub set (publish = 'insert')")
    report = look(any_database, publication="pub")
    assert report.find("replica_identity") is None
    assert report.ready


def test_identities_are_checked_where_rows_are_stored(any_database: Any) -> None:
    any_database.execute(
        """
        create table keyed (id int primary key);
        create table keyless (id int);
        create table nothing (id int primary key); alter table nothing replica identity nothing;
        create table late (id int primary key deferrable);
        create table whole (id int); alter table whole replica identity full;
        create table top (id int) partition by range (id);
        create table leaf1 partition of top for values from (0) to (10);
        create table leaf2 (id int primary key); alter table top attach partition leaf2 for values from (10) to (20);
        """
    )
    unasked = look(any_database)
    assert state(unasked, "replica_identity") == WARNING
    assert unasked.ready
    any_database.execute("create publication pub for all tables with (publish_via_partition_root)")
    report = look(any_database, publication="pub")
    assert state(report, "replica_identity") == CRITICAL
    assert finding(report, "replica_identity").subjects == (
        "public.keyless",
        "public.late",
        "public.leaf1",
        "public.nothing",
    )
    # the server agrees
    for table in ("keyless", "late", "nothing", "leaf1"):
        any_database.execute(f"insert into {table} values (1)")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            any_database.execute(f"delete from {table}")
    any_database.execute("delete from keyed; delete from whole; delete from leaf2")
    assert state(report, "replica_identity_full") == WARNING
    assert finding(report, "replica_identity_full").subjects == ("public.whole",)
    assert finding(report, "partitions").subjects == ("public.top",)


def test_column_lists_and_row_filters_that_break_updates(any_database: Any) -> None:
    any_database.execute(
        """
        create table good (id int primary key, x text); create table bad (id int primary key, x text);
        create table filtered (id int primary key, "Kind" text, note text);
        create publication pub for table good (id), bad (x), filtered where (note <> 'Kind' and id > 0)
        """
    )
    report = look(any_database, publication="pub")
    assert state(report, "column_lists") == CRITICAL
    assert finding(report, "column_lists").subjects == ("public.bad",)
    assert state(report, "row_filters") == CRITICAL
    assert finding(report, "row_filters").subjects == ("public.filtered",)
    for statement in ("update bad set x = 'y'", "delete from filtered"):
        any_database.execute("insert into bad values (1) on conflict do nothing")
        any_database.execute("insert into filtered values (1, 'a', 'b') on conflict do nothing")
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            any_database.execute(statement)
    any_database.execute(
        "alter publication pub set table good (id), bad (id, x), filtered where (id > 0);"
        "insert into good values (1); update good set x = 'y'"
    )
    report = look(any_database, publication="pub")
    assert state(report, "column_lists") == PASSED
    assert state(report, "row_filters") == PASSED
    assert report.ready


def test_identities_with_generated_columns_that_break_updates(database: Any) -> None:
    """PostgreSQL 18 rejects updates if the replica identity has generated columns that it does not send."""
    database.execute(
        """
        create table whole (id int, g int generated always as (id) stored);
        create table in_key (id int, g int generated always as (id) stored not null, primary key (id, g));
        create table virtual (id int, v int generated always as (id));
        create table keyed (id int primary key, g int generated always as (id) stored, v int generated always as (1));
        alter table whole replica identity full; alter table virtual replica identity full;
        insert into whole values (1); insert into in_key values (1); insert into virtual values (1);
        insert into keyed values (1);
        create publication pub for all tables
        """
    )
    report = look(database, publication="pub")
    assert state(report, "generated_identity") == CRITICAL
    assert finding(report, "generated_identity").subjects == ("public.in_key", "public.virtual", "public.whole")
    for table in ("whole", "in_key", "virtual"):
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            database.execute(f"update {table} set id = 2")
    database.execute("update keyed set id = 2")
    database.execute("alter publication pub set (publish_generated_columns = stored)")
    assert finding(look(database, publication="pub"), "generated_identity").subjects == ("public.virtual",)
    database.execute("update whole set id = 2; update in_key set id = 2")
    database.execute("alter table virtual add primary key (id), replica identity default; update virtual set id = 2")
    assert look(database, publication="pub").ready


def test_generated_columns_of_a_key_that_older_servers_omit(server_pool: Any) -> None:
    server = server_pool.get(15)
    name = server.create_database()
    server.execute(
        """
        create table in_key (id int, g int generated always as (id) stored not null, primary key (id, g));
        create table whole (id int, g int generated always as (id) stored, primary key (id, g));
        alter table whole replica identity full;
        create publication pub for all tables
        """,
        database=name,
    )
    report = run_preflight(SourceSettings(server.dsn(name)), Request(publication="pub"))
    assert state(report, "generated_identity") == WARNING
    assert finding(report, "generated_identity").subjects == ("public.in_key",)
    assert report.ready
    server.drop_database(name)


def test_good_to_know(any_database: Any) -> None:
    any_database.execute(
        """
        create table t (id int primary key, g int generated always as (id) stored, p point, m money[], n numeric);
        create unlogged table scratch (id int); create materialized view seen as select 1 as one;
        create table top (id int primary key) partition by range (id);
        create table leaf partition of top for values from (0) to (10);
        create publication pub for table t, top
        """
    )
    report = look(any_database, publication="pub")
    assert state(report, "unpublishable_tables") == INFO
    assert set(finding(report, "unpublishable_tables").subjects) == {
        "public.scratch (unlogged)",
        "public.seen (materialized view)",
    }
    assert finding(report, "generated_columns").subjects == ("public.t.g",)
    assert finding(report, "partitions_as_leaves").subjects == ("public.leaf",)
    assert "public.t.p (point)" in finding(report, "types_as_text").subjects
    assert "public.t.n (numeric)" in finding(report, "types_as_text").subjects
    assert report.ready


@pytest.fixture
def role(any_database: Any) -> Iterator[tuple[str, str]]:
    """A role that may only log in: its name and its URL."""
    name = f"r_{any_database.name}"
    any_database.execute(f"create role {name} login password 's3cret-pa55'")
    yield name, f"postgresql://{name}:s3cret-pa55@{SourceSettings(any_database.dsn).location}"
    any_database.execute(f"drop owned by {name}; drop role {name}")


def test_a_role_that_may_do_nothing_is_told_all_at_once(any_database: Any, role: tuple[str, str]) -> None:
    name, url = role
    any_database.execute(
        f"""
        create table t (id int primary key, x text, y text);
        create schema hidden; create table hidden.h (id int primary key); grant select on hidden.h to {name};
        create table guarded (id int primary key); alter table guarded enable row level security;
        grant select on guarded to {name};
        create publication pub for table t (id, x), hidden.h, guarded
        """
    )
    report = run_preflight(SourceSettings(url), Request(publication="pub"))
    assert state(report, "replication_connection") == CRITICAL
    assert "replication" in finding(report, "replication_connection").remedy
    assert state(report, "select_privilege") == CRITICAL
    assert set(finding(report, "select_privilege").subjects) == {"public.t", "hidden.h"}
    assert state(report, "row_security") == CRITICAL
    assert finding(report, "row_security").subjects == ("public.guarded",)
    assert not [check for check in report.checks if check.status is Status.UNKNOWN]
    assert "s3cret" not in str(report)
    any_database.execute(
        f"grant select (id, x) on t to {name}; grant usage on schema hidden to {name};"
        f"alter role {name} replication bypassrls"
    )
    assert run_preflight(SourceSettings(url), Request(publication="pub")).ready


def test_slots_missing_ready_active_and_foreign(any_database: Any) -> None:
    name = f"s_{any_database.name}"
    assert state(look(any_database, slot=name), "slot") == PASSED
    needed = look(any_database, slot=name, needs_slot=True)
    assert state(needed, "slot") == CRITICAL
    assert 'on_lost_slot = "recreate"' in finding(needed, "slot").remedy
    assert state(look(any_database, slot="No-Name"), "slot") == CRITICAL
    with connect(SourceSettings(any_database.dsn), Role.SLOT) as connection:
        create_slot(connection, name, temporary=True)
        report = look(any_database, slot=name)
        assert state(report, "slot") == WARNING
        assert f"pid {connection.info.backend_pid}" in finding(report, "slot").what
        assert state(report, "slot_retention") == PASSED
    physical = f"p_{any_database.name}"
    any_database.execute("select pg_create_physical_replication_slot(%s)", [physical])
    try:
        assert state(look(any_database, slot=physical), "slot") == CRITICAL
    finally:
        any_database.execute("select pg_drop_replication_slot(%s)", [physical])


def test_prepared_transactions_delay_new_slots(any_database: Any) -> None:
    any_database.execute("create table t (id int primary key)")
    any_database.execute("begin; insert into t values (1); prepare transaction 'held'")
    check = finding(look(any_database), "open_transactions")
    assert (check.status, check.severity) == WARNING
    assert any("held" in subject for subject in check.subjects)


@pytest.mark.remedy("replication_slots", "wal_senders", "idle_slot_timeout", "wal_sender_timeout")
def test_settings_that_lose_slots_are_found_and_their_remedies_work(make_server: MakeServer) -> None:
    server = make_server(
        settings={
            "wal_level": "replica",
            "max_slot_wal_keep_size": "0",
            "idle_replication_slot_timeout": "60s",
            "wal_sender_timeout": "2s",
            "max_replication_slots": "1",
            "max_wal_senders": "1",
        }
    )
    server.execute("select pg_create_physical_replication_slot('other')")
    report = run_preflight(SourceSettings(server.dsn()))
    assert state(report, "wal_level") == CRITICAL
    assert state(report, "slot_wal_keep_size") == CRITICAL
    assert state(report, "idle_slot_timeout") == WARNING
    assert state(report, "wal_sender_timeout") == WARNING
    assert state(report, "replication_slots") == CRITICAL
    assert state(report, "wal_senders") == WARNING
    assert "60 s" in finding(report, "idle_slot_timeout").what
    server.execute("alter system set max_slot_wal_keep_size = '64MB'")
    server.execute("alter system set wal_sender_timeout = 0")
    server.execute("select pg_reload_conf()")
    report = run_preflight(SourceSettings(server.dsn()))
    assert state(report, "wal_sender_timeout") == WARNING
    remedies = {
        "wal_level": "wal_level = 'logical'",
        "idle_slot_timeout": "idle_replication_slot_timeout = 0",
        "wal_sender_timeout": "wal_sender_timeout = '60s'",
        "replication_slots": "max_replication_slots = 10",
        "wal_senders": "max_wal_senders = 10",
    }
    for id_, setting in remedies.items():
        name, _, value = setting.partition(" = ")
        assert name in finding(report, id_).what + finding(report, id_).remedy
        server.execute(f"alter system set {name} = {value}")
    server.restart()
    report = run_preflight(SourceSettings(server.dsn()))
    assert {state(report, id_) for id_ in remedies} == {PASSED}


def test_connections_of_checks_do_not_use_up_the_senders(make_server: MakeServer) -> None:
    server = make_server(settings={"wal_level": "logical", "max_wal_senders": "1"})
    settings = SourceSettings(server.dsn())
    assert state(run_preflight(settings), "wal_senders") == WARNING
    ending = connect_replication(settings, Role.CHECK)
    try:
        assert state(run_preflight(settings), "wal_senders") == WARNING
    finally:
        ending.finish()


def test_a_check_that_breaks_does_not_hide_the_others(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(context: Context) -> Iterator[Check]:
        context.connection.execute("select pg_terminate_backend(pg_backend_pid())")
        yield from ()

    def mistake(context: Context) -> Iterator[Check]:
        raise ZeroDivisionError

    checks = {"first": cut, "second": mistake, **ALL_CHECKS}
    monkeypatch.setattr("penstock.source.preflight.run.ALL_CHECKS", checks)
    report = look(database)
    assert finding(report, "first").status is Status.UNKNOWN
    assert finding(report, "second").status is Status.UNKNOWN
    assert state(report, "wal_level") == PASSED
    assert report.ready


def test_keys_that_a_setting_would_change_are_found_and_overrides_that_nothing_has(any_database: Any) -> None:
    any_database.execute("create table keyed (id date primary key, at date)")
    any_database.execute("create table whole (cell numeric); alter table whole replica identity full")
    any_database.execute("create table fine (id int primary key, at date, price numeric)")
    any_database.execute("create publication pub for table keyed, whole, fine")
    assert look(any_database, publication="pub").find("exact_keys") is None
    types = TypeSettings(out_of_range=OutOfRange.NULL, numeric=NumericPolicy.DOUBLE)
    report = look(any_database, publication="pub", types=types)
    assert state(report, "exact_keys") == CRITICAL
    found = finding(report, "exact_keys")
    assert found.subjects == ("public.keyed.id", "public.whole.cell")
    assert '[tables."public.keyed".types.columns."id"]' in found.remedy
    overrides = tuple(
        TypeOverride(table, column, TypeSettings())
        for table, column in (
            ("public.keyed", "id"),
            ("public.whole", None),
            ("public.gone", None),
            ("public.fine", "x"),
        )
    )
    report = look(any_database, publication="pub", types=replace(types, overrides=overrides))
    assert report.find("exact_keys") is None
    assert finding(report, "type_overrides").subjects == ("public.gone", "public.fine.x")


def test_rules_for_columns_are_shown_and_checked(any_database: Any) -> None:
    any_database.execute("create table users (id int primary key, email text); create publication pub for table users")

    def rules(table: str, column: str) -> Transforms:
        return Transforms({table: TableRules(((column, ColumnRule(hash=True)),), key=b"k")})

    report = look(any_database, publication="pub", transforms=rules("public.users", "email"))
    assert finding(report, "column_rules").what.endswith("public.users: email hashed")
    assert report.ready
    report = look(any_database, publication="pub", transforms=rules("public.users", "mail"))
    assert state(report, "column_rules") == CRITICAL
    assert "does not have: 'mail'" in finding(report, "column_rules").what
    report = look(any_database, publication="pub", transforms=rules("public.usres", "email"))
    assert state(report, "column_rules") == WARNING
    assert finding(report, "column_rules").subjects == ("public.usres",)


def test_settings_of_tables_that_a_start_would_publish_are_not_lost(any_database: Any) -> None:
    any_database.execute("create table users (id int primary key, email text); create publication pub for table users")
    any_database.execute("create table late (id int primary key, email text)")
    names = ("public.late", "public.lost", "public.former")
    rules = TableRules((("email", ColumnRule(null=True)),))
    (oid,) = any_database.execute("select 'users'::regclass::oid::int8")[0]
    settings: dict[str, Any] = {
        "publication": "pub",
        "patterns": ("public.*",),
        "manage_publication": True,
        "transforms": Transforms(
            dict.fromkeys(names, rules), {oid: RulesInForce("public.former", rules.fingerprint, {})}
        ),
        "types": TypeSettings(overrides=tuple(TypeOverride(each, None, TypeSettings()) for each in names[:2])),
        "schema_changes": {"": "copied again", **dict.fromkeys(names, "stopped")},
    }
    report = look(any_database, **settings)
    for each in ("column_rules", "type_overrides", "schema_changes"):
        (lost,) = [check for check in report.checks if check.id == each and "not published" in check.what]
        assert lost.subjects == ("public.lost",), each
    shown = [check.what for check in report.checks if check.id == "column_rules"]
    assert any(what.endswith("public.users: email set to NULL") for what in shown)
    settings["manage_publication"] = False
    (lost,) = [check for check in look(any_database, **settings).checks if check.id == "type_overrides"]
    assert lost.subjects == ("public.late", "public.lost")


def test_tables_that_are_skipped_are_named(database: Any) -> None:
    database.execute('create schema a; create schema "a.b"; create table nothing ()')
    database.execute('create table a."b.c" (id int primary key); create table "a.b".c (id int primary key)')
    report = look(database, patterns=("*.*",))
    assert state(report, "tables_without_columns") == INFO
    assert finding(report, "tables_without_columns").subjects == ("public.nothing",)
    assert state(report, "names_alike") == WARNING
    assert set(finding(report, "names_alike").subjects) == {'"a"."b.c"', '"a.b"."c"'}
    database.execute('drop table a."b.c"; drop table nothing')
    report = look(database, patterns=("*.*",))
    assert report.find("names_alike") is None
    assert report.find("tables_without_columns") is None


TRIES = """
    insert into s.hidden values (1, 1, 'x'); update s.hidden set x = 2; delete from s.hidden;
    insert into s."Odd" values (1, 1, 'x'); update s."Odd" set x = 2; delete from s."Odd";
"""


@pytest.mark.remedy(
    *("PermissionDenied", "NotIdentified", "IdentitiesDiffer", "publication", "publication_operations"),
    *("unpublishable_tables", "select_privilege", "row_security", "replica_identity", "replica_identity_full"),
    *("partition_identity", "column_lists", "row_filters", "partitions_as_leaves", "generated_columns"),
)
def test_the_statements_of_findings_are_run_as_printed_until_nothing_is_found(any_database: Any) -> None:
    role = f"reader_{any_database.name[-12:]}"
    any_database.execute(
        f"""
        create role {role} login replication password 'x';
        create schema s;
        create table s.hidden (id int primary key, x int, note text);
        alter table s.hidden replica identity full;
        create table s."Odd" (id int primary key, x int, note text, twice int generated always as (x * 2) stored);
        alter table s."Odd" enable row level security;
        create table s.bare (x int);
        create table s.filtered (id int primary key, "Kind" text);
        create unlogged table s.unlogged (id int primary key);
        create table s.top (id int, x int) partition by range (id);
        create table s.leaf1 partition of s.top (primary key (id)) for values from (0) to (10);
        create table s.leaf2 partition of s.top for values from (10) to (20);
        create publication empty;
        create publication pub for table s.hidden (x, note) where (id > 0), s."Odd", s.bare, s.top,
            s.filtered where ("Kind" = 'a') with (publish = 'insert, update, delete');
        """
    )
    settings = SourceSettings(make_conninfo(any_database.dsn, user=role, password="x"))
    run: set[str] = set()
    report = run_preflight(settings)
    found: list[Check] = []
    try:
        for publication in ("none", "empty", "pub"):
            for _ in range(4):
                # A statement may uncover what the next finding is about.
                report = run_preflight(settings, Request(publication=publication, patterns=("s.*",)))
                found = [check for check in report.failed if re.search(r"\b(alter|create|grant) \w", check.remedy)]
                for check in found:
                    if publication == "pub" or check.id in ("publication", "unpublishable_tables"):
                        statements = re.search(r"((?:alter|create|grant) \w.*;)", check.remedy)
                        assert statements is not None, check
                        any_database.execute(statements[1])
                        run.add(check.id)
        assert report.ready, report.critical
        assert found == []
        any_database.execute(TRIES)
    finally:
        any_database.execute(f"drop owned by {role}; drop role {role}")
    assert run >= {
        *("publication", "publication_operations", "unpublishable_tables", "select_privilege", "row_security"),
        *("replica_identity", "replica_identity_full", "column_lists", "row_filters", "partitions_as_leaves"),
    }
