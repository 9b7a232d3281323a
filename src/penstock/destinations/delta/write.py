"""The files that tasks write: new rows with their index, vectors of dead rows, and, in mode `history`, every change as
a row.

Nothing here changes a file. Every name is new, so a task that runs twice leaves files that no commit names and no
reader sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.batch import Rows
from penstock.changes.compaction import LIVE, NetChanges, keys_of
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
    Operation,
    Texts,
    field_names,
    join_texts,
    names_not_sent,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import read_segment
from penstock.destinations.delta.actions import Add, VectorDescriptor
from penstock.destinations.delta.files import (
    LiveFile,
    create_data_file,
    iterate_data_file,
    read_rows,
    remember,
    write_data_file,
)
from penstock.destinations.delta.index import FileMatch, build_index, index_folder
from penstock.destinations.delta.layout import DELETED_AT, Mode, TableLayout
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, vector_file, write_vectors
from penstock.destinations.shared_place import require_written, unseen
from penstock.lsn import Lsn
from penstock.schema import TableSchema

PIECE_BYTES = 256 << 20
"""Size of new rows that form one chunk of a column; four of them stay below the limit of 32-bit offsets."""
COPIED, TRUNCATED, COPIED_AGAIN = "copy", "truncate", "resync"
BEFORE_ALL = -1
"""`_ordinal` of a copied row, which precedes the changes at the copy's position."""
_OPERATIONS = (None, *(operation.name.lower() for operation in Operation))
"""By number."""
_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files that a task wrote for a table; the driver commits them."""

    added: tuple[Add, ...] = ()
    """New files."""
    vectors: tuple[tuple[str, VectorDescriptor], ...] = ()
    """Files with more dead rows than before, by path in the log."""
    removed: tuple[str, ...] = ()
    """Files without live rows."""
    row_count: int = 0
    """New rows."""
    dead_count: int = 0
    """Rows that were live before."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """How long each step took."""

    @classmethod
    def all_of(cls, parts: Sequence[WrittenFiles]) -> WrittenFiles:
        """Return the files of several tasks, which concern different files of the table."""
        seconds: dict[str, float] = {}
        for step, each in (item for part in parts for item in part.seconds.items()):
            seconds[step] = seconds.get(step, 0.0) + each
        return cls(
            added=tuple(each for part in parts for each in part.added),
            vectors=tuple(each for part in parts for each in part.vectors),
            removed=tuple(each for part in parts for each in part.removed),
            row_count=sum(part.row_count for part in parts),
            dead_count=sum(part.dead_count for part in parts),
            seconds=seconds,
        )


def require_listed(table: str, storage: Storage, added: Iterable[Add]) -> None:
    """Raise `DestinationUnavailable` if the driver does not see a file, or sees it with another size."""
    sizes = {file.path: file.bytes for file in storage.list()}
    for add in added:
        if sizes.get(add.file) != add.size:
            raise unseen(table, f"{storage.url}/{add.file}")


def require_seen(table: str, storage: Storage, written: WrittenFiles) -> None:
    """Do the same for the files of a batch, and their vectors, if they are in a folder.

    An object store is not asked in every batch: its URL means the same place everywhere.
    """
    vectors = (vector_file(vector) for _, vector in written.vectors)
    files = [*((add.file, add.size) for add in written.added), *((name, None) for name in vectors if name is not None)]
    paths = ((storage.local_path(name), size) for name, size in files)
    require_written(table, ((path, size) for path, size in paths if path is not None))


def assemble(net: NetChanges, layout: TableLayout) -> pa.Table:
    """Return the new rows with the columns of the lake."""
    rows, texts = net.rows()
    if layout.mode is Mode.SOFT_DELETE:
        assert net.gone_at is not None
        times = pa.array(net.gone_at, pa.int64(), mask=net.gone_at == LIVE).cast(pa.timestamp("us", "UTC"))
        rows = rows.append_column(DELETED_AT, times)
    return lake_rows(rows, texts, layout)


def lake_rows(rows: pa.Table, texts: Texts, layout: TableLayout) -> pa.Table:
    """Return rows with the columns of the lake; the texts of cells only if there are some."""
    maps = join_texts(texts, rows.num_rows) if texts else None
    schema = pa.schema([field for field in layout.schema if maps is not None or field.name != UNREPRESENTABLE])
    rows = rows if maps is None else rows.append_column(UNREPRESENTABLE, maps)
    pieces = -(-rows.nbytes // PIECE_BYTES)
    if pieces <= 1:
        return fit(rows, schema)
    # Texts in the lake have 32-bit offsets.
    size = -(-rows.num_rows // pieces)
    return pa.concat_tables([fit(rows.slice(start, size), schema) for start in range(0, rows.num_rows, size)])


def write_rows(storage: Storage, layout: TableLayout, rows: pa.Table, keys: pa.Array | None = None) -> Add:
    """Write rows as a new file with its index, durably; `keys` are the rows' keys, if the caller has them."""
    add = write_data_file(storage, rows)
    if layout.key and layout.mode is not Mode.HISTORY:
        if keys is None:
            rows = rows.combine_chunks()
            keys = keys_of(rows, split_texts(rows), layout.key)
        index_folder(storage, layout).write(add.file, build_index(keys))
    return add


