"""What the stream does not say, or says in another way: DDL that computes values, other types, other publications."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.documents.backfill import Backfill
from penstock.documents.fan_out import FanOuts
from penstock.documents.output import DocumentsSettings
from penstock.documents.sinks import MemorySink
from penstock.errors import ConfigError, PublicationChanged
from penstock.state import CommandKind, IndexBuild
from penstock.values import NumericPolicy, TypeSettings, UnknownTypes
from tests.e2e.documents import Site, run, specifications
from tests.e2e.support import Alone, wait_for

TABLES = """
create schema w;
create type w.mood as enum ('bad', 'good');
create table w.teams (id int primary key, label text, other text, unread text);
create table w.people (id int primary key, team_id int, mood w.mood, name text);
insert into w.teams select n, 'team ' || n, 'other ' || n from generate_series(1, 5) n;
insert into w.people select n, n % 5 + 1, 'bad', 'person ' || n from generate_series(1, 20) n;
"""
TEAMS = """
version: 1
schema: w
table: teams
fields:
  - {keyword: label}
  - {keyword: other}
  - {has_many: people, table: people, foreign_key: team_id, primary_key: id, fields: [{keyword: mood}, {text: name}]}
"""
PEOPLE = "version: 1\nschema: w\ntable: people\nfields: [{text: name}]\n"


def site_on(database: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("penstock.coordinator.REFRESH_SECONDS", 0.2)
    database.execute(TABLES)
    sink = MemorySink()
    return Site(database, folder, specifications(teams=TEAMS, people=PEOPLE), sink, sink.documents)


@pytest.fixture
def site(database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return site_on(database, tmp_path, monkeypatch)


@pytest.fixture
def any_site(any_database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return site_on(any_database, tmp_path, monkeypatch)


def wait_rebuilt(site: Site, output: Alone, before: IndexBuild) -> None:
    wait_for(lambda: output.wait(0) or output.indexes[before.index].build != before.build, "another build")
    site.wait_settled(output)


def is_noted(output: Alone, build: str) -> bool:
    """Another build interrupts this one of the teams, or follows it."""
    current = output.indexes["teams"]
    return current.build != build or "next" in current.plan


SILENT = {
    "values computed": "alter table w.people alter name type varchar using upper(name)",
    "dropped and added": "alter table w.people drop name, add name text default 'nobody'",
    "names exchanged": "begin; alter table w.teams rename label to x; alter table w.teams rename other to label;"
    " alter table w.teams rename x to other; commit",
    "label renamed": "alter type w.mood rename value 'bad' to 'sad'",
}


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is down"])
def test_values_that_ddl_changes_without_a_word_in_the_stream_are_noticed(any_site: Site, running: bool) -> None:
    site = any_site
    output = site.output()
    with run(output):
        site.wait_settled(output)
        for statement in SILENT.values() if running else ():
            before = output.indexes["teams"]
            site.database.execute(statement)
            wait_rebuilt(site, output, before)
            site.check()
    if not running:
        for statement in SILENT.values():
            site.database.execute(statement)
        with run(output := site.output()):
            site.wait_settled(output)
            site.check()


def test_what_no_index_reads_may_change(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        before = output.indexes
        site.database.execute("alter table w.teams alter unread type varchar using upper(unread)")
        site.database.execute("alter type w.mood add value 'fine'")
        site.database.execute("vacuum full w.people")
        site.database.execute("alter table w.people alter name type varchar using upper(name)")
        wait_rebuilt(site, output, before["people"])
        assert "column 'name' was altered" in output.indexes["people"].reason
        site.database.execute("update w.people set mood = 'fine', team_id = 1 where id = 2")
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(42)
@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is down"])
def test_a_key_of_another_type_leaves_nothing_behind_that_cannot_be_cast(any_site: Site, running: bool) -> None:
    site = any_site
    to_uuid = "('00000000-0000-0000-0000-0000000000' || lpad(({})::text, 2, '0'))::uuid"

    def change() -> None:
        site.database.execute("update w.people set team_id = team_id % 5 + 1; delete from w.people where id = 1")
        site.database.execute(f"alter table w.people alter team_id type uuid using {to_uuid.format('team_id')}")
        site.database.execute(f"alter table w.teams alter id type uuid using {to_uuid.format('id')}")
        site.database.execute(f"update w.people set team_id = {to_uuid.format('id % 5 + 1')}")

    with run(output := site.output()):
        site.wait_settled(output)
        if running:
            output.store.add_command(CommandKind.PAUSE)
            wait_for(lambda: output.paused, "it to pause")
            change()
            output.store.add_command(CommandKind.RESUME)
            site.wait_settled(output)
            site.check()
    if not running:
        change()
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()
        site.database.execute(f"update w.people set team_id = {to_uuid.format('id % 3 + 1')}")
        site.database.execute("delete from w.people where id = 5")
        site.wait_settled(output)
        site.check()


def test_a_publication_that_stops_sending_an_operation_stops_the_documents(site: Site) -> None:
    site.stream["manage_publication"] = False
    site.database.execute("create publication e2e for table w.teams, w.people")
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("alter publication e2e set (publish = 'insert, update')")
        with pytest.raises(PublicationChanged, match="does not send delete and truncate"):
            wait_for(lambda: output.wait(0), "its end")
    with pytest.raises(PublicationChanged, match="does not send delete and truncate"), run(site.output()):
        pass
    site.database.execute("delete from w.people where id = 3")
    site.database.execute("alter publication e2e set (publish = 'insert, update, delete, truncate')")
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()


def test_tables_that_inherit_are_tables_of_their_own(site: Site) -> None:
    site.database.execute("create table w.guests () inherits (w.people)")
    site.database.execute("insert into w.guests (id, team_id, name) values (100, 1, 'a guest')")
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("update w.teams set label = 'changed' where id = 1")
        site.database.execute("insert into w.guests (id, team_id, name) values (101, 1, 'another guest')")
        site.database.execute("update w.people set name = 'changed' where id = 5")
        site.wait_settled(output)
        site.check()
        assert "a guest" not in str(site.read("teams")) + str(site.read("people"))


def test_rows_written_while_a_table_had_another_name_are_followed(site: Site) -> None:
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute(
            "begin; alter table w.people rename to persons; update w.persons set team_id = 2, name = 'moved'"
            " where id = 1; alter table w.persons rename to people; commit"
        )
        site.wait_settled(output)
        site.check()


@pytest.mark.trap(25, 42)
def test_a_large_key_that_an_update_leaves_alone_stays_in_the_map(site: Site) -> None:
    site.database.execute("create table w.notes (id text primary key, team_id int, body text)")
    site.database.execute("alter table w.notes alter id set storage external")
    site.database.execute("insert into w.notes select repeat(n::text, 2400), n, 'x' from generate_series(1, 3) n")
    text = TEAMS + "  - {count: notes, table: notes, foreign_key: team_id}\n"
    site.specifications = specifications(teams=text)
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("update w.notes set body = 'y'")
        site.wait_settled(output)
        site.database.execute("update w.notes set team_id = 5 where id like '1%'")
        site.database.execute("delete from w.notes where id like '2%'")
        site.wait_settled(output)
        site.check()


def test_the_types_of_a_lake_do_not_change_the_keys_of_documents(site: Site) -> None:
    site.database.execute(
        "create extension ltree; create table w.parents (id numeric primary key, path public.ltree unique)"
    )
    site.database.execute("create table w.children (id int primary key, parent numeric, path public.ltree)")
    site.database.execute("insert into w.parents values (18446744073709551617, 'a'), (18446744073709551618, 'b.c')")
    numbers = "version: 1\nschema: w\ntable: parents\nfields: [{count: c, table: children, foreign_key: parent}]\n"
    paths = numbers.replace("fields:", "primary_key: path\nfields:").replace("parent}", "path}")
    site.specifications = specifications(paths=paths.replace("primary_key: path\n", "doc_id: id\nprimary_key: path\n"))
    site.stream["types"] = TypeSettings(unknown_types=UnknownTypes.BYTES)
    with run(output := site.output()):
        site.wait_settled(output)
        site.database.execute("insert into w.children values (1, 18446744073709551618, 'b.c')")
        site.wait_settled(output)
        site.check()
    site.specifications = specifications(numbers=numbers)
    site.stream["types"] = TypeSettings(numeric=NumericPolicy.DOUBLE)
    with pytest.raises(ConfigError, match="by which documents are found"), run(site.output()):
        pass


def test_fields_in_another_order_do_not_confuse_a_fan_out_that_waits(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = "  - {belongs_to: team, column: team_id, table: teams, primary_key: id, fields: [{keyword: label}]}"
    head = "version: 1\nschema: w\ntable: people\nfields:\n  - {text: name}\n"
    site.database.execute("insert into w.people select n, 1, 'bad', 'x' from generate_series(100, 400) n")
    first = [team, "  - {count: mates, table: people, foreign_key: team_id}"]
    site.specifications = specifications(people=head + "\n".join(first))
    site.settings = DocumentsSettings(fan_out_documents=10)
    with run(output := site.output()):
        site.wait_settled(output)
        with monkeypatch.context() as patch:
            patch.setattr(FanOuts, "round", lambda *_: None)
            site.database.execute("update w.teams set label = 'changed' where id = 1")
            wait_for(lambda: output.unfinished_work, "a fan-out")
    site.specifications = specifications(people=head + "\n".join(reversed(first)))
    with run(output := site.output()):
        site.wait_settled(output)
        site.check()


AGAIN = {
    "people": "truncate w.people; insert into w.people values (1, 1, 'bad', 'again')",
    "teams": "truncate w.teams; insert into w.teams values (1, 'again', 'other'), (6, 'new', 'other')",
}


@pytest.mark.parametrize("table", AGAIN)
def test_an_index_is_complete_though_a_table_is_truncated_more_often_than_a_build_takes(site: Site, table: str) -> None:
    truncated: list[str] = []

    def truncate(build: str) -> None:
        if len(truncated) < 4:
            truncated.append(build)
            site.database.execute(AGAIN[table])
            wait_for(lambda: is_noted(output, build), "another build to be noted")

    class Truncating(MemorySink):
        def mark_seeded(self, index: str) -> None:
            super().mark_seeded(index)
            served.append(index)

    served: list[str] = []
    sink = Truncating()
    site.sink, site.read = sink, sink.documents
    site.specifications = site.specifications[:1]
    fill = Backfill._fill  # pyright: ignore[reportPrivateUsage]

    def slow(backfill: Any, build: Any, parts: Any) -> None:
        fill(backfill, build, parts)
        truncate(build.build)

    with pytest.MonkeyPatch.context() as patch, run(output := site.output()):
        site.wait_settled(output)
        served.clear()
        patch.setattr(Backfill, "_fill", slow)
        site.database.execute(f"truncate w.{table}")
        wait_for(lambda: output.wait(0) or len(truncated) == 4, "four builds")
        site.wait_settled(output)
        assert len(set(truncated)) == 4, "each truncate came during another build"
        assert len(served) >= 4, "only the first of them was interrupted"
        site.check()


WRONG = {
    "another identity for a moment": "begin; alter table w.people replica identity default;"
    " update w.people set team_id = team_id % 5 + 1; alter table w.people replica identity full; commit",
    "truncated": "truncate w.people",
    "another type for a moment": "begin; alter table w.people alter team_id type text;"
    " update w.people set team_id = '1'; alter table w.people alter team_id type int using team_id::int; commit",
    "values computed": "alter table w.people alter name type varchar using upper(name)",
    "not published for a moment": "begin; alter publication e2e drop table w.people;"
    " update w.people set team_id = team_id % 5 + 1; alter publication e2e add table w.people; commit",
}


@pytest.mark.parametrize("reason", WRONG.values(), ids=WRONG)
def test_a_build_that_becomes_wrong_while_it_runs_never_serves(
    site: Site, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    held, go_on = threading.Event(), threading.Event()
    fill = Backfill._fill  # pyright: ignore[reportPrivateUsage]

    def slow(backfill: Any, build: Any, parts: Any) -> None:
        fill(backfill, build, parts)
        if not held.is_set():
            held.set()
            assert go_on.wait(60)

    class Noting(MemorySink):
        def mark_seeded(self, index: str) -> None:
            served.append(self.facts(index).filling)
            super().mark_seeded(index)

    served: list[str | None] = []
    sink = Noting()
    site.sink, site.read = sink, sink.documents
    site.specifications = site.specifications[:1]
    site.database.execute("alter table w.people replica identity full")
    with run(output := site.output()):
        site.wait_settled(output)
        monkeypatch.setattr(Backfill, "_fill", slow)
        output.store.add_command(CommandKind.REBUILD_INDEX)
        try:
            assert held.wait(60)
            wrong = output.indexes["teams"]
            site.database.execute(reason)
            wait_for(lambda: output.wait(0) or is_noted(output, wrong.build), "another build to be noted")
        finally:
            go_on.set()
        site.wait_settled(output)
        site.check()
        assert wrong.plan["generation"] not in served
