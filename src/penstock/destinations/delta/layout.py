"""The layout of a table in the lake: its columns, by mode, and what is stored about the source's schema.

| mode | a row of the lake is | besides the table's columns |
|---|---|---|
| `mirror` | a row of the source | |
| `soft_delete` | the last state of a row, even of a deleted one | `_deleted_at` |
| `history` | a change, or a row that was copied | `_op`, `_commit_lsn`, `_ordinal`, `_schema_version` … |

`_unrepresentable` is added when it is needed. The layout is stored in the table's properties, together with the
pipeline that owns the table and the attempt of the copy that it started with. The log is the only source of truth.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    RESERVED,
    SCHEMA_VERSION,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    XID,
    field_names,
)
from penstock.destinations.delta.actions import Metadata, compact_json
from penstock.destinations.delta.schema import (
    MAPPING_MODE,
    OWNER,
    arrow_schema,
    column_names,
    delta_type,
    fit,
    schema_string,
    shown_names,
)
from penstock.destinations.refusals import not_followed, rejected
from penstock.schema import Column, ReplicaIdentity, TableSchema, fold_case
from penstock.schema.table import schema_from_json, schema_to_json
from penstock.schema.types import keeps_values
from penstock.values.datetimes import holds_times

DELETED_AT = "_deleted_at"
_TABLE_ID, _MODE, _SOURCE, _COLUMNS = "penstock.tableId", "penstock.mode", "penstock.source", "penstock.columns"
_TIMES, _BEGUN, _COPIED = "penstock.times", "penstock.attempt", "penstock.copied"
_RETIRED, _VERSIONS = "penstock.retired", "penstock.schemaVersions"
_LAST_ID = "delta.columnMapping.maxColumnId"
_OWN_COLUMNS = 2_000
"""More than the attribute numbers of any table."""
_RESERVED_IDS = (UNREPRESENTABLE, DELETED_AT)
_WIDENING = ((pa.int16(), pa.int32(), pa.int64()), (pa.float32(), pa.float64()))
"""Spark, Polars and delta-rs read files with an earlier type of a family as a later one."""


class Mode(StrEnum):
    """What a table keeps."""

    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"


class VersionColumn(NamedTuple):
    """A column of the source in one version of its schema."""

    lake_name: str
    name: str
    type: str
    attnum: int


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
    """The names of dropped columns, regardless of case: files may still have them, so a column that gets such a name
    needs new files."""
    shown: Mapping[str, str] | None = None
    """The names that readers see by the names in files, if the table maps columns; all other names here are those in
    files."""
    versions: tuple[tuple[VersionColumn, ...], ...] = ()
    """In `history`: every schema that rows of the table have, oldest first."""

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
    def version(self) -> int:
        """The number of the source's schema, in `history`: it grows by one when a column changes."""
        return max(1, len(self.versions))

    @property
    def has_texts(self) -> bool:
        return UNREPRESENTABLE in self.schema.names

    def with_texts(self) -> TableLayout:
        """Return the same layout with a column for texts of cells that their type cannot hold."""
        if self.has_texts:
            return self
        shown = None if self.shown is None else {**self.shown, UNREPRESENTABLE: UNREPRESENTABLE}
        return replace(self, schema=self.schema.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)), shown=shown)

    def evolved(self, schema: TableSchema, segment: pa.Schema, *, keep: bool = False) -> TableLayout:
        """Return the layout after a change of the source's schema, whose rows have these types.

        Columns may be added, dropped and renamed, and decimals may get wider; with `keep`, columns that are dropped at
        the source stay. Any other change that readers would see raises `SchemaNotFollowed`, except in `history`.
        `needs_rewrite` says whether files must be written again.
        """
        if self.mode is Mode.HISTORY:
            return self._continued(schema, segment)
        before = {column.attnum: column for column in self.source.columns}
        after = {column.attnum: column for column in schema.columns}
        # Without a key, rows may be found by all their cells, so a new key would identify them differently.
        is_matched = self.source.key or self.source.replica_identity is ReplicaIdentity.FULL
        if is_matched and {column.attnum for column in self.source.key} != {column.attnum for column in schema.key}:
            raise not_followed(str(schema), "its key changed")
        if not schema.columns:
            raise not_followed(str(schema), "all columns were dropped, but a Delta table needs one")
        in_segments = dict(zip(after, field_names(schema), strict=True))
        same = {attnum for attnum in before.keys() & after.keys() if before[attnum].name == after[attnum].name}
        others = [name for name in self.schema.names if name not in self.columns]
        stay = {self.names[attnum] for attnum in before.keys() - after.keys()} if keep and self.shown is None else set()
        # Texts of cells are stored by the names of their columns, so these must be the new ones.
        is_mapped = self.shown is not None and not self.has_texts
        kept = before.keys() & after.keys() if is_mapped else same
        names = {attnum: name for attnum, name in self.names.items() if attnum in kept}
        in_files = [*self.retired, *self.schema.names] if is_mapped else []
        for attnum in (each for each in after if each not in kept):
            taken = [*names.values(), *others, *stay, *_reserved(self.mode), *in_files]
            names[attnum] = _free_name(in_segments[attnum], taken)
        types = {attnum: self._type_after(schema, after[attnum], segment, in_segments[attnum]) for attnum in after}
        times = {attnum for attnum in after if holds_times(segment.field(in_segments[attnum]).type)}
        fields = list(self._fields_after(names, types, stay))
        evolved = TableLayout(schema, self.mode, names, pa.schema(fields), self.times | times)
        if self.shown is not None:
            evolved = replace(evolved, shown=self._shown_after(names, same, in_segments))
        return evolved.succeeding(self)

    def mapped(self) -> TableLayout:
        """Return the same layout with a map of columns, if all columns can have one."""
        has_numbers = set(self.schema.names) <= {*self.names.values(), *_RESERVED_IDS}
        if self.shown is not None or not has_numbers or any(map(_has_struct, self.schema.types)):
            return self
        return replace(self, shown={name: name for name in self.schema.names})

    def _shown_after(self, names: Mapping[int, str], same: set[int], in_segments: Mapping[int, str]) -> dict[str, str]:
        assert self.shown is not None
        shown = {name: name for name in self.schema.names if name not in self.columns}
        shown |= {names[attnum]: self.shown.get(self.names[attnum], self.names[attnum]) for attnum in same}
        for attnum in (each for each in names if each not in same):
            shown[names[attnum]] = _free_name(in_segments[attnum], [*shown.values(), *_reserved(self.mode)])
        return shown

    def succeeding(self, before: TableLayout) -> TableLayout:
        """Return this layout with the dropped columns that files have if `before` was their layout."""
        if self.needs_rewrite(before):
            return replace(self, retired=frozenset())
        return replace(self, retired=(before.retired | _folded(before.schema.names)) - _folded(self.schema.names))

    def needs_rewrite(self, before: TableLayout) -> bool:
        """True if readers would find wrong values in files that were written in the layout `before`."""
        if self.mode is Mode.HISTORY:
            return False
        for attnum, name in self.names.items():
            earlier = before.names.get(attnum)
            if earlier is None:
                if fold_case(name) in before.retired | _folded(before.schema.names):
                    return True  # of another column that was dropped
            elif earlier != name or before.schema.field(earlier).type != self.schema.field(name).type:
                return True
        # Texts of cells are stored by the names of their columns.
        return before.has_texts and not before.names.keys() <= self.names.keys()

    def id_of(self, name: str) -> int:
        """Return the column id of a column, by its name in files."""
        numbers = {each: attnum for attnum, each in self.names.items()}
        return numbers[name] if name in numbers else _OWN_COLUMNS + 1 + _RESERVED_IDS.index(name)

    def _fields_after(
        self, names: Mapping[int, str], types: Mapping[int, pa.DataType], stay: set[str]
    ) -> Iterator[pa.Field]:
        """Yield the columns of the next layout: those of this one where they were, then the new ones."""
        attnums = {name: attnum for attnum, name in self.names.items()}
        for field in self.schema:
            attnum = attnums.get(field.name)
            if attnum is None or field.name in stay:
                yield field
            elif attnum in names:
                yield pa.field(names[attnum], types[attnum])
        for attnum in names:
            if attnum not in self.names:
                yield pa.field(names[attnum], types[attnum])

    def _type_after(self, schema: TableSchema, column: Column, segment: pa.Schema, name: str) -> pa.DataType:
        """Return the lake's type of a column; raise if existing values cannot be given that type."""
        wanted = _lake_type(schema, column, segment.field(name).type)
        before = next((each for each in self.source.columns if each.attnum == column.attnum), None)
        if before is None:
            return wanted
        present = self.schema.field(self.names[column.attnum]).type
        # A cell that the narrow type could not hold may fit into the wide one, so texts prevent it.
        widens = all(map(pa.types.is_decimal, (present, wanted))) and not self.has_texts
        if not _keeps_values(before, column) or not (present == wanted or widens):
            raise not_followed(str(schema), f"the type of column {column.name!r} changed")
        return wanted

    def keeping(self, before: TableLayout) -> TableLayout:
        """Return the layout of a new copy with the columns before it that the source no longer has."""
        if before.shown is not None:
            return self
        current = {name for attnum, name in before.names.items() if attnum in self.names}
        taken = {fold_case(name) for name in (*self.schema.names, *current, *_reserved(self.mode))}
        kept = [field for field in before.schema if fold_case(field.name) not in taken]
        return replace(self, schema=pa.schema([*self.schema, *kept]))

    def _continued(self, schema: TableSchema, segment: pa.Schema) -> TableLayout:
        """Return the layout of a log of changes after any change of the source's schema. Earlier rows stay as they are.

        A column of the source goes to the column of the lake with its name. If that can neither hold its values nor be
        widened, it goes to the first of `name_2`, `name_3` … that can, or is new. Columns without a column of the
        source stay, and are NULL in new rows.
        """
        before = {column.attnum: column for column in self.source.columns}
        fields = {field.name: field for field in self.schema}
        kinds = {
            column.attnum: segment.field(name).type
            for column, name in zip(schema.columns, field_names(schema), strict=True)
        }
        types = {column.attnum: _lake_type(schema, column, kinds[column.attnum]) for column in schema.columns}
        names = {
            column.attnum: self.names[column.attnum]
            for column in schema.columns
            if column.attnum in before
            and before[column.attnum].name == column.name
            and _common_type(fields[self.names[column.attnum]].type, types[column.attnum]) is not None
        }
        for column, name in zip(schema.columns, field_names(schema), strict=True):
            wanted = types[column.attnum]
            if column.attnum not in names:
                taken = {*_reserved(self.mode), *names.values()}
                taken |= {each for each, field in fields.items() if _common_type(field.type, wanted) is None}
                same = {fold_case(each): each for each in fields}
                free = _free_name(name, list(taken))
                names[column.attnum] = same.get(fold_case(free), free)
            lake_name = names[column.attnum]
            before_type = fields[lake_name].type if lake_name in fields else wanted
            fields[lake_name] = pa.field(lake_name, _common_type(before_type, wanted))
        fields.setdefault(SCHEMA_VERSION, pa.field(SCHEMA_VERSION, pa.int32()))
        old = {field.name: fields[field.name] for field in fields[OLD].type} if OLD in fields else {}
        old |= {field.name: field for field in _old_type(schema, names, pa.schema(fields.values()))}
        if old:
            fields[OLD] = pa.field(OLD, pa.struct(list(old.values())))
        versions = self.versions or (_version(self.source, self.names),)
        if not schema.has_columns_of(self.source):
            versions = (*versions, _version(schema, names))
        return replace(
            self,
            source=schema,
            names=names,
            schema=pa.schema(list(fields.values())),
            times=frozenset(attnum for attnum, kind in kinds.items() if holds_times(kind)),
            versions=versions,
        )


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


