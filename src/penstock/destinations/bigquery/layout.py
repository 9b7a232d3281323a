"""The columns of a table in BigQuery, and the view through which people read it.

A table is kept in *generations*: a new copy, and a truncate, fill a new physical table, and then the view shows that
one. In it, the column with attribute number 3 is called `c3`. So a renamed column is a change of the view alone, a
dropped column only leaves the view, and a name that comes back never meets the values of its predecessor.

| kind | for | columns besides those of the source |
|---|---|---|
| `MIRROR` | tables with a key | `_unrepresentable` |
| `BAG` | tables without a key | `_weight` (1 or −1), `_row` (the whole row as bytes); the view counts |
| `HISTORY` | `mode = "history"` | those of a change (`_op`, `_commit_lsn` …), and `o3`: `c3` before the change |

BigQuery's arrays have neither NULL elements nor NULL itself, so a list is a `struct<list array<struct<element T>>>`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.cloud import bigquery
from google.cloud.bigquery.table import PrimaryKey, TableConstraints

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    Texts,
    field_names,
    join_texts,
    split_texts,
)
from penstock.destinations.refusals import not_followed, rejected
from penstock.schema import Column, ReplicaIdentity, TableSchema

WEIGHT, ROW, HAS_OLD = "_weight", "_row", "_has_old"
_CELLS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.string())]))
_HISTORY = (
    pa.field(OP, pa.string()),
    pa.field(COMMIT_LSN, pa.int64()),
    pa.field(ORDINAL, pa.int64()),
    pa.field(COMMIT_TIME, pa.timestamp("us", "UTC")),
    pa.field(XID, pa.int64()),
    pa.field(UNCHANGED, pa.list_(pa.string())),
    pa.field(HAS_OLD, pa.bool_()),
)
_BAG = (pa.field(WEIGHT, pa.int64()), pa.field(ROW, pa.binary()))
_NUMERIC_DIGITS, _NUMERIC_SCALE = 29, 9
_MOST_KEYS, _MOST_CLUSTERED = 16, 4
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,299}")
_RESERVED = re.compile(r"_(change_|colidentifier|file_|partition|row_timestamp|table_|_root__)", re.IGNORECASE)
_WIDENED = {("int2", "int4"), ("int2", "int8"), ("int4", "int8"), ("varchar", "text"), ("text", "varchar")}


class Kind(StrEnum):
    """How a generation keeps its rows."""

    MIRROR = "mirror"
    BAG = "bag"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Layout:
    """A table's columns, in its source and in a generation."""

    kind: Kind
    schema: TableSchema
    types: pa.Schema
    """The columns as in segments; with `_unrepresentable` or without."""
    kept: tuple[tuple[int, str], ...] = ()
    """Number and name of dropped columns that the view still shows."""

    @property
    def names(self) -> dict[str, str]:
        """Name in segments → name in the generation."""
        pairs = zip(field_names(self.schema), self.schema.columns, strict=True)
        return {name: f"c{column.attnum}" for name, column in pairs}

    @property
    def key(self) -> list[str]:
        """The columns of the key, by their names in segments."""
        pairs = zip(self.schema.columns, field_names(self.schema), strict=True)
        return [name for column, name in pairs if column in self.schema.key]

    @property
    def old_columns(self) -> list[str]:
        """The columns of an old identity, by their names in segments."""
        full = self.schema.replica_identity is ReplicaIdentity.FULL
        pairs = zip(self.schema.columns, field_names(self.schema), strict=True)
        return [name for column, name in pairs if full or column.identity]

    def physical_schema(self) -> pa.Schema:
        """Return the columns of the generation."""
        own = [pa.field(there, _stored(self.types.field(name).type)) for name, there in self.names.items()]
        head = {Kind.MIRROR: (), Kind.BAG: _BAG, Kind.HISTORY: _HISTORY}[self.kind]
        olds: list[pa.Field] = []
        if self.kind is Kind.HISTORY:
            olds = [pa.field(_old(self.names[name]), _stored(self.types.field(name).type)) for name in self.old_columns]
        return pa.schema([*head, *own, *olds, pa.field(UNREPRESENTABLE, _CELLS)])

    def physical(self, rows: pa.Table, texts: Texts) -> pa.Table:
        """Return rows of segments as rows of the generation; columns that they lack are NULL.

        Names that begin with an underscore stay as they are; texts may also have names of the generation.
        """
        names = self.names
        found = {names.get(name, name): rows.column(name) for name in rows.column_names}
        cells = {names.get(name, name): column for name, column in texts.items()}
        arrays = [
            _cells(cells, rows.num_rows)
            if field.name == UNREPRESENTABLE
            else _store(found[field.name], field.type)
            if field.name in found
            else pa.nulls(rows.num_rows, field.type)
            for field in self.physical_schema()
        ]
        return pa.Table.from_arrays(arrays, schema=self.physical_schema())

    def restored(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the generation as rows of segments, always with `_unrepresentable`."""
        arrays = [_restore(rows.column(there), self.types.field(name).type) for name, there in self.names.items()]
        cells = rows.column(UNREPRESENTABLE)
        back = {there: name for name, there in self.names.items()}
        found = split_texts(pa.table({UNREPRESENTABLE: cells}))
        texts = {back[there]: column for there, column in found.items() if there in back}
        maps = join_texts(texts, len(cells))
        arrays.append(
            pa.nulls(len(cells), self.restored_schema().field(UNREPRESENTABLE).type) if maps is None else maps
        )
        return pa.RecordBatch.from_arrays(arrays, schema=self.restored_schema())

    def restored_schema(self) -> pa.Schema:
        """Return the columns of `restored`."""
        fields = [self.types.field(name) for name in self.names]
        return pa.schema([*fields, pa.field(UNREPRESENTABLE, pa.map_(pa.string(), pa.string()))])

    def current(self, table: str) -> str:
        """Return a query for the current rows, with the names of the generation; `table` is quoted."""
        listed = [*self.names.values(), *(f"c{number}" for number, _ in self.kept), UNREPRESENTABLE]
        if self.kind is not Kind.BAG:
            return f"select {', '.join(listed)} from {table}"
        values = ", ".join(f"any_value({name}) as {name}" for name in listed)
        counted = f"select {values}, cast(sum({WEIGHT}) as int64) as _n from {table} group by {ROW}"
        shown = ", ".join(f"t.{name}" for name in listed)
        return f"select {shown} from ({counted}) as t cross join unnest(generate_array(1, t._n)) as _i where t._n > 0"

    def view(self, table: str) -> str:
        """Return the query of the view; `table` is the generation, quoted."""
        shown = {there: name for name, there in self.names.items()}
        columns = [f"{there} as `{column_name(name)}`" for there, name in shown.items()]
        taken = {column_name(name).lower() for name in shown.values()}
        for number, name in self.kept:
            if column_name(name).lower() not in taken:
                columns.append(f"c{number} as `{column_name(name)}`")
        olds = {_old(self.names[name]): name for name in self.old_columns} if self.kind is Kind.HISTORY else {}
        cases = {**shown, **{there: f"{OLD}.{name}" for there, name in olds.items()}}
        cell = f"struct({_case('cell.key', cases)} as name, cell.value as text)"
        columns.append(f"array(select {cell} from unnest({UNREPRESENTABLE}) as cell) as {UNREPRESENTABLE}")
        if self.kind is not Kind.HISTORY:
            return f"select {', '.join(columns)} from ({self.current(table)})"
        head = [OP, COMMIT_LSN, ORDINAL, COMMIT_TIME, XID]
        head.append(f"array(select {_case('name', shown)} from unnest({UNCHANGED}) as name) as {UNCHANGED}")
        if olds:
            fields = ", ".join(f"{there} as `{column_name(name)}`" for there, name in olds.items())
            head.append(f"if({HAS_OLD}, struct({fields}), null) as {OLD}")
        return f"select {', '.join([*head, *columns])} from {table}"

    def require_storable(self) -> None:
        """Raise if BigQuery cannot keep this table."""
        if self.kind is not Kind.MIRROR:
            return
        wrong = [name for name in self.key if not _can_be_key(self.types.field(name).type)]
        if wrong or len(self.key) > _MOST_KEYS:
            raise rejected(
                str(self.schema),
                f"BigQuery allows no primary key with column {wrong[0]}" if wrong else "its key has over 16 columns",
                hint='Use mode = "history", or exclude the table.',
            )

    def table(self, reference: str, max_staleness: str | None) -> bigquery.Table:
        """Return the generation, for creating it."""
        made = bigquery.Table(reference, schema=fields_of(self.physical_schema(), self._descriptions()))
        if self.kind is Kind.MIRROR:
            keys = [self.names[name] for name in self.key]
            primary = PrimaryKey(columns=keys)
            made.table_constraints = TableConstraints(primary_key=primary, foreign_keys=None)
            made.clustering_fields = keys[:_MOST_CLUSTERED]
            made.max_staleness = max_staleness
        elif self.kind is Kind.HISTORY:
            made.clustering_fields = [COMMIT_LSN]
        made.description = f"A generation of {self.schema}, written by Penstock. Read the view instead."
        return made

    def _descriptions(self) -> dict[str, str]:
        return {there: name for name, there in self.names.items()}


def follow(table: str, before: Layout, schema: TableSchema, types: pa.Schema, *, keep_dropped: bool) -> Layout:
    """Return the layout after a schema change; raise `SchemaNotFollowed` if only a new copy has the right rows."""
    former = {column.attnum: column for column in before.schema.columns}
    kept = dict(before.kept)
    if before.kind is not Kind.HISTORY:
        if [each.attnum for each in before.schema.key] != [each.attnum for each in schema.key]:
            raise not_followed(table, "its key changed")
        if before.kind is Kind.BAG and not before.schema.has_columns_of(schema):
            raise not_followed(table, "its columns changed, and it has no key")
        for column in schema.columns:
            if column.attnum not in former and (column.missing is not None or column.backfilled):
                raise not_followed(table, f"existing rows have a value in the added column {column.name}")
    after = Layout(before.kind, schema, types)
    for column, name in zip(schema.columns, field_names(schema), strict=True):
        was = former.get(column.attnum)
        if was is not None and not _same_values(was, column, before, after, name):
            raise not_followed(table, f"the type of column {column.name} changed")
        kept.pop(column.attnum, None)
    present = {column.attnum for column in schema.columns}
    if keep_dropped:
        kept |= {number: column.name for number, column in former.items() if number not in present}
    return Layout(before.kind, schema, types, tuple(kept.items()))


def fields_of(schema: pa.Schema, descriptions: Mapping[str, str] | None = None) -> list[bigquery.SchemaField]:
    """Return columns as BigQuery has them."""
    return [_field(field.name, field.type, (descriptions or {}).get(field.name)) for field in schema]


def sql_type(type_: pa.DataType) -> str:
    """Return a type of a generation for SQL."""
    if pa.types.is_list(type_):
        return f"array<{sql_type(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"struct<{', '.join(f'{each.name} {sql_type(each.type)}' for each in type_)}>"
    return _kind(type_)


def column_name(name: str) -> str:
    """Return the name of a column in a view; a name that BigQuery does not allow gets a digest."""
    if _NAME.fullmatch(name) and not _RESERVED.match(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"c_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')[:200]}_{digest}"


def split_rows(rows: pa.Table) -> tuple[pa.Table, Texts]:
    """Return rows of a copy without their texts, and the texts."""
    texts = split_texts(rows)
    return (rows.drop_columns([UNREPRESENTABLE]) if UNREPRESENTABLE in rows.column_names else rows), texts


def old_name(layout: Layout, name: str) -> str:
    """Return the column of a history that has the old value of a column."""
    return _old(layout.names[name])


def _old(there: str) -> str:
    return f"o{there[1:]}"


def _case(value: str, names: Mapping[str, str]) -> str:
    if not names:
        return value
    quoted = (name.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") for name in names.values())
    branches = " ".join(f"when '{there}' then '{name}'" for there, name in zip(names, quoted, strict=True))
    return f"case {value} {branches} else {value} end"


def _same_values(was: Column, now: Column, before: Layout, after: Layout, name: str) -> bool:
    old_type = before.types.field(field_names(before.schema)[before.schema.columns.index(was)]).type
    new_type = after.types.field(name).type
    if _kind(_stored(old_type)) != _kind(_stored(new_type)):
        return False
    if (was.type, was.type_modifier) == (now.type, now.type_modifier) or (was.type.name, now.type.name) in _WIDENED:
        return True
    if was.type != now.type:
        return False
    if pa.types.is_decimal(old_type) and pa.types.is_decimal(new_type):
        digits = new_type.precision - new_type.scale
        return new_type.scale >= old_type.scale and digits >= old_type.precision - old_type.scale
    return now.type.name == "varchar"


def _stored(type_: pa.DataType) -> pa.DataType:
    """Return the type in the generation for a type of segments."""
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.struct([pa.field("list", pa.list_(pa.struct([pa.field("element", _stored(type_.value_type))])))])
    if pa.types.is_large_string(type_) or pa.types.is_null(type_):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(type_) else type_


def _store(column: pa.Array | pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    array = column if isinstance(column, pa.Array) else _whole(column)
    if not (pa.types.is_list(array.type) and pa.types.is_struct(type_)):
        return array.cast(type_)
    element = type_.field(0).type.value_type.field(0).type
    elements = pa.StructArray.from_arrays([array.flatten().cast(element)], ["element"])
    lists = _lists(array, elements)
    return pa.StructArray.from_arrays([lists], fields=[type_.field(0)], mask=array.is_null())


def _restore(array: pa.Array, type_: pa.DataType) -> pa.Array:
    if not pa.types.is_list(type_):
        return array.cast(type_)
    lists = pc.struct_field(array, 0)
    elements = pc.struct_field(lists.flatten(), 0).cast(type_.value_type)
    found = _lists(lists, elements)
    return pc.if_else(array.is_valid(), found, pa.scalar(None, found.type)).cast(type_)


def _lists(like: pa.Array, elements: pa.Array) -> pa.Array:
    """Return lists as long as those of `like`, never NULL, of other elements."""
    lengths = pc.fill_null(pc.list_value_length(like), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), elements)


def _cells(texts: Mapping[str, pa.Array], count: int) -> pa.Array:
    maps = join_texts(texts, count)
    if maps is None:
        return pa.nulls(count, _CELLS)
    entries = pa.StructArray.from_arrays([maps.keys, maps.items], ["key", "value"])
    return pa.ListArray.from_arrays(maps.offsets, entries)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _can_be_key(type_: pa.DataType) -> bool:
    return not (pa.types.is_floating(type_) or pa.types.is_time(type_) or pa.types.is_nested(type_))


def _field(name: str, type_: pa.DataType, description: str | None = None) -> bigquery.SchemaField:
    mode = "NULLABLE"
    if pa.types.is_list(type_):
        type_, mode = type_.value_type, "REPEATED"
    nested: Iterable[bigquery.SchemaField] = ()
    if pa.types.is_struct(type_):
        nested = [_field(each.name, each.type) for each in type_]
    if description is None:
        return bigquery.SchemaField(name, _kind(type_), mode=mode, fields=nested)
    return bigquery.SchemaField(name, _kind(type_), mode=mode, fields=nested, description=description)


_KINDS: Sequence[tuple[object, str]] = (
    (pa.types.is_boolean, "BOOL"),
    (pa.types.is_integer, "INT64"),
    (pa.types.is_floating, "FLOAT64"),
    (pa.types.is_string, "STRING"),
    (pa.types.is_binary, "BYTES"),
    (pa.types.is_date, "DATE"),
    (pa.types.is_time, "TIME"),
)


def _kind(type_: pa.DataType) -> str:
    """Return BigQuery's name of a type of the generation; of a struct, with the kinds of its fields."""
    if pa.types.is_struct(type_):
        return "RECORD"
    if pa.types.is_timestamp(type_):
        return "DATETIME" if type_.tz is None else "TIMESTAMP"
    if pa.types.is_decimal(type_):
        is_small = type_.scale <= _NUMERIC_SCALE and type_.precision - type_.scale <= _NUMERIC_DIGITS
        return "NUMERIC" if is_small else "BIGNUMERIC"
    for test, name in _KINDS:
        if callable(test) and test(type_):
            return name
    raise TypeError(f"no BigQuery type for {type_}")
