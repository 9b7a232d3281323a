"""The columns of a table in Snowflake, and the view through which people read it.

A table is kept in *generations*: a new copy fills a new physical table, and then the view shows that one. In it, the
column with attribute number 3 is called `C3_` and its type. So a renamed column is a change of the view alone, a
dropped column only leaves the view, and a column that comes back, also with another type, never meets earlier values.
`X3` has the texts of values that the type cannot hold.

| shape | for | columns besides those of the source |
|---|---|---|
| keyed | tables with a key | – |
| bag | tables without a key | `_ROW` (the whole row as bytes), `_ID` (tells equal rows apart) |
| log | `mode = "history"` | those of a change (`_OP`, `_COMMIT_LSN` …) |

`mode = "soft_delete"` adds `_DELETED_AT`. DDL commits the transaction that it is in, so columns are added before one.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    XID,
    field_names,
    join_texts,
)
from penstock.destinations.postgres.encoding import Cells, printed
from penstock.destinations.refusals import not_followed
from penstock.destinations.snowflake.connection import literal, quote
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json
from penstock.schema.types import keeps_values
from penstock.values import TypeSettings, codec_for

ROW, ID, DELETED_AT = "_ROW", "_ID", "_DELETED_AT"
_TIME = pa.timestamp("us", "UTC")
_OWN: Mapping[str, tuple[str, pa.DataType]] = {
    ROW: ("BINARY", pa.large_binary()),
    ID: ("VARCHAR", pa.string()),
    DELETED_AT: ("TIMESTAMP_TZ(6)", _TIME),
}
_LOG: Mapping[str, tuple[str, pa.DataType]] = {
    OP.upper(): ("VARCHAR", pa.string()),
    COMMIT_LSN.upper(): ("NUMBER(38,0)", pa.int64()),
    ORDINAL.upper(): ("NUMBER(38,0)", pa.int64()),
    COMMIT_TIME.upper(): ("TIMESTAMP_TZ(6)", _TIME),
    XID.upper(): ("NUMBER(38,0)", pa.int64()),
    UNCHANGED.upper(): ("VARCHAR", pa.string()),
    OLD.upper(): ("VARCHAR", pa.large_string()),
}
_SIMPLE = re.compile(r"[a-z_][a-z0-9_$]*")
_NAME_LENGTH = 255


class Mode(StrEnum):
    """What a table holds."""

    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Stored:
    """A column of the source in a generation."""

    attnum: int
    name: str
    """At the source."""
    type: str
    """In Snowflake."""

    @property
    def column(self) -> str:
        return f"C{self.attnum}_{re.sub(r'[^A-Z0-9]+', '_', self.type).strip('_')}"

    @property
    def text(self) -> str | None:
        """The column for texts of values that the type cannot hold."""
        return f"X{self.attnum}" if self.type.startswith(("NUMBER", "DATE", "TIME")) else None

    @property
    def columns(self) -> dict[str, str]:
        """The columns that it takes, with their types."""
        return {self.column: self.type, **({} if self.text is None else {self.text: "VARCHAR"})}


@dataclass(frozen=True, slots=True)
class Layout:
    """A table's columns, in its source and in a generation."""

    mode: Mode
    schema: TableSchema
    types: pa.Schema
    """The columns as in segments, without `_unrepresentable`."""
    kept: tuple[Stored, ...] = ()
    """Columns that the source no longer has, and that the view still shows."""

    @property
    def is_bag(self) -> bool:
        return self.mode is not Mode.HISTORY and not self.schema.key

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The columns of the source."""
        pairs = zip(self.schema.columns, self.types, strict=True)
        return tuple(Stored(column.attnum, column.name, column_type(field.type)) for column, field in pairs)

    @property
    def key(self) -> list[str]:
        """The columns of the key in the generation, in the order of the schema's key."""
        found = {each.attnum: each.column for each in self.stored}
        return [found[column.attnum] for column in self.schema.key]

    @property
    def own(self) -> dict[str, tuple[str, pa.DataType]]:
        """Columns of Penstock's own: their types in Snowflake and in Arrow."""
        if self.mode is Mode.HISTORY:
            return dict(_LOG)
        names = [*((ROW, ID) if self.is_bag else ()), *((DELETED_AT,) if self.mode is Mode.SOFT_DELETE else ())]
        return {name: _OWN[name] for name in names}

    @property
    def columns(self) -> dict[str, str]:
        """All columns of the generation, with their types."""
        found = {name: type_ for name, (type_, _) in self.own.items()}
        for each in (*self.stored, *self.kept):
            found |= each.columns
        return found

    def physical(self, schema: TableSchema, cells: Sequence[Cells]) -> dict[str, pa.Array]:
        """Return cells of rows of some schema as columns of the generation; columns that it lacks are left out."""
        places = {each.attnum: each for each in (*self.kept, *self.stored)}
        found: dict[str, pa.Array] = {}
        for column, each in zip(schema.columns, cells, strict=True):
            if column.attnum in places:
                place = places[column.attnum]
                found[place.column] = store(each)
                if place.text is not None:
                    texts = pa.nulls(len(each.array), pa.string()) if each.texts is None else each.texts
                    found[place.text] = texts.cast(pa.string())
        return found

    def select(self) -> str:
        """Return the columns to read back, in the order of the schema: numbers and times without loss."""
        listed: list[str] = []
        for each, field in zip(self.stored, self.types, strict=True):
            name, quoted = each.column, quote(each.column)
            if pa.types.is_decimal(field.type):
                listed.append(f"to_varchar({quoted}) as {name}")
            elif each.type.startswith("TIMESTAMP"):
                # As timestamps, the connector limits years to those that nanoseconds can express.
                listed.append(f"date_part(epoch_microsecond, {quoted}) as {name}")
            else:
                listed.append(f"{quoted} as {name}")
            listed += [f"{each.text} as {each.text}"] if each.text is not None else []
        return ", ".join(listed)

    def restored(self, rows: pa.Table) -> pa.RecordBatch:
        """Return rows of `select` as rows of segments, always with `_unrepresentable`."""
        arrays: list[pa.Array] = []
        texts: dict[str, pa.Array] = {}
        for each, field, column in zip(self.stored, self.types, self.schema.columns, strict=True):
            array = _whole(rows.column(each.column))
            if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
                text = array.cast(pa.large_string())
                decoded = codec_for(column.type, column.type_modifier, TypeSettings()).decode(text)
                array = decoded.array
                if decoded.rejected is not None:
                    texts[field.name] = pc.if_else(pa.array(decoded.rejected), text, pa.scalar(None, text.type))
            elif pa.types.is_timestamp(field.type):
                array = array.cast(pa.int64())
            arrays.append(array.cast(field.type))
            if each.text is not None:
                texts[field.name] = _whole(rows.column(each.text)).cast(pa.string())
        maps = join_texts(texts, rows.num_rows)
        arrays.append(pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps)
        return pa.RecordBatch.from_arrays(arrays, schema=self.restored_schema())

    def restored_schema(self) -> pa.Schema:
        """Return the columns of `restored`."""
        return pa.schema([*self.types, pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)])

    def view(self, table: str) -> str:
        """Return the query of the view; `table` is the generation, quoted."""
        listed = [name for name in self.own if name not in (ROW, ID)]
        taken = [UNREPRESENTABLE.upper(), *listed]
        texts: list[str] = []
        columns: list[str] = []
        for each in (*self.stored, *self.kept):
            shown = shown_name(each.name, each.attnum, taken)
            taken.append(shown)
            columns.append(f"{quote(each.column)} as {quote(shown)}")
            if each.text is not None:
                texts += [literal(shown), each.text]
        cells = f"object_construct({', '.join(texts)}) as {UNREPRESENTABLE.upper()}"
        return f"select {', '.join([*listed, *columns, *([cells] if texts else [])])} from {table}"

    def to_json(self) -> str:
        """Return the layout as text."""
        types = base64.b64encode(self.types.remove_metadata().serialize()).decode()
        kept = [[each.attnum, each.name, each.type] for each in self.kept]
        record = {"mode": self.mode.value, "schema": schema_to_json(self.schema), "types": types, "kept": kept}
        return json.dumps(record)


