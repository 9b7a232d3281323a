"""The layout of a table in the lake: its columns, by mode, and what is stored about the source's schema.

| mode | a row of the lake is | besides the table's columns |
|---|---|---|
| `mirror` | a row of the source | |
| `soft_delete` | the last state of a row, even of a deleted one | `_deleted_at` |
| `history` | a change, or a row that was copied | `_op`, `_commit_lsn`, `_ordinal`, `_commit_time`, `_xid` … |

`_unrepresentable` is added when it is needed. The layout is stored in the table's properties, together with the
pipeline that owns the table and the attempt of the copy that it started with. The log is the only source of truth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    RESERVED,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    XID,
    field_names,
)
from penstock.destinations.delta.actions import Metadata, compact_json
from penstock.destinations.delta.schema import (
    OWNER,
    arrow_schema,
    column_names,
    delta_type,
    fit,
    schema_string,
)
from penstock.destinations.refusals import not_followed, rejected
from penstock.schema import Column, ReplicaIdentity, TableSchema, fold_case
from penstock.schema.table import schema_from_json, schema_to_json
from penstock.schema.types import keeps_values
from penstock.values.datetimes import holds_times

DELETED_AT = "_deleted_at"
_TABLE_ID, _MODE, _SOURCE, _COLUMNS = "penstock.tableId", "penstock.mode", "penstock.source", "penstock.columns"
_TIMES, _BEGUN, _COPIED = "penstock.times", "penstock.attempt", "penstock.copied"
_RETIRED = "penstock.retired"


class Mode(StrEnum):
    """What a table keeps."""

    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table's columns in the lake."""

    source: TableSchema
    mode: Mode
    names: Mapping[int, str]
    """The names of the source's columns in the lake, by attribute number."""
    schema: pa.Schema
    """All columns, in the order and with the types of the log."""
    times: frozenset[int] = frozenset()
    """Columns that are times of day, which a Delta table stores as text."""
    retired: frozenset[str] = frozenset()
    """The names of dropped columns, regardless of case: files may still have them, so a new column cannot use them."""

    def fit(self, rows: pa.Table) -> pa.Table:
        """Return rows with some of the columns, in the types of the lake; columns that need large offsets keep them."""
        fields = [self.schema.field(field.name) for field in rows.schema]
        kept = [
            wanted.with_type(field.type) if field.type in (pa.large_string(), pa.large_binary()) else wanted
            for field, wanted in zip(rows.schema, fields, strict=True)
        ]
        return fit(rows, pa.schema(kept))

    @property
    def columns(self) -> list[str]:
        """The source's columns, in its order."""
        return [self.names[column.attnum] for column in self.source.columns]

    @property
    def key(self) -> list[str]:
        """The key columns in the order of the table; empty without a key."""
        key = {column.attnum for column in self.source.key}
        return [self.names[column.attnum] for column in self.source.columns if column.attnum in key]

    @property
    def match_columns(self) -> list[str]:
        """The columns by which rows are found again; empty if the mode never needs that."""
        if self.mode is Mode.HISTORY:
            return []
        return self.key or (self.columns if self.source.replica_identity is ReplicaIdentity.FULL else [])

    @property
    def renames(self) -> dict[str, str]:
        """Name in segments → name in the lake."""
        pairs = zip(field_names(self.source), self.source.columns, strict=True)
        return {name: self.names[column.attnum] for name, column in pairs}

    @property
    def has_texts(self) -> bool:
        return UNREPRESENTABLE in self.schema.names

    def with_texts(self) -> TableLayout:
        """Return the same layout with a column for texts of cells that their type cannot hold."""
        if self.has_texts:
            return self
        return replace(self, schema=self.schema.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)))

    def evolved(self, schema: TableSchema, segment: pa.Schema) -> TableLayout:
        """Return the layout after a change of the source's schema, whose rows have these types.

        Columns may be added; except in `history` they may be dropped, which only changes the metadata. Any other change
        that readers would see raises `SchemaNotFollowed`.
        """
        before = {column.attnum: column for column in self.source.columns}
        after = {column.attnum: column for column in schema.columns}
        for attnum, column in before.items():
            self._refuse(column, after.get(attnum))
        # Without a key, rows may be found by all their cells, so a new key would identify them differently.
        is_matched = self.source.key or self.source.replica_identity is ReplicaIdentity.FULL
        if is_matched and {column.attnum for column in self.source.key} != {column.attnum for column in schema.key}:
            raise not_followed(str(schema), "its key changed")
        types = dict(zip((column.attnum for column in schema.columns), field_names(schema), strict=True))
        dropped = {self.names[attnum] for attnum in before.keys() - after.keys()}
        if dropped and (self.has_texts or not schema.columns):
            # Files have texts of cells by the names of their columns, and a Delta table needs a column.
            raise not_followed(str(schema), f"columns were dropped: {', '.join(sorted(dropped))}")
        retired = self.retired | {fold_case(name) for name in dropped}
        fields = [field for field in self.schema if field.name not in dropped]
        names = {attnum: name for attnum, name in self.names.items() if name not in dropped}
        times = set(self.times)
        for column in schema.columns:
            segment_type = segment.field(types[column.attnum]).type
            arrow_type = _lake_type(schema, column, segment_type)
            times |= {column.attnum} if holds_times(segment_type) else set()
            if column.attnum in names:
                fits = self.schema.field(names[column.attnum]).type == arrow_type
                if not fits or not _keeps_values(before[column.attnum], column):
                    raise not_followed(str(schema), f"the type of column {column.name!r} changed")
                continue
            name = _free_name(types[column.attnum], [field.name for field in fields])
            if fold_case(name) in retired:
                raise not_followed(
                    str(schema),
                    f"files still have an earlier column {column.name!r}, which was dropped before this one was added",
                )
            names[column.attnum] = name
            fields.append(pa.field(names[column.attnum], arrow_type))
        if self.mode is Mode.HISTORY:
            old = pa.field(OLD, _old_type(schema, names, pa.schema(fields)))
            fields = [old if field.name == OLD else field for field in fields]
        return TableLayout(schema, self.mode, names, pa.schema(fields), frozenset(times), retired)

    def _refuse(self, before: Column, after: Column | None) -> None:
        table = str(self.source)
        if after is None and self.mode is Mode.HISTORY:
            raise not_followed(table, f"column {before.name!r} was dropped, or is no longer published")
        if after is not None and after.name != before.name:
            raise not_followed(table, f"column {before.name!r} was renamed to {after.name!r}")


