"""Random transactions on a table that is a dictionary, in the form in which a server would send them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema, TypeKind
from penstock.testing.destinations.script import ScriptedSource, ScriptedTransaction

INT8, INT4, TEXT, DATE, FLOAT8 = (
    PostgresType(20, "int8"),
    PostgresType(23, "int4"),
    PostgresType(25, "text"),
    PostgresType(1082, "date"),
    PostgresType(701, "float8"),
)

_VALUES = (
    Column("note", 10, TEXT),
    Column("detail", 11, TEXT),
    Column("due", 12, DATE),
    Column("factor", 13, FLOAT8),
    Column("numbers", 14, PostgresType(1016, "_int8", kind=TypeKind.ARRAY, element=INT8)),
)


def _key(name: str, number: int, type_: PostgresType) -> Column:
    return Column(name, number, type_, identity=True, primary_key_position=number)


KEYED = TableSchema(16_500, "public", "keyed", (_key("id", 1, INT8), *_VALUES))
COMPOSITE = TableSchema(
    16_501, "public", "composite", (_key("part", 1, TEXT), *_VALUES, _key("day", 2, DATE), _key("number", 3, INT4))
)
FULL = replace(
    KEYED,
    table_id=16_502,
    name="full",
    columns=tuple(replace(column, identity=True) for column in KEYED.columns),
    replica_identity=ReplicaIdentity.FULL,
)
KEYLESS = TableSchema(
    16_503,
    "public",
    "keyless",
    tuple(replace(column, identity=True, primary_key_position=None) for column in KEYED.columns),
    ReplicaIdentity.FULL,
)
SCHEMAS = (KEYED, COMPOSITE, FULL, KEYLESS)


@dataclass
class RandomTable:
    """A table's rows, and what happens to them; keys are few, so that they come again."""

    schema: TableSchema
    random: Random
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fill(self, count: int) -> list[dict[str, Any]]:
        """First rows."""
        for _ in range(count):
            row = self._row()
            if not self._taken(row):
                self.rows.append(row)
        return [dict(row) for row in self.rows]

    def act(self, transaction: ScriptedTransaction) -> None:
        """One change."""
        kind = self.random.choices(["insert", "update", "move", "delete", "truncate"], [30, 40, 15, 20, 2])[0]
        row = self.random.choice(self.rows) if self.rows else None
        if kind == "insert":
            new = self._row()
            if not self._taken(new):
                transaction.insert(self.schema, new)
                self.rows.append(new)
        elif kind == "truncate":
            transaction.truncate(self.schema)
            self.rows.clear()
        elif row is not None and kind == "delete":
            transaction.delete(self.schema, self._identity(row))
            self._drop(row)
        elif row is not None:
            self._update(transaction, row, moves=kind == "move")

    def transact(self, source: ScriptedSource, changes: int) -> None:
        """A transaction of some changes."""
        with source.transaction() as transaction:
            for _ in range(changes):
                self.act(transaction)

    def _update(self, transaction: ScriptedTransaction, row: dict[str, Any], *, moves: bool) -> None:
        fresh = self._row()
        names = [column.name for column in _VALUES if self.random.random() < 0.4]
        names += [column.name for column in self.schema.key] if moves else []
        new = row | {name: fresh[name] for name in names}
        moved = self._key_of(new) != self._key_of(row)
        if moved and self._taken(new):
            return
        # What is large and stayed the same is not sent, also of a key; but then the old one comes with it.
        large = [
            name
            for name, value in new.items()
            if name in ("note", "detail", "part") and value == row[name] and isinstance(value, str) and len(value) > 3
        ]
        sent = new | dict.fromkeys(large, Unchanged)
        full = self.schema.replica_identity is ReplicaIdentity.FULL
        identified = full or moved or "part" in large
        transaction.update(self.schema, sent, old=self._identity(row) if identified else None)
        self._drop(row)
        self.rows.append(new)

    def _drop(self, row: dict[str, Any]) -> None:
        # Not by equality: 0 equals -0, and NaN nothing.
        self.rows = [each for each in self.rows if each is not row]

    def _row(self) -> dict[str, Any]:
        choose = self.random
        cells: dict[str, Any] = {
            "id": choose.randrange(12),
            "part": choose.choice(["", "a", "large part", "large other part"]),
            "day": choose.choice([None, Unrepresentable("infinity"), Unrepresentable("-infinity")]),
            "number": choose.randrange(3),
            "note": choose.choice([None, "", "n", f"large {choose.randrange(99)}"]),
            "detail": choose.choice([None, "d", f"detail {choose.randrange(99)}"]),
            "due": choose.choice([None, Unrepresentable("infinity"), Unrepresentable("0044-03-15 BC")]),
            "numbers": choose.choice([None, [], [1, None], Unrepresentable("[0:1]={1,2}"), Unrepresentable("{{1,2}}")]),
            "factor": choose.choice([None, 0.0, -0.0, 1.5, float("nan")]),
        }
        if cells["day"] is None:
            cells["day"] = Unrepresentable("5874897-12-31")
        return {column.name: cells[column.name] for column in self.schema.columns}

    def _taken(self, row: dict[str, Any]) -> bool:
        return bool(self.schema.key) and any(self._key_of(row) == self._key_of(each) for each in self.rows)

    def _key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[column.name] for column in self.schema.key)

    def _identity(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.schema.replica_identity is ReplicaIdentity.FULL:
            return dict(row)
        return {column.name: row[column.name] for column in self.schema.key}
