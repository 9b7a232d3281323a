"""Changes of schemas and partitions: the mirror equals the source afterwards, and nobody types a command."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.http import HttpDestination, read_bodies
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.lsn import reaches
from penstock.state import CommandKind, Errored, Init, open_store
from penstock.values import OutOfRange, TypeSettings
from penstock.workers import DropColumn, DropTable, Partitions, Recopy, SchemaChanges
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.lake import HistoryReadBack, LakeReadBack
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.readback import check_equal
from tests.unit.destinations.receiver import Receiver, Request

PLAIN = "create table {t} (id int primary key, note text, n int)"
ROWS = "insert into {t} (id, note, n) select i, 'n' || i, i from generate_series(1, 20) i"
PARTED = """
    create table {t} (id int, note text, n int, primary key (id)) partition by range (id);
    create table {t}_low partition of {t} for values from (0) to (10);
    create table {t}_mid partition of {t} for values from (10) to (20);
    create table {t}_high partition of {t} for values from (20) to (1000)
"""
MOOD = "create type {t}_mood as enum ('sad', 'glad'); create table {t} (id {key}, note text, n int, m {t}_mood {last})"
MOODS = (
    "insert into {t} select i, 'n' || i, i, (array['sad', 'glad'])[i % 2 + 1]::{t}_mood from generate_series(1, 20) i"
)

STATEMENTS = {
    "widened": (PLAIN, ROWS, "alter table {t} alter n type bigint"),
    "as_text": (PLAIN, ROWS, "alter table {t} alter n type text"),
    "computed": (PLAIN, ROWS, "alter table {t} alter n type int using n * 2"),
    "computed_text": (PLAIN, ROWS, "alter table {t} alter note type text using upper(note)"),
    "another_key": (PLAIN, ROWS, "alter table {t} drop constraint {t}_pkey, add primary key (n)"),
    "readded": (PLAIN, ROWS, "alter table {t} drop column note; alter table {t} add column note text default 'x'"),
    "exchanged": (
        PLAIN + "; alter table {t} add other text",
        ROWS + "; update {t} set other = 'o' || id",
        """
        begin; alter table {t} rename note to x; alter table {t} rename other to note;
        alter table {t} rename x to other; commit
        """,
    ),
    "volatile": (
        PLAIN,
        ROWS,
        "alter table {t} add c uuid default gen_random_uuid(); alter table {t} alter c drop default",
    ),
    "serial": (
        PLAIN,
        ROWS,
        "alter table {t} add c serial; alter table {t} alter c drop default, alter c drop not null",
    ),
    "identity": (
        PLAIN,
        ROWS,
        """
        alter table {t} add c int generated always as identity;
        alter table {t} alter c drop identity, alter c drop not null
        """,
    ),
    "constant": (
        PLAIN,
        ROWS,
        "alter table {t} add c int default 7; alter table {t} alter c drop default; vacuum full {t}",
    ),
    "generated": (
        PLAIN,
        ROWS,
        "alter table {t} add c int generated always as (n * 3) stored; alter table {t} alter c drop expression",
    ),
    "computed_default": (
        PLAIN,
        ROWS + "; alter table {t} add c int default 4",
        "alter table {t} alter c drop default; alter table {t} alter c type int using n",
    ),
    "enum_key": (
        MOOD.format(t="{t}", key="int", last=", primary key (id, m)"),
        MOODS,
        "alter type {t}_mood rename value 'sad' to 'low'",
    ),
    "no_longer_generated": (
        PLAIN + "; alter table {t} add c int generated always as (n * 3) stored",
        ROWS,
        "alter table {t} alter c drop expression",
    ),
    "enum_and_back": (
        MOOD.format(t="{t}", key="int primary key", last=""),
        MOODS,
        """
        alter type {t}_mood rename value 'sad' to 'low'; update {t} set n = n + 1;
        alter type {t}_mood rename value 'low' to 'sad'
        """,
    ),
    "composite_and_back": (
        "create type {t}_pair as (a int, b int); create table {t} (id int primary key, note text, n int, c {t}_pair)",
        "insert into {t} select i, 'n', i, row(i, i)::{t}_pair from generate_series(1, 20) i",
        """
        alter type {t}_pair add attribute z int; update {t} set n = n + 1 where id = 3;
        alter type {t}_pair drop attribute z
        """,
    ),
    "attached_with_a_default": (
        PARTED + "; create table {t}_far (id int not null, note text, n int)",
        ROWS + "; insert into {t}_far select i, 'far', i from generate_series(1001, 1010) i",
        """
        alter table {t} add c int; alter table {t}_far add c int default 5; alter table {t}_far alter c drop default;
        alter table {t} attach partition {t}_far for values from (1001) to (2000)
        """,
    ),
    "came_and_went": (
        PLAIN,
        ROWS,
        """
        begin; alter table {t} add x text; update {t} set x = 'gone'; alter table {t} drop x;
        alter table {t} add x text; commit
        """,
    ),
    "name_passed_on": (
        PLAIN,
        ROWS,
        """
        begin; alter table {t} add x int; update {t} set x = id; alter table {t} rename x to y;
        alter table {t} add x int; commit
        """,
    ),
    "enum_renamed": (
        MOOD.format(t="{t}", key="int primary key", last=""),
        MOODS,
        "alter type {t}_mood rename value 'sad' to 'low'; alter type {t}_mood rename to {t}_feeling",
    ),
    "enum": (
        MOOD.format(t="{t}", key="int primary key", last=""),
        MOODS,
        "alter type {t}_mood rename value 'sad' to 'low'",
    ),
    "cidr": (
        "create table {t} (c cidr primary key, note text, n int)",
        """
        insert into {t} select ('10.0.' || i || '.0/24')::cidr, 'x', i from generate_series(1, 20) i;
        insert into {t} values ('10.9.9.9/32', 'x', 99)
        """,
        "alter table {t} alter c type inet",
    ),
    "vacuumed_leaf_default": (
        PARTED,
        ROWS + "; alter table {t} add c int default 7",
        "alter table {t} alter c drop default; vacuum full {t}_low, {t}_mid, {t}_high",
    ),
}
"""A table, its rows, and what happens to it."""
PARTITIONS = {
    "detached": (PARTED, ROWS, "alter table {t} detach partition {t}_mid"),
    "dropped_leaf": (PARTED, ROWS, "drop table {t}_mid"),
    "vacuumed_leaf": (PARTED, ROWS, "vacuum full {t}_mid"),
    "truncated_leaf": (PARTED, ROWS, "truncate {t}_mid"),
    "attached": (
        PARTED + "; create table {t}_far (like {t})",
        ROWS + "; insert into {t}_far select i, 'far', i from generate_series(1001, 1010) i",
        "alter table {t} attach partition {t}_far for values from (1001) to (2000)",
    ),
    "attached_again": (
        PARTED,
        ROWS,
        """
        alter table {t} detach partition {t}_mid; insert into {t}_mid values (19, 'more', 1) on conflict do nothing;
        delete from {t}_mid where id = 12;
        alter table {t} attach partition {t}_mid for values from (10) to (20)
        """,
    ),
    "new_and_truncated": (
        PARTED,
        ROWS,
        """
        create table {t}_far partition of {t} for values from (1001) to (2000);
        insert into {t} values (1001, 'far', 1); truncate {t}_far; insert into {t} values (1002, 'far', 1)
        """,
    ),
    "attached_and_truncated": (
        PARTED + "; create table {t}_far (like {t})",
        ROWS + "; insert into {t}_far select i, 'far', i from generate_series(1001, 1010) i",
        """
        alter table {t} attach partition {t}_far for values from (1001) to (2000);
        insert into {t} values (1500, 'far', 1); update {t} set n = 3 where id = 1002; truncate {t}_far
        """,
    ),
    "attached_tree": (
        PARTED
        + """;
        create table {t}_far (like {t}) partition by range (id);
        create table {t}_farther partition of {t}_far for values from (1001) to (2000)
        """,
        ROWS + "; insert into {t}_farther select i, 'far', i from generate_series(1001, 1010) i",
        "alter table {t} attach partition {t}_far for values from (1001) to (2000)",
    ),
    "reloaded_leaf": (
        PARTED,
        ROWS,
        """
        begin; truncate {t}_mid; insert into {t} values (11, 'new', 11); create index on {t}_mid (n); commit;
        analyze {t}_mid
        """,
    ),
    "new_and_dropped": (
        PARTED,
        ROWS,
        """
        create table {t}_far partition of {t} for values from (1001) to (2000);
        insert into {t} values (1001, 'far', 1); drop table {t}_far
        """,
    ),
    "passing_through": (
        PARTED + "; create table {t}_tree partition of {t} for values from (1001) to (3000) partition by list (id)",
        ROWS,
        """
        begin; create table {t}_far partition of {t}_tree for values in (1001);
        insert into {t} select 1001, repeat(md5(i::text), 10), i from generate_series(1, 1) i; commit;
        update {t} set n = 2 where id = 1001; alter table {t}_tree detach partition {t}_far
        """,
    ),
    "attached_at_once": (
        PARTED,
        ROWS,
        """
        begin; create table {t}_far (like {t}); insert into {t}_far select i, 'f', i from generate_series(1001, 1010) i;
        alter table {t} attach partition {t}_far for values from (1001) to (2000); commit
        """,
    ),
    "replaced_leaf": (
        PARTED,
        ROWS,
        """
        drop table {t}_mid; create table {t}_middle partition of {t} for values from (10) to (20);
        insert into {t} values (11, 'new', 11), (12, 'new', 12); update {t} set note = 'newer' where id = 12
        """,
    ),
    "by_time": (
        """
        create table {t} (id int, note text, n int, at timestamptz default '2024-02-03 04:05:06+00')
            partition by range (at);
        alter table {t} replica identity full;
        create table {t}_a partition of {t} for values from ('2024-01-01') to ('2024-02-01');
        create table {t}_b partition of {t} for values from ('2024-02-01') to ('2024-03-01');
        create table {t}_rest partition of {t} default;
        alter table {t}_a replica identity full; alter table {t}_b replica identity full;
        alter table {t}_rest replica identity full
        """,
        """
        insert into {t} select i, 'n' || i, i, '2024-01-30'::timestamptz + i * interval '8 hours'
        from generate_series(1, 200) i;
        insert into {t} values (0, null, 0, null)
        """,
        "alter table {t} detach partition {t}_a; insert into {t} values (300, 'default', 1, '2024-01-15')",
    ),
    "by_list": (
        """
        create table {t} (id int, note text, n int, kind text default 'x y') partition by list (kind);
        alter table {t} replica identity full;
        create table {t}_a partition of {t} for values in ('a', 'it''s', null);
        create table {t}_b partition of {t} for values in ('b');
        create table {t}_c partition of {t} for values in ('x y');
        alter table {t}_a replica identity full; alter table {t}_b replica identity full;
        alter table {t}_c replica identity full
        """,
        """
        insert into {t} select i, 'n', i, (array['a', 'it''s', null, 'b', 'x y'])[i % 5 + 1]
        from generate_series(1, 50) i
        """,
        "truncate {t}_a; drop table {t}_b",
    ),
    "by_levels": (
        """
        create table {t} (id int, note text, n int, day date default '2024-01-01', primary key (id, day))
            partition by range (day);
        create table {t}_a partition of {t} for values from ('2024-01-01') to ('2024-02-01')
            partition by range (id, day);
        create table {t}_a1 partition of {t}_a for values from (minvalue, minvalue) to (10, '2024-01-10');
        create table {t}_a2 partition of {t}_a for values from (10, '2024-01-10') to (maxvalue, maxvalue);
        create table {t}_b partition of {t} for values from ('2024-02-01') to ('2024-03-01') partition by hash (id);
        create table {t}_b1 partition of {t}_b for values with (modulus 2, remainder 0);
        create table {t}_b2 partition of {t}_b for values with (modulus 2, remainder 1)
        """,
        "insert into {t} select i, 'n', i, '2024-01-01'::date + i % 50 from generate_series(1, 60) i",
        "truncate {t}_a1; truncate {t}_b2; insert into {t} values (10, 'more', 1, '2024-01-09')",
    ),
}
"""The same, where only some partitions are copied again."""
STATEMENTS["hashed"] = (
    """
    create table {t} (id int primary key, note text, n int) partition by hash (id);
    create table {t}_0 partition of {t} for values with (modulus 2, remainder 0);
    create table {t}_1 partition of {t} for values with (modulus 2, remainder 1)
    """,
    ROWS,
    "truncate {t}_0",
)
MOVED = ("readded", "exchanged", "came_and_went", "name_passed_on")
"""Of these: names that moved to another column. With the trigger files are rewritten instead."""
REWRITTEN = {
    "renamed": (PLAIN, ROWS, "alter table {t} rename column note to remark"),
    "renamed_key": (
        "create table {t} (id int, note text, n int, k int default 1, primary key (id, k))",
        ROWS,
        "update {t} set k = 2 where id = 3; alter table {t} rename k to kk; delete from {t} where kk = 2",
    ),
    "renamed_full": (
        PLAIN.replace(" primary key", "") + "; alter table {t} replica identity full",
        ROWS,
        "update {t} set n = n + 1 where id < 5; alter table {t} rename column note to remark",
    ),
    "renamed_twice": (
        PLAIN,
        ROWS,
        """
        alter table {t} rename column note to remark; update {t} set remark = 'x' where id = 3;
        alter table {t} rename column remark to comment; delete from {t} where id = 4
        """,
    ),
    "renamed_within": (
        PLAIN,
        ROWS,
        """
        begin; update {t} set note = 'before' where id = 3; alter table {t} rename column note to remark;
        update {t} set remark = 'after' where id = 4; alter table {t} add more int; delete from {t} where id = 5; commit
        """,
    ),
    "renamed_leaves": (PARTED, ROWS, "alter table {t} rename column note to remark"),
    "precise": (
        PLAIN + "; alter table {t} add price numeric(8, 2)",
        ROWS + "; update {t} set price = id + 0.25",
        "alter table {t} alter price type numeric(20, 2)",
    ),
    "back_again": (
        PLAIN,
        ROWS + "; alter table {t} drop column note; insert into {t} (id, n) values (50, 50)",
        "alter table {t} add column note int default 9; alter table {t} alter note drop default",
    ),
}
"""The same, where files are rewritten instead of copying the table again."""
QUIET = {
    "new_leaf": (
        PARTED,
        ROWS,
        """
        create table {t}_far partition of {t} for values from (1001) to (2000);
        insert into {t} values (1001, 'far', 1)
        """,
    ),
    "all_logged": (PLAIN, ROWS, "alter table {t} replica identity full"),
    "dropped": (PLAIN, ROWS, "alter table {t} drop column note"),
    "empty_leaf": (
        PARTED,
        ROWS,
        """
        create table {t}_far (like {t} including all);
        alter table {t} attach partition {t}_far for values from (1001) to (2000)
        """,
    ),
    "renamed_leaf": (
        PARTED,
        ROWS,
        """
        begin; create table {t}_far partition of {t} for values from (1001) to (2000);
        alter table {t}_far rename to {t}_further; commit; insert into {t} values (1001, 'far', 1)
        """,
    ),
    "vacuumed": (PLAIN, ROWS, "vacuum full {t}"),
    "clustered": (PLAIN, ROWS, "cluster {t} using {t}_pkey"),
    "added": (PLAIN, ROWS, "alter table {t} add c int"),
    "not_null": (PLAIN, ROWS, "alter table {t} alter n set not null"),
    "label": (MOOD.format(t="{t}", key="int primary key", last=""), MOODS, "alter type {t}_mood add value 'calm'"),
    "analyzed": (PARTED, ROWS, "analyze {t}"),
}
"""The same, where no new copy is needed."""


def run(database: Any, script: str, table: str) -> None:
    with database.connect() as connection:
        for statement in script.format(t=table).split(";"):
            if statement.strip():
                connection.execute(statement)


class Site:
    """A pipeline with one table per case."""

    def __init__(
        self,
        database: Any,
        folder: Path,
        cases: dict[str, tuple[str, str, str]],
        destination: Callable[..., Destination] = DeltaDestination,
        **options: Any,
    ) -> None:
        self.database = database
        self.options = options
        self.folder = folder
        self.cases = cases
        self.destination = destination
        for name, (create, rows, _) in cases.items():
            run(database, create, name)
            run(database, rows, name)
        self.store = open_store(f"sqlite:///{folder / 'state.db'}", "changes")

    @contextmanager
    def running(self, **changes: Any) -> Iterator[Alone]:
        changes = {"tables": tuple(f"public.{name}" for name in self.cases), **changes}
        settings = tables_settings(self.database, self.folder, "changes", **changes)
        destination = self.destination(self.folder / "lake", **self.options)
        with tables_alone(settings, self.store, destination, ProcessTasks()) as pipeline:
            yield pipeline

    def change(self) -> None:
        for name, (_, _, script) in self.cases.items():
            run(self.database, script, name)

    def write(self, number: int) -> None:
        """A row for each table, in which only the columns that all of them have are named."""
        for name, (_, rows, _) in self.cases.items():
            key = "c" if name == "cidr" else "id"
            value = f"'10.200.{number % 250}.0/24'" if name == "cidr" else str(number)
            mood = ", m" if rows is MOODS else ""
            label = ", 'glad'" if rows is MOODS else ""
            n = f"'{number}'" if name == "as_text" else str(number)
            self.database.execute(f"insert into {name} ({key}, n{mood}) values ({value}, {n}{label})")

    def wait_applied(self, pipeline: Alone) -> None:
        end = current_position(self.database)

        def done() -> bool:
            pipeline.wait(0)
            phases = pipeline.phases
            return {phase.name for phase in phases.values()} == {"ready"} and reaches(pipeline.status.applied, end)

        wait_for(done, "all tables to be ready")

    def check(self, pipeline: Alone) -> None:
        self.wait_applied(pipeline)
        check_equal(self.database.dsn, LakeReadBack(self.folder / "lake"), list(self.cases))

    def wait_noticed(self, pipeline: Alone) -> None:
        """Wait until nothing in the catalog, or only mentioned in the stream, is left to be followed."""
        end = current_position(self.database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply")
        looks = pipeline.coordinator.looks
        wait_for(lambda: pipeline.wait(0) or pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
        wait_for(lambda: pipeline.wait(0) or not pipeline.pending, "the catalog to be followed")

    def id_of(self, name: str) -> int:
        return self.database.execute(f"select '{name}'::regclass::oid::int8")[0][0]

    def copies(self, name: str) -> int:
        history = self.store.get_table_replication_history(self.id_of(name))
        return sum(record.phase.name == "data_sync" for record in history)

    def wait_copied(self, pipeline: Alone, times: int) -> None:
        def behind() -> dict[str, int]:
            pipeline.wait(0)
            return {name: count for name in self.cases if (count := self.copies(name)) < times}

        wait_for(lambda: not behind(), "a new copy of every table")


@pytest.mark.parametrize("ddl_trigger", [False, True], ids=["by the catalog", "by the trigger"])
def test_what_the_stream_does_not_carry_is_copied_again_by_itself(
    database: Any, tmp_path: Path, ddl_trigger: bool
) -> None:
    # The trigger says in time that the column had no default where the other partitions got it.
    unknown = (*MOVED, "attached_with_a_default")
    cases = {name: case for name, case in STATEMENTS.items() if name not in unknown or not ddl_trigger}
    site = Site(database, tmp_path, cases)
    with site.running(ddl_trigger=ddl_trigger) as pipeline:
        site.check(pipeline)
        site.write(100)
        site.check(pipeline)
        site.change()
        site.write(101)
        site.wait_copied(pipeline, 2)
        site.check(pipeline)
        site.write(102)
        site.check(pipeline)


def test_what_happened_while_the_pipeline_was_down_is_noticed_at_its_start(each_database: Any, tmp_path: Path) -> None:
    site = Site(each_database, tmp_path, STATEMENTS)
    with site.running() as pipeline:
        site.check(pipeline)
    site.change()
    with site.running() as pipeline:
        site.write(101)
        site.wait_copied(pipeline, 2)
        site.check(pipeline)


def test_what_the_stream_carries_needs_no_copy(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, QUIET)
    with site.running() as pipeline:
        site.check(pipeline)
        for number in (100, 101):
            site.change() if number == 100 else None
            site.write(number)
            looks = pipeline.coordinator.looks
            wait_for(lambda looks=looks: pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
            site.check(pipeline)
    site_copies = {name: site.copies(name) for name in QUIET}
    assert site_copies == dict.fromkeys(QUIET, 1)


def test_with_the_trigger_values_that_ddl_computes_are_noticed_where_it_happens(database: Any, tmp_path: Path) -> None:
    """Readers never see rows from after the statement next to values from before it, and there is one copy."""
    cases = {name: STATEMENTS[name] for name in ("computed", "computed_text", "widened", "volatile")}
    site = Site(database, tmp_path, cases)
    with site.running(ddl_trigger=True) as pipeline:
        site.check(pipeline)
        site.change()
        site.write(101)
        site.wait_copied(pipeline, 2)
        site.wait_noticed(pipeline)
        site.check(pipeline)
        site.write(102)
        site.check(pipeline)
    assert {name: site.copies(name) for name in cases} == dict.fromkeys(cases, 2)


@pytest.mark.parametrize("options", [{}, {"deletion_vectors": False}], ids=str)
def test_only_the_partitions_that_changed_are_copied_again(
    database: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    site = Site(database, tmp_path, PARTITIONS, **options)
    with site.running() as pipeline:
        site.check(pipeline)
        site.write(100)
        site.check(pipeline)
        site.change()
        site.write(101)
        site.wait_noticed(pipeline)
        site.check(pipeline)
        site.write(102)
        site.check(pipeline)
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(site.cases, 1)


def test_partitions_that_changed_while_the_pipeline_was_down_are_copied_again(
    each_database: Any, tmp_path: Path
) -> None:
    site = Site(each_database, tmp_path, PARTITIONS)
    with site.running() as pipeline:
        site.check(pipeline)
    site.write(100)
    site.change()
    with site.running() as pipeline:
        site.write(101)
        site.wait_noticed(pipeline)
        site.check(pipeline)
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(site.cases, 1)


def test_a_type_that_changes_after_a_partition_and_before_its_copy_is_noticed(database: Any, tmp_path: Path) -> None:
    create = "create type mood as enum ('sad', 'glad');" + PARTED.replace("n int", "n int, m mood", 1)
    rows = "insert into {t} select i, 'n', i, (array['sad', 'glad'])[i % 2 + 1]::mood from generate_series(1, 20) i"
    site = Site(database, tmp_path, {"parts": (create, rows, "alter table {t} detach partition {t}_mid")})
    with site.running() as pipeline, database.connect() as other:
        site.check(pipeline)
        # Until it ends, no snapshot can be taken.
        other.execute("begin; select pg_current_xact_id()")
        site.change()
        wait_for(lambda: pipeline.wait(0) or pipeline.pending, "the partition to be missed")
        database.execute("alter type mood rename value 'sad' to 'low'")
        other.execute("rollback")
        site.wait_copied(pipeline, 2)
        site.check(pipeline)


@pytest.mark.parametrize("policy", [OutOfRange.NULL, OutOfRange.TEXT])
def test_partitions_by_a_column_that_a_setting_changes_are_copied_with_the_others(
    database: Any, tmp_path: Path, policy: OutOfRange
) -> None:
    """Otherwise rows of the others would seem to be outside of their bounds."""
    create = """
        create table {t} (id int, at timestamptz) partition by range (at);
        create table {t}_a partition of {t} for values from ('2024-01-01') to ('2024-02-01');
        create table {t}_b partition of {t} for values from ('2024-02-01') to (maxvalue)
    """
    rows = "insert into {t} values (1, '2024-01-05'), (2, '2024-02-01'), (3, 'infinity')"
    site = Site(database, tmp_path, {"parts": (create, rows, "truncate {t}_a")})
    types = TypeSettings(out_of_range=policy)
    with site.running(types=types, unidentified=frozenset({"public.parts"})) as pipeline:
        site.wait_applied(pipeline)
        site.change()
        site.wait_copied(pipeline, 2)
        site.wait_applied(pipeline)
    assert sorted(pl.read_delta(str(tmp_path / "lake" / "public" / "parts"))["id"].to_list()) == [2, 3]


def test_rows_of_attached_partitions_come_also_if_others_are_kept(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, {name: PARTITIONS[name] for name in ("attached", "attached_again")})
    with site.running(schema_changes=SchemaChanges(partitions=Partitions.KEEP)) as pipeline:
        site.check(pipeline)
        database.execute("drop table attached_low")
        site.change()
        site.write(101)
        site.wait_noticed(pipeline)
        end = current_position(database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply")
    lake = LakeReadBack(tmp_path / "lake")
    # Of `attached` all 20 rows are kept, and 10 came; `attached_again` has what the source has.
    assert lake.read_table("public.attached").num_rows == 31
    assert (
        lake.read_table("public.attached_again").num_rows
        == database.execute("select count(*) from attached_again")[0][0]
    )
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(site.cases, 1)


@pytest.mark.parametrize("alone", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("ddl_trigger", [False, True], ids=["by the catalog", "by the trigger"])
def test_files_are_rewritten_where_that_is_enough(
    database: Any, tmp_path: Path, ddl_trigger: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:
        monkeypatch.setattr("penstock.destinations.delta.planner.REWRITE_BYTES", 0)
    moved = {name: STATEMENTS[name] for name in MOVED if ddl_trigger}
    site = Site(database, tmp_path, REWRITTEN | moved)
    with site.running(ddl_trigger=ddl_trigger) as pipeline:
        site.check(pipeline)
        site.write(100)
        site.check(pipeline)
        site.change()
        site.write(101)
        looks = pipeline.coordinator.looks
        wait_for(lambda: pipeline.wait(0) or pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
        site.check(pipeline)
        site.write(102)
        site.check(pipeline)
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(site.cases, 1)


def test_files_are_rewritten_after_the_pipeline_was_down(each_database: Any, tmp_path: Path) -> None:
    site = Site(each_database, tmp_path, REWRITTEN)
    with site.running() as pipeline:
        site.check(pipeline)
    site.write(100)
    site.change()
    site.write(101)
    with site.running() as pipeline:
        looks = pipeline.coordinator.looks
        wait_for(lambda: pipeline.wait(0) or pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
        site.check(pipeline)
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(site.cases, 1)


def test_columns_of_a_table_without_changes_are_followed_too(database: Any, tmp_path: Path) -> None:
    """Readers of an idle table do not see values of a column that is gone under the name of another."""
    renamed = {
        "renamed": REWRITTEN["renamed"],
        "renamed_leaves": REWRITTEN["renamed_leaves"],
        "dropped": (PLAIN, ROWS, "alter table {t} rename column note to remark; alter table {t} drop column n"),
    }
    moved = {name: STATEMENTS[name] for name in ("readded", "exchanged")}
    site = Site(database, tmp_path, renamed | moved)
    with site.running() as pipeline:
        site.check(pipeline)
        site.change()
        site.wait_noticed(pipeline)
        site.check(pipeline)
        for name in site.cases:
            database.execute(f"insert into {name} (id) values (103)")
        site.check(pipeline)
    lake = LakeReadBack(tmp_path / "lake")
    assert [column.name for column in lake.schema("public.dropped").columns] == ["id", "remark"]
    assert {name: site.copies(name) for name in site.cases} == dict.fromkeys(renamed, 1) | dict.fromkeys(moved, 2)


def test_a_table_with_an_unlogged_partition_is_refused(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, {"parts": (PARTED, ROWS, "alter table {t}_mid set unlogged")})
    with site.running() as pipeline:
        site.check(pipeline)
        site.change()
        failed = wait_for(
            lambda: next((each for each in pipeline.phases.values() if isinstance(each, Errored)), None), "the stop"
        )
    assert failed.reason.startswith("partition public.parts_mid of public.parts is unlogged")
    assert failed.solution == "Run: alter table public.parts_mid set logged; then: penstock resync <table>."


def test_a_policy_stops_the_table_instead(database: Any, tmp_path: Path) -> None:
    cases = {name: STATEMENTS[name] for name in ("another_key", "hashed", "enum", "computed", "as_text")}
    site = Site(database, tmp_path, cases)
    stop = SchemaChanges(recopy=Recopy.STOP)
    small = SchemaChanges(recopy_max_bytes=10)
    with site.running(schema_changes=stop, of_tables={"public.as_text": small}) as pipeline:
        site.check(pipeline)
        site.change()
        site.write(101)
        wait_for(
            lambda: pipeline.wait(0) or all(isinstance(phase, Errored) for phase in pipeline.phases.values()), "stops"
        )
        reasons = {name: phase.reason for name, phase in pipeline.phases.items()}
    assert reasons["public.another_key"] == "public.another_key: its key changed"
    assert reasons["public.hashed"] == "public.hashed: partition public.hashed_0 was truncated or rewritten"
    assert reasons["public.enum"] == "public.enum: type 'enum_mood' was altered"
    assert reasons["public.computed"] == "public.computed: column 'n' was altered and all its rows were rewritten"
    assert reasons["public.as_text"].endswith(" bytes, but recopy_max_bytes is 10")


def test_rows_of_partitions_that_leave_are_kept_if_asked(database: Any, tmp_path: Path) -> None:
    cases = {name: PARTITIONS[name] for name in ("detached", "dropped_leaf", "truncated_leaf")}
    site = Site(database, tmp_path, cases)
    with site.running(schema_changes=SchemaChanges(partitions=Partitions.KEEP)) as pipeline:
        site.check(pipeline)
        site.change()
        looks = pipeline.coordinator.looks
        wait_for(lambda: pipeline.wait(0) or pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
        site.write(101)
        end = current_position(database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply")
    lake = LakeReadBack(tmp_path / "lake")
    assert {name: lake.read_table(f"public.{name}").num_rows for name in cases} == dict.fromkeys(cases, 21)
    assert {name: site.copies(name) for name in cases} == dict.fromkeys(cases, 1)


def test_rows_are_kept_when_the_table_is_renamed(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, {"events": (PARTED, ROWS, "drop table {t}_mid; alter table {t} rename to former")})
    keep = {"public.events": SchemaChanges(partitions=Partitions.KEEP)}
    with site.running(tables=("public.*",), of_tables=keep) as pipeline:
        site.check(pipeline)
        site.change()
        looks = pipeline.coordinator.looks
        wait_for(lambda: pipeline.wait(0) or pipeline.coordinator.looks > looks + 1, "two looks at the catalog")
        database.execute("insert into former values (101, 'new', 1)")
        end = current_position(database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply")
    assert LakeReadBack(tmp_path / "lake").read_table("public.former").num_rows == 21
    assert (tmp_path / "lake" / "public" / "events").exists()


@pytest.mark.parametrize(
    "policy",
    [SchemaChanges(partitions=Partitions.KEEP), SchemaChanges(recopy=Recopy.STOP), SchemaChanges(recopy_max_bytes=10)],
    ids=["partitions", "recopy", "recopy_max_bytes"],
)
def test_a_renamed_table_keeps_its_policy_after_a_restart(database: Any, tmp_path: Path, policy: SchemaChanges) -> None:
    """Also after a second one, and if the rename was not seen while the pipeline ran."""
    site = Site(database, tmp_path, {"events": (PARTED, ROWS, "alter table {t} rename to former")})
    settings: dict[str, Any] = {"tables": ("public.*",), "of_tables": {"public.events": policy}}
    with site.running(**settings) as pipeline:
        site.check(pipeline)
        site.change()
        site.wait_noticed(pipeline)
    with site.running(**settings) as pipeline:
        site.wait_noticed(pipeline)
    database.execute("alter table former rename to latest")
    with site.running(**settings) as pipeline:
        site.wait_noticed(pipeline)
        if policy.partitions is Partitions.KEEP:
            database.execute("drop table events_mid")
            site.wait_noticed(pipeline)
        database.execute("insert into latest values (101, 'new', 1)")
        end = current_position(database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply")
    assert LakeReadBack(tmp_path / "lake").read_table("public.latest").num_rows == 21
    assert site.copies("latest") == 1
    assert [path.name for path in (tmp_path / "lake" / "public").iterdir()] == ["events"]


def test_the_phase_says_why_a_table_waits_to_be_copied_again(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, {"another_key": STATEMENTS["another_key"]})
    with site.running() as pipeline:
        site.check(pipeline)
        site.change()
        site.write(101)
        site.wait_copied(pipeline, 2)
        site.check(pipeline)
    (table_id,) = database.execute("select 'another_key'::regclass::oid::int8")[0]
    reasons = [r.phase.reason for r in site.store.get_table_replication_history(table_id) if isinstance(r.phase, Init)]
    assert reasons == [None, "public.another_key: its key changed"]


def test_a_row_with_values_that_were_never_sent_stops_its_table_only_until_the_cause_is_seen(
    database: Any, tmp_path: Path
) -> None:
    """The rows of such a table are found by all their values."""
    create = "create table {t} (id int, note text, n int); alter table {t} replica identity full"
    site = Site(database, tmp_path, {"whole": (create, ROWS, "alter table {t} alter n type int using n * 2")})
    with site.running() as pipeline:
        site.check(pipeline)
        count = pipeline.coordinator.looks
        wait_for(lambda: pipeline.coordinator.looks > count, "a look, so that the next one is some seconds away")
        site.change()
        database.execute("update whole set note = 'changed' where id = 3")
        # Usually it stops first; a look may also come in time.
        site.wait_copied(pipeline, 2)
        site.check(pipeline)


@pytest.mark.parametrize("while_down", [False, True], ids=["running", "down"])
def test_what_the_source_drops_stays_or_goes_as_asked(database: Any, tmp_path: Path, while_down: bool) -> None:
    drop_column, drop_table = "alter table {t} drop column note", "drop table {t}"
    scripts = {"kept": drop_column, "without": drop_column, "gone": drop_table, "stays": drop_table}
    site = Site(database, tmp_path, {name: (PLAIN, ROWS, script) for name, script in scripts.items()})
    policies = {
        "public.kept": SchemaChanges(drop_column=DropColumn.KEEP),
        "public.gone": SchemaChanges(drop_table=DropTable.DROP),
    }
    with site.running(tables=("public.*",), of_tables=policies) as pipeline:
        site.check(pipeline)
        if not while_down:
            site.change()
            site.wait_noticed(pipeline)
    if while_down:
        site.change()
    site.cases = {name: site.cases[name] for name in ("kept", "without")}
    lake = tmp_path / "lake" / "public"
    with site.running(tables=("public.*",), of_tables=policies) as pipeline:
        site.write(101)
        site.wait_applied(pipeline)
        rows = pl.read_delta(str(lake / "kept")).sort("id")
        assert rows["note"].to_list() == [*(f"n{i}" for i in range(1, 21)), None]
        assert pl.read_delta(str(lake / "without")).columns == ["id", "n"]
        assert pl.read_delta(str(lake / "stays")).height == 20
        assert not [path for path in (lake / "gone").rglob("*") if path.is_file()]
        # A new copy has no values for the column, but readers still find it.
        pipeline.store.add_command(CommandKind.RESYNC, ("public.kept",))
        wait_for(lambda: site.copies("kept") == 2, "the copy")
        site.wait_applied(pipeline)
        assert pl.read_delta(str(lake / "kept"))["note"].to_list() == [None] * 21


SAME_COLUMNS = {
    *("computed", "computed_text", "enum_key", "enum_renamed", "enum", "detached", "dropped_leaf", "vacuumed_leaf"),
    *("truncated_leaf", "attached", "attached_again", "new_and_truncated", "attached_tree", "reloaded_leaf"),
    *("vacuumed_leaf_default", "attached_at_once", "computed_default", "new_and_dropped", "passing_through"),
}
"""Statements after which rows have the same columns."""
SAME_ROWS = {
    *("renamed", "another_key", "readded", "exchanged", "detached", "dropped_leaf", "truncated_leaf", "cidr"),
    *("vacuumed_leaf", "new_and_truncated", "reloaded_leaf", "new_and_dropped", "passing_through"),
}
"""Statements after which the log has all that the source has, or rows that left with their partition."""
ALL = STATEMENTS | PARTITIONS | REWRITTEN
LOGGED = SAME_COLUMNS | SAME_ROWS | {"widened", "as_text", "volatile", "serial", "identity", "constant", "generated"}


@pytest.mark.parametrize(
    ("destination", "read"),
    [(partial(DeltaDestination, mode="history"), HistoryReadBack), (ParquetDestination, ParquetReader)],
    ids=["history", "parquet"],
)
def test_a_log_of_changes_follows_everything(
    each_database: Any, tmp_path: Path, destination: Callable[[Path], Destination], read: Callable[[Path], Any]
) -> None:
    site = Site(each_database, tmp_path, {name: ALL[name] for name in sorted(LOGGED)}, destination)
    with site.running() as pipeline:
        site.wait_applied(pipeline)
        site.write(100)
        site.wait_applied(pipeline)
        site.change()
        site.write(101)
        site.wait_noticed(pipeline)
        site.wait_applied(pipeline)
    with site.running() as pipeline:
        site.write(102)
        site.wait_applied(pipeline)
    shapes = site.store.get_table_shapes()
    assert {name for name in LOGGED if shapes[site.id_of(name)].silent_change is None} == SAME_ROWS
    assert {name: site.copies(name) for name in LOGGED} == dict.fromkeys(LOGGED, 1)
    lake = read(tmp_path / "lake")
    for name in LOGGED:
        rows = lake.read_changes(f"public.{name}").to_pylist()
        rows.sort(key=lambda row: (row["_commit_lsn"], row["_ordinal"]))
        key, values = (
            ("c", [f"10.200.{n}.0/24" for n in (100, 101, 102)]) if name == "cidr" else ("id", [100, 101, 102])
        )
        found = [row for row in rows if row["_op"] in ("insert", 1) and row[key] in values]
        assert [row[key] for row in found] == values, name
        assert len([row for row in rows if row["_ordinal"] == -1]) >= 20
        first, second, third = (row["_schema_version"] for row in found)
        assert (first, third) == (1, second), name
        assert (second == 1) == (name in SAME_COLUMNS), name


@pytest.mark.parametrize("while_down", [False, True], ids=["running", "down"])
def test_a_new_copy_keeps_rows_that_were_deleted_softly(each_database: Any, tmp_path: Path, while_down: bool) -> None:
    names = ("widened", "as_text", "computed", "another_key", "detached", "truncated_leaf", "volatile")
    cases = {name: ALL[name] for name in names}
    site = Site(each_database, tmp_path, cases, partial(DeltaDestination, mode="soft_delete"))
    with site.running() as pipeline:
        site.check(pipeline)
        for name in names:
            each_database.execute(f"delete from {name} where id in (3, 4)")
        site.check(pipeline)
        if not while_down:
            site.change()
            site.write(100)
            site.wait_copied(pipeline, 2)
    if while_down:
        site.change()
        site.write(100)
    with site.running() as pipeline:
        site.wait_copied(pipeline, 2)
        for name in names:
            n = "'4'" if name == "as_text" else "4"
            each_database.execute(f"insert into {name} (id, n) values (4, {n})")
        site.write(101)
        site.check(pipeline)
    for name in names:
        rows = pl.read_delta(str(tmp_path / "lake" / "public" / name))
        left = [3, *range(10, 20)] if name in ("detached", "truncated_leaf") else [3]
        assert sorted(rows.filter(pl.col("_deleted_at").is_not_null())["id"].to_list()) == left, name


class LogReceiver(Receiver):
    """Accepts everything; `requests` has what came."""

    def _dispatch(self, request: Request) -> tuple[int, Any]:
        return 200, None


def test_a_receiver_gets_schema_changes_as_steps(database: Any, tmp_path: Path) -> None:
    names = ("renamed", "as_text", "computed", "volatile", "constant", "another_key", "readded")
    receiver = LogReceiver()
    site = Site(database, tmp_path, {name: ALL[name] for name in names}, lambda _: HttpDestination(receiver.url))
    try:
        with site.running() as pipeline:
            site.wait_applied(pipeline)
            site.write(100)
            site.wait_applied(pipeline)
            site.change()
            site.write(101)
            site.wait_noticed(pipeline)
            site.wait_applied(pipeline)
    finally:
        receiver.close()
    assert {name: site.copies(name) for name in names} == dict.fromkeys(names, 1)
    for name in names:
        bodies = [each.body for each in receiver.requests if each.path == f"/api/tables/public/{name}/changes"]
        steps = [step for body in bodies for step in read_bodies(io.BytesIO(body))]
        kinds = ["rows", "rows"] if name == "computed" else ["rows", "schema", "rows"]
        assert [step.step for step in steps] == kinds, name


def test_resync_adds_a_copy_to_a_log(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, {"computed": STATEMENTS["computed"]}, partial(DeltaDestination, mode="history"))
    with site.running() as pipeline:
        site.wait_applied(pipeline)
        site.write(100)
        site.change()
        site.wait_noticed(pipeline)
        site.wait_applied(pipeline)
        pipeline.store.add_command(CommandKind.RESYNC, ("public.computed",))
        site.wait_copied(pipeline, 2)
        site.wait_applied(pipeline)
        site.write(101)
        site.wait_applied(pipeline)
    lake = HistoryReadBack(tmp_path / "lake")
    check_equal(database.dsn, lake, ["computed"])
    operations = Counter(lake.read_changes("public.computed").column("_op").to_pylist())
    assert operations == {"copy": 41, "insert": 2, "resync": 1}
    assert site.store.get_table_shapes()[site.id_of("computed")].silent_change is None