@dataclass(frozen=True, slots=True)
class TableState:
    """The table's state, as its properties describe it."""

    owner: str
    table_id: int
    begun: str
    """The newest attempt of a copy; it fences off all earlier ones."""
    copied: str
    """The attempt whose rows the table has; empty if none is complete."""
    layout: TableLayout

    @property
    def is_copied(self) -> bool:
        """True if changes may be added: no newer copy has started."""
        return bool(self.copied) and self.copied == self.begun


def new_layout(source: TableSchema, mode: Mode, columns: pa.Schema, *, texts: bool = False) -> TableLayout:
    """Return the layout of a copied table; `columns` are those of the copy, with the names and types of segments."""
    if not source.columns:
        raise rejected(
            str(source), "it has no columns, but a Delta table needs at least one", hint="Exclude the table."
        )
    fields = field_names(source)
    taken = _reserved(mode)
    clean = column_names(fields)
    lake_names = {
        column.attnum: _free_name(name, taken) if fold_case(name) in taken else name
        for column, name in zip(source.columns, clean, strict=True)
    }
    own = [
        pa.field(lake_names[column.attnum], _lake_type(source, column, columns.field(name).type))
        for column, name in zip(source.columns, fields, strict=True)
    ]
    times = frozenset(
        column.attnum
        for column, name in zip(source.columns, fields, strict=True)
        if holds_times(columns.field(name).type)
    )
    layout = TableLayout(source, mode, lake_names, _whole_schema(source, mode, lake_names, own), times)
    return layout.with_texts() if texts else layout


