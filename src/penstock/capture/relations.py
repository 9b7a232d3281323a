"""The schema that the rows of a table have at this point of the stream.

The server describes a table (RELATION) before its first row on a connection, and again whenever something invalidated
what it remembered: ANALYZE, VACUUM, CREATE INDEX, ALTER PUBLICATION … Mostly nothing has changed, and then nothing
changes here. `RelationMap` lives as long as the connection. What is described inside a streamed transaction counts for
that transaction alone until it commits. `CatalogResolver` completes a message from the source's catalog, or from the
DDL that the source has recorded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from penstock.capture.messages import LogicalMessage, Relation
from penstock.changes.segment import SegmentLayout, segment_layout
from penstock.errors import DecodeError
from penstock.lsn import OrderKey
from penstock.schema import PostgresType, ReplicaIdentity, TableSchema
from penstock.source.catalog import (
    Attribute,
    CatalogTable,
    build_schema,
    load_attributes,
    load_table,
    load_types,
    schema_from_catalog,
)
from penstock.source.ddl_messages import Ledger, parse_announcement, parse_rewrite
from penstock.source.ddl_trigger import REWRITE_PREFIX, DdlTrigger
from penstock.source.identity import RowIdentity
from penstock.spool.schemas import SchemaVersions
from penstock.values import TypeSettings


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Rows of one table in one shape; rows of different lanes never share a segment."""

    number: int
    layout: SegmentLayout

    @property
    def schema(self) -> TableSchema:
        return self.layout.schema


class RelationMap:
    """The tables that the server has described on a connection."""

    def __init__(self, resolver: CatalogResolver, settings: TypeSettings) -> None:
        self._resolver = resolver
        self._settings = settings
        self._current: dict[int, Lane] = {}
        self._streamed: dict[int, dict[int, Lane]] = {}
        # Which description of a table came last: the ordinary one, or the one inside a streamed transaction.
        self._count = 0
        self._described_at: dict[int, int] = {}
        self._announced_at: dict[int, dict[int, int]] = {}
        self.lanes: list[Lane] = []

    def describe(self, relation: Relation, *, transaction: int | None = None, at: OrderKey | None = None) -> Lane:
        """Take a RELATION message; the lane stays the same if nothing has changed."""
        schema = self._resolver.resolve(relation, at)
        lane = self._visible(relation.table_id, transaction)
        if lane is None or lane.schema != schema:
            lane = Lane(len(self.lanes), segment_layout(schema, self._settings))
            self.lanes.append(lane)
        if transaction is None:
            self._current[relation.table_id] = lane
            self._described_at[relation.table_id] = self._next_count()
        else:
            self._streamed.setdefault(transaction, {})[relation.table_id] = lane
        return lane

    def is_genuine(self, message: LogicalMessage, xid: int) -> bool:
        """Return whether the DDL trigger sent a message; if not, log it."""
        return self._resolver.is_genuine(message, xid)

    def learn(self, content: bytes, at: OrderKey) -> None:
        """Take a message of the DDL trigger; the table's RELATION message follows before its next row."""
        self._resolver.learn(content, at)

    def announce(self, table_id: int, transaction: int) -> None:
        """Note a description inside a streamed transaction; it counts (`describe`) at its commit."""
        self._announced_at.setdefault(transaction, {})[table_id] = self._next_count()

    def lane(self, table_id: int, *, transaction: int | None = None) -> Lane:
        """The current lane of a table's rows."""
        lane = self._visible(table_id, transaction)
        if lane is None:
            raise DecodeError(f"a change belongs to relation {table_id}, which the server never described", offset=0)
        return lane

    def commit(self, transaction: int) -> None:
        """Make what a streamed transaction described valid for all, unless it was described again since."""
        announced_at = self._announced_at.pop(transaction, {})
        for table_id, lane in self._streamed.pop(transaction, {}).items():
            count = announced_at.get(table_id, 0)
            if count > self._described_at.get(table_id, -1):
                self._current[table_id] = lane
                self._described_at[table_id] = count

    def abort(self, transaction: int) -> None:
        """Forget what a streamed transaction described."""
        self._announced_at.pop(transaction, None)

    def _visible(self, table_id: int, transaction: int | None) -> Lane | None:
        if transaction is not None:
            lane = self._streamed.get(transaction, {}).get(table_id)
            if lane is not None:
                return lane
        return self._current.get(table_id)

    def _next_count(self) -> int:
        self._count += 1
        return self._count


