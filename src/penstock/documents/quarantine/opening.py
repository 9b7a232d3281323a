"""The quarantine by the URL of the state that it stands beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from penstock.documents.quarantine.contract import QuarantineStore
from penstock.documents.quarantine.postgres import PostgresQuarantine
from penstock.documents.quarantine.sqlite import SqliteQuarantine
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect

SUFFIX = ".quarantine"

_SQLITE = "sqlite:///"
_MEMORY = "memory:"


def open_quarantine(state_url: str, owner: str) -> QuarantineStore:
    """In the same Postgres database; in a file beside the SQLite file; or in memory. `owner` is the output's id."""
    if state_url == _MEMORY:
        return SqliteQuarantine(Path(":memory:"), owner)
    if state_url.startswith(_SQLITE):
        path = Path(state_url.removeprefix(_SQLITE))
        path.parent.mkdir(parents=True, exist_ok=True)
        return SqliteQuarantine(path.with_name(path.name + SUFFIX), owner)

    def reconnect() -> psycopg.Connection[Any]:
        return connect(SourceSettings(state_url), Role.STATE, parameters=NO_TIMEOUTS)

    return PostgresQuarantine(reconnect, owner)
