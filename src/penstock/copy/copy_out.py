"""Beginning a COPY to us through libpq, and telling why it failed; what its rows are is the reader's matter."""

from __future__ import annotations

import select

from psycopg import pq

from penstock.errors import SourceError
from penstock.source.faults import Place, from_result

CONSUME_TIMES = 8
"""How often the socket is read before rows are taken: libpq's buffer grows to that, and polls become rare."""


def start_copy_out(connection: pq.abc.PGconn, query: str, place: Place, doing: str) -> select.poll:
    """Begin a COPY; what to wait on for its rows."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLIN)
    connection.send_query(query.encode())
    connection.flush()
    while connection.is_busy():
        poll.poll()
        connection.consume_input()
    result = connection.get_result()
    if result is None or result.status != pq.ExecStatus.COPY_OUT:
        raise failure_of(result, place, doing)
    return poll


def failure_of(result: pq.abc.PGresult | None, place: Place, doing: str) -> SourceError:
    if result is None:
        return SourceError(f"cannot {doing} ({place.where}): the server gave no answer", where=place.where)
    return from_result(result, place, doing)
