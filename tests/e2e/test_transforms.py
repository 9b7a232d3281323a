"""Columns that are left out, hashed, masked or renamed, and filtered rows: copy, stream, restart and verify agree."""

from __future__ import annotations

import hmac
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from penstock.changes.column_rules import ColumnRule
from penstock.changes.conditions import parse_filter
from penstock.changes.transform import TableRules, Transforms
from penstock.comparison.verification import verify_tables
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.memory import MemoryDestination
from penstock.destinations.parquet import ParquetDestination
from penstock.state import CommandKind, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.values import OutOfRange, TypeOverride, TypeSettings
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied
from tests.e2e.test_inexact_keys import wait_errored, wait_phases

KEY = b"a key of at least 16 bytes"
WHERE = "country in ('DE', 'FR') and not deleted"
RULES = {
    "public.users": TableRules(
        (
            ("email", ColumnRule(hash=True, rename="email_hash")),
            ("phone", ColumnRule(keep_last=3)),
            ("note", ColumnRule(mask="hidden")),
            ("born", ColumnRule(null=True)),
            ("secret", ColumnRule(exclude=True)),
        ),
        WHERE,
        parse_filter(WHERE),
        KEY,
    ),
    "public.accounts": TableRules((("email", ColumnRule(hash=True)),), key=KEY),
    # Without a key; the column that the filter needs is left out.
    "public.visits": TableRules(
        (("country", ColumnRule(exclude=True)),), "country = 'DE'", parse_filter("country = 'DE'")
    ),
}
LARGE = "(select string_agg(md5(i::text || {seed}), '') from generate_series(1, 300) i)"


def digest(text: str | None) -> str | None:
    return None if text is None else hmac.digest(KEY, text.encode(), "sha256").hex()


