"""The changes of one table as columns: all steps of a batch, in the shape of their last schema.

A column is followed by its attribute number. Rows from before it was added have NULL in it, as the source has for an
added column without a default; or the constant that the source has in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.segment import (
    COMMIT_TIME,
    OLD,
    OP,
    UNCHANGED,
    UNREPRESENTABLE,
    Operation,
    Texts,
    field_names,
    split_texts,
    unsent_cells,
)
from penstock.changes.steps import Segment
from penstock.errors import ValuesNotSent
from penstock.schema import Column, ReplicaIdentity, TableSchema
from penstock.values import TypeSettings, codec_for

_Column = TypeVar("_Column")

LARGE_BYTES = 1 << 30
"""Size of a column from which its texts get 64-bit offsets. One transaction may be that large."""
_SMALL_BYTES = 1 << 18
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


@dataclass(frozen=True, slots=True)
class ChangeColumns:
    """Changes in order; every array has one element per change unless stated otherwise."""

    schema: TableSchema
    operations: NDArray[np.int8]
    commit_times: NDArray[np.int64]
    """Microseconds since the epoch."""
    rows: pa.Table
    """The table's columns, by their names in segments, each in one chunk."""
    texts: Texts
    """Texts of unrepresentable values."""
    not_sent: Mapping[str, NDArray[np.bool_]]
    """Which values of inserts and updates the server omitted; columns without omitted values are left out."""
    old_at: NDArray[np.int64]
    """The changes that came with the row's old identity, in order."""
    old: pa.Table
    """That identity, one row for each of `old_at`."""
    old_texts: Texts

    @property
    def count(self) -> int:
        return len(self.operations)

    def fitted(self, names: Mapping[str, str], convert: Callable[[pa.Table], pa.Table]) -> ChangeColumns:
        """The same changes with renamed columns, converted to types that hold the same values."""
        return replace(
            self,
            rows=convert(_rename_table(self.rows, names)).combine_chunks(),
            texts=_rename(self.texts, names),
            not_sent=_rename(self.not_sent, names),
            old=convert(_rename_table(self.old, names)).combine_chunks(),
            old_texts=_rename(self.old_texts, names),
        )


def read_changes(
    steps: Sequence[Rows], schema: TableSchema, constants: Mapping[str, pa.Scalar] | None = None
) -> ChangeColumns:
    """Read the segments of steps, in order; `schema` is that of the last step.

    `constants` are what rows from before a column was added have in it, by the column's name in segments.
    """
    parts = [_read_step(step, schema, constants or {}) for step in steps]
    return parts[0] if len(parts) == 1 else concatenate_changes(parts, schema)


def constant_of(table: str, column: Column, type_: pa.DataType) -> pa.Scalar:
    """Return the value of existing rows in an added column of this type; raise `ValuesNotSent` if it is unknown."""
    if column.missing is None and not column.backfilled:
        return pa.scalar(None, type_)
    if column.missing is None:
        raise ValuesNotSent(
            f"{table}: the server did not send the values of existing rows for the added column {column.name}",
            table=table,
        )
    codec = codec_for(column.type, column.type_modifier, TypeSettings())
    decoded = codec.decode(pa.array([column.missing], pa.large_string()))
    if decoded.rejected is not None or codec.arrow_type != type_:
        raise ValuesNotSent(
            f"{table}: the server did not send the values of existing rows for the added column {column.name}, and "
            "the destination's type cannot hold its default",
            table=table,
        )
    return decoded.array[0]


def unidentified(table: str) -> ValuesNotSent:
    """The error of an update or delete that does not say which row it concerns."""
    return ValuesNotSent(
        f"{table}: an update or a delete came without the values that say which row it concerns; the replica identity "
        "of the table or of one of its partitions has changed",
        table=table,
    )


def concatenate_texts(texts: Sequence[Texts], counts: Sequence[int]) -> dict[str, pa.Array]:
    """Concatenate the texts of tables with `counts` rows."""
    names = {name for each in texts for name in each}
    return {
        name: pa.concat_arrays(
            [
                each[name].cast(pa.string()) if name in each else pa.nulls(count, pa.string())
                for each, count in zip(texts, counts, strict=True)
            ]
        )
        for name in names
    }


def in_one_piece(table: pa.Table) -> pa.Table:
    """The table with one chunk per column, and 64-bit offsets where 32 bits might not be enough."""
    for number, field in enumerate(table.schema):
        large = _large(field.type)
        if large != field.type and table.column(number).nbytes > LARGE_BYTES:
            table = table.set_column(number, field.name, table.column(number).cast(large))
    return table.combine_chunks()


