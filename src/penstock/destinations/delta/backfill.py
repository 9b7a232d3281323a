"""A column that is added with a constant: the files that are there are written anew with it.

The source keeps the constant in its catalog and rewrites nothing. A Delta table has no such thing: readers would see
NULL in rows from before. So tasks write the files again, each file an item, and the batch that brings the column
exchanges them in its own commit: readers see all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import LiveFile, dead_rows
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import rewrite
from penstock.destinations.refusals import unexpected
from penstock.errors import PenstockError, ValuesNotSent
from penstock.schema import Column
from penstock.values import TypeSettings, codec_for


@dataclass(frozen=True, slots=True)
class Backfill:
    """One file that is to get columns, for a task."""

    table: str
    storage: Storage
    layout: TableLayout
    """With the columns."""
    file: LiveFile
    constants: Mapping[str, pa.Scalar]
    """By the columns' names in the lake, in the types that they have there."""


def backfill(item: Backfill) -> Add | PenstockError | None:
    """Write a file's live rows with the columns; None if there are no such rows. Errors are values."""
    try:
        dead = dead_rows(item.storage, item.file)
        return rewrite(item.storage, item.layout, item.file, dead, constants=item.constants)
    except Exception as error:
        return unexpected(item.table, error)


def backfills(
    table: str,
    storage: Storage,
    layout: TableLayout,
    files: Sequence[LiveFile],
    constants: Mapping[str, pa.Scalar],
) -> tuple[Backfill, ...]:
    """What has to be done for a table; `constants` are by names in segments."""
    named = pa.table({layout.renames[name]: pa.array([value], value.type) for name, value in constants.items()})
    fitted = layout.fit(named)
    lake = {name: fitted.column(name)[0] for name in fitted.column_names}
    return tuple(Backfill(table, storage, layout, file, lake) for file in files)


def constant_of(table: str, column: Column, type_: pa.DataType) -> pa.Scalar:
    """What rows from before have in a column whose segments have this type; `ValuesNotSent` if that cannot be told."""
    codec = codec_for(column.type, column.type_modifier, TypeSettings())
    decoded = codec.decode(pa.array([column.missing], pa.large_string()))
    if decoded.rejected is not None or codec.arrow_type != type_:
        raise ValuesNotSent(
            f"{table}: what rows from before have in the added column {column.name} is not in the stream, and its "
            "default is none that the lake's type can hold",
            table=table,
        )
    return decoded.array[0]
