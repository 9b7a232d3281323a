"""Wait until queries see what the stream has delivered.

A commit is decoded and sent before it is visible: with a synchronous standby, before the standby has answered. Whoever
builds a document in between builds it without the change, and no later change corrects it. So before anything is read,
every transaction of a batch must be visible in the reader's own snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from penstock.documents.statements import run_statement
from penstock.errors import SnapshotBlocked

_FIRST_WAIT = 0.001
_LONGEST_WAIT = 0.1

# The stream has the lower half of a transaction's number; the whole is the nearest one to where the server is now.
_INVISIBLE = """
    select pg_catalog.count(*)
    from pg_catalog.pg_current_snapshot() s,
         lateral (select pg_catalog.pg_snapshot_xmax(s)::text::int8) now (xid),
         unnest($1::int8[]) u (short),
         lateral (select now.xid + ((u.short - now.xid % 4294967296) + 6442450944) % 4294967296 - 2147483648) w (whole)
    where not pg_catalog.pg_visible_in_snapshot(w.whole::text::pg_catalog.xid8, s)
"""


def wait_until_visible(
    connection: psycopg.Connection[Any],
    xids: Sequence[int],
    *,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a new snapshot of this connection sees all these transactions; `SnapshotBlocked` after `timeout`.

    In a transaction that keeps one snapshot (repeatable read) there is nothing to wait for: call it outside of one.
    """
    if not xids:
        return
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT
    while hidden := run_statement(connection, _INVISIBLE, [list(xids)], "look whether changes are visible")[0][0]:
        if time.monotonic() >= deadline:
            raise SnapshotBlocked(
                f"{hidden} transactions were received and are still not visible after {timeout:g} s",
                hint="A commit that waits for a synchronous standby is not visible yet: look at pg_stat_replication.",
                blockers=[],
            )
        pause(wait)
        wait = min(wait * 2, _LONGEST_WAIT)
