"""The tables that Penstock creates in ClickHouse: columns, engines, views, and how they follow the source.

Readers use a view. The table under it belongs to one copy and has columns that never change their names (`c3` for
attribute number 3), so a renamed column is another view.

| shape | for | a row of the table | the view |
|---|---|---|---|
| `KEYED` | mode `mirror` | the newest `_version` of a key; deleted rows stay as tombstones | live rows |
| `COUNTED` | mode `mirror`, without a key | a row that came (`_sign` 1) or went (-1) | rows that came more often |
| `LOG` | mode `history` | a change | all of them |

`_version` is the order key: commit position × 2⁶⁴ + ordinal + 1; copied rows have the copy's position and 0. Every
table replaces rows that have the same key and version, so writing a change again changes nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.columns import constant_of
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    field_names,
)
from penstock.destinations.clickhouse.server import literal, quote
from penstock.destinations.refusals import not_followed
from penstock.lsn import OrderKey
from penstock.schema import Column, PostgresType, TableSchema, resolve_domain
from penstock.schema.table import moved_names, schema_from_json, schema_to_json
from penstock.schema.types import keeps_values
from penstock.values.datetimes import print_times

VERSION, DELETED, SIGN, NUMBER, COPY = "_version", "_deleted", "_sign", "_number", "_copy"
KEY_TEXT = "_key"
"""The texts of cells of the key that their types cannot hold."""
NULL_ARRAYS = "_null_arrays"
"""The columns whose array is NULL: ClickHouse has no such arrays, they are empty there."""
DURABLE = "fsync_after_insert = 1, fsync_part_directory = 1, min_compressed_bytes_to_fsync_after_merge = 1"
"""The settings of tables whose rows survive a power failure."""
_OWN = (OP, COMMIT_LSN, ORDINAL, COMMIT_TIME, XID, SCHEMA_VERSION, UNCHANGED, OLD, UNREPRESENTABLE, NULL_ARRAYS)
"""Names in views that belong to Penstock."""
_LOG_COLUMNS: Mapping[str, str] = {
    OP: "LowCardinality(String)",
    COMMIT_LSN: "Int64",
    ORDINAL: "Int64",
    COMMIT_TIME: "Nullable(DateTime64(6, 'UTC'))",
    XID: "Nullable(Int64)",
    SCHEMA_VERSION: "Int32",
    UNCHANGED: "Array(String)",
    OLD: "Map(String, Nullable(String))",
}
_ENGINES = {
    "KEYED": f"ReplacingMergeTree({VERSION}, {DELETED})",
    "COUNTED": "ReplacingMergeTree",
    "LOG": "ReplacingMergeTree",
}
_TYPES = {
    pa.int8(): "Int8",
    pa.int16(): "Int16",
    pa.int32(): "Int32",
    pa.int64(): "Int64",
    pa.bool_(): "Bool",
    pa.float32(): "Float32",
    pa.float64(): "Float64",
    pa.date32(): "Date32",
}
_TEXT = "String"
_NO_TYPE = PostgresType(0, "")


class Mode(StrEnum):
    """What a table at the destination holds."""

    MIRROR = "mirror"
    HISTORY = "history"


class Shape(Enum):
    """How a table stores it; see the module's docstring."""

    KEYED = auto()
    COUNTED = auto()
    LOG = auto()


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of a table."""

    stored: str
    """Its name in the table."""
    name: str
    """Its name in the view."""
    type: str
    """In ClickHouse, without `Nullable`."""
    arrow: pa.DataType
    """In segments."""
    attnum: int | None
    """None if the source no longer has the column."""

    @property
    def is_list(self) -> bool:
        return pa.types.is_list(self.arrow) or pa.types.is_large_list(self.arrow)

    @property
    def may_not_fit(self) -> bool:
        """True if the source may have a value that the column cannot hold."""
        return self.is_list or pa.types.is_decimal(self.arrow) or pa.types.is_temporal(self.arrow)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table."""

    source: TableSchema
    mode: Mode
    columns: tuple[StoredColumn, ...]
    """Those of the source in its order, then those that it no longer has."""
    version: int = 1
    """The number of the source's schema, in a log."""
    hidden: tuple[str, ...] = ()
    """Further columns of the table, which no view shows: the source has dropped them."""

    @property
    def shape(self) -> Shape:
        if self.mode is Mode.HISTORY:
            return Shape.LOG
        return Shape.KEYED if self.source.key else Shape.COUNTED

    def of(self, attnum: int) -> StoredColumn | None:
        """Return the column with an attribute number."""
        return next((each for each in self.columns if each.attnum == attnum), None)

    @property
    def key(self) -> list[StoredColumn]:
        """The columns of the key; none unless the table is `KEYED`."""
        if self.shape is not Shape.KEYED:
            return []
        found = (self.of(column.attnum) for column in self.source.key)
        return [each for each in found if each is not None]

    @property
    def has_key_text(self) -> bool:
        return any(each.may_not_fit for each in self.key)

    @property
    def has_texts(self) -> bool:
        return any(each.may_not_fit for each in self.columns)

    @property
    def has_lists(self) -> bool:
        return any(each.is_list for each in self.columns)

    def create(self, name: str, *, fsync: bool) -> str:
        """Return the statement that creates the table."""
        own = [f"{quote(name)} {type_}" for name, type_ in self._own_columns().items()]
        columns = [f"{each.stored} {self._declared(each)}" for each in self.columns]
        match self.shape:
            case Shape.KEYED:
                order = [*(each.stored for each in self.key), *([KEY_TEXT] if self.has_key_text else [])]
            case Shape.COUNTED:
                order = [VERSION, SIGN, NUMBER]
            case Shape.LOG:
                order = [COMMIT_LSN, ORDINAL, COPY, NUMBER]
        settings = ["non_replicated_deduplication_window = 1000"]
        if any(each.is_list for each in self.key):
            settings.append("allow_nullable_key = 1")
        if fsync:
            settings.append(DURABLE)
        return (
            f"create table if not exists {name} ({', '.join([*columns, *own])}) engine = {_ENGINES[self.shape.name]} "
            f"order by ({', '.join(order)}) settings {', '.join(settings)}"
        )

    def rows(self, table: str, floor: int) -> str:
        """Return the current rows of a table as the operand of FROM, without those from before its last truncate.

        Its columns have the names of the table. Of a log, all rows.
        """
        where = [f"not {DELETED}"] if self.shape is Shape.KEYED else []
        if floor and self.shape is not Shape.LOG:
            where.append(f"{VERSION} > toUInt128('{floor}')")
        condition = f" where {' and '.join(where)}" if where else ""
        head = [*_LOG_COLUMNS] if self.shape is Shape.LOG else []
        cells = ", ".join([*head, *(each.stored for each in self.columns), *self._extra_columns()])
        if self.shape is not Shape.COUNTED:
            return f"(select {cells} from {table} final{condition})"
        groups = f"select {cells}, sum({SIGN}) as total from {table} final{condition} group by {cells}"
        return f"(select {cells} from ({groups} having total > 0) array join range(toUInt64(total)) as number)"

    def view(self, name: str, table: str, floor: int) -> str:
        """Return the statement that shows readers the current rows of a table."""
        head = [*_LOG_COLUMNS] if self.shape is Shape.LOG else []
        # With the name of the table: to ClickHouse, a bare name may mean an alias.
        shown = [*head, *(f"t.{each.stored} as {quote(each.name)}" for each in self.columns)]
        stored = ", ".join(literal(each.stored) for each in self.columns)
        names = ", ".join(literal(each.name) for each in self.columns)
        renamed = f"transform(k, [{stored}], [{names}], k)"
        if self.has_texts:
            shown.append(f"mapApply((k, v) -> ({renamed}, v), t.{UNREPRESENTABLE}) as {UNREPRESENTABLE}")
        if self.has_lists:
            shown.append(f"arrayMap(k -> {renamed}, t.{NULL_ARRAYS}) as {NULL_ARRAYS}")
        return f"create or replace view {name} as select {', '.join(shown)} from {self.rows(table, floor)} as t"

    def _extra_columns(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.has_texts:
            found[UNREPRESENTABLE] = "Map(String, String)"
        if self.has_lists:
            found[NULL_ARRAYS] = "Array(String)"
        return found

    def _own_columns(self) -> dict[str, str]:
        found = self._extra_columns()
        match self.shape:
            case Shape.KEYED:
                texts = {KEY_TEXT: _TEXT} if self.has_key_text else {}
                return {**texts, **found, VERSION: "UInt128", DELETED: "UInt8"}
            case Shape.COUNTED:
                return {**found, VERSION: "UInt128", SIGN: "Int8", NUMBER: "UInt64"}
            case Shape.LOG:
                return {**_LOG_COLUMNS, **found, COPY: _TEXT, NUMBER: "UInt64"}

    def _declared(self, column: StoredColumn) -> str:
        return column.type if column.is_list or column in self.key else f"Nullable({column.type})"

    def stored_names(self) -> list[str]:
        """Return the names of all columns of the table."""
        return [*(each.stored for each in self.columns), *self._own_columns()]

    def added(self, before: Layout, defaults: Mapping[str, str]) -> list[str]:
        """Return the clauses of ALTER TABLE that lead here; running them again changes nothing."""
        known = {each.stored: each for each in before.columns}
        clauses: list[str] = []
        for each in self.columns:
            if each.stored not in known:
                default = f" default {defaults[each.stored]}" if each.stored in defaults else ""
                clauses.append(f"add column if not exists {each.stored} {self._declared(each)}{default}")
            elif known[each.stored].type != each.type:
                clauses.append(f"modify column {each.stored} {self._declared(each)}")
        extra = self._extra_columns().items() - before._extra_columns().items()
        return [*clauses, *(f"add column if not exists {name} {type_}" for name, type_ in sorted(extra))]

    def to_json(self) -> str:
        """Return the layout as text."""
        arrow = pa.schema([pa.field(each.stored, each.arrow) for each in self.columns]).serialize()
        columns = [[each.stored, each.name, each.type, each.attnum] for each in self.columns]
        record = {"source": schema_to_json(self.source), "mode": self.mode.value, "version": self.version}
        return json.dumps(
            record | {"columns": columns, "hidden": self.hidden, "arrow": base64.b64encode(arrow.to_pybytes()).decode()}
        )


@lru_cache(maxsize=4096)
def layout_from_json(text: str) -> Layout:
    """Read what `Layout.to_json` returned."""
    record = json.loads(text)
    arrow = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["arrow"])))
    columns = tuple(
        StoredColumn(stored, name, type_, field.type, attnum)
        for (stored, name, type_, attnum), field in zip(record["columns"], arrow, strict=True)
    )
    hidden = tuple(record["hidden"])
    return Layout(schema_from_json(record["source"]), Mode(record["mode"]), columns, record["version"], hidden)


