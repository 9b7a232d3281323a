"""What tasks write: new rows with their index, and which rows of other files are dead from now on.

Nothing here changes a file. Every name is new, so a task that runs twice, or at the same time, leaves files that no
commit names, and nobody sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.compaction import LIVE, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Texts, join_texts, split_texts
from penstock.destinations.delta.actions import Add, VectorDescriptor
from penstock.destinations.delta.files import LiveFile, read_rows, remember, write_data_file
from penstock.destinations.delta.index import FileMatch, build_index, index_folder
from penstock.destinations.delta.layout import DELETED_AT, Mode, TableLayout
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, write_vectors

PIECE_BYTES = 256 << 20
"""Of new rows that are one chunk of a column; no four of them together reach the end of 32 bits."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a task did for a table: the driver makes a commit of it."""

    added: tuple[Add, ...] = ()
    """New files."""
    vectors: tuple[tuple[str, VectorDescriptor], ...] = ()
    """Files of which more rows are dead now, by their path in the log."""
    removed: tuple[str, ...] = ()
    """Files of which nothing is left."""
    row_count: int = 0
    """New rows."""
    dead_count: int = 0
    """Rows that were live before."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """How long each step took."""


def assemble(net: NetChanges, layout: TableLayout) -> pa.Table:
    """The new rows, as the lake has them."""
    rows, texts = net.rows()
    if layout.mode is Mode.SOFT_DELETE:
        assert net.gone_at is not None
        times = pa.array(net.gone_at, pa.int64(), mask=net.gone_at == LIVE).cast(pa.timestamp("us", "UTC"))
        rows = rows.append_column(DELETED_AT, times)
    return lake_rows(rows, texts, layout)


def lake_rows(rows: pa.Table, texts: Texts, layout: TableLayout) -> pa.Table:
    """Rows in the columns of the lake; the texts of cells only if there are some."""
    maps = join_texts(texts, rows.num_rows) if texts else None
    schema = pa.schema([field for field in layout.schema if maps is not None or field.name != UNREPRESENTABLE])
    rows = rows if maps is None else rows.append_column(UNREPRESENTABLE, maps)
    pieces = -(-rows.nbytes // PIECE_BYTES)
    if pieces <= 1:
        return fit(rows, schema)
    # The lake's texts have offsets of 32 bits.
    size = -(-rows.num_rows // pieces)
    return pa.concat_tables([fit(rows.slice(start, size), schema) for start in range(0, rows.num_rows, size)])


def write_rows(storage: Storage, layout: TableLayout, rows: pa.Table, keys: pa.Array | None = None) -> Add:
    """Write rows as a new file with its index, durably; `keys` are theirs, if somebody has them already."""
    add = write_data_file(storage, rows)
    if layout.key and layout.mode is not Mode.HISTORY:
        if keys is None:
            rows = rows.combine_chunks()
            keys = keys_of(rows, split_texts(rows), layout.key)
        index_folder(storage, layout).write(add.file, build_index(keys))
    return add


def bury(storage: Storage, matches: Sequence[FileMatch]) -> Written:
    """Mark rows as dead: by vectors, or by leaving out files of which nothing lives on."""
    spent = [match for match in matches if len(match.dead) + len(match.rows) == match.row_count]
    partly = [match for match in matches if len(match.dead) + len(match.rows) < match.row_count]
    vectors = [match.dead.union(Vector.of(match.rows)) for match in partly]
    descriptors = write_vectors(storage, vectors)
    for descriptor, vector in zip(descriptors, vectors, strict=True):
        remember(storage, descriptor, vector)
    return Written(
        vectors=tuple((match.file.path, each) for match, each in zip(partly, descriptors, strict=True)),
        removed=tuple(match.file.path for match in spent),
        dead_count=sum(len(match.rows) for match in matches),
    )


def rewrite(
    storage: Storage,
    layout: TableLayout,
    file: LiveFile,
    dead: Vector,
    *,
    deleted_at: int | None = None,
    constants: Mapping[str, pa.Scalar] | None = None,
) -> Add | None:
    """Write what lives on of a file as a new one; None if that is nothing.

    With `deleted_at` its rows are deleted softly, those that are not yet; `constants` take the place of columns.
    """
    rows = read_rows(storage, file.file, layout.schema, layout.schema.names)
    rows = rows.filter(pa.array(dead.alive(rows.num_rows)))
    if not rows.num_rows:
        return None
    if deleted_at is not None:
        moment = pa.scalar(deleted_at, pa.timestamp("us", "UTC"))
        times = pc.fill_null(rows.column(DELETED_AT), moment)
        rows = rows.set_column(rows.schema.get_field_index(DELETED_AT), DELETED_AT, times)
    for name, value in (constants or {}).items():
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.repeat(value, rows.num_rows))
    return write_rows(storage, layout, rows)
