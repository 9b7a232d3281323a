"""Maps of relations by the URL of the state that they stand beside."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.documents.relation_map.contract import RelationMap
from penstock.documents.relation_map.postgres import PostgresRelationMap
from penstock.documents.relation_map.sqlite import SqliteRelationMap
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.state.opening import file_beside

SUFFIX = ".relations"


def open_relation_map(state_url: str, owner: str) -> RelationMap:
    """In the same Postgres database; in a file beside the SQLite file; or in memory. `owner` is the output's id."""
    path = file_beside(state_url, SUFFIX)
    if path is not None:
        return SqliteRelationMap(path, owner)

    def reconnect() -> psycopg.Connection[Any]:
        return connect(SourceSettings(state_url), Role.STATE, parameters=NO_TIMEOUTS)

    return PostgresRelationMap(reconnect(), owner, reconnect=reconnect)