def layout_from_json(text: str) -> Layout:
    """Return the layout from its text."""
    record: dict[str, Any] = json.loads(text)
    types = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["types"])))
    kept = tuple(Stored(int(attnum), str(name), str(type_)) for attnum, name, type_ in record["kept"])
    return Layout(Mode(record["mode"]), schema_from_json(record["schema"]), types, kept)


def plain(types: pa.Schema, schema: TableSchema) -> pa.Schema:
    """Return the columns of a schema without what segments and copies add to them."""
    return pa.schema([types.field(name) for name in field_names(schema)]).remove_metadata()


def follow(table: str, before: Layout, schema: TableSchema, types: pa.Schema, *, keep_dropped: bool) -> Layout:
    """Return the layout after a schema change; raise `SchemaNotFollowed` if only a new copy has the right rows."""
    after = Layout(before.mode, schema, types)
    former = {column.attnum: (column, each) for column, each in zip(before.schema.columns, before.stored, strict=True)}
    is_log = before.mode is Mode.HISTORY
    if not is_log:
        if [each.attnum for each in before.schema.key] != [each.attnum for each in schema.key]:
            raise not_followed(table, "its key changed")
        if before.is_bag and not before.schema.has_columns_of(schema):
            raise not_followed(table, "its columns changed, and it has no key")
    for column, each in zip(schema.columns, after.stored, strict=True):
        if column.attnum not in former:
            if not is_log and (column.missing is not None or column.backfilled):
                raise not_followed(table, f"existing rows have a value in the added column {column.name}")
            continue
        was, place = former[column.attnum]
        is_same = keeps_values((was.type, was.type_modifier), (column.type, column.type_modifier))
        if not is_log and not (is_same and place.type == each.type):
            raise not_followed(table, f"the type of column {column.name} changed")
    present = {each.column for each in after.stored}
    kept = [each for each in before.kept if each.column not in present]
    if is_log or keep_dropped:
        kept += [each for _, each in former.values() if each.column not in present]
    return Layout(before.mode, schema, types, tuple(kept))


