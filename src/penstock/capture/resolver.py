"""Completes RELATION messages from the source's catalog, or from what the source has recorded of its DDL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg

from penstock.capture.messages import Relation
from penstock.lsn import OrderKey
from penstock.schema import PostgresType, TableSchema
from penstock.source.catalog import (
    Attribute,
    CatalogTable,
    build_schema,
    load_attributes,
    load_table,
    load_types,
    schema_from_catalog,
)
from penstock.source.ddl_trigger import parse_announcement
from penstock.spool.schemas import SchemaVersions


class CatalogResolver:
    """Asks once per RELATION message: these are rare, and a column can be dropped and added again unseen otherwise.

    Where DDL is `recorded` the version that holds at a position is the truth, and the catalog, which may be ahead, is
    asked only for tables of which there is none.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], versions: SchemaVersions, *, recorded: bool = False
    ) -> None:
        self._connection = connection
        self._versions = versions
        self._recorded = recorded
        self._types: dict[int, PostgresType] = {}

    def resolve(self, relation: Relation, at: OrderKey | None = None) -> TableSchema:
        """The message's columns with attribute numbers, types and the primary key."""
        versions, table_id = self._versions, relation.table_id
        previous = versions.latest(table_id) if at is None else versions.at(table_id, at)
        catalog = _as_recorded(relation, previous) if self._recorded else None
        if catalog is None:
            catalog = load_table(self._connection, table_id)
        self._load_types({column.type_oid for column in relation.columns})
        return build_schema(
            table_id,
            relation.namespace,
            relation.name,
            relation.replica_identity,
            relation.columns,
            catalog,
            self._types,
            previous,
        )

    def learn(self, content: bytes, at: OrderKey) -> None:
        """Remember a table's attributes as the version that holds from here on."""
        table = self._with_missing(parse_announcement(content))
        self._load_types({attribute.type_oid for attribute in table.live_attributes})
        self._versions.version_for(schema_from_catalog(table, self._types), at)

    def _with_missing(self, table: CatalogTable) -> CatalogTable:
        """With the values that rows from before have in added columns; the catalog keeps them, if it keeps the column.

        They are not in the record: whoever ran the DDL may print values in another way.
        """
        if not any(attribute.backfilled for attribute in table.live_attributes):
            return table
        now = {attribute.attnum: attribute for attribute in load_attributes(self._connection, table.oid)}
        known = {
            attribute.attnum: now[attribute.attnum].missing
            for attribute in table.live_attributes
            if attribute.backfilled and attribute.attnum in now and _same_type(attribute, now[attribute.attnum])
        }
        attributes = (replace(each, missing=known.get(each.attnum)) for each in table.attributes)
        return replace(table, attributes=tuple(attributes))

    def _load_types(self, oids: set[int]) -> None:
        self._types |= load_types(self._connection, oids - self._types.keys(), self._types)


def _same_type(one: Attribute, other: Attribute) -> bool:
    return (one.type_oid, one.type_modifier) == (other.type_oid, other.type_modifier)


def _as_recorded(relation: Relation, version: TableSchema | None) -> CatalogTable | None:
    """The attributes of a version, if it has all columns of the message; what else a catalog has is not needed."""
    if version is None or not {column.name for column in relation.columns} <= {c.name for c in version.columns}:
        return None
    keyed = [column for column in version.columns if column.primary_key_position is not None]
    return CatalogTable(
        oid=version.table_id,
        namespace=version.namespace,
        name=version.name,
        kind="r",
        persistence="p",
        replica_identity=version.replica_identity,
        identity_attnums=(),
        primary_key_attnums=tuple(
            column.attnum for column in sorted(keyed, key=lambda each: each.primary_key_position or 0)
        ),
        is_partition=False,
        partition_parent_oid=None,
        partition_root_oid=None,
        attributes=tuple(
            Attribute(
                column.attnum,
                column.name,
                column.type.oid,
                column.type_modifier,
                backfilled=column.backfilled,
                missing=column.missing,
            )
            for column in version.columns
        ),
    )
