"""Every type and edge value arrives at Delta and Parquet as the source has it; docs/reference/types.md says how.

After a change of types or values: PENSTOCK_WRITE_PAGES=1 .venv/bin/python -m pytest tests/e2e/test_types.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from psycopg import sql

from penstock.changes.segment import UNREPRESENTABLE
from penstock.destinations.clickhouse.layout import column_type
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.duckdb.layout import column_type as duckdb_type
from penstock.destinations.parquet import ParquetReader
from penstock.destinations.snowflake.layout import column_type as snowflake_type
from penstock.source.connections import PINNED_PARAMETERS
from tests.e2e.lake import BothLakes
from tests.support import type_matrix
from tests.support.oracle import normalised
from tests.support.readback import ReadBack, formatted
from tests.support.replay import Row
from tests.support.type_matrix import IMPOSSIBLE, UPDATED, WIDE, Case, key_tables
from tests.support.workload import read_rows

PAGE = Path(__file__).parents[2] / "docs/reference/types.md"
BEGIN, END = "<!-- Written by tests/e2e/test_types.py -->\n", "<!-- End -->\n"
WRITE_VARIABLE = "PENSTOCK_WRITE_PAGES"
SHOWN = 40
"""Values longer than this are not printed on the page."""


def run(database: Any, folder: Path) -> tuple[list[Case], BothLakes]:
    """Run one pipeline over the whole matrix."""
    with database.connect() as connection:
        cases = type_matrix.create(connection)
    with BothLakes(database, folder, max_table_sync_workers=8) as lakes:
        lakes.wait(len(WIDE) + len(key_tables(cases)))
        with database.connect() as connection:
            type_matrix.change(connection, cases)
        lakes.wait(len(WIDE) + len(key_tables(cases)))
    return cases, lakes


class Compared:
    """The cells of one table that differ, and those that are kept as text."""

    def __init__(self, server: psycopg.Connection[Any], lake: ReadBack, table: str) -> None:
        name = f"public.{table}"
        schema = lake.schema(name)
        rows = lake.read_table(name)
        columns = [column.name for column in schema.columns]
        at = columns.index("id" if table in WIDE else "n")
        texts = read_rows(server, sql.Identifier("public", table), columns)
        expected = _by(at, normalised(texts, schema))
        found = _by(at, list(formatted(rows, schema)))
        assert len(found) == rows.num_rows, f"{table}: a row appears twice"
        self.wrong: set[tuple[str, str]] = {("row", key) for key in expected.keys() ^ found.keys()}
        """Column and row."""
        for key in expected.keys() & found.keys():
            pairs = zip(columns, expected[key], found[key], strict=True)
            self.wrong |= {(column, key) for column, before, after in pairs if before != after}
        self.texts: dict[str, list[str]] = {}
        if UNREPRESENTABLE in rows.column_names:
            for cell in rows.column(UNREPRESENTABLE).to_pylist():
                for column, text in cell or ():
                    self.texts.setdefault(column, []).append(text)


def _by(at: int, rows: Sequence[Row]) -> dict[str, Row]:
    return {str(row[at]): row for row in rows}


def compare(lakes: BothLakes, tables: Sequence[str]) -> dict[tuple[str, str], Compared]:
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(lakes.database.dsn, autocommit=True, options=options) as server:
        return {
            (name, table): Compared(server, lake, table) for name, lake in lakes.readbacks.items() for table in tables
        }


def differences(cases: Sequence[Case], found: dict[tuple[str, str], Compared]) -> Iterator[str]:
    types = {f"{letter}{case.number}": case.type for case in cases for letter in "ca"}
    for (lake, table), compared in found.items():
        for column, row in sorted(compared.wrong):
            yield f"{lake} {table} row {row}: {column} {types.get(column, '')}"


# The page


def types_of(folder: Path) -> tuple[dict[str, str], ...]:
    """Return the types of the columns of `plain`: in Parquet files, Delta, ClickHouse, DuckDB and Snowflake."""
    (first, *_) = ParquetReader(folder / "parquet").files("public.plain")
    schema = pq.read_schema(first)
    parquet = {field.name: str(field.type) for field in schema}
    clickhouse = {field.name: column_type(field.type) for field in schema}
    duckdb = {field.name: duckdb_type(field.type).upper() for field in schema}
    delta = DeltaTable(DeltaReader(folder / "delta").folder("public.plain"))
    fields = json.loads(delta.schema().to_json())["fields"]
    snowflake = {field.name: snowflake_type(field.type) for field in schema}
    return parquet, {field["name"]: field["type"] for field in fields}, clickhouse, duckdb, snowflake


def render(folder: Path, cases: Sequence[Case], found: dict[tuple[str, str], Compared]) -> str:
    """Return the tables of the page."""
    parquet, *others = types_of(folder)
    delta = others[0]
    keys = {case.number: keyed.name for keyed in key_tables(cases) for case in keyed.cases}
    typed: list[str] = []
    texts: list[str] = []
    for case in cases:
        column = f"c{case.number}"
        marks = [
            *(mark(found, "plain", [column], rows) for rows in (COPIED, INSERTED, ALTERED)),
            mark(found, keys[case.number], [column, "n"], None) + ("" if case.has_key else " *"),
            mark(found, "arrays", [column], None) if case.has_array else "–",
            mark(found, "domains", [column, f"a{case.number}"], None) if case.has_domain else "–",
        ]
        cells = [case.label, parquet[column], *(each[column] for each in others), *marks]
        if delta[column] == "string" and not delta_is_typed(case):
            texts.append(f"| {' | '.join([cells[0], *marks])} |")
        else:
            kept = found["Delta", "plain"].texts.get(column, [])
            assert found["Parquet", "plain"].texts.get(column, []) == kept or sorted(
                found["Parquet", "plain"].texts[column]
            ) == sorted(kept)
            shown = ", ".join(f"`{text}`" for text in dict.fromkeys(kept) if len(text) <= SHOWN) or "–"
            typed.append(f"| {' | '.join([*cells, shown])} |")
    ways = "copy | insert | update | key | array | domain"
    rule = "|---" * 6
    return (
        f"\n| Postgres | Parquet | Delta and Spark | ClickHouse | DuckDB | Snowflake | {ways} | kept as text |\n"
        f"|---|---|---|---|---|---{rule}|---|\n"
        + "\n".join(typed)
        + "\n\nAll other types are text, exactly as the server prints it: `string` at every destination.\n"
        + f"\n| Postgres | {ways} |\n"
        + f"|---{rule}|\n"
        + "\n".join(texts)
        + "\n\nThe server stores no values of its internal types "
        + ", ".join(f"`{name}`" for name in sorted(IMPOSSIBLE))
        + ".\n\n"
    )


def delta_is_typed(case: Case) -> bool:
    return case.type.startswith("time") and not case.type.startswith("timetz")


COPIED, INSERTED, ALTERED = "copied", "inserted", "altered"


def mark(found: dict[tuple[str, str], Compared], table: str, columns: Sequence[str], rows: str | None) -> str:
    def counts(column: str, row: str) -> bool:
        kind = ALTERED if int(row) >= UPDATED else INSERTED if int(row) % 2 else COPIED
        return column in ("row", *columns) and rows in (None, kind)

    wrong = [place for (_, name), each in found.items() if name == table for place in each.wrong if counts(*place)]
    return "✗" if wrong else "✓"


def check_page(written: str) -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    present, _, tail = rest.partition(END)
    if os.environ.get(WRITE_VARIABLE):
        PAGE.write_text(f"{head}{BEGIN}{written}{END}{tail}")
    else:
        assert present == written, f"run this test with {WRITE_VARIABLE}=1 to write {PAGE.name}, and commit it"


@pytest.mark.trap(31)
def test_every_value_of_every_type_arrives_and_the_page_says_how(each_database: Any, tmp_path: Path) -> None:
    cases, lakes = run(each_database, tmp_path)
    builtin = each_database.execute(
        """
        select typname from pg_type where typnamespace = 'pg_catalog'::regnamespace and typtype in ('b', 'r', 'm')
        and typcategory <> 'A' order by 1
        """
    )
    tried = each_database.execute(
        """
        select distinct typname from pg_attribute join pg_type t on t.oid = atttypid
        where attrelid = 'plain'::regclass and attnum > 0
        """
    )
    # A server may be built without xml.
    assert {name for (name,) in builtin} - {name for (name,) in tried} - {"xml"} == IMPOSSIBLE
    found = compare(lakes, [*WIDE, *(keyed.name for keyed in key_tables(cases))])
    assert not list(differences(cases, found))
    (version,) = each_database.execute("show server_version_num")[0]
    if int(version) // 10_000 == 18:
        check_page(render(tmp_path, cases, found))