@dataclass(frozen=True, slots=True)
class LostRows:
    """A file that has lost rows."""

    file: LiveFile
    row_count: int
    """Rows in the whole file."""
    dead: Vector
    """All dead rows."""
    count: int
    """How many of them were live before."""

    @classmethod
    def of(cls, match: FileMatch, count: int = 0) -> LostRows:
        """Return the file without the rows of a match; it had lost `count` rows before."""
        return cls(match.file, match.row_count, match.dead.union(Vector.of(match.rows)), count + len(match.rows))


def bury(
    storage: Storage, layout: TableLayout, files: Sequence[LostRows], *, deletion_vectors: bool = True
) -> WrittenFiles:
    """Remove rows: by removing files without live rows, by vectors, or, without these, by rewriting the files."""
    spent = [each for each in files if len(each.dead) == each.row_count]
    partly = [each for each in files if len(each.dead) < each.row_count]
    count = sum(each.count for each in files)
    if not deletion_vectors:
        added = [rewrite(storage, layout, each.file, each.dead) for each in partly]
        return WrittenFiles(
            added=tuple(add for add in added if add is not None),
            removed=tuple(each.file.path for each in files),
            dead_count=count,
        )
    descriptors = write_vectors(storage, [each.dead for each in partly])
    for each, descriptor in zip(partly, descriptors, strict=True):
        remember(storage, descriptor, each.dead)
    return WrittenFiles(
        vectors=tuple((each.file.path, descriptor) for each, descriptor in zip(partly, descriptors, strict=True)),
        removed=tuple(each.file.path for each in spent),
        dead_count=count,
    )


def rewrite(
    storage: Storage, layout: TableLayout, file: LiveFile, dead: Vector, *, deleted_at: int | None = None
) -> Add | None:
    """Write the remaining rows of a file as a new file; None if there are none.

    With `deleted_at` rows that are not yet deleted are soft-deleted.
    """
    rows = read_rows(storage, file.file, layout.schema, layout.schema.names)
    rows = rows.filter(pa.array(dead.alive(rows.num_rows)))
    if not rows.num_rows:
        return None
    if deleted_at is not None:
        moment = pa.scalar(deleted_at, pa.timestamp("us", "UTC"))
        times = pc.fill_null(rows.column(DELETED_AT), moment)
        rows = rows.set_column(rows.schema.get_field_index(DELETED_AT), DELETED_AT, times)
    return write_rows(storage, layout, rows)


def relay_file(
    storage: Storage,
    file: LiveFile,
    dead: Vector,
    before: TableLayout,
    layout: TableLayout,
    constants: Mapping[str, pa.Scalar],
) -> Add | None:
    """Write the remaining rows of a file as a new file in another layout, piece by piece; None if there are none.

    Columns are followed by their attribute numbers. An added column has its constant, or NULL.
    """
    with_index = bool(layout.key) and layout.mode is not Mode.HISTORY
    keys: list[pa.Array] = []
    with create_data_file(storage, layout.schema) as new:
        for rows in iterate_data_file(storage, file, before.schema, dead):
            if rows.num_rows:
                piece = _relaid(rows, before, layout, constants)
                new.write(piece)
                if with_index:
                    keys.append(keys_of(piece.combine_chunks(), split_texts(piece), layout.key))
    if not new.rows:
        storage.delete([new.name])
        return None
    if with_index:
        index_folder(storage, layout).write(new.name, build_index(pa.concat_arrays(keys)))
    return new.action()


def _relaid(rows: pa.Table, before: TableLayout, layout: TableLayout, constants: Mapping[str, pa.Scalar]) -> pa.Table:
    now = {name: layout.names[attnum] for attnum, name in before.names.items() if attnum in layout.names}
    # Columns that stay although the source has dropped them.
    now |= {name: name for name in layout.schema.names if name in before.columns and name not in layout.names.values()}
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in rows.column_names:
        if name in now:
            columns[now[name]] = rows.column(name)
        elif name == UNREPRESENTABLE:
            texts = {now[each]: column for each, column in split_texts(rows).items() if each in now}
            maps = join_texts(texts, rows.num_rows)
            columns |= {} if maps is None else {UNREPRESENTABLE: maps}
        elif name not in before.columns:
            columns[name] = rows.column(name)
    columns |= {name: pa.repeat(value, rows.num_rows) for name, value in constants.items()}
    # Without any column there would be no rows to count.
    return fit(pa.table(columns or {"": pa.nulls(rows.num_rows)}), layout.schema)


