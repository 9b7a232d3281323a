"""Which shape the rows of a table have at this point of the stream.

The server describes a table (RELATION) before its first row on a connection, and again whenever something
invalidated what it remembered: ANALYZE, VACUUM, CREATE INDEX, ALTER PUBLICATION … Mostly nothing has changed, and
then nothing changes here. The map lives as long as the connection. What is described inside a streamed transaction
counts for that transaction alone until it commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.capture.messages import Relation
from penstock.changes.segment import SegmentLayout, segment_layout
from penstock.errors import DecodeError
from penstock.lsn import OrderKey
from penstock.schema import TableSchema
from penstock.values import TypeSettings


class SchemaResolver(Protocol):
    """Completes a RELATION message by what only the catalog knows: attribute numbers, types, primary key."""

    def resolve(self, relation: Relation, at: OrderKey | None = None) -> TableSchema:
        """Called once per RELATION message, from the decoding thread; may ask the source. `at` is where it stands."""
        ...

    def learn(self, content: bytes, at: OrderKey) -> None:
        """The source has recorded a change of a table here (`penstock.source.ddl_trigger`)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Rows of one table in one shape; rows of different lanes never share a segment."""

    number: int
    layout: SegmentLayout

    @property
    def schema(self) -> TableSchema:
        return self.layout.schema


class RelationMap:
    """Tables described so far on a connection."""

    def __init__(self, resolver: SchemaResolver, settings: TypeSettings) -> None:
        self._resolver = resolver
        self._settings = settings
        self._current: dict[int, Lane] = {}
        self._streamed: dict[int, dict[int, Lane]] = {}
        # Which description of a table came last: its own, or that inside of a streamed transaction.
        self._count = 0
        self._described_at: dict[int, int] = {}
        self._announced_at: dict[int, dict[int, int]] = {}
        self.lanes: list[Lane] = []

    def describe(self, relation: Relation, *, transaction: int | None = None, at: OrderKey | None = None) -> Lane:
        """Take a RELATION message; the lane stays the same when nothing has changed."""
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

    def learn(self, content: bytes, at: OrderKey) -> None:
        """Take a record of DDL; the table's RELATION message follows before its next row."""
        self._resolver.learn(content, at)

    def announce(self, table_id: int, transaction: int) -> None:
        """A description has arrived inside a streamed transaction; it is taken (`describe`) at its commit."""
        self._announced_at.setdefault(transaction, {})[table_id] = self._next_count()

    def lane(self, table_id: int, *, transaction: int | None = None) -> Lane:
        """The lane that a row of this table belongs to now."""
        lane = self._visible(table_id, transaction)
        if lane is None:
            raise DecodeError(f"a change of relation {table_id}, which was never described", offset=0)
        return lane

    def commit(self, transaction: int) -> None:
        """What a streamed transaction described is now true for all, unless it was described again since."""
        announced_at = self._announced_at.pop(transaction, {})
        for table_id, lane in self._streamed.pop(transaction, {}).items():
            count = announced_at.get(table_id, 0)
            if count > self._described_at.get(table_id, -1):
                self._current[table_id] = lane
                self._described_at[table_id] = count

    def abort(self, transaction: int) -> None:
        """What a streamed transaction described was never true."""
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
