"""The columns of a segment: the file format for changes of one table in one schema version.

The first columns describe the change; the table's own columns follow, typed.

| column | meaning |
|---|---|
| `_op` | 1 insert, 2 update, 3 delete |
| `_commit_lsn` | start of the commit record; with `_ordinal` the order key |
| `_ordinal` | number of the change among all surviving changes of its transaction |
| `_commit_time` | by the source's clock, UTC |
| `_xid` | of the top-level transaction |
| `_unchanged` | bitmap of the columns with *omitted* values (bit i of byte i // 8); NULL if there are none |
| `_old` | the row's identity before an update, if the server sent it |
| `_unrepresentable` | texts of unrepresentable values, by column name; only in segments that have some |

An omitted value is NULL in its own column: only `_unchanged` distinguishes it from a real NULL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import RESYNC, ConfigError, ValueOutOfRange
from penstock.schema import Column, ReplicaIdentity, TableSchema, fold_case
from penstock.values import Codec, NumericPolicy, OutOfRange, TypeSettings, codec_for, merging_setting, settle

OP = "_op"
COMMIT_LSN = "_commit_lsn"
ORDINAL = "_ordinal"
COMMIT_TIME = "_commit_time"
XID = "_xid"
UNCHANGED = "_unchanged"
OLD = "_old"
UNREPRESENTABLE = "_unrepresentable"
SCHEMA_VERSION = "_schema_version"
"""Not in segments: destinations that keep every change number the schemas of a table with it, from 1."""

RESERVED = (OP, COMMIT_LSN, ORDINAL, COMMIT_TIME, XID, UNCHANGED, OLD, UNREPRESENTABLE, SCHEMA_VERSION)
UNREPRESENTABLE_TYPE = pa.map_(pa.string(), pa.string())
Texts = Mapping[str, pa.Array]
"""Column → the server's texts of the cells that the column's type cannot hold, NULL elsewhere. Columns without such
cells are left out. A file has all texts of a row in one map; here each text can follow its cell."""
_EXACT = {"numeric": NumericPolicy.STRING, "out_of_range": OutOfRange.KEEP}
"""Values of settings that never make different values the same."""
_ENTRY_TYPE = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())])


class Operation(IntEnum):
    """What happened to a row."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3


@dataclass(frozen=True, slots=True)
class SegmentColumn:
    """A table's column in a segment."""

    column: Column
    field_name: str
    codec: Codec
    index: int
    policy: OutOfRange = OutOfRange.KEEP
    """What happens to values that the codec rejects."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """A table's columns with their names and types in segments."""

    schema: TableSchema
    columns: tuple[SegmentColumn, ...]
    old_columns: tuple[SegmentColumn, ...]
    """The columns of `_old`: the identity; with FULL, every column; none without an identity."""
    arrow_schema: pa.Schema

    @property
    def old_type(self) -> pa.DataType | None:
        return self.arrow_schema.field(OLD).type if self.old_columns else None


def segment_layout(schema: TableSchema, settings: TypeSettings | None = None) -> SegmentLayout:
    """Choose names and types; once per schema version."""
    settings = settings or TypeSettings()
    names = field_names(schema)
    columns = tuple(
        _segment_column(column, name, index, settings.of(str(schema), column.name))
        for index, (column, name) in enumerate(zip(schema.columns, names, strict=True))
    )
    full = schema.replica_identity is ReplicaIdentity.FULL
    old_columns = tuple(column for column in columns if full or column.column.identity)
    fields = [
        pa.field(OP, pa.int8(), nullable=False),
        pa.field(COMMIT_LSN, pa.int64(), nullable=False),
        pa.field(ORDINAL, pa.int64(), nullable=False),
        pa.field(COMMIT_TIME, pa.timestamp("us", "UTC"), nullable=False),
        pa.field(XID, pa.int64(), nullable=False),
        pa.field(UNCHANGED, pa.binary()),
    ]
    if old_columns:
        old_type = pa.struct([pa.field(column.field_name, column.codec.arrow_type) for column in old_columns])
        fields.append(pa.field(OLD, old_type))
    fields += [pa.field(column.field_name, column.codec.arrow_type) for column in columns]
    return SegmentLayout(schema, columns, old_columns, pa.schema(fields))


def _segment_column(column: Column, name: str, index: int, settings: TypeSettings) -> SegmentColumn:
    codec = codec_for(column.type, column.type_modifier, settings)
    return SegmentColumn(column, name, codec, index, settings.out_of_range)


