"""What polling will not see, and what it will cost, for `penstock index check`: findings with their remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psycopg

from penstock.documents.catalog import SourceCatalog, SourceTable
from penstock.documents.polling import sees_all_sessions
from penstock.documents.polling_rows import TIME_TYPES, XMIN
from penstock.source.patterns import TableName
from penstock.source.preflight.report import Check, Severity, failed


def check_polling(
    connection: psycopg.Connection[Any],
    tables: Iterable[TableName],
    catalog: SourceCatalog,
    cursors: Mapping[TableName, str],
) -> list[Check]:
    """Findings about the tables of an index; `cursors` has one for each. Tables that are missing are left out."""
    there = [catalog.tables[name] for name in sorted(tables) if name in catalog.tables]
    found = [
        failed(
            "polling",
            Severity.WARNING,
            "polling does not see rows that are deleted, nor changed primary keys, nor emptied tables",
            "Mark rows as deleted (soft_delete), or compare by `penstock index diff --full` and rebuild.",
            [str(table.name) for table in there],
        )
    ]
    for table in there:
        cursor = cursors[table.name]
        found += _check_key(table)
        found += _check_xmin(table) if cursor == XMIN else _check_column(table, cursor)
    by_column = [str(table.name) for table in there if cursors[table.name] != XMIN]
    if by_column and not sees_all_sessions(connection):
        found.append(
            failed(
                "polling",
                Severity.WARNING,
                "the server does not tell this role when transactions of others began: those that take longer than"
                " polling.overlap can be missed",
                "Run: grant pg_read_all_stats to the role, or raise polling.overlap.",
                by_column,
            )
        )
    return found


def _check_key(table: SourceTable) -> Iterator[Check]:
    if not table.primary_key:
        what = f"{table.name} has no primary key, and cannot be polled"
        yield failed("polling", Severity.CRITICAL, what, "Add one.", [str(table.name)])


def _check_xmin(table: SourceTable) -> Iterator[Check]:
    yield failed(
        "polling",
        Severity.INFO,
        f"{table.name} is polled by {XMIN}: all of it is read each time",
        "Name a column with the time of the last change in polling.cursor or polling.tables.",
        [str(table.name)],
    )


def _check_column(table: SourceTable, cursor: str) -> Iterator[Check]:
    column = table.columns.get(cursor)
    subject = [f"{table.name}.{cursor}"]
    if column is None or column.base.name not in TIME_TYPES:
        what = "has no column" if column is None else "cannot be polled by"
        yield failed(
            "polling",
            Severity.CRITICAL,
            f"{table.name} {what} {cursor!r}; polling needs a timestamp",
            f'Name another column in polling.tables, or "{XMIN}".',
            subject,
        )
        return
    yield failed(
        "polling",
        Severity.INFO,
        f"{table.name}: a change that does not set {cursor} is not seen",
        "Set it by a trigger, so that nobody forgets it.",
        subject,
    )
    if not column.not_null:
        yield failed(
            "polling",
            Severity.WARNING,
            f"{table.name}.{cursor} may be null; such rows are not seen",
            f"Run: alter table {table.name} alter {cursor} set not null;",
            subject,
        )
    if not table.has_index_on([cursor]):
        yield failed(
            "polling",
            Severity.WARNING,
            f"{table.name} has no index on ({cursor}): each poll reads the whole table",
            f"Run: create index concurrently on {table.name} ({cursor});",
            subject,
        )