def history_rows(
    steps: Sequence[Rows | Truncation],
    stages: Sequence[TableLayout],
    layout: TableLayout,
    piece_rows: int,
    piece_bytes: int,
) -> Iterator[pa.Table]:
    """Yield the changes of a batch, in order, in pieces of at least `piece_rows` rows or `piece_bytes`.

    `stages` are the layouts at the steps, `layout` is the last one.
    """
    parts: list[pa.Table] = []
    for part in _history(steps, stages, layout):
        parts.append(part)
        if sum(each.num_rows for each in parts) >= piece_rows or sum(each.nbytes for each in parts) >= piece_bytes:
            yield _joined(parts, layout)
            parts = []
    if any(part.num_rows for part in parts):
        yield _joined(parts, layout)


def _history(
    steps: Sequence[Rows | Truncation], stages: Sequence[TableLayout], layout: TableLayout
) -> Iterator[pa.Table]:
    for step, stage in zip(steps, stages, strict=True):
        if isinstance(step, Truncation):
            yield _versioned(_truncated(step), stage)
        else:
            for segment in step.segments:
                yield _versioned(_changes(read_segment(segment), step.schema, stage, layout), stage)


def _joined(parts: Sequence[pa.Table], layout: TableLayout) -> pa.Table:
    has_texts = any(UNREPRESENTABLE in part.column_names for part in parts)
    schema = pa.schema([field for field in layout.schema if has_texts or field.name != UNREPRESENTABLE])
    return pa.concat_tables([fit(part, schema) for part in parts])


def copied_rows(rows: pa.Table, position: Lsn, layout: TableLayout) -> pa.Table:
    """Return rows of a copy, which are named as in the lake, in the form of changes."""
    head = {
        OP: pa.repeat(pa.scalar(COPIED), rows.num_rows),
        COMMIT_LSN: pa.repeat(pa.scalar(int(position), pa.int64()), rows.num_rows),
        ORDINAL: pa.repeat(pa.scalar(BEFORE_ALL, pa.int64()), rows.num_rows),
    }
    for number, (name, column) in enumerate(head.items()):
        rows = rows.add_column(number, name, column)
    return _versioned(rows, layout)


def copy_marker(position: Lsn, layout: TableLayout) -> pa.Table:
    """Return the row that precedes a new copy in a log: rows from before it no longer count as the table's rows."""
    row = {OP: [COPIED_AGAIN], COMMIT_LSN: [int(position)], ORDINAL: [BEFORE_ALL - 1]}
    return lake_rows(_versioned(pa.table(row), layout), {}, layout)


def _versioned(rows: pa.Table, layout: TableLayout) -> pa.Table:
    version = pa.scalar(layout.version, pa.int32())
    return rows.append_column(SCHEMA_VERSION, pa.repeat(version, rows.num_rows))


def _truncated(step: Truncation) -> pa.Table:
    row = {
        OP: [TRUNCATED],
        COMMIT_LSN: [int(step.key.commit_lsn)],
        ORDINAL: [step.key.ordinal],
        COMMIT_TIME: pa.array([step.commit_time], pa.int64()).cast(_TIME),
    }
    return pa.table(row)


def _changes(segment: pa.Table, schema: TableSchema, stage: TableLayout, layout: TableLayout) -> pa.Table:
    names = {name: stage.names[column.attnum] for name, column in zip(field_names(schema), schema.columns, strict=True)}
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        OP: pa.array(_OPERATIONS).take(segment.column(OP).combine_chunks()),
        COMMIT_LSN: segment.column(COMMIT_LSN),
        ORDINAL: segment.column(ORDINAL),
        COMMIT_TIME: segment.column(COMMIT_TIME),
        XID: segment.column(XID),
        UNCHANGED: names_not_sent(segment.column(UNCHANGED), list(names.values())),
    }
    if OLD in segment.column_names and OLD in layout.schema.names:
        columns[OLD] = _old(segment.column(OLD).combine_chunks(), names, layout.schema.field(OLD).type)
    columns |= {lake: segment.column(name) for name, lake in names.items()}
    renamed = {**names, **{f"{OLD}.{name}": f"{OLD}.{lake}" for name, lake in names.items()}}
    maps = join_texts({renamed[name]: texts for name, texts in split_texts(segment).items()}, segment.num_rows)
    if maps is not None:
        columns[UNREPRESENTABLE] = maps
    return pa.table(columns)


def _old(old: pa.StructArray, names: Mapping[str, str], wanted: pa.StructType) -> pa.Array:
    """Return the identity before a change, with the names and types of the lake."""
    there = pa.table({names[field.name]: pc.struct_field(old, number) for number, field in enumerate(old.type)})
    fitted = fit(there, pa.schema(list(wanted))).combine_chunks()
    arrays = [column.chunk(0) if column.num_chunks else pa.nulls(0, column.type) for column in fitted.columns]
    return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=old.is_null())