def _read_step(step: Rows, schema: TableSchema, constants: Mapping[str, pa.Scalar]) -> ChangeColumns:
    wanted = {OP, COMMIT_TIME, UNCHANGED, OLD, UNREPRESENTABLE, *field_names(step.schema)}
    tables = [segment.read(_columns(segment, wanted)) for segment in step.segments]
    table = in_one_piece(pa.concat_tables(tables, promote_options="default"))
    operations = table.column(OP).to_numpy()
    renamed = _renamed(step.schema, schema)
    rows = pa.table({name: table.column(before) for name, before in renamed.items()})
    not_sent = _not_sent(table, operations, step.schema, renamed)
    all_texts = split_texts(table)
    texts = {name: all_texts[before] for name, before in renamed.items() if before in all_texts}
    old_at, old, old_texts = _old(table, all_texts, renamed)
    if len(old_at) and not_sent:
        # Of FULL the whole row is there; otherwise its key, which may be too large to be sent twice.
        rows, texts, not_sent = _fill_from_old(rows, texts, not_sent, old_at, old, old_texts)
    _require_identified(step.schema, operations, (rows, texts), (old_at, old, old_texts), renamed)
    added = [name for name in field_names(schema) if name not in renamed]
    if added:
        rows = _with_added(rows, schema, constants)
        if old_at.size and schema.replica_identity is ReplicaIdentity.FULL:
            old = _with_added(old, schema, constants)
    times = table.column(COMMIT_TIME).cast(pa.int64()).to_numpy()
    return ChangeColumns(schema, operations, times, rows, texts, not_sent, old_at, old, old_texts)


def _require_identified(
    schema: TableSchema,
    operations: NDArray[np.int8],
    new: tuple[pa.Table, Texts],
    old: tuple[NDArray[np.int64], pa.Table, Texts],
    renamed: Mapping[str, str],
) -> None:
    """Raise unless every update and delete says which row it concerns. Columns of a key are never NULL."""
    old_at, old_rows, old_texts = old
    if schema.key:
        key = {name for column, name in zip(schema.columns, field_names(schema), strict=True) if column in schema.key}
        names = [name for name, before in renamed.items() if before in key]
        images = (new, (old_rows, old_texts)) if len(old_at) else (new,)
        is_known = all(
            name in rows.column_names and _is_known(rows.column(name), texts.get(name))
            for name in names
            for rows, texts in images
        )
    elif schema.replica_identity is ReplicaIdentity.FULL:
        is_known = bool((operations[old_at] == Operation.UPDATE).sum() == (operations == Operation.UPDATE).sum())
    else:
        is_known = bool((operations == Operation.INSERT).all())
    if not is_known:
        raise unidentified(str(schema))


def _is_known(cells: pa.ChunkedArray, texts: pa.Array | None) -> bool:
    if not cells.null_count:
        return True
    return texts is not None and not pc.any(pc.and_(cells.is_null(), texts.is_null())).as_py()


def _columns(segment: Segment, wanted: set[str]) -> list[str] | None:
    """The columns to read from a file (not all have texts or an old identity); None for all."""
    if segment.bytes < _SMALL_BYTES or segment.transform is not None:
        # Reading the file's schema first would take longer than reading unneeded columns; a transform chooses itself.
        return None
    return [name for name in segment.arrow_schema().names if name in wanted]


def _renamed(before: TableSchema, after: TableSchema) -> dict[str, str]:
    """The columns that both schemas have: current name → name in the files."""
    names = {column.attnum: name for column, name in zip(before.columns, field_names(before), strict=True)}
    pairs = zip(after.columns, field_names(after), strict=True)
    return {name: names[column.attnum] for column, name in pairs if column.attnum in names}


def _not_sent(
    table: pa.Table, operations: NDArray[np.int8], schema: TableSchema, renamed: Mapping[str, str]
) -> dict[str, NDArray[np.bool_]]:
    at, bits = unsent_cells(table.column(UNCHANGED), operations != Operation.DELETE)
    places = {name: index for index, name in enumerate(field_names(schema))}
    found: dict[str, NDArray[np.bool_]] = {}
    for name, before in renamed.items():
        column = bits[:, places[before]].astype(np.bool_) if len(at) else np.zeros(0, np.bool_)
        if column.any():
            found[name] = np.zeros(len(operations), np.bool_)
            found[name][at] = column
    return found