def shown_name(name: str, attnum: int, taken: Sequence[str]) -> str:
    """Return the name of a column in a view: in capitals if SQL without quotes should find it."""
    shown = name.upper() if _SIMPLE.fullmatch(name) else name
    lower = {each.lower() for each in taken}
    while shown.lower() in lower:
        suffix = f"_{attnum}"
        shown = shown[: _NAME_LENGTH - len(suffix)] + suffix
    return shown


def column_type(type_: pa.DataType) -> str:
    """Return the type in Snowflake for a type of segments."""
    if pa.types.is_decimal(type_):
        return f"NUMBER(38,{type_.scale})"
    if pa.types.is_timestamp(type_):
        return "TIMESTAMP_NTZ(6)" if type_.tz is None else "TIMESTAMP_TZ(6)"
    for test, name in (
        (pa.types.is_boolean, "BOOLEAN"),
        (pa.types.is_integer, "NUMBER(38,0)"),
        (pa.types.is_floating, "FLOAT"),
        (pa.types.is_binary, "BINARY"),
        (pa.types.is_large_binary, "BINARY"),
        (pa.types.is_date, "DATE"),
        (pa.types.is_time, "TIME(6)"),
    ):
        if test(type_):
            return name
    return "VARCHAR"


def store(cells: Cells) -> pa.Array:
    """Return cells as a file for `copy into` has them."""
    array = cells.array
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return printed(cells)
    if pa.types.is_decimal(array.type):
        return array.cast(pa.decimal128(38, array.type.scale))
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64())
    if pa.types.is_floating(array.type):
        return array.cast(pa.float64())
    return array.cast(pa.string()) if pa.types.is_null(array.type) else array


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pc.cast(pa.nulls(0), column.type)