def version_of(key: OrderKey) -> int:
    """Return the `_version` of a change."""
    return (int(key.commit_lsn) << 64) + key.ordinal + 1


def new_layout(source: TableSchema, arrow: pa.Schema, mode: Mode) -> Layout:
    """Return the layout of a table that is copied; `arrow` has its columns as in segments."""
    columns: list[StoredColumn] = []
    for column, field in zip(source.columns, field_names(source), strict=True):
        name = _free_name(column, [*_OWN, *(each.name for each in columns)])
        columns.append(_stored(column, name, arrow.field(field).type))
    return Layout(source, mode, tuple(columns))


def follow(
    before: Layout, schema: TableSchema, arrow: pa.Schema, *, keeps_dropped: bool, records_ddl: bool
) -> tuple[Layout, list[str]]:
    """Return the layout for another schema of the source, and the clauses of ALTER TABLE that lead to it.

    Raise `SchemaNotFollowed` if only a new copy has the right rows.
    """
    if before.source == schema or before.source.has_columns_of(schema):
        return replace(before, source=schema), []
    if before.mode is Mode.HISTORY:
        after = extend(before, schema, arrow)
        return after, after.added(before, {})
    table = str(schema)
    if [each.attnum for each in before.source.key] != [each.attnum for each in schema.key]:
        raise not_followed(table, "its key changed")
    if not records_ddl and (moved := moved_names(before.source, schema)):
        # The catalog that named the columns may be newer than the rows.
        raise not_followed(table, f"the name of another column was given to column {moved[0]!r}")
    now = {column.attnum for column in schema.columns}
    dropped = [replace(each, attnum=None) for each in before.columns if each.attnum not in now]
    kept = dropped if keeps_dropped else [each for each in dropped if each in before.columns]
    used = [*(each.stored for each in before.columns), *before.hidden]
    types = {column.attnum: column for column in before.source.columns}
    defaults: dict[str, str] = {}
    columns: list[StoredColumn] = []
    for column, field in zip(schema.columns, field_names(schema), strict=True):
        name = _free_name(column, [*_OWN, *(each.name for each in (*columns, *kept))])
        new = _stored(column, name, arrow.field(field).type)
        old = before.of(column.attnum)
        if old is None:
            # A column that comes back, as a publication may let it, does not get its old values back.
            number = used.count(new.stored) and len(used)
            new = replace(new, stored=f"{new.stored}_{number}") if number else new
            if column.missing is not None or column.backfilled:
                defaults[new.stored] = _default(schema, column, new)
        else:
            new = replace(new, stored=old.stored)
            was = types[column.attnum]
            is_kept = keeps_values((was.type, was.type_modifier), (column.type, column.type_modifier))
            if not is_kept or not _is_wider(old, new, is_key=old in before.key):
                raise not_followed(table, f"the type of column {column.name!r} changed")
        columns.append(new)
    shown = {each.stored for each in (*columns, *kept)}
    hidden = tuple(name for name in used if name not in shown)
    after = replace(before, source=schema, columns=(*columns, *kept), hidden=hidden)
    return after, after.added(before, defaults)