def to_metadata(state: TableState, id_: str, created: int, configuration: Mapping[str, str]) -> Metadata:
    """Return the metadata of a table; `configuration` has the properties that do not concern its layout."""
    layout = state.layout
    own = {
        OWNER: state.owner,
        _TABLE_ID: str(state.table_id),
        _BEGUN: state.begun,
        _COPIED: state.copied,
        _MODE: layout.mode.value,
        _SOURCE: compact_json(schema_to_json(layout.source)),
        _COLUMNS: compact_json({str(attnum): name for attnum, name in layout.names.items()}),
        _TIMES: compact_json(sorted(layout.times)),
        _RETIRED: compact_json(sorted(layout.retired)),
    }
    return Metadata(id_, schema_string(layout.schema), {**configuration, **own}, (), created)


def from_metadata(metadata: Metadata) -> TableState | None:
    """Parse the output of `to_metadata`; None for a table that Penstock does not write."""
    found = metadata.configuration
    if OWNER not in found or _SOURCE not in found:
        return None
    names = {int(attnum): name for attnum, name in json.loads(found[_COLUMNS]).items()}
    source = schema_from_json(json.loads(found[_SOURCE]))
    times = frozenset[int](json.loads(found[_TIMES]))
    retired = frozenset[str](json.loads(found.get(_RETIRED, "[]")))
    layout = TableLayout(source, Mode(found[_MODE]), names, arrow_schema(metadata.schema_string), times, retired)
    return TableState(found[OWNER], int(found[_TABLE_ID]), found[_BEGUN], found[_COPIED], layout)


def _lake_type(source: TableSchema, column: Column, segment_type: pa.DataType) -> pa.DataType:
    try:
        return delta_type(segment_type)
    except TypeError as error:
        what = f"Delta has no type for column {column.name!r} ({segment_type})"
        hint = "Exclude the table, or leave the column out of the publication."
        raise rejected(str(source), what, hint=hint) from error


def _whole_schema(source: TableSchema, mode: Mode, names: Mapping[int, str], own: list[pa.Field]) -> pa.Schema:
    match mode:
        case Mode.MIRROR:
            return pa.schema(own)
        case Mode.SOFT_DELETE:
            return pa.schema([*own, pa.field(DELETED_AT, pa.timestamp("us", "UTC"))])
        case Mode.HISTORY:
            head = [
                pa.field(OP, pa.string()),
                pa.field(COMMIT_LSN, pa.int64()),
                pa.field(ORDINAL, pa.int64()),
                pa.field(COMMIT_TIME, pa.timestamp("us", "UTC")),
                pa.field(XID, pa.int64()),
                pa.field(UNCHANGED, pa.list_(pa.string())),
            ]
            old = _old_type(source, names, pa.schema(own))
            return pa.schema([*head, *([pa.field(OLD, old)] if len(old) else []), *own])


def _old_type(source: TableSchema, names: Mapping[int, str], lake: pa.Schema) -> pa.StructType:
    full = source.replica_identity is ReplicaIdentity.FULL
    present = [names[column.attnum] for column in source.columns if full or column.identity]
    return pa.struct([lake.field(name) for name in present])


def _reserved(mode: Mode) -> list[str]:
    names = [UNREPRESENTABLE] if mode is Mode.MIRROR else [UNREPRESENTABLE, DELETED_AT]
    return list(RESERVED) if mode is Mode.HISTORY else names


def _keeps_values(before: Column, after: Column) -> bool:
    return keeps_values((before.type, before.type_modifier), (after.type, after.type_modifier))


def _free_name(name: str, taken: list[str]) -> str:
    """Return a name that Delta allows and no other column has, regardless of case."""
    used = {fold_case(each) for each in taken}
    (clean,) = column_names([name])
    number = 2
    candidate = clean
    while fold_case(candidate) in used:
        candidate = f"{clean}_{number}"
        number += 1
    return candidate
