"""Mode `history`: every change is a row, in the order of `_commit_lsn` and `_ordinal`.

Rows of a copy have `_op` `copy`; a row `resync` precedes those of a later copy, and a row `truncate` stands for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.batch import Rows
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    XID,
    Operation,
    Texts,
    field_names,
    names_not_sent,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import read_segment
from penstock.destinations.postgres.encoding import Cells, cells_of, copy_text, printed
from penstock.destinations.postgres.layout import OWN_COLUMNS, Layout, Mode, Target
from penstock.destinations.postgres.server import Session
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.values.cells import large_text
from penstock.values.cells import layout as layout_of

COPIED, TRUNCATED, COPIED_AGAIN = "copy", "truncate", "resync"
BEFORE_ALL = -1
"""`_ordinal` of a copied row, which precedes the changes at the copy's position."""
_OPERATIONS = pa.array([None, *(operation.name.lower() for operation in Operation)])
"""By number."""
_OWN = tuple(OWN_COLUMNS[Mode.HISTORY])
_TIME = pa.timestamp("us", "UTC")


def append_rows(session: Session, target: Target, layout: Layout, step: Rows) -> None:
    """Append changes."""
    schema = step.schema
    names = [layout.names[column.attnum] for column in schema.columns]
    for segment in step.segments:
        rows = read_segment(segment)
        texts = split_texts(rows)
        head = {
            OP: _OPERATIONS.take(rows.column(OP).combine_chunks().cast(pa.int64())),
            COMMIT_LSN: rows.column(COMMIT_LSN),
            ORDINAL: rows.column(ORDINAL),
            COMMIT_TIME: rows.column(COMMIT_TIME),
            XID: rows.column(XID),
            SCHEMA_VERSION: pa.repeat(pa.scalar(layout.version), rows.num_rows),
            UNCHANGED: names_not_sent(rows.column(UNCHANGED), names),
            OLD: old_as_json(rows, texts, schema, names),
        }
        cells = [*(Cells(_whole(column)) for column in head.values()), *cells_of(rows, texts, schema)]
        session.copy(target.sql, [*head, *names], copy_text(cells, rows.num_rows))


def copied_cells(rows: pa.Table, schema: TableSchema, position: Lsn, version: int) -> list[Cells]:
    """Return the cells of copied rows, in the order of `copied_columns`."""
    count = rows.num_rows
    head = (pa.scalar(COPIED), pa.scalar(int(position), pa.int64()), pa.scalar(BEFORE_ALL, pa.int64()))
    own = [pa.repeat(value, count) for value in (*head, pa.scalar(version))]
    return [*map(Cells, own), *cells_of(rows, split_texts(rows), schema)]


def copied_columns(layout: Layout) -> list[str]:
    """Return the columns of copied rows."""
    return [OP, COMMIT_LSN, ORDINAL, SCHEMA_VERSION, *layout.columns]


def append_truncate(session: Session, target: Target, layout: Layout, step: Truncation) -> None:
    """Append the row of a truncate."""
    session.run(
        f"insert into {target.sql} ({OP}, {COMMIT_LSN}, {ORDINAL}, {COMMIT_TIME}, {SCHEMA_VERSION}) "
        f"values ('{TRUNCATED}', {int(step.key.commit_lsn)}, {step.key.ordinal}, "
        f"timestamptz 'epoch' + interval '{step.commit_time} microseconds', {layout.version})"
    )


def append_copy_marker(session: Session, target: Target, layout: Layout, position: Lsn) -> None:
    """Append the row that precedes a later copy: rows from before it no longer count as the table's rows."""
    session.run(
        f"insert into {target.sql} ({OP}, {COMMIT_LSN}, {ORDINAL}, {SCHEMA_VERSION}) "
        f"values ('{COPIED_AGAIN}', {int(position)}, {BEFORE_ALL - 1}, {layout.version})"
    )


def old_as_json(rows: pa.Table, texts: Texts, schema: TableSchema, names: Sequence[str]) -> pa.Array:
    """Return the identity before a change as JSON, with the server's text of each value; NULL if it was not sent."""
    if OLD not in rows.column_names or rows.column(OLD).null_count == rows.num_rows:
        return pa.nulls(rows.num_rows, pa.large_string())
    old = _whole(rows.column(OLD))
    places = dict(zip(field_names(schema), zip(names, schema.columns, strict=True), strict=True))
    parts: list[pa.Array] = []
    for number, field in enumerate(old.type):
        name, column = places[field.name]
        text = printed(Cells(pc.struct_field(old, number), column.type, texts.get(f"{OLD}.{field.name}")))
        quoted = pc.binary_join_element_wise(large_text('"'), _json(text), large_text('"'), large_text(""))
        label = _json(pa.array([name], pa.large_string()))[0].as_py()
        value = pc.fill_null(quoted, "null")
        parts.append(pc.binary_join_element_wise(large_text(f'"{label}": '), value, large_text("")))
    inside = pc.binary_join_element_wise(*parts, large_text(", "))
    whole = pc.binary_join_element_wise(large_text("{"), inside, large_text("}"), large_text(""))
    return pc.if_else(old.is_valid(), whole, pa.scalar(None, pa.large_string()))


def _json(text: pa.Array) -> pa.Array:
    """Return texts with what JSON escapes."""
    _, data = layout_of(text)
    for character in ("\\", '"'):
        if (data == ord(character)).any():
            text = pc.replace_substring(text, character, f"\\{character}")
    # Few texts have control characters, and there are few of them.
    for code in sorted({int(byte) for byte in data[data < 0x20]}):
        text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return text


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
