"""Turns an error into the state of a table: reason, solution, and whether and when to retry."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg

from penstock.destinations.refusals import is_passing, unexpected
from penstock.errors import PenstockError, Retry
from penstock.lsn import Lsn
from penstock.retry import Backoff
from penstock.source.faults import Place, from_exception
from penstock.state import Errored, RetryPolicy, TableReplicationPhase
from penstock.state.transitions import fail


def as_error(error: BaseException) -> PenstockError:
    """Return a named error. For an unknown error only the class is kept, because libraries quote values in messages."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, psycopg.OperationalError):
        # These concern the connection or the server, not values.
        return from_exception(error, Place("the source"), "go on")
    if is_passing(error):
        return unexpected("the destination", error)
    return PenstockError(
        f"an unexpected {type(error).__name__}",
        hint="Please report this with the log; `penstock resync` copies the table again.",
    )


def errored(
    current: TableReplicationPhase,
    error: BaseException,
    *,
    position: Lsn | None,
    after: Errored | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Errored:
    """Return the phase of a table that has failed."""
    named = as_error(error)
    attempts = after.attempts + 1 if after else 0
    policy = RetryPolicy()
    if named.retry is Retry.TIMED:
        delay = Backoff(first=1.0, longest=300.0, attempt=attempts).next_delay()
        policy = RetryPolicy(Retry.TIMED, now() + timedelta(seconds=delay))
    return fail(
        current,
        reason=named.message,
        solution=named.hint or None,
        retry_policy=policy,
        at=now(),
        position=position,
        after=after,
    )