def extend(before: Layout, schema: TableSchema, arrow: pa.Schema) -> Layout:
    """Return the layout of a log for another schema of the source; earlier rows stay as they are.

    A column goes to the one with its name and type; if there is only one with another type, to `name_2`.
    """
    if before.source == schema or before.source.has_columns_of(schema):
        return replace(before, source=schema)
    columns: list[StoredColumn] = []
    left = [replace(each, attnum=None) for each in before.columns]
    number = len(left)
    for column, field in zip(schema.columns, field_names(schema), strict=True):
        wanted = _stored(column, column.name, arrow.field(field).type)
        taken = [*_OWN, *(each.name for each in columns), *(e.name for e in left if e.type != wanted.type)]
        name = _free_name(column, taken, first=2)
        found = next((each for each in left if each.name == name), None)
        if found is None:
            number += 1
            found = replace(wanted, stored=f"c{column.attnum}_{number}")
        else:
            left.remove(found)
        columns.append(replace(found, name=name, attnum=column.attnum, arrow=wanted.arrow))
    return Layout(schema, before.mode, (*columns, *left), before.version + 1)


def _stored(column: Column, name: str, arrow: pa.DataType) -> StoredColumn:
    return StoredColumn(f"c{column.attnum}", name, column_type(arrow, column.type), arrow, column.attnum)