def new_layout(source: TableSchema, mode: Mode, columns: pa.Schema) -> TableLayout:
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
    versions = (_version(source, lake_names),) if mode is Mode.HISTORY else ()
    schema = _whole_schema(source, mode, lake_names, own)
    return TableLayout(source, mode, lake_names, schema, times, versions=versions)


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
        **({_VERSIONS: compact_json(layout.versions)} if layout.versions else {}),
    }
    shown = layout.shown
    if shown is None and MAPPING_MODE in configuration:
        # A table that has mapped columns once does so for good.
        shown = {}
    if shown is None:
        return Metadata(id_, schema_string(layout.schema), {**configuration, **own}, (), created)
    own |= {MAPPING_MODE: "name", _LAST_ID: str(_OWN_COLUMNS + len(_RESERVED_IDS))}
    text = schema_string(
        layout.schema, {name: (shown.get(name, name), layout.id_of(name)) for name in layout.schema.names}
    )
    return Metadata(id_, text, {**configuration, **own}, (), created)


def from_metadata(metadata: Metadata) -> TableState | None:
    """Parse the output of `to_metadata`; None for a table that Penstock does not write."""
    found = metadata.configuration
    if OWNER not in found or _SOURCE not in found:
        return None
    names = {int(attnum): name for attnum, name in json.loads(found[_COLUMNS]).items()}
    source = schema_from_json(json.loads(found[_SOURCE]))
    times = frozenset[int](json.loads(found[_TIMES]))
    retired = frozenset[str](json.loads(found.get(_RETIRED, "[]")))
    versions = tuple(
        tuple(VersionColumn(*each) for each in columns) for columns in json.loads(found.get(_VERSIONS, "[]"))
    )
    shown = shown_names(metadata.schema_string) if MAPPING_MODE in found else None
    schema = arrow_schema(metadata.schema_string)
    layout = TableLayout(source, Mode(found[_MODE]), names, schema, times, retired, shown, versions)
    return TableState(found[OWNER], int(found[_TABLE_ID]), found[_BEGUN], found[_COPIED], layout)


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both, if readers accept files with either; None if there is none."""
    for family in _WIDENING:
        if one in family and other in family:
            return max(one, other, key=family.index)
    return one if one == other else None


def _version(source: TableSchema, names: Mapping[int, str]) -> tuple[VersionColumn, ...]:
    return tuple(VersionColumn(names[each.attnum], each.name, each.type.name, each.attnum) for each in source.columns)


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
                pa.field(SCHEMA_VERSION, pa.int32()),
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


def _has_struct(type_: pa.DataType) -> bool:
    if pa.types.is_map(type_):
        return _has_struct(type_.key_type) or _has_struct(type_.item_type)
    if pa.types.is_list(type_):
        return _has_struct(type_.value_type)
    return pa.types.is_struct(type_)


def _folded(names: Iterable[str]) -> frozenset[str]:
    return frozenset(fold_case(name) for name in names)


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