class CatalogResolver:
    """Queries the catalog once per RELATION message: these are rare, and a column may have been dropped and added
    again.

    If a trigger records DDL, the version that is valid at a position decides; the catalog, which may be ahead, decides
    only for tables without a version, and says what partitions send.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], versions: SchemaVersions, trigger: DdlTrigger | None = None
    ) -> None:
        self._connection = connection
        self._versions = versions
        self._ledger = None if trigger is None else Ledger(connection, trigger.ledger)
        self._types: dict[int, PostgresType] = {}

    def resolve(self, relation: Relation, at: OrderKey | None = None) -> TableSchema:
        """Complete a message's columns with attribute numbers, types and the primary key."""
        versions, table_id = self._versions, relation.table_id
        previous = versions.latest(table_id) if at is None else versions.at(table_id, at)
        now = load_table(self._connection, table_id)
        recorded = _as_recorded(relation, previous) if self._ledger is not None else None
        catalog = now if recorded is None else _with_values_of(recorded, now)
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
            _partitioned_identity(now) if now is not None else _last_identity(relation, previous),
        )

    def is_genuine(self, message: LogicalMessage, xid: int) -> bool:
        """Return whether the DDL trigger sent a message, and it can be read; if not, log it."""
        assert self._ledger is not None
        parse = parse_rewrite if message.prefix.startswith(REWRITE_PREFIX) else parse_announcement
        with suppress(DecodeError):
            if self._ledger.has(message.prefix, message.content, message.lsn, xid):
                parse(message.content)
                return True
        self._ledger.warn(message.lsn, xid)
        return False

    def learn(self, content: bytes, at: OrderKey) -> None:
        """Store a table's attributes as the version that is valid from here on."""
        table = self._with_missing(parse_announcement(content))
        self._load_types({attribute.type_oid for attribute in table.live_attributes})
        identity = _partitioned_identity(load_table(self._connection, table.oid)) if table.kind == "p" else None
        self._versions.version_for(schema_from_catalog(table, self._types, identity=identity), at)

    def _with_missing(self, table: CatalogTable) -> CatalogTable:
        """Add the values that earlier rows have in added columns, from the catalog if it still has the column.

        The record does not contain them: the session that ran the DDL may format values differently.
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


def _partitioned_identity(table: CatalogTable | None) -> RowIdentity | None:
    """The identity of a partitioned table's rows. The message has that of its root, which no row need have."""
    return None if table is None or table.partitions is None else table.row_identity


def _last_identity(relation: Relation, previous: TableSchema | None) -> RowIdentity | None:
    """The identity of the rows of a table that no longer exists: perhaps its partitions sent less than whole rows."""
    if relation.replica_identity != ReplicaIdentity.FULL or previous is None or not previous.key:
        return None
    return RowIdentity(previous.replica_identity, frozenset(each.attnum for each in previous.columns if each.identity))


def _with_values_of(recorded: CatalogTable, now: CatalogTable | None) -> CatalogTable:
    """Add values of earlier rows that the catalog did not show yet when the DDL was recorded."""
    known = {each.attnum: each for each in now.attributes} if now is not None else {}
    attributes = (
        replace(each, missing=known[each.attnum].missing)
        if each.backfilled and each.missing is None and each.attnum in known and _same_type(each, known[each.attnum])
        else each
        for each in recorded.attributes
    )
    return replace(recorded, attributes=tuple(attributes))


def _same_type(one: Attribute, other: Attribute) -> bool:
    return (one.type_oid, one.type_modifier) == (other.type_oid, other.type_modifier)


def _as_recorded(relation: Relation, version: TableSchema | None) -> CatalogTable | None:
    """The attributes of a version, if it has all columns of the message."""
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
