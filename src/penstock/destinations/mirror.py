"""The current rows of a table, kept by applying its changes one by one: the simple way, without columns.

For tests, for display and for readers of destinations that keep changes; not for speed. It shows everything that a
mirroring destination must do: take omitted values from the replaced row, along any chain of changed keys; remove the
old row when a key changes; without a key, remove one equal row, not all; and treat a new row with omitted values, or a
change of a missing row, as an error, never as NULL.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from penstock.changes.columns import constant_of, unidentified
from penstock.changes.events import Delete, Event, Insert, Relation, Row, Truncate, Unchanged, Unrepresentable, Update
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, field_names, segment_layout
from penstock.destinations.refusals import unknown_row
from penstock.schema import Column, ReplicaIdentity, TableSchema
from penstock.values import TypeSettings

_Cells = dict[str, Any]


class MirrorTable:
    """The rows of one table."""

    def __init__(self, schema: TableSchema, rows: Iterable[Row] = ()) -> None:
        self._schema = schema
        self._keyed: dict[Hashable, _Cells] = {}
        # Without a key: equal rows share one pile.
        self._piles: dict[Hashable, list[_Cells]] = {}
        for row in rows:
            self.insert(row)

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def __len__(self) -> int:
        return len(self._keyed) + sum(len(pile) for pile in self._piles.values())

    def copy(self) -> MirrorTable:
        """Return a mirror with the same rows. They are shared: rows are replaced, never changed."""
        other = MirrorTable(self._schema)
        other._keyed = dict(self._keyed)
        other._piles = {key: list(pile) for key, pile in self._piles.items()}
        return other

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, by column name."""
        return [dict(row) for row in self._iterate()]

    def arrow(self, settings: TypeSettings | None = None) -> pa.Table:
        """Return all rows, named and typed as in segments; with `_unrepresentable` if some cells are."""
        layout = segment_layout(self._schema, settings)
        rows = list(self._iterate())
        arrays = [
            pa.array(
                [_plain(row[column.column.name]) for row in rows],
                column.codec.arrow_type,
            )
            for column in layout.columns
        ]
        fields = [pa.field(column.field_name, column.codec.arrow_type) for column in layout.columns]
        texts = [_texts(row, self._schema) for row in rows]
        if any(texts):
            arrays.append(pa.array([each or None for each in texts], UNREPRESENTABLE_TYPE))
            fields.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def apply(self, event: Event) -> None:
        """Apply an event of this table; events that do not concern its rows do nothing."""
        match event:
            case Insert():
                self.insert(event.row)
            case Update():
                self._update(event)
            case Delete():
                self._take(event.old)
            case Truncate():
                self.clear()
            case Relation():
                self.change_schema(event.table)
            case _:
                pass

    def insert(self, row: Row) -> None:
        """Add a row; one with the same key is replaced."""
        if any(value is Unchanged for value in row.values()):
            raise unknown_row(str(self._schema), "a row has omitted values, and there is no old row to take them from")
        if self._schema.key:
            self._keyed[self._key(row)] = dict(row)
        else:
            self._piles.setdefault(_frozen_row(row), []).append(dict(row))

    def clear(self) -> None:
        """Remove all rows."""
        self._keyed.clear()
        self._piles.clear()

    def change_schema(self, schema: TableSchema) -> None:
        """Switch to another schema. Columns are matched by number, so a renamed one keeps its values.

        A new column has in existing rows what the server said: NULL, or its default. Raise `ValuesNotSent` if the
        server did not say it.
        """
        if schema == self._schema:
            return
        before = {column.attnum: column for column in self._schema.columns}
        for column in schema.columns:
            _check_type(schema, before.get(column.attnum), column)
        names = {column.name: before[column.attnum].name for column in schema.columns if column.attnum in before}
        rows = list(self._iterate())
        added = {
            each.column.name: constant_of(str(schema), each.column, each.codec.arrow_type).as_py()
            for each in segment_layout(schema).columns
            if rows and each.column.name not in names
        }
        rows = [added | {name: row[former] for name, former in names.items()} for row in rows]
        self.clear()
        self._schema = schema
        for row in rows:
            self.insert(row)

    def _iterate(self) -> Iterator[_Cells]:
        yield from self._keyed.values()
        for pile in self._piles.values():
            yield from pile

    def _update(self, event: Update) -> None:
        if event.old is None and not self._schema.key:
            raise unidentified(str(self._schema))
        before = self._take(event.row if event.old is None else event.old)
        self.insert({name: before[name] if value is Unchanged else value for name, value in event.row.items()})

    def _take(self, identity: Row) -> _Cells:
        """Remove and return the row that this identifies."""
        if not self._identifies(identity):
            raise unidentified(str(self._schema))
        if self._schema.key:
            row = self._keyed.pop(self._key(identity), None)
            if row is None:
                raise unknown_row(str(self._schema), "a changed or deleted row does not exist")
            return row
        frozen = _frozen_row(identity)
        pile = self._piles.get(frozen)
        if not pile:
            raise unknown_row(str(self._schema), "a changed or deleted row does not exist")
        row = pile.pop()
        if not pile:
            del self._piles[frozen]
        return row

    def _identifies(self, identity: Row) -> bool:
        """Return whether this says which row is meant: by a key, which is never NULL, or as a whole row."""
        if self._schema.key:
            return all(identity.get(column.name) not in (None, Unchanged) for column in self._schema.key)
        return self._schema.replica_identity is ReplicaIdentity.FULL

    def _key(self, row: Row) -> Hashable:
        return tuple(_frozen(row[column.name]) for column in self._schema.key)


_WIDENED = {
    ("int2", "int4"),
    ("int2", "int8"),
    ("int4", "int8"),
    ("varchar", "text"),
    ("text", "varchar"),
}


def _check_type(schema: TableSchema, before: Column | None, after: Column) -> None:
    """Raise if a column's type changed: the source converted its values, but sends none of them."""
    if before is None or before.type == after.type or (before.type.name, after.type.name) in _WIDENED:
        return
    raise unknown_row(str(schema), f"the type of column {after.name} changed from {before.type} to {after.type}")


def _frozen_row(row: Row) -> Hashable:
    return tuple((name, _frozen(row[name])) for name in sorted(row))


def _frozen(value: Any) -> Hashable:
    """Return a value that is equal exactly if the values are the same: NaN equals itself, 0 differs from -0, 1 from
    True."""
    if isinstance(value, list):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return (type(value).__name__, value)


def _plain(value: Any) -> Any:
    return None if isinstance(value, Unrepresentable) else value


def _texts(row: _Cells, schema: TableSchema) -> list[tuple[str, str]]:
    cells = zip(field_names(schema), (row[column.name] for column in schema.columns), strict=True)
    return [(name, value.text) for name, value in cells if isinstance(value, Unrepresentable)]