def _free_name(column: Column, taken: Sequence[str], first: int | None = None) -> str:
    """Return the column's name, with a number if the name is taken: by default that of the column."""
    name, number = column.name, column.attnum if first is None else first
    while name in taken:
        name, number = f"{column.name}_{number}", number + 1
    return name


def column_type(arrow: pa.DataType, type_: PostgresType = _NO_TYPE) -> str:
    """Return the type of a column without `Nullable`: lossless, or text."""
    if arrow in _TYPES:
        return _TYPES[arrow]
    if pa.types.is_decimal128(arrow) and 0 <= arrow.scale <= arrow.precision:
        return f"Decimal({arrow.precision}, {arrow.scale})"
    if pa.types.is_timestamp(arrow):
        return "DateTime64(6, 'UTC')"
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        # Dates and times of any year fit only into text, and one element cannot be kept beside its array.
        element = _TEXT if pa.types.is_temporal(arrow.value_type) else column_type(arrow.value_type)
        return f"Array(Nullable({element}))"
    base, _ = resolve_domain(type_, -1)
    return "UUID" if base.is_builtin and base.name == "uuid" else _TEXT


def _is_wider(old: StoredColumn, new: StoredColumn, *, is_key: bool) -> bool:
    """Return True if ALTER TABLE changes one type to the other without changing a value."""
    if old.type == new.type:
        return True
    of_decimals = pa.types.is_decimal(old.arrow) and pa.types.is_decimal(new.arrow)
    return not is_key and of_decimals and old.arrow.scale == new.arrow.scale and old.type[:7] == new.type[:7]


def _default(schema: TableSchema, column: Column, stored: StoredColumn) -> str:
    """Return what existing rows have in an added column, as SQL; raise if that is unknown or has no literal."""
    value = constant_of(str(schema), column, stored.arrow)
    is_binary = pa.types.is_binary(stored.arrow) or pa.types.is_large_binary(stored.arrow)
    if stored.is_list or is_binary or not value.is_valid:
        raise not_followed(str(schema), f"column {column.name!r} was added with a default that has no literal")
    if (pa.types.is_date(stored.arrow) or pa.types.is_timestamp(stored.arrow)) and not _in_range(value):
        raise not_followed(str(schema), f"column {column.name!r} was added with a default that its type cannot hold")
    if pa.types.is_timestamp(stored.arrow):
        value = value.cast(pa.timestamp("us"))
    text = pc.cast(print_times(pa.array([value.as_py()], value.type)), pa.string())[0].as_py()
    return f"cast({literal(text)} as {stored.type})"


def _in_range(value: pa.Scalar) -> bool:
    return bool(in_range(pa.array([value.as_py()], value.type))[0])


_DAYS = (np.datetime64("1900-01-01", "D").astype(np.int64), np.datetime64("2299-12-31", "D").astype(np.int64))
_MICROSECONDS_PER_DAY = 86_400_000_000


def in_range(cells: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each date or time whether ClickHouse can hold it: the years 1900 to 2299; True for NULL."""
    is_date = pa.types.is_date(cells.type)
    numbers = pc.fill_null(pc.cast(cells, pa.int32() if is_date else pa.int64()), 0).to_numpy(zero_copy_only=False)
    unit = 1 if is_date else _MICROSECONDS_PER_DAY
    return (numbers >= _DAYS[0] * unit) & (numbers < (_DAYS[1] + 1) * unit)