def inexact_keys(schema: TableSchema, settings: TypeSettings) -> Iterator[ConfigError]:
    """Find columns that identify rows, and in which a setting can make different values the same.

    Rows are identified by the columns of the key; with `REPLICA IDENTITY FULL` and without a key, by all columns.
    """
    if not settings.can_merge:
        return
    table = str(schema)
    whole = schema.columns if schema.replica_identity is ReplicaIdentity.FULL else ()
    for column in schema.key or whole:
        chosen = settings.of(table, column.name)
        setting = merging_setting(column.type, column.type_modifier, chosen)
        if setting is not None:
            place = f'[tables."{table}".types.columns."{column.name}"]'
            yield ConfigError(
                f'{table}: {setting} = "{getattr(chosen, setting)}" cannot be used for column {column.name!r}, which '
                "identifies rows: different rows would become the same",
                hint=f'Set {setting} = "{_EXACT[setting]}" in {place}, restart the pipeline, then copy the table '
                f"again: {RESYNC}.",
                table=table,
                column=column.name,
            )


def require_exact_key(schema: TableSchema, settings: TypeSettings) -> None:
    """Raise if a setting can make rows of a table the same; see `inexact_keys`."""
    for error in inexact_keys(schema, settings):
        raise error


def field_names(schema: TableSchema) -> tuple[str, ...]:
    """The names of the columns in segments.

    A name that collides with ours, or with another one if case is ignored (as Spark does), gets its attribute number as
    a suffix.
    """
    # In `_unrepresentable` the old value of a column stands under `_old.` and its name.
    taken: set[str] = {*RESERVED, *(fold_case(f"{OLD}.{column.name}") for column in schema.columns)}
    names: list[str] = []
    for column in schema.columns:
        name = column.name
        while fold_case(name) in taken:
            name = f"{name}#{column.attnum}"
        taken.add(fold_case(name))
        names.append(name)
    return tuple(names)


def count_unrepresentable(rows: pa.Table) -> int:
    """The number of rows with unrepresentable values."""
    if UNREPRESENTABLE not in rows.column_names:
        return 0
    return rows.num_rows - rows.column(UNREPRESENTABLE).null_count


def count_operations(rows: pa.Table) -> tuple[int, ...]:
    """The number of rows that were inserted, updated and deleted."""
    counts = np.bincount(rows.column(OP).to_numpy(), minlength=4)
    return tuple(int(count) for count in counts[1:4])


def refused_columns(schema: TableSchema, settings: TypeSettings, excluded: Collection[str] = ()) -> tuple[str, ...]:
    """The columns, by their names in segments, whose unrepresentable values stop the table (policy `error`)."""
    columns = [each for each in segment_layout(schema, settings).columns if each.column.name not in excluded]
    return tuple(column.field_name for column in columns if column.policy is OutOfRange.ERROR)


def require_representable(rows: pa.Table, table: str, table_id: int, refused: Collection[str]) -> None:
    """Raise if rows have unrepresentable values in one of the columns `refused`. The error names columns, no value."""
    if not count_unrepresentable(rows):
        return
    entries = pc.list_flatten(rows.column(UNREPRESENTABLE).cast(pa.list_(_ENTRY_TYPE)))
    found: set[str] = set(pc.struct_field(entries, 0).unique().to_pylist())
    columns = sorted(name for name in found if name in refused or name.removeprefix(f"{OLD}.") in refused)
    if columns:
        raise ValueOutOfRange(
            f"{table} has values that the types of these columns cannot hold: {', '.join(columns)}",
            hint='Choose another out_of_range policy ("keep" loses nothing) and run `penstock rollback`; or fix the '
            "values at the source and run `penstock resync`, because captured changes keep the old values.",
            table=table,
            table_id=table_id,
            columns=columns,
        )


Settled = tuple[tuple[str, OutOfRange], ...]
"""Columns, by their names in segments, whose unrepresentable values become NULL or the nearest value when they are
read."""


def settled_columns(schema: TableSchema, settings: TypeSettings, excluded: Collection[str] = ()) -> Settled:
    """The columns of a table with the policies `null` and `clamp`."""
    changing = (OutOfRange.NULL, OutOfRange.CLAMP)
    columns = [each for each in segment_layout(schema, settings).columns if each.column.name not in excluded]
    return tuple((column.field_name, column.policy) for column in columns if column.policy in changing)


def settle_rows(rows: pa.Table, settled: Settled) -> tuple[pa.Table, int]:
    """Return rows with values in place of kept texts, and the number of changed cells, without those of old rows."""
    if not settled or not count_unrepresentable(rows):
        return rows, 0
    texts = dict(split_texts(rows))
    changed = 0
    for name, policy in settled:
        if name in texts and name in rows.column_names:
            before = len(texts[name]) - texts[name].null_count
            cells, kept = settle(_whole(rows.column(name)), texts.pop(name), policy)
            changed += before
            if kept is not None:
                texts[name] = kept
                changed -= len(kept) - kept.null_count
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), cells)
        if f"{OLD}.{name}" in texts and OLD in rows.column_names:
            rows = _settle_old(rows, name, policy, texts)
    maps = join_texts(texts, rows.num_rows)
    maps = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps
    place = rows.schema.get_field_index(UNREPRESENTABLE)
    return rows.set_column(place, rows.schema.field(UNREPRESENTABLE), maps), changed


