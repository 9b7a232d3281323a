"""Connections that jobs of documents reuse: the server may end one at any time."""

from __future__ import annotations

import pytest

from penstock.documents.statements import ConnectionPool
from penstock.errors import ServerUnavailable
from penstock.source.connections import SourceSettings
from tests.conftest import Database


def test_a_connection_that_the_server_has_ended_is_replaced_after_an_error_that_time_heals(database: Database) -> None:
    pool, source = ConnectionPool(), SourceSettings(database.dsn)
    with pool.borrow(source) as connection:
        first = connection.info.backend_pid
    assert database.execute("select pg_terminate_backend(%s, 10000)", [first]) == [(True,)]
    with (
        pytest.raises(ServerUnavailable, match="terminating connection"),
        pool.borrow(source) as connection,
        connection.transaction(),
    ):
        pass
    with pool.borrow(source) as connection, connection.transaction():
        assert connection.info.backend_pid != first
    pool.clear()
