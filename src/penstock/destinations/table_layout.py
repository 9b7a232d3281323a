"""Tables of SQL destinations that have the source's columns: their modes, names and types, and which changes of a
schema they can follow in place.

A destination records one row for each table: its place, the attempt of its copy, its position, and its layout as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from penstock.destinations.base import Capabilities
from penstock.destinations.refusals import not_followed
from penstock.lsn import Lsn
from penstock.schema import ReplicaIdentity, TableSchema, quote_identifier
from penstock.schema.table import moved_names, schema_from_json, schema_to_json
from penstock.schema.types import keeps_values

DELETED_AT = "_deleted_at"


class Mode(StrEnum):
    """What a table at the destination holds."""

    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"


def table_capabilities(mode: Mode) -> Capabilities:
    """Return what a destination can do that changes rows and position in one transaction."""
    mirrors = mode is not Mode.HISTORY
    return Capabilities(
        records_position=True,
        updates_rows=mirrors,
        keeps_old_rows_while_copying=True,
        fills_added_columns=mirrors,
        accepts_unknown_rows=mirrors,
        loses_nothing_by_a_copy=mode is Mode.MIRROR,
        keeps_deleted_rows=mode is Mode.SOFT_DELETE,
    )


@dataclass(frozen=True, slots=True)
class Target:
    """A table at the destination."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def sql(self) -> str:
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table."""

    source: TableSchema
    mode: Mode
    names: Mapping[int, str]
    """The columns' names at the destination, by attribute number."""
    version: int = 1
    """The number of the source's schema, in `history`."""
    types: Mapping[int, str] = field(default_factory=dict[int, str])
    """The types at the destination, by attribute number."""
    has_texts: bool = False
    """The table has the column `_unrepresentable`."""

    @property
    def columns(self) -> list[str]:
        """The names of the source's columns, in the order of its schema."""
        return [self.names[column.attnum] for column in self.source.columns]

    @property
    def key(self) -> list[str]:
        """The names of the columns of the key, in the order of `TableSchema.key`."""
        return [self.names[column.attnum] for column in self.source.key]

    def definition(self, own: Mapping[str, str]) -> str:
        """Return the columns for CREATE TABLE; `own` are those that Penstock adds, with their types."""
        lines = [
            f"{quote_identifier(self.names[each.attnum])} {self.types[each.attnum]}" for each in self.source.columns
        ]
        extra = [f"{quote_identifier(name)} {type_}" for name, type_ in own.items()]
        return ", ".join([*extra, *lines] if self.mode is Mode.HISTORY else [*lines, *extra])

    def to_json(self) -> str:
        """Return the layout as text."""
        record = {
            "source": schema_to_json(self.source),
            "mode": self.mode.value,
            "names": {str(attnum): name for attnum, name in self.names.items()},
            "types": {str(attnum): name for attnum, name in self.types.items()},
            "version": self.version,
        }
        return json.dumps(record | ({"has_texts": True} if self.has_texts else {}))


@lru_cache(maxsize=4096)
def layout_from_json(text: str) -> Layout:
    """Read what `Layout.to_json` returned."""
    record = json.loads(text)
    return Layout(
        schema_from_json(record["source"]),
        Mode(record["mode"]),
        {int(attnum): name for attnum, name in record["names"].items()},
        record["version"],
        {int(attnum): name for attnum, name in record["types"].items()},
        record.get("has_texts", False),
    )


@dataclass(frozen=True, slots=True)
class Known:
    """What a destination has recorded of a table; see `table_parts.RecordedTable`."""

    pipeline: str
    table_id: int
    source: str
    place: str
    """The folder that `DestinationContext.take_folder` gave the table; stands for its name at the destination."""
    target: Target | None
    """None if another table has taken its place."""
    former: Target | None
    """Where the table is until its copy to `target` is complete."""
    attempt: str
    copied: str | None
    """The attempt whose rows the table has."""
    epoch: int
    lineage: str
    position: Lsn | None
    layout: Layout | None

    @property
    def mode(self) -> Mode | None:
        return None if self.layout is None else self.layout.mode

    @property
    def is_copied(self) -> bool:
        """True if changes may be applied: no newer copy has started."""
        return self.target is not None and self.copied == self.attempt and self.position is not None

    @property
    def readable(self) -> Target | None:
        """The table that has rows for readers."""
        return None if self.copied is None else self.former or self.target


def known_from_row(row: tuple[Any, ...]) -> Known:
    """Return the record of a table from its row: the fields of `Known` in order, each table as two columns."""
    pipeline, table_id, source, place, namespace, name, former_namespace, former_name, *rest = row
    attempt, copied, epoch, lineage, position, layout = rest
    return Known(
        *(pipeline, table_id, source, place),
        None if name is None else Target(namespace, name),
        None if former_name is None else Target(former_namespace, former_name),
        *(attempt, copied, epoch, lineage),
        None if position is None else Lsn.parse(position),
        None if layout is None else layout_from_json(layout),
    )


def require_followable(before: TableSchema, after: TableSchema, *, records_ddl: bool) -> None:
    """Raise `SchemaNotFollowed` if only a new copy has the right rows after a change of the schema."""
    table = str(after)
    is_matched = before.key or before.replica_identity is ReplicaIdentity.FULL
    if is_matched and [each.attnum for each in before.key] != [each.attnum for each in after.key]:
        raise not_followed(table, "its key changed")
    if not records_ddl and (moved := moved_names(before, after)):
        # The catalog that named the columns may be newer than the rows.
        raise not_followed(table, f"the name of another column was given to column {moved[0]!r}")
    known = {column.attnum: column for column in before.columns}
    for column in after.columns:
        old = known.get(column.attnum)
        if old is not None and not keeps_values((old.type, old.type_modifier), (column.type, column.type_modifier)):
            raise not_followed(table, f"the type of column {column.name!r} changed")
