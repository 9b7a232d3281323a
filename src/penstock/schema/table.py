"""A table's schema: columns by attribute number, replica identity and key; as JSON, and its names in SQL."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from penstock.schema.types import PostgresType, TypeKind


def schema_to_json(schema: TableSchema) -> dict[str, Any]:
    """The schema as plain dictionaries and lists."""
    return {
        "table_id": schema.table_id,
        "namespace": schema.namespace,
        "name": schema.name,
        "replica_identity": schema.replica_identity.value,
        "columns": [
            {field.name: getattr(column, field.name) for field in fields(column)} | {"type": _type_to_json(column.type)}
            for column in schema.columns
        ],
    }


def schema_from_json(record: dict[str, Any]) -> TableSchema:
    """Read what `schema_to_json` returned."""
    columns = tuple(Column(**(column | {"type": _type_from_json(column["type"])})) for column in record["columns"])
    return TableSchema(
        table_id=record["table_id"],
        namespace=record["namespace"],
        name=record["name"],
        columns=columns,
        replica_identity=ReplicaIdentity(record["replica_identity"]),
    )


def _type_to_json(type_: PostgresType) -> dict[str, Any]:
    record: dict[str, Any] = {field.name: getattr(type_, field.name) for field in fields(type_)}
    record["kind"] = type_.kind.value
    for part in ("element", "base"):
        if record[part] is not None:
            record[part] = _type_to_json(record[part])
    return record


def _type_from_json(record: dict[str, Any]) -> PostgresType:
    changed: dict[str, Any] = {"kind": TypeKind(record["kind"])}
    changed |= {part: _type_from_json(record[part]) for part in ("element", "base") if record[part] is not None}
    return PostgresType(**(record | changed))


class ReplicaIdentity(StrEnum):
    """What the server logs of a row before it is updated or deleted (`pg_class.relreplident`)."""

    DEFAULT = "d"
    INDEX = "i"
    FULL = "f"
    NOTHING = "n"


def quote_identifier(name: str) -> str:
    """Quote a name for SQL and replication commands."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote text for SQL and replication commands."""
    return "'" + text.replace("'", "''") + "'"


@lru_cache(maxsize=1 << 16)
def fold_case(name: str) -> str:
    """Return what names have in common that are the same to readers that ignore case, such as Spark.

    They compare letter by letter, so that `s` and `ſ`, `i` and `İ`, `µ` and `μ` are the same, too.
    """
    upper = (letter.upper() for letter in name)
    folded = "".join(many if len(many) == 1 else letter for letter, many in zip(name, upper, strict=True))
    return "".join(letter.lower()[0] for letter in folded)


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `attnum` identifies it: a name can move to another column, a number cannot."""

    name: str
    attnum: int
    type: PostgresType
    type_modifier: int = -1
    identity: bool = False
    """Part of the replica identity: sent with updates of the key and with deletes."""
    primary_key_position: int | None = None
    """Counted from 1; None outside the primary key."""
    backfilled: bool = field(default=False, compare=False)
    """Rows that are older than the column may have a value in it that was never sent. Not compared."""
    missing: str | None = field(default=None, compare=False)
    """The text of that value if it is the same in all those rows; None otherwise."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A replicated table: its published columns, in the order in which the server sends them."""

    table_id: int
    namespace: str
    name: str
    columns: tuple[Column, ...]
    replica_identity: ReplicaIdentity = ReplicaIdentity.DEFAULT

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    def has_columns_of(self, other: TableSchema) -> bool:
        """True if both have the same columns, whatever their types are called: a type may be renamed at any time."""
        of_both = zip(self.columns, other.columns, strict=False)
        return len(self.columns) == len(other.columns) and all(
            one.type.oid == another.type.oid and one == replace(another, type=one.type) for one, another in of_both
        )

    @property
    def key(self) -> tuple[Column, ...]:
        """The columns that identify a row: the replica identity; with FULL the primary key; empty if there is none.

        A deferrable primary key does not count: within a transaction, rows may share it.
        """
        if self.replica_identity is ReplicaIdentity.FULL:
            keyed = [column for column in self.columns if column.primary_key_position is not None]
            return tuple(sorted(keyed, key=lambda column: column.primary_key_position or 0))
        if self.replica_identity is ReplicaIdentity.NOTHING:
            return ()
        return tuple(column for column in self.columns if column.identity)


def moved_names(before: TableSchema, after: TableSchema) -> list[str]:
    """Return the names of `after` that belong to another column of `before`."""
    known = {column.name: column.attnum for column in before.columns}
    return [column.name for column in after.columns if known.get(column.name, column.attnum) != column.attnum]
