"""Names that Postgres allows: schemas, tables and columns arrive under them, or Penstock says which two clash."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.schema import fold_case
from penstock.state import MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.lake import BothLakes, HistoryReadBack, LakeReadBack
from tests.e2e.support import tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied, wait_ready
from tests.support.readback import check_equal

_COMPOSED, _DECOMPOSED = (unicodedata.normalize(form, "Ünïcødé") for form in ("NFC", "NFD"))
NAMES = (
    *("Mixed Case", 'double"quote', "single'quote", "back\\slash", "dot.ted", ".", "..", "sl/ash", "per%20cent", "*"),
    *(_COMPOSED, _DECOMPOSED, "n" * 63, "select", "_delta_log", "_penstock", "a=b", "line\nbreak", "-", "🚰", " ", "#"),
    *("[a-z]?", "a--b", "public--oid16384", "$1", "nul", "~", "con:", "CamelCase", "camelcase"),
)
COLUMNS = (
    *NAMES,
    *("a", "A", "a#3", "_op", "_OP", "_commit_lsn", "_ordinal", "_commit_time", "_xid", "_unchanged", "_old"),
    *("_unrepresentable", "_deleted_at", "_old.a", "_old.day", "a.b", "a`b", "a,b", "a;b", "a{b}", "a(b)", "a\tb"),
    # Spark ignores case letter by letter: these are pairs for it.
    *("s", "ſ", "k", "\u212a", "i", "İ", "I", "ı", "µ", "μ", "ς", "σ", "ß", "ẞ", "é", "É", "e\u0301", "E\u0301"),
)


def identifier(*parts: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def create_tables(database: Any) -> list[tuple[str, str]]:
    """A table per name, in a schema of the same name; two of them have a column per name."""
    tables = [(name, name) for name in NAMES]
    with database.connect() as connection:
        for namespace, name in tables:
            connection.execute(f"create schema {identifier(namespace)}".encode())
            table = identifier(namespace, name)
            columns = ", ".join(f"{identifier(each)} text" for each in columns_of(name))
            # In every other table, rows are found by all their cells.
            key = "primary key" if len(name) % 2 else ""
            connection.execute(f"create table {table} (id int {key}, {columns}, day date)".encode())
            if not key:
                connection.execute(f"alter table {table} replica identity full".encode())
            insert(connection, (namespace, name), 1, 2)
    return tables


def columns_of(table: str) -> Sequence[str]:
    return COLUMNS if table in (".", "..", "t") else ["a", table]


def insert(connection: Any, table: tuple[str, str], *keys: int) -> None:
    for key in keys:
        values = [f"{number}-{key}" for number in range(len(columns_of(table[1])))]
        statement = sql.SQL("insert into {} values ({}, {}, {})").format(
            sql.Identifier(*table), key, sql.SQL(", ").join(values), "infinity" if key % 2 else "2024-02-29"
        )
        connection.execute(statement)


def change(connection: Any, table: tuple[str, str]) -> None:
    insert(connection, table, 3, 4, 5)
    where = sql.Identifier(*table)
    cells = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(name), f"new {name}") for name in columns_of(table[1])
    )
    connection.execute(sql.SQL("update {} set {} where id in (1, 4)").format(where, cells))
    connection.execute(sql.SQL("update {} set id = 9, day = '-infinity' where id = 2").format(where))
    connection.execute(sql.SQL("delete from {} where id = 3").format(where))


def test_every_name_arrives_and_every_reader_reads_it(delta_spark: Any, database: Any, tmp_path: Path) -> None:
    tables = create_tables(database)
    names = [name for _, name in tables]
    with BothLakes(database, tmp_path, tables=("*.*",)) as lakes:
        lakes.wait(len(tables))
        with database.connect() as connection, connection.transaction():
            for table in tables:
                change(connection, table)
        lakes.wait(len(tables))
        assert {name for output in lakes.running for name in output.phases} == {
            f"{namespace}.{name}" for namespace, name in tables
        }
    lakes.check_equal(names)
    reader = DeltaReader(tmp_path / "delta")
    assert len({reader.folder(table) for table in reader.tables()}) == len(tables)
    for table in ("...", ".....", "select.select"):
        expected = Counter(map(_as_texts, _cells(reader.read_table(table))))
        found = delta_spark.read.format("delta").load(reader.folder(table)).collect()
        assert Counter(_as_texts(row) for row in found) == expected
        folder = lakes.readbacks["Parquet"].folder(table)  # type: ignore[attr-defined]
        files = [str(path) for path in lakes.readbacks["Parquet"].files(table)]  # type: ignore[attr-defined]
        assert len(delta_spark.read.parquet(*files).columns) > len(columns_of(reader.schema(table).name)), folder


def _cells(rows: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows.to_pylist()]


def _as_texts(row: Any) -> tuple[str, ...]:
    return tuple(json.dumps(sorted(dict(cell).items())) if isinstance(cell, list | dict) else str(cell) for cell in row)


@pytest.mark.parametrize("mode", ["soft_delete", "history"])
def test_columns_with_penstocks_own_names_keep_their_values_in_every_mode(
    database: Any, tmp_path: Path, mode: str
) -> None:
    columns = ", ".join(f"{identifier(name)} text" for name in COLUMNS)
    database.execute(f"create table t (id int primary key, {columns}, day date)")
    database.execute("alter table t replica identity full")
    with database.connect() as connection:
        insert(connection, ("public", "t"), 1, 2)
    destination = DeltaDestination(tmp_path / "lake", mode=mode)
    with tables_alone(tables_settings(database, tmp_path), MemoryStore("e2e"), destination, ProcessTasks()) as pipeline:
        wait_ready(pipeline, 1)
        with database.connect() as connection, connection.transaction():
            change(connection, ("public", "t"))
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    readback = HistoryReadBack if mode == "history" else LakeReadBack
    check_equal(database.dsn, readback(tmp_path / "lake"), ["t"])


def test_columns_that_differ_by_case_come_and_go(database: Any, tmp_path: Path) -> None:
    database.execute('create table t (id int primary key, a text, "A" text, b text)')
    database.execute("insert into t values (1, 'small', 'large', 'b')")
    settings = tables_settings(database, tmp_path)
    destination = DeltaDestination(tmp_path / "lake")
    with tables_alone(settings, MemoryStore("e2e"), destination, ProcessTasks()) as pipeline:
        wait_ready(pipeline, 1)
        for number, statement in enumerate(
            (
                "alter table t drop a",
                """alter table t add "B" text default 'a default'""",
                "alter table t drop b",
                "alter table t add b text",
                """alter table t add "É" text""",
                """alter table t add "é" text""",
                'alter table t rename b to "C"',
                'alter table t rename "C" to c',
                """alter table t rename "é" to b; alter table t rename "É" to "é" """,
                """alter table t rename b to swap; alter table t rename c to b; alter table t rename swap to c""",
                'alter table t add "S" text default 7; alter table t rename "S" to "ſ"; alter table t add s text',
            )
        ):
            # In one batch, so that rows of both schemas are read together.
            with database.connect() as connection, connection.transaction():
                connection.execute("update t set id = -id where id = 1 or id = -1")
                connection.execute(statement.encode())
                connection.execute('insert into t (id, "A") values (%s, %s)', [10 + number, statement])
            wait_applied(pipeline, database)
            wait_ready(pipeline, 1)
            check_equal(database.dsn, LakeReadBack(tmp_path / "lake"), ["t"])
            # To Spark, all are different.
            names = DeltaReader(tmp_path / "lake").layout("public.t").schema.names
            assert len(set(map(fold_case, names))) == len(names)


def test_two_tables_whose_names_read_alike_are_told_apart(
    database: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database.execute('create schema a; create schema "a.b"')
    database.execute('create table a."b.c" (id int primary key); insert into a."b.c" values (1)')
    with caplog.at_level(logging.INFO, "penstock"), BothLakes(database, tmp_path, tables=("*.*",)) as lakes:
        lakes.wait(1)
        database.execute('create table "a.b".c (id int primary key); insert into "a.b".c values (2)')
        wait_for(lambda: lakes.running.wait(0) or "reads like" in caplog.text, "the refusal")
        database.execute('insert into a."b.c" values (3)')
        lakes.wait(1)
    lakes.check_equal(["b.c"])
    texts = {each.getMessage() for each in caplog.records if "reads like" in each.message}
    assert texts == {'table is skipped, because its name reads like that of another table="a.b"."c" other="a"."b.c"'}