class House:
    """A database, and a lake that follows it."""

    def __init__(self, database: Any, folder: Any) -> None:
        self.database = database
        self.folder = folder
        self.store = MemoryStore("e2e")
        database.execute(
            """
            create table users (
                id int primary key, email text, phone text, note text, born date, secret text, country varchar(100),
                deleted bool not null default false, bio text, at timestamptz
            );
            create table accounts (email text primary key, n int, bio text);
            create table visits (n int, country text, page text);
            alter table visits replica identity full
            """
        )

    def pipeline(self, rules: dict[str, TableRules] = RULES, **options: Any) -> Alone:
        settings = tables_settings(
            self.database, self.folder, manage_publication=True, transforms=Transforms(rules), **options
        )
        return tables_alone(settings, self.store, DeltaDestination(self.folder / "lake"), LocalTasks())

    def lake(self, table: str) -> list[dict[str, Any]]:
        rows = LakeReadBack(self.folder / "lake").read_table(f"public.{table}").to_pylist()
        return sorted(({name: row[name] for name in row if name != "_unrepresentable"} for row in rows), key=str)

    def columns(self, table: str) -> list[str]:
        return [column.name for column in LakeReadBack(self.folder / "lake").schema(f"public.{table}").columns]

    def source(self, query: str) -> list[dict[str, Any]]:
        with self.database.connect() as connection, connection.cursor() as cursor:
            cursor.execute(query)
            names = [column.name for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def check(self) -> None:
        """The lake equals the source, transformed here row by row."""
        users = [
            {
                "id": row["id"],
                "email_hash": digest(row["email"]),
                "phone": None if row["phone"] is None else "***" + (row["phone"][-3:] if len(row["phone"]) > 3 else ""),
                "note": None if row["note"] is None else "hidden",
                "born": None,
            }
            | {name: row[name] for name in ("country", "deleted", "bio", "at")}
            for row in self.source(f"select id, email, phone, note, country, deleted, bio, at from users where {WHERE}")
        ]
        accounts = [row | {"email": digest(row["email"])} for row in self.source("select * from accounts")]
        visits = self.source("select n, page from visits where country = 'DE'")
        for table, expected in (("users", users), ("accounts", accounts), ("visits", visits)):
            assert self.lake(table) == sorted(expected, key=str), table

    def verify(self, pipeline: Alone) -> Any:
        definition = pipeline.definition
        report = verify_tables(definition.settings, self.store, DeltaDestination(self.folder / "lake"), LocalTasks())
        for table in report.tables:
            assert table.reason is None, table
            assert table.counts.equal > 5, table
            assert table.result == "equal", table
        return report


def write(database: Any, seed: int) -> None:
    """Rows enter and leave the filter, keys change, and large values stay the same."""
    first = seed * 1000
    database.execute(
        f"""
        insert into users
        select {first} + i, 'u' || i || '@example.com', '+49 30 ' || i, 'note ' || i,
               case when i % 5 = 0 then 'infinity' else '2000-01-01'::date end, 'secret ' || i,
               (array['DE', 'FR', 'US', null])[1 + i % 4], i % 7 = 0, {LARGE.format(seed="i")}, now()
        from generate_series(1, 40) i;
        insert into users (id, country) values ({first}, 'DE');
        update users set country = 'US' where id in ({first + 4}, {first + 5});
        update users set country = 'DE' where id in ({first + 2}, {first + 6});
        update users set country = repeat('long', 20) where id = {first + 8};
        update users set note = 'changed' where id = {first + 8};
        update users set id = id + 500, deleted = false where id in ({first + 7}, {first + 9});
        update users set id = id + 500, country = 'XX' where id = {first + 12};
        update users set email = 'x@example.com', phone = '12' where id % 10 = 3;
        delete from users where id in ({first + 10}, {first + 13});
        insert into accounts select 'u' || {first} + i || '@example.com', i, {LARGE.format(seed="i")}
        from generate_series(1, 10) i;
        update accounts set n = n + 1 where n % 2 = 0;
        update accounts set email = 'moved ' || email where n = 5;
        delete from accounts where n = 7;
        insert into visits select i % 3, (array['DE', 'US'])[1 + i % 2], 'p' from generate_series(1, 20) i;
        update visits set country = 'DE' where ctid = (select ctid from visits where country = 'US' limit 1);
        update visits set country = 'US' where ctid = (select ctid from visits where country = 'DE' limit 1);
        delete from visits where ctid = (select ctid from visits where country = 'US' limit 1)
        """
    )


READY = {"users": "ready", "accounts": "ready", "visits": "ready"}
READY_LOGINS = {"users": "ready", "logins": "ready", "visits": "ready"}


def test_copy_stream_restart_and_verify_agree(any_database, tmp_path):
    house = House(any_database, tmp_path)
    write(house.database, 1)
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY)
        house.check()
        write(house.database, 2)
        wait_applied(pipeline, house.database)
        house.check()
    write(house.database, 3)
    house.database.execute(
        "alter table users add city text; insert into users (id, country, city) values (-1, 'DE', 'B')"
    )
    with house.pipeline() as pipeline:
        wait_applied(pipeline, house.database)
        wait_phases(pipeline, READY)
        assert {row["city"] for row in house.lake("users")} == {None, "B"}
        house.database.execute("alter table users drop city; insert into users (id, country) values (-2, 'DE')")
        wait_applied(pipeline, house.database)
        wait_for(lambda: "city" not in house.columns("users"), "the column to go")
        wait_phases(pipeline, READY)
        house.check()
        report = house.verify(pipeline)
    said = " ".join(" ".join(table.not_compared) for table in report.tables)
    for phrase in (
        "rows that `where` in the config excludes",
        "column secret",
        "values of column note",
        "values of column phone",
    ):
        assert phrase in said, said


