"""Names that someone chose to do harm: every command works with them, and none reaches the terminal as it is."""

from __future__ import annotations

import io
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from penstock.destinations.parquet.reader import ParquetReader
from tests.integration.cli.support import Site
from tests.program import penstock

ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
NAMES = (
    f'a"; drop table x; --{ESCAPE}',
    "[/red]%s %(x)s {0} {x}\r\n2026 error all is lost",
    "n" * 63,
)


def is_harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\u202e\r")


def test_hostile_names_work_and_are_shown_as_escapes(database: Any, tmp_path: Path) -> None:
    name = f'{database.name[-8:]}"%s{{}}\x1b[31m'
    database.execute(sql.SQL("create database {}").format(sql.Identifier(name)).as_string(None))
    dsn = make_conninfo(database.dsn, dbname=name)
    publication = f"p\"'%s{{}}{ESCAPE}"
    slot = f"names_{database.name[-12:]}"
    try:
        run_all(database, dsn, publication, slot, tmp_path)
    finally:
        database.server.drop_database(name)


def run_all(database: Any, dsn: str, publication: str, slot: str, folder: Path) -> None:

    with psycopg.connect(dsn, autocommit=True) as connection:
        for each in NAMES:
            connection.execute(sql.SQL("create schema {}").format(sql.Identifier(each)))
            table = sql.Identifier(each, each)
            connection.execute(
                sql.SQL("create table {} (id int primary key, {} text)").format(table, sql.Identifier(each))
            )
            connection.execute(sql.SQL("insert into {} values (1, 'one')").format(table))
    quoted = publication.replace("\\", "\\\\").replace('"', '\\"')
    quoted = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in quoted)
    config = f"""
        [pipeline]
        id = "names"
        spool = {{path = "spool", min_free_bytes = 0}}
        [source]
        url = "${{SOURCE_URL}}"
        publication = "{quoted}"
        slot = "{slot}"
        ddl_trigger = true
        [spark]
        master = "none"
        [destination]
        type = "parquet"
        path = "lake"
    """
    assert tomllib.loads(config)["source"]["publication"] == publication
    (folder / "penstock.toml").write_text(config)
    site = Site(database, folder)
    said: list[str] = []

    def run(*arguments: str, code: int = 0) -> str:
        done = penstock(*arguments, environment={**site.environment, "SOURCE_URL": dsn}, folder=folder)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        said.extend((done.stdout, done.stderr))
        return done.stdout

    run("check")
    run("run", "--plan")
    run("--log-level", "info", "run", "--once")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for each in NAMES:
            table = sql.Identifier(each, each)
            connection.execute(
                sql.SQL("alter table {} add column {} int").format(table, sql.Identifier(each[:-1] + "2"))
            )
            connection.execute(sql.SQL("insert into {} values (2, 'two', 3)").format(table))
    run("--log-level", "info", "--log-format", "json", "run", "--once")
    for command in (["tables"], ["tables", "--json"], ["report", "--to", "r.tar.gz"]):
        run(*command)
    for command in (["status"], ["status", "--json"]):
        run(*command, code=3)  # it is not running
    assert "[/red]%s %(x)s {0} {x}" in run("tables")
    reader = ParquetReader(folder / "lake")
    for each in NAMES:
        rows = reader.read_table(f"{each}.{each}").to_pylist()
        assert sorted((row["id"], row[each]) for row in rows) == [(1, "one"), (2, "two")]
    run("teardown", "--yes")
    assert all(is_harmless(text) for text in said), [text for text in said if not is_harmless(text)]
    with tarfile.open(folder / "r.tar.gz") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            assert is_harmless(io.TextIOWrapper(file, newline="").read()), member.name
