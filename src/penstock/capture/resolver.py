"""Completes RELATION messages from the source's catalog."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.capture.messages import Relation
from penstock.schema import PostgresType, TableSchema
from penstock.source.catalog import build_schema, load_table, load_types
from penstock.spool.schemas import SchemaVersions


class CatalogResolver:
    """Asks once per RELATION message: these are rare, and a column can be dropped and added again unseen otherwise."""

    def __init__(self, connection: psycopg.Connection[Any], versions: SchemaVersions) -> None:
        self._connection = connection
        self._versions = versions
        self._types: dict[int, PostgresType] = {}

    def resolve(self, relation: Relation) -> TableSchema:
        """The message's columns with attribute numbers, types and the primary key."""
        catalog = load_table(self._connection, relation.table_id)
        oids = {column.type_oid for column in relation.columns}
        self._types |= load_types(self._connection, oids - self._types.keys(), self._types)
        return build_schema(
            relation.table_id,
            relation.namespace,
            relation.name,
            relation.replica_identity,
            relation.columns,
            catalog,
            self._types,
            self._versions.latest(relation.table_id),
        )