@pytest.mark.trap(31)
def test_a_renamed_column_never_flows_in_clear(any_database, tmp_path):
    house = House(any_database, tmp_path)
    write(house.database, 1)
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY)
        house.database.execute(
            "alter table users rename secret to confidential; insert into users (id, country) values (0, 'DE')"
        )
        stopped = wait_errored(pipeline, "users")
        assert "names a column that the table does not have: 'secret'" in stopped.reason
        assert "confidential" not in house.lake("users")[0]
        house.store.add_command(CommandKind.RESYNC, ("public.users",))
        wait_errored(pipeline, "users")
        assert "confidential" not in house.lake("users")[0]
    columns = tuple(
        ("confidential" if name == "secret" else name, rule) for name, rule in RULES["public.users"].columns
    )
    with house.pipeline(RULES | {"public.users": replace(RULES["public.users"], columns=columns)}) as pipeline:
        house.store.add_command(CommandKind.RESYNC, ("public.users",))
        wait_phases(pipeline, READY)
        house.check()


@pytest.mark.parametrize("ddl_trigger", [False, True])
def test_a_column_whose_name_another_one_got_never_flows_in_clear(database, tmp_path, ddl_trigger):
    house = House(database, tmp_path)
    write(database, 1)
    with house.pipeline(ddl_trigger=ddl_trigger) as pipeline:
        wait_phases(pipeline, READY)
        database.execute(
            "begin; alter table users rename secret to former; alter table users add secret text; commit;"
            "insert into users (id, country, former) values (0, 'DE', 'secret 0')"
        )
        assert "the former one is 'former'" in wait_errored(pipeline, "users").reason
        house.store.add_command(CommandKind.RESYNC, ("public.users",))
        wait_errored(pipeline, "users")
    with house.pipeline(ddl_trigger=ddl_trigger) as pipeline:
        wait_errored(pipeline, "users")
        assert "secret" not in str(house.lake("users"))
    columns = (*RULES["public.users"].columns, ("former", ColumnRule(exclude=True)))
    rules = RULES | {"public.users": replace(RULES["public.users"], columns=columns)}
    with house.pipeline(rules, ddl_trigger=ddl_trigger) as pipeline:
        house.store.add_command(CommandKind.RESYNC, ("public.users",))
        wait_phases(pipeline, READY)
        house.check()


def test_a_column_of_the_filter_that_is_dropped_and_added_again_leads_to_a_new_copy(database, tmp_path):
    house = House(database, tmp_path)
    write(database, 1)
    with house.pipeline(ddl_trigger=True) as pipeline:
        wait_phases(pipeline, READY)
        database.execute(
            "begin; alter table users drop deleted; alter table users add deleted bool not null default false; commit;"
            "insert into users (id, country) values (0, 'DE')"
        )
        count = len(house.source(f"select from users where {WHERE}"))
        wait_for(lambda: len(house.lake("users")) == count, "the new copy")


def test_a_table_that_is_renamed_before_its_first_copy_keeps_its_rules(database, tmp_path):
    house = House(database, tmp_path)
    database.execute("drop table accounts")
    others = {"users": "ready", "visits": "ready"}
    with database.connect() as other:
        with house.pipeline() as pipeline:
            wait_phases(pipeline, others)
            other.execute("begin")
            other.execute("select pg_current_xact_id()")  # the copy waits for this transaction
            database.execute("create table accounts (email text primary key); insert into accounts values ('a')")
            wait_for(lambda: pipeline.waits, "the copy to wait")
            database.execute("alter table accounts rename to logins")
        other.execute("commit")
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY_LOGINS)
        assert [row["email"] for row in house.lake("logins")] == [digest("a")]


