"""Runs this package's statements on the source: parameters as `$1`, errors without cell values, and visibility.

**Visibility.** The server decodes and sends a commit before it is visible to queries: with a synchronous standby,
before the standby has answered. A document built in between would lack the change, and no later change would correct
it. So before anything is read, every transaction of a batch must be visible in the reader's own snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import QueryFailed, SnapshotBlocked, TableLocked
from penstock.source.faults import Place, from_exception, translated

_DATA_EXCEPTION = "22"
LOCKED = ("40P01", "55P03")
"""A deadlock, and a lock timeout."""
_FIRST_WAIT = 0.001
_LONGEST_WAIT = 0.1

# The stream has the lower 32 bits of a transaction id; the full id is the nearest to the server's current one.
_INVISIBLE = """
    select pg_catalog.count(*)
    from pg_catalog.pg_current_snapshot() s,
         lateral (select pg_catalog.pg_snapshot_xmax(s)::text::int8) now (xid),
         unnest($1::int8[]) u (short),
         lateral (select now.xid + ((u.short - now.xid % 4294967296) + 6442450944) % 4294967296 - 2147483648) w (whole)
    where not pg_catalog.pg_visible_in_snapshot(w.whole::text::pg_catalog.xid8, s)
"""


def run_statement(
    connection: psycopg.Connection[Any], text: str, parameters: Sequence[Any], doing: str
) -> list[tuple[Any, ...]]:
    """Run a statement and return all its rows. Percent signs in the text have no special meaning."""
    with translated(connection, doing):
        try:
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                cursor.execute(as_literal(text), parameters)
                return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


def without_values(error: psycopg.Error, connection: psycopg.Connection[Any], doing: str) -> Exception:
    """Return the error without the cell values that the server quotes; lock errors become `TableLocked`."""
    state = error.sqlstate or ""
    if state in LOCKED:
        said = from_exception(error, Place.of(connection), doing)
        return TableLocked(said.message, **said.facts)
    if not state.startswith(_DATA_EXCEPTION):
        return error
    where = Place.of(connection).where
    return QueryFailed(
        f"cannot {doing} ({where}): a value does not fit its type (SQLSTATE {state})",
        hint="A column's type changed, or a filter compares a column with a value that it cannot hold.",
        where=where,
        sqlstate=state,
    )


def as_literal(text: str) -> LiteralString:
    """Mark SQL that this package composed as safe."""
    return cast("LiteralString", text)


def wait_until_visible(
    connection: psycopg.Connection[Any],
    xids: Sequence[int],
    *,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a new snapshot of this connection sees all these transactions; `SnapshotBlocked` after `timeout`.

    Do not call it in a repeatable read transaction, whose snapshot never changes.
    """
    if not xids:
        return
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT
    while hidden := run_statement(connection, _INVISIBLE, [list(xids)], "check whether changes are visible")[0][0]:
        if time.monotonic() >= deadline:
            raise SnapshotBlocked(
                f"{hidden} received transactions are still not visible to queries after {timeout:g} s",
                hint="A commit that waits for a synchronous standby is not visible yet: check pg_stat_replication.",
                blockers=[],
            )
        pause(wait)
        wait = min(wait * 2, _LONGEST_WAIT)
