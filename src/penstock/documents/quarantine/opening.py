"""The quarantine by the URL of the state that it stands beside."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.documents.quarantine.contract import QuarantineStore
from penstock.documents.quarantine.postgres import PostgresQuarantine
from penstock.documents.quarantine.sqlite import SqliteQuarantine
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.state.opening import file_beside

SUFFIX = ".quarantine"


def open_quarantine(state_url: str, owner: str) -> QuarantineStore:
    """In the same Postgres database; in a file beside the SQLite file; or in memory. `owner` is the output's id."""
    path = file_beside(state_url, SUFFIX)
    if path is not None:
        return SqliteQuarantine(path, owner)

    def reconnect() -> psycopg.Connection[Any]:
        return connect(SourceSettings(state_url), Role.STATE, parameters=NO_TIMEOUTS)

    return PostgresQuarantine(reconnect, owner)