def _settle_old(rows: pa.Table, name: str, policy: OutOfRange, texts: dict[str, pa.Array]) -> pa.Table:
    old = _whole(rows.column(OLD))
    fields = list(old.type)
    arrays = [pc.struct_field(old, number) for number in range(len(fields))]
    place = next(number for number, field in enumerate(fields) if field.name == name)
    arrays[place], kept = settle(arrays[place], texts.pop(f"{OLD}.{name}"), policy)
    if kept is not None:
        texts[f"{OLD}.{name}"] = kept
    settled = pa.StructArray.from_arrays(arrays, fields=fields, mask=old.is_null())
    return rows.set_column(rows.schema.get_field_index(OLD), rows.schema.field(OLD), settled)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def split_texts(rows: pa.Table) -> Texts:
    """Split the maps of `_unrepresentable` by column."""
    if UNREPRESENTABLE not in rows.column_names:
        return {}
    maps: pa.Array = rows.column(UNREPRESENTABLE).combine_chunks()
    if isinstance(maps, pa.ChunkedArray):
        maps = maps.chunk(0) if maps.num_chunks else pa.nulls(0, UNREPRESENTABLE_TYPE)
    if maps.null_count == len(maps):
        return {}
    entries = pc.list_flatten(maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))))
    counts = pc.fill_null(pc.list_value_length(maps.cast(pa.list_(entries.type))), 0).to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(maps)), counts)
    names, values = pc.struct_field(entries, 0), pc.struct_field(entries, 1)
    found: dict[str, pa.Array] = {}
    for name in names.unique().to_pylist():
        where = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
        at = np.full(len(maps), -1, np.int64)
        at[owners[where]] = where
        found[name] = values.take(pa.array(at, mask=at < 0))
    return found


def join_texts(texts: Texts, row_count: int) -> pa.Array | None:
    """Build the maps of `_unrepresentable`; None if there is no text."""
    present = {name: column for name, column in texts.items() if column.null_count < len(column)}
    if not present:
        return None
    wheres = [np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)) for column in present.values()]
    owners = np.concatenate(wheres)
    order = np.argsort(owners, kind="stable")
    names = pa.array(np.repeat(np.array(list(present), object), [len(where) for where in wheres]), pa.string())
    values = pa.concat_arrays([column.drop_null().cast(pa.string()) for column in present.values()])
    counts = np.bincount(owners, minlength=row_count)
    borders = np.zeros(row_count + 1, np.int32)
    np.cumsum(counts, out=borders[1:])
    # A NULL offset means that the row has no map.
    offsets = pa.array(borders, mask=np.append(counts == 0, False))
    taken = pa.array(order)
    return pa.MapArray.from_arrays(offsets, names.take(taken), values.take(taken))


def unsent_cells(
    bitmaps: pa.ChunkedArray, wanted: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The rows with omitted values, and for each of them a 1 for every omitted column (with padding)."""
    present = bitmaps.is_valid().to_numpy()
    present = present if wanted is None else present & wanted
    at = np.flatnonzero(present)
    if not at.size:
        return at, np.zeros((0, 0), np.uint8)
    # All have the same number of bytes.
    content = np.frombuffer(_bytes_of(bitmaps.filter(pa.array(present))), np.uint8).reshape(len(at), -1)
    return at, np.unpackbits(content, axis=1, bitorder="little")


def names_not_sent(bitmaps: pa.ChunkedArray, names: Sequence[str]) -> pa.Array:
    """Return the names of omitted columns; NULL if none was omitted."""
    at, bits = unsent_cells(bitmaps)
    bits = bits[:, : len(names)]
    counts = np.zeros(len(bitmaps), np.int64)
    counts[at] = bits.sum(axis=1)
    offsets = np.zeros(len(bitmaps) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(bits)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), values)


def pack_unsent(flags: NDArray[np.bool_]) -> pa.Array:
    """The bitmaps of `_unchanged` from a row of flags for each change, one per column; see `unsent_cells`."""
    some = flags.any(axis=1)
    bits = np.packbits(flags[some], axis=1, bitorder="little")
    offsets = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(some * bits.shape[1], out=offsets[1:])
    validity = pa.array(some).buffers()[1]
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(bits))]
    return pa.Array.from_buffers(pa.binary(), len(flags), buffers)


def _bytes_of(values: pa.ChunkedArray) -> bytes:
    """The concatenated bytes of a column without NULL."""
    array = pa.concat_arrays(values.chunks).cast(pa.large_binary())
    ends = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    return array.buffers()[2][int(ends[0]) : int(ends[-1])].to_pybytes()
