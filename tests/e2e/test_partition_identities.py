"""Partitions with other replica identities than their root: the server describes the root, and sends what leaves log.

What every leaf identifies is followed exactly. Otherwise the table stops with statements that help, before rows are
wrong; once they are run, it is copied again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock import coordinator
from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.memory import MemoryDestination
from penstock.lsn import reaches
from penstock.source import SourceSettings
from penstock.source.preflight import Request, Status, run_preflight
from penstock.source.publications import identity_problems
from penstock.state import Errored, MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.readback import MemoryReadBack, ReadBack, check_equal

LARGE = "(select string_agg(md5((i * 7 + j)::text), '') from generate_series(1, 300) j)"
"""A text that is stored outside of its row, and differs by `i`."""
TABLE = "create table t (id int not null, part int not null, other int not null, note text, large text)"
SECONDS = 120.0
LEAF = "create table {0} partition of t for values in ({1})"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.2)


@pytest.fixture(params=["memory", "delta"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Destination, ReadBack]:
    if request.param == "memory":
        memory = MemoryDestination()
        return memory, MemoryReadBack(memory)
    return DeltaDestination(str(tmp_path / "lake")), LakeReadBack(tmp_path / "lake")


@dataclass(frozen=True, slots=True)
class Case:
    """A case in a schema of its own, so that one pipeline follows many of them."""

    database: Any
    name: str
    """What it is about; the schema is named after it."""

    @property
    def schema(self) -> str:
        return re.sub("[^a-z]+", "_", self.name)

    def execute(self, statements: str) -> None:
        self.database.execute(f"set search_path = {self.schema}; {statements}")


def make_cases(database: Any, identities: Mapping[str, tuple[str, ...]]) -> list[Case]:
    cases = [Case(database, name) for name in identities]
    for case in cases:
        database.execute(f"create schema {case.schema}")
        create(case, *identities[case.name])
    return cases


def create(database: Any, *statements: str) -> None:
    """The table `t`, partitioned by `part`, with 20 rows in two leaves; and `plain`, which must never stop."""
    for statement in (
        f"{TABLE} partition by list (part)",
        LEAF.format("one", 1),
        LEAF.format("two", 2),
        *statements,
        f"insert into t select i, i % 2 + 1, i, 'n' || i, {LARGE} from generate_series(1, 20) i",
        "create table plain (id int primary key, n int)",
        "insert into plain select i, 0 from generate_series(1, 5) i",
    ):
        database.execute(statement)


def change(database: Any, *, keys: bool = True) -> None:
    """Updates, deletes, and changes of everything that might be a key; of rows with omitted values."""
    for statement in (
        "update t set note = note || '+' where id <= 8",
        "delete from t where id in (3, 4)",
        *(("update t set id = id + 1000 where id in (5, 6)",) if keys else ()),
        "update t set part = 3 - part where id in (7, 8)",
        "update t set other = other + 1000 where id in (9, 10)",
        f"insert into t select i, i % 2 + 1, i, null, {LARGE} from generate_series(31, 34) i",
        "delete from t where id = 31",
        "update plain set n = n + 1",
    ):
        database.execute(statement)


def run(database: Any, folder: Path, made: tuple[Destination, ReadBack], **changes: Any) -> Alone:
    settings = tables_settings(database, folder, "leaves", **changes)
    return tables_alone(settings, MemoryStore("leaves"), made[0], ProcessTasks())


def run_cases(cases: Sequence[Case], folder: Path, made: tuple[Destination, ReadBack], **changes: Any) -> Alone:
    tables = tuple(f"{case.schema}.*" for case in cases)
    return run(cases[0].database, folder, made, tables=tables, **changes)


def wait_ready(pipeline: Alone, cases: int = 1) -> None:
    wait_for(
        lambda: pipeline.wait(0) or [phase.name for phase in pipeline.phases.values()] == ["ready"] * 2 * cases,
        "ready tables",
        SECONDS,
    )


def wait_refused(pipeline: Alone, cases: Sequence[Case]) -> list[Errored]:
    """Wait until the table `t` of each case is refused, and return why."""

    def refused() -> list[Errored]:
        found = [pipeline.phases.get(f"{case.schema}.t") for case in cases]
        return [each for each in found if isinstance(each, Errored)]

    wait_for(lambda: pipeline.wait(0) or len(refused()) == len(cases), "tables that are refused", SECONDS)
    return refused()


def check(database: Any, pipeline: Alone, made: tuple[Destination, ReadBack], cases: int = 1) -> None:
    wait_ready(pipeline, cases)
    end = current_position(database)
    wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply to reach the end", SECONDS)
    wait_ready(pipeline, cases)
    check_equal(database.dsn, made[1], ["t", "plain"] * cases)


def copies(database: Any, pipeline: Alone, schema: str = "public") -> int:
    (table_id,) = database.execute("select %s::regclass::oid::int8", [f"{schema}.t"])[0]
    history = pipeline.store.get_table_replication_history(table_id)
    return sum(record.phase.name == "data_sync" for record in history)


FOLLOWED: dict[str, tuple[str, ...]] = {
    "a primary key on the leaves only": (
        "alter table one add primary key (id, part)",
        "alter table two add primary key (id, part)",
    ),
    "indexes on the leaves only": (
        "create unique index one_key on one (part, id); alter table one replica identity using index one_key",
        "create unique index two_key on two (id, part); alter table two replica identity using index two_key",
    ),
    "the root full, leaves by their primary key": (
        "alter table t add primary key (id, part)",
        "alter table t replica identity full",
    ),
    "the root nothing, leaves by the primary key": (
        "alter table t add primary key (id, part)",
        "alter table t replica identity nothing",
    ),
    "the root full without a key, leaves by theirs": (
        "alter table t replica identity full",
        "alter table one add primary key (id, part)",
        "alter table two add primary key (id, part)",
    ),
    "one leaf full, the root and the other by the primary key": (
        "alter table t add primary key (id, part)",
        "alter table one replica identity full",
    ),
    "all leaves full, the root by its primary key": (
        "alter table t add primary key (id, part)",
        "alter table one replica identity full; alter table two replica identity full",
    ),
    "all leaves full, the root without a key": (
        "alter table one replica identity full; alter table two replica identity full",
    ),
    "a leaf by more columns than the primary key": (
        "alter table t add primary key (id, part)",
        "create unique index one_key on one (id, part, other); alter table one replica identity using index one_key",
    ),
    "a leaf whose columns have other numbers": (
        "alter table t detach partition two; drop table two",
        "create table two (large text, gone int, note text, other int not null, part int not null, id int not null)",
        "alter table two drop column gone; alter table two add primary key (part, id)",
        "alter table one add primary key (id, part)",
        "alter table t attach partition two for values in (2)",
    ),
    "leaves below a partition": (
        "drop table two",
        "create table two partition of t for values in (2) partition by list (other)",
        "create table rest partition of two default",
        "alter table one add primary key (id, part, other)",
        "alter table rest add primary key (id, part, other)",
    ),
}
"""Identities that differ, and can be followed."""

REFUSED: dict[str, tuple[str, ...]] = {
    "keys that are unique within a leaf only": (
        "alter table one add primary key (id)",
        "alter table two add primary key (id)",
    ),
    "keys of different columns": (
        "alter table one add primary key (id, part)",
        "alter table two add primary key (other, part)",
    ),
    "a leaf by another index than the root's key": (
        "alter table t add primary key (id, part)",
        "create unique index one_other on one (other); alter table one replica identity using index one_other",
    ),
    "a leaf full, the other by a key that the root lacks": (
        "alter table one add primary key (id, part)",
        "alter table two replica identity full",
    ),
    "the root by an index, leaves by the primary key": (
        "create unique index t_other on t (other, part); alter table t replica identity using index t_other",
        "alter table one add primary key (id)",
        "alter table two add primary key (id)",
    ),
}
"""Identities by which changes cannot be matched to rows."""


@pytest.mark.trap(25, 26)
def test_what_every_leaf_identifies_is_followed(
    each_database: Any, tmp_path: Path, destination: tuple[Destination, ReadBack]
) -> None:
    database = each_database
    cases = make_cases(database, FOLLOWED)
    with run_cases(cases, tmp_path, destination) as pipeline:
        wait_ready(pipeline, len(cases))
        for case in cases:
            change(case)
        check(database, pipeline, destination, len(cases))
        assert {case.name: copies(database, pipeline, case.schema) for case in cases} == dict.fromkeys(FOLLOWED, 1)


def test_what_cannot_be_matched_is_refused_and_its_remedy_works(
    each_database: Any, tmp_path: Path, destination: tuple[Destination, ReadBack]
) -> None:
    database = each_database
    cases = make_cases(database, REFUSED)
    with run_cases(cases, tmp_path, destination) as pipeline:
        refused = wait_refused(pipeline, cases)
        for case in cases:
            change(case)
        wait_for(
            lambda: all(pipeline.phases[f"{case.schema}.plain"].name == "ready" for case in cases),
            "the other tables",
            SECONDS,
        )
        for each in refused:
            assert "replica identit" in each.reason
            follow(database, each.solution)
        check(database, pipeline, destination, len(cases))
        for case in cases:
            case.execute("update t set note = note || '-'; delete from t where id = 20")
        check(database, pipeline, destination, len(cases))


def follow(database: Any, remedy: str | None) -> None:
    """Run the statements of a remedy, to the letter."""
    assert remedy is not None
    _, found, statements = remedy.partition("Run: ")
    assert found
    database.execute(statements)


UNPUBLISHED: dict[str, tuple[str, ...]] = {
    "no leaf has an identity": (),
    "one leaf has none": ("alter table one add primary key (id, part)",),
    "one leaf has none, the other a key that is unique within it": ("alter table one add primary key (id)",),
    "one leaf has none, the other is full": ("alter table one replica identity full",),
    "one leaf has another key that it does not use": (
        "alter table one add primary key (id, part)",
        "alter table two add primary key (other) deferrable",
    ),
    "a leaf of a table with a key has none": (
        "alter table t add primary key (id, part)",
        "alter table one replica identity nothing",
    ),
    "many leaves": ("\n".join(f"{LEAF.format(f'leaf{i}', i)};" for i in range(10, 20)),),
}
"""Identities with which the server refuses updates and deletes."""


def test_check_reports_it_and_is_content_once_its_remedies_were_followed(any_database: Any) -> None:
    database = any_database
    for case in make_cases(database, {**REFUSED, **UNPUBLISHED}):
        request = Request("leaves", None, (f"{case.schema}.*",), manage_publication=True)

        def look(request: Request = request) -> list[Any]:
            report = run_preflight(SourceSettings(database.dsn), request)
            found = [each for each in report.checks if each.id in ("replica_identity", "partition_identity")]
            assert len(found) == 2
            return [each for each in found if each.status is not Status.PASSED]

        failed = look()
        assert failed, case.name
        assert case.name not in REFUSED or "partition_identity" in [each.id for each in failed], case.name
        with database.connect() as connection:
            assert identity_problems(connection, [f"{case.schema}.t", f"{case.schema}.plain"]).keys() == {
                subject for each in failed if each.id == "partition_identity" for subject in each.subjects
            }
        for each in failed:
            follow(database, each.remedy)
        assert not look(), case.name
        case.execute(f"create publication {case.schema} for table t with (publish_via_partition_root = true)")
        change(case)


ALTERED: dict[str, str] = {
    "a leaf gets another identity": (
        "create unique index one_other on one (other); alter table one replica identity using index one_other"
    ),
    "a leaf with another identity is attached": (
        "create table three (like t); alter table three add primary key (id, part);"
        "create unique index three_other on three (other);"
        "alter table three replica identity using index three_other;"
        "alter table t attach partition three for values in (3)"
    ),
}


@pytest.mark.parametrize("ddl_trigger", [False, True], ids=["by the catalog", "by the trigger"])
def test_an_identity_that_changes_while_running_is_noticed(
    each_database: Any, tmp_path: Path, destination: tuple[Destination, ReadBack], ddl_trigger: bool
) -> None:
    database = each_database
    cases = make_cases(database, dict.fromkeys(ALTERED, ("alter table t add primary key (id, part)",)))
    with run_cases(cases, tmp_path, destination, ddl_trigger=ddl_trigger) as pipeline:
        wait_ready(pipeline, len(cases))
        for case in cases:
            change(case)
            case.execute(ALTERED[case.name])
        refused = wait_refused(pipeline, cases)
        for case in cases:
            case.execute("update t set other = other + 1, id = id + 5000 where id < 20")
            case.execute("insert into plain values (100, 1)")
        for each in refused:
            follow(database, each.solution)
        check(database, pipeline, destination, len(cases))
        for case in cases:
            case.execute("update t set note = note || '-'; delete from t where id = 20")
        check(database, pipeline, destination, len(cases))


def test_old_rows_that_may_lack_what_is_now_expected_of_them_lead_to_a_new_copy(
    each_database: Any, tmp_path: Path, destination: tuple[Destination, ReadBack]
) -> None:
    """The catalog is ahead of the stream: while Penstock was stopped, leaves that sent their keys became full."""
    database = each_database
    create(database, "alter table t add primary key (id, part)", "alter table t replica identity full")
    store = MemoryStore("leaves")
    settings = tables_settings(database, tmp_path, "leaves")
    with tables_alone(settings, store, destination[0], ProcessTasks()) as pipeline:
        wait_ready(pipeline)
    change(database)
    database.execute("alter table one replica identity full; alter table two replica identity full")
    with tables_alone(settings, store, destination[0], ProcessTasks()) as pipeline:
        check(database, pipeline, destination)
        assert copies(database, pipeline) == 2
        change_again = "update t set id = id + 7000, note = note || '-' where id > 10"
        database.execute(change_again)
        check(database, pipeline, destination)
        assert copies(database, pipeline) == 2