def _old(
    table: pa.Table, texts: Texts, renamed: Mapping[str, str]
) -> tuple[NDArray[np.int64], pa.Table, dict[str, pa.Array]]:
    if OLD not in table.column_names or table.column(OLD).null_count == table.num_rows:
        return np.zeros(0, np.int64), pa.table({}), {}
    whole = table.column(OLD)
    at = np.flatnonzero(whole.is_valid().to_numpy())
    taken = whole.take(pa.array(at)).combine_chunks()
    # By number: Arrow takes a name that begins with a dot for a path.
    places = {field.name: number for number, field in enumerate(whole.type)}
    columns = {name: pc.struct_field(taken, places[before]) for name, before in renamed.items() if before in places}
    prefixed = {name: f"{OLD}.{before}" for name, before in renamed.items()}
    old_texts = {name: texts[there].take(pa.array(at)) for name, there in prefixed.items() if there in texts}
    return at, pa.table(columns), old_texts


def _fill_from_old(
    rows: pa.Table,
    texts: Texts,
    not_sent: Mapping[str, NDArray[np.bool_]],
    old_at: NDArray[np.int64],
    old: pa.Table,
    old_texts: Texts,
) -> tuple[pa.Table, Texts, dict[str, NDArray[np.bool_]]]:
    """Take omitted values from the old image of the same change, if there is one."""
    filled = dict(texts)
    left: dict[str, NDArray[np.bool_]] = {}
    place = np.full(rows.num_rows, -1, np.int64)
    place[old_at] = np.arange(len(old_at))
    for name, missing in not_sent.items():
        if name not in old.column_names:
            left[name] = missing
            continue
        known = missing & (place >= 0)
        index = np.where(known, rows.num_rows + place, np.arange(rows.num_rows))
        sent = _array(rows.column(name))
        cells = pa.concat_arrays([sent, _array(old.column(name)).cast(sent.type)])
        rows = rows.set_column(rows.schema.get_field_index(name), name, cells.take(pa.array(index)))
        if name in filled or name in old_texts:
            both = [filled.get(name, pa.nulls(rows.num_rows, pa.string())), old_texts.get(name)]
            both[1] = both[1] if both[1] is not None else pa.nulls(len(old_at), pa.string())
            filled[name] = pa.concat_arrays(both).take(pa.array(index))
        if (missing & ~known).any():
            left[name] = missing & ~known
    return rows, filled, left


def _with_added(rows: pa.Table, schema: TableSchema, constants: Mapping[str, pa.Scalar]) -> pa.Table:
    """All columns of a schema, in its order. Missing ones are a constant, or NULL of unknown type."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in field_names(schema):
        if name in rows.column_names:
            columns[name] = rows.column(name)
        elif name in constants:
            columns[name] = pa.repeat(constants[name], rows.num_rows)
        else:
            columns[name] = pa.nulls(rows.num_rows)
    return pa.table(columns)


def concatenate_changes(parts: Sequence[ChangeColumns], schema: TableSchema) -> ChangeColumns:
    """Return changes of one schema one after the other."""
    borders = np.cumsum([0, *(part.count for part in parts)])
    names = {name for part in parts for name in part.not_sent}
    not_sent = {
        name: np.concatenate([part.not_sent.get(name, np.zeros(part.count, np.bool_)) for part in parts])
        for name in names
    }
    return ChangeColumns(
        schema,
        np.concatenate([part.operations for part in parts]),
        np.concatenate([part.commit_times for part in parts]),
        _concatenate_tables([part.rows for part in parts]),
        concatenate_texts([part.texts for part in parts], [part.count for part in parts]),
        not_sent,
        np.concatenate([part.old_at + border for part, border in zip(parts, borders, strict=False)]),
        _concatenate_tables([part.old for part in parts if len(part.old_at)]),
        concatenate_texts([part.old_texts for part in parts], [len(part.old_at) for part in parts]),
    )


def _concatenate_tables(tables: Sequence[pa.Table]) -> pa.Table:
    return in_one_piece(pa.concat_tables(tables, promote_options="permissive")) if tables else pa.table({})


def _large(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_large(field.type)) for field in type_])
    return _LARGE.get(type_, type_)


def _rename_table(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    renamed = [names.get(name, name) for name in table.column_names]
    return table if renamed == table.column_names else table.rename_columns(renamed)


def _rename(columns: Mapping[str, _Column], names: Mapping[str, str]) -> dict[str, _Column]:
    return {names.get(name, name): column for name, column in columns.items()}


def _array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