def test_a_renamed_table_keeps_its_rules_and_changed_rules_copy_it_again(database, tmp_path):
    house = House(database, tmp_path)
    write(database, 1)
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY)
        database.execute("alter table accounts rename to logins; insert into logins values ('new@example.com')")
        wait_phases(pipeline, READY_LOGINS)
        wait_applied(pipeline, database)
        hashed = {digest(row["email"]) for row in house.source("select email from logins")}
        wait_for(lambda: {row["email"] for row in house.lake("logins")} == hashed, "hashes")
    with house.pipeline() as pipeline:
        database.execute("insert into logins values ('newer@example.com')")
        wait_applied(pipeline, database)
        assert digest("newer@example.com") in {row["email"] for row in house.lake("logins")}
    # Another key: the rows are made again.
    other = {name: replace(rules, key=b"another key of 16 bytes") for name, rules in RULES.items()}
    with house.pipeline(other) as pipeline:
        expected = hmac.digest(b"another key of 16 bytes", b"newer@example.com", "sha256").hex()
        wait_for(lambda: expected in {row["email"] for row in house.lake("logins")}, "the new copy")
        assert not hashed & {row["email"] for row in house.lake("logins")}


def test_values_that_a_policy_changed_are_counted(database, tmp_path):
    database.execute(
        """
        create table terms (id int primary key, since date, until date, kept date);
        insert into terms values (1, '-infinity', 'infinity', 'infinity'), (2, '2026-01-01', 'infinity', null)
        """
    )
    overrides = (
        TypeOverride("public.terms", "since", TypeSettings(out_of_range=OutOfRange.NULL)),
        TypeOverride("public.terms", "until", TypeSettings(out_of_range=OutOfRange.CLAMP)),
    )
    settings = tables_settings(database, tmp_path, manage_publication=True, types=TypeSettings(overrides=overrides))
    store = MemoryStore("e2e")
    last = date(9999, 12, 31)
    with tables_alone(settings, store, DeltaDestination(tmp_path / "lake"), LocalTasks()) as pipeline:
        wait_phases(pipeline, {"terms": "ready"})
        assert list(store.get_changed_cells().values()) == [3]
        database.execute(
            "insert into terms values (3, '0044-03-15 BC', 'infinity', '-infinity');"
            "insert into terms values (4, '2026-01-01', '2026-01-02', null);"
            "update terms set until = '20000-01-01' where id = 2"
        )
        wait_applied(pipeline, database)
        assert list(store.get_changed_cells().values()) == [6]
        report = verify_tables(settings, store, DeltaDestination(tmp_path / "lake"), LocalTasks())
        assert [table.result for table in report.tables] == ["equal"]
        store.add_command(CommandKind.RESYNC, ("public.terms",))
        wait_for(lambda: list(store.get_changed_cells().values()) == [5], "the new copy")
    rows = LakeReadBack(tmp_path / "lake").read_table("public.terms").sort_by("id").to_pylist()
    assert [(row["since"], row["until"], row["_unrepresentable"]) for row in rows] == [
        (None, last, [("kept", "infinity")]),
        (date(2026, 1, 1), last, None),
        (None, last, [("kept", "-infinity")]),
        (date(2026, 1, 1), date(2026, 1, 2), None),
    ]


@pytest.mark.parametrize("mode", ["history", "soft_delete", "parquet", "memory"])
def test_destinations_that_keep_changes_need_to_know_old_rows(database, tmp_path, mode):
    house = House(database, tmp_path)
    write(database, 1)
    memory = MemoryDestination()

    def destination() -> Any:
        lake = tmp_path / "lake"
        return {"memory": memory, "parquet": ParquetDestination(lake)}.get(mode) or DeltaDestination(lake, mode=mode)

    settings = tables_settings(database, tmp_path, manage_publication=True, transforms=Transforms(RULES))
    with tables_alone(settings, house.store, destination(), LocalTasks()) as pipeline:
        if mode != "soft_delete":
            assert "needs replica identity full" in wait_errored(pipeline, "users").reason
            database.execute("alter table users replica identity full")
            house.store.add_command(CommandKind.RESYNC, ("public.users",))
        wait_phases(pipeline, READY)
        write(database, 2)
        wait_applied(pipeline, database)
        wait_phases(pipeline, READY)
        report = verify_tables(settings, house.store, destination(), LocalTasks())
    expected = "not compared" if mode == "history" else "equal"
    assert {table.result for table in report.tables} == {expected}, report
