"""Run the statements of this package: parameters as `$1`, errors by name and without the values of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import QueryFailed, TableLocked
from penstock.source.faults import Place, from_exception, translated

_DATA_EXCEPTION = "22"
LOCKED = ("40P01", "55P03")
"""A deadlock, and a lock that did not come in time."""


def run_statement(
    connection: psycopg.Connection[Any], text: str, parameters: Sequence[Any], doing: str
) -> list[tuple[Any, ...]]:
    """All rows of a statement. A percent sign in the text is just that."""
    with translated(connection, doing):
        try:
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                cursor.execute(as_literal(text), parameters)
                return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


def without_values(error: psycopg.Error, connection: psycopg.Connection[Any], doing: str) -> Exception:
    """The same error, or one that says less: what the server says about a value quotes it. Locks can be tried again."""
    state = error.sqlstate or ""
    if state in LOCKED:
        said = from_exception(error, Place.of(connection), doing)
        return TableLocked(said.message, **said.facts)
    if not state.startswith(_DATA_EXCEPTION):
        return error
    where = Place.of(connection).where
    return QueryFailed(
        f"cannot {doing} ({where}): a value does not fit the type that it should have (SQLSTATE {state})",
        hint="A column's type was changed, or a condition compares it with what it cannot hold.",
        where=where,
        sqlstate=state,
    )


def as_literal(text: str) -> LiteralString:
    """SQL that was composed by this package."""
    return cast("LiteralString", text)
