"""What a Spark destination writes, as data frames: rows of a copy, changes, and the net effect of changes.

Executors read everything: segments of the spool, ranges of the source. An error of Penstock's that a task raises
reaches the driver as itself (`failure`).
"""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import AnalysisException, PySparkException

from penstock import errors
from penstock.changes.batch import Rows, TableChanges
from penstock.changes.columns import read_changes
from penstock.changes.compaction import NetChanges, compact, keys_of, touched_keys
from penstock.changes.frames import frame_of
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
    Operation,
    field_names,
    join_texts,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.base import CopyRows, RangeReader
from penstock.destinations.refusals import busy, unexpected, unreadable
from penstock.errors import (
    RESYNC,
    DestinationUnavailable,
    PenstockError,
    SparkGone,
    TableRejected,
    TasksFailed,
    ValuesNotSent,
)
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema, fold_case
from penstock.spark.session import reason_of

COPIED, TRUNCATED = "copy", "truncate"
BEFORE_ALL = -1
"""`_ordinal` of copied rows, which precede the changes at the position of the copy."""
CHANGE_COLUMNS = (OP, COMMIT_LSN, ORDINAL, COMMIT_TIME, XID, UNCHANGED, OLD)
DELETE, UPSERT = "delete", "upsert"
HASH, BATCH = "_row_hash", "_batch"
"""Names that a column of the source may have; see `hidden_name`."""
LONG = "_" * 60
"""In names that no column of the source can have: those of PostgreSQL have 63 bytes at most."""
ORIGIN, LIMIT = f"_origin{LONG}", f"_limit{LONG}"
UNKNOWN_ROW = "penstock: the row that a change replaces does not exist"
MIXED = "penstock: a transform combines an omitted value with others"
"""What SQL raises with `raise_error`."""

_TOKEN = uuid.uuid4().hex
"""Marks the errors of this process's tasks: an error of Spark's may quote a cell, which could look like one of them."""
_ERROR = re.compile(rf"penstock-error-{_TOKEN}:([A-Za-z0-9+/=]+):")
_CONFLICT = re.compile(r"Concurrent\w*Exception|MetadataChangedException|ProtocolChangedException")
_AWAY = (
    "java.net.ConnectException",
    "java.net.UnknownHostException",
    "java.net.NoRouteToHostException",
    "java.net.SocketException",
    "The connection attempt failed",
    "No space left on device",
)
AWAY_STATES = ("08", "53", "57P")
"""Beginnings of SQLSTATEs that time or an operator heals: connections, resources, shutdown."""


def quote(name: str) -> str:
    """Quote a name for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def literal(text: str) -> str:
    """Quote a text for Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def as_json(cell: str) -> str:
    """Return the expression that prints a nested value as JSON, exactly: by default Spark cuts off microseconds."""
    moments = "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS"
    options = f"'timestampFormat', '{moments}xxx', 'timestampNTZFormat', '{moments}', 'ignoreNullFields', 'false'"
    return f"to_json({cell}, map({options}))"


def failure(table: str, error: Exception) -> PenstockError:
    """Return the error of a table for what Spark raised; its text is left out, since it may contain values."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, Py4JNetworkError | ConnectionError | EOFError):
        return SparkGone(f"Spark could not write {table}: its JVM no longer answers")
    if not isinstance(error, PySparkException | Py4JError):
        return unexpected(table, error)
    text = str(error)
    if found := _ERROR.search(text):
        return _decoded(found[1])
    if UNKNOWN_ROW in text:
        return ValuesNotSent(
            f"{table}: a change omits values, and the destination does not have the row that it replaces", table=table
        )
    if MIXED in text:
        return TableRejected(
            f"{table}: its transform combines a value that the server omitted with others",
            hint=f"Run: alter table {table} replica identity full; then: {RESYNC}.",
            table=table,
        )
    if _CONFLICT.search(text):
        return busy(table)
    if isinstance(error, AnalysisException):
        return TableRejected(f"{table} was rejected: {reason_of(error)}", table=table)
    is_away = isinstance(error, Py4JJavaError) and sql_state(error).startswith(AWAY_STATES)
    if is_away or any(each in text for each in _AWAY):
        return DestinationUnavailable(f"{table}: the destination does not answer Spark", table=table)
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    return TasksFailed(f"Spark could not write {table} ({condition or type(error).__name__})", table=table)


def sql_state(error: Py4JJavaError) -> str:
    """Return the SQLSTATE of a database that Spark writes to by JDBC; empty if there is none."""
    cause = error.java_exception
    while cause is not None:
        if hasattr(cause, "getSQLState") and "SQLException" in str(cause.getClass().getName()):
            return str(cause.getSQLState() or "")
        cause = cause.getCause()
    return ""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Reads in a task; what it raises survives the way through the JVM."""

    table: str
    read: Callable[[Any], Iterable[pa.RecordBatch]]
    token: str = _TOKEN

    def __call__(self, item: Any) -> Iterator[pa.RecordBatch]:
        try:
            yield from self.read(item)
        except Exception as error:
            raise RuntimeError(f"penstock-error-{self.token}:{_encoded(unexpected(self.table, error))}:") from None


def _encoded(error: PenstockError) -> str:
    record = {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "facts": error.facts}
    return base64.b64encode(json.dumps(record, default=str).encode()).decode()


def _decoded(content: str) -> PenstockError:
    record = json.loads(base64.b64decode(content))
    kind = getattr(errors, record["kind"])
    return kind(record["message"], hint=record["hint"], **record["facts"])


def key_names(schema: TableSchema) -> list[str]:
    """Return the names that the columns of the key have in segments."""
    return [name for column, name in zip(schema.columns, field_names(schema), strict=True) if column in schema.key]


def hidden_name(schema: TableSchema, wanted: str = HASH) -> str:
    """Return the name of a column that Penstock adds to a table, whatever the names of its own columns are."""
    taken = {fold_case(name) for name in field_names(schema)}
    while wanted in taken:
        wanted += "_"
    return wanted


def hash_column(schema: TableSchema) -> tuple[str, ...]:
    """Return the name of the column that identifies rows without a key; none if the table has one."""
    return () if schema.key else (hidden_name(schema),)


def printed_times(frame: Any) -> Any:
    """Return a frame with times of day as text, as Postgres prints them; also in arrays and structs.

    Every frame of the destination has this form: Delta, JDBC and most formats have no type for times.
    """
    return frame.selectExpr(
        *(f"{_printed(quote(each.name), each.dataType)} as {quote(each.name)}" for each in frame.schema)
    )


def _printed(cell: str, kind: Any) -> str:
    if "time(" not in kind.simpleString():
        return cell
    match kind.typeName():
        case "array":
            return f"transform({cell}, each -> {_printed('each', kind.elementType)})"
        case "struct":
            parts = (f"{literal(each.name)}, {_printed(f'{cell}.{quote(each.name)}', each.dataType)}" for each in kind)
            return f"if({cell} is null, null, named_struct({', '.join(parts)}))"
        case _:
            return f"cast({cell} as string)"


def copy_frame(session: Any, rows: CopyRows) -> Any:
    """Return the rows of a copy: the columns as in segments, `_unrepresentable`, and `_row_hash` without a key."""
    read = Guarded(str(rows.schema), partial(_read_range, rows.reader, rows.schema))
    frame = frame_of(session, _with_hash(rows.schema, rows.arrow_schema), rows.ranges, read)
    return printed_times(_hashed(frame, rows.schema))


def _read_range(reader: RangeReader, schema: TableSchema, part: Any) -> Iterator[pa.RecordBatch]:
    for batch in reader.read(part):
        yield from _add_hash(pa.Table.from_batches([batch]), schema).to_batches()


def _with_hash(schema: TableSchema, columns: pa.Schema) -> pa.Schema:
    return columns if schema.key else columns.append(pa.field(hidden_name(schema), pa.binary()))


def _add_hash(table: pa.Table, schema: TableSchema) -> pa.Table:
    if schema.key:
        return table
    table = table.combine_chunks()
    return table.append_column(
        hidden_name(schema), keys_of(table, split_texts(table), field_names(schema), whole=True).cast(pa.binary())
    )


def _hashed(frame: Any, schema: TableSchema) -> Any:
    """Replace the bytes that identify a row without a key by their digest."""
    if schema.key:
        return frame
    name = hidden_name(schema)
    return frame.selectExpr(
        *(quote(each) for each in frame.columns if each != name), f"sha2({quote(name)}, 256) as {quote(name)}"
    )


def changes_frame(session: Any, rows: Rows) -> Any:
    """Return changes as rows: `_op` as text, names in `_unchanged`, always with `_old` and `_unrepresentable`."""
    frame = printed_times(rows.frame(session))
    names = field_names(rows.schema)
    operations = " ".join(f"when {operation.value} then '{operation.name.lower()}'" for operation in Operation)
    listed = ", ".join(literal(name) for name in names)
    byte = f"cast(conv(hex(substring({UNCHANGED}, cast(number div 8 as int) + 1, 1)), 16, 10) as int)"
    bit = f"getbit({byte}, number % 8) = 1"
    old = quote(OLD) if OLD in frame.columns else "cast(null as string)"
    texts = UNREPRESENTABLE if UNREPRESENTABLE in frame.columns else "cast(null as map<string,string>)"
    return frame.selectExpr(
        f"case {OP} {operations} end as {OP}",
        *(COMMIT_LSN, ORDINAL, COMMIT_TIME, XID),
        f"if({UNCHANGED} is null, null, filter(array({listed}), (name, number) -> {bit})) as {UNCHANGED}",
        f"{old} as {OLD}",
        *map(quote, names),
        f"{texts} as {UNREPRESENTABLE}",
    )


def has_old(frame: Any) -> bool:
    """Return True if a frame of changes has old keys or rows; otherwise its column for them has no type of its own."""
    return dict(frame.dtypes)[OLD].startswith("struct")


def old_as_text(frame: Any) -> Any:
    """Return changes with old keys and rows as JSON, so that frames with and without them have the same columns."""
    if not has_old(frame):
        return frame
    return frame.selectExpr(*(f"{as_json(OLD)} as {OLD}" if name == OLD else quote(name) for name in frame.columns))


def copied_changes(session: Any, rows: CopyRows) -> Any:
    """Return the rows of a copy in the form of changes."""
    read = Guarded(str(rows.schema), rows.reader.read)
    frame = printed_times(frame_of(session, rows.arrow_schema, rows.ranges, read))
    return frame.selectExpr(
        f"{literal(COPIED)} as {OP}",
        f"{int(rows.position)}L as {COMMIT_LSN}",
        f"{BEFORE_ALL}L as {ORDINAL}",
        f"cast(null as timestamp) as {COMMIT_TIME}",
        f"cast(null as bigint) as {XID}",
        f"cast(null as array<string>) as {UNCHANGED}",
        f"cast(null as string) as {OLD}",
        *map(quote, field_names(rows.schema)),
        UNREPRESENTABLE,
    )


def truncated_changes(session: Any, step: Truncation) -> Any:
    """Return a truncate as one row, without the table's columns."""
    return _truncate(session, step.key, f"timestamp_micros({step.commit_time})", f"{step.xid}L")


def emptied(session: Any, position: Lsn) -> Any:
    """Return the row that precedes a copy: a truncate that no user executed."""
    return _truncate(session, OrderKey(position, BEFORE_ALL - 1), "cast(null as timestamp)", "cast(null as bigint)")


def _truncate(session: Any, key: OrderKey, time: str, xid: str) -> Any:
    return session.sql(
        f"select {literal(TRUNCATED)} as {OP}, {int(key.commit_lsn)}L as {COMMIT_LSN}, {key.ordinal}L as {ORDINAL}, "
        f"{time} as {COMMIT_TIME}, {xid} as {XID}, cast(null as array<string>) as {UNCHANGED}, "
        f"cast(null as string) as {OLD}, cast(null as map<string,string>) as {UNREPRESENTABLE}"
    )


def with_columns_of(table: Any, frame: Any) -> Any:
    """Return a frame with NULL in the columns that only the table has: most formats demand all of them."""
    there = {fold_case(name) for name in frame.columns}
    missing = [field for field in table.schema if fold_case(field.name) not in there]
    nulls = (f"cast(null as {field.dataType.simpleString()}) as {quote(field.name)}" for field in missing)
    return frame.selectExpr("*", *nulls)


def has_omitted(steps: Sequence[Rows]) -> bool:
    """Return True if some change may omit a value; reads the footers of the segments."""
    for segment in (segment for step in steps for segment in step.segments):
        file = pq.read_metadata(segment.path)
        place = file.schema.names.index(UNCHANGED)
        for number in range(file.num_row_groups):
            found = file.row_group(number).column(place).statistics
            if found is None or not found.has_null_count or found.null_count < file.row_group(number).num_rows:
                return True
    return False


@dataclass(frozen=True, slots=True)
class NetWork:
    """The changes of a table whose net effect a task computes."""

    table: str
    table_id: int
    schema: TableSchema
    steps: tuple[Rows, ...]
    truncated: bool
    """All rows from before them are gone."""


def after_truncate(changes: TableChanges) -> tuple[tuple[Rows, ...], bool]:
    """Return the rows after the last truncate, and whether there is one: earlier rows do not matter."""
    steps = [step for step in changes.steps if isinstance(step, Rows | Truncation)]
    places = [number for number, step in enumerate(steps) if isinstance(step, Truncation)]
    left = steps[places[-1] + 1 :] if places else steps
    return tuple(step for step in left if isinstance(step, Rows)), bool(places)


def net_frame(session: Any, work: NetWork, columns: pa.Schema) -> Any:
    """Return the net effect of changes, one row for each key.

    | column | |
    |---|---|
    | `_op` | `upsert` or `delete` |
    | `_unchanged` | the columns whose values are those of an earlier row |
    | `ORIGIN` | the key of that row, a struct |
    | `LIMIT` | without a key: how many equal rows to delete |
    | the table's columns, `_unrepresentable` | of a `delete`: the key; without a key `_row_hash` |

    `columns` are the table's, as in segments. One task computes it: an omitted value may come along a chain of changed
    keys.
    """
    schema = work.schema
    key = key_names(schema)
    fields = [
        pa.field(OP, pa.string()),
        pa.field(UNCHANGED, pa.list_(pa.string())),
        pa.field(ORIGIN, pa.struct([columns.field(name) for name in key] or [pa.field("none", pa.int32())])),
        pa.field(LIMIT, pa.int64()),
        *columns,
        pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE),
    ]
    wanted = _with_hash(schema, pa.schema(fields))
    read = Guarded(work.table, partial(_net_rows, key, wanted))
    frame = frame_of(session, wanted, [work] if work.steps else [], read, partitions=1)
    return printed_times(_hashed(frame, schema))


def _net_rows(key: list[str], wanted: pa.Schema, work: NetWork) -> Iterator[pa.RecordBatch]:
    try:
        changes = read_changes(work.steps, work.schema)
    except PenstockError:
        raise
    except Exception as error:
        raise unreadable(work.table, work.table_id, error) from error
    net = compact(changes, key)
    touched = touched_keys(changes, key) if key else None
    upserts = _upserts(net, key, work, touched)
    if touched is not None:
        keys, cells, texts = touched
        live = net.touched.take(pa.array(net.keys))
        gone = pc.invert(pc.is_in(keys, value_set=live))
        cells, texts = cells.filter(gone), {name: each.filter(gone) for name, each in texts.items()}
        maps = join_texts(texts, cells.num_rows)
        deletes = cells if maps is None else cells.append_column(UNREPRESENTABLE, maps)
    else:
        deletes = pa.table({hidden_name(work.schema): net.touched.cast(pa.binary()), LIMIT: pa.array(net.limits)})
    deletes = deletes.append_column(OP, pa.repeat(pa.scalar(DELETE), deletes.num_rows))
    for part in (deletes, upserts):
        yield from _conformed(part, wanted).to_batches(max_chunksize=10_000)


def _upserts(
    net: NetChanges, key: list[str], work: NetWork, touched: tuple[pa.Array, pa.Table, Any] | None
) -> pa.Table:
    count = len(net.images)
    first, unknown = net.table.num_rows, net.unknown
    omitted = {name: found >= first for name, found in net.origins.items()}
    if any((found == unknown).any() for found in net.origins.values()) or (
        work.truncated and any(mask.any() for mask in omitted.values())
    ):
        raise ValuesNotSent(
            f"{work.table}: a new row came without some of its values, and there is no earlier row that has them",
            table=work.table,
        )
    known = net.select(np.arange(count))
    table, texts = known.table, known.texts
    if not key:
        maps = join_texts(texts, count)
        table = table if maps is None else table.append_column(UNREPRESENTABLE, maps)
        table = _add_hash(table, work.schema)
        return table.append_column(OP, pa.repeat(pa.scalar(UPSERT), count))
    assert touched is not None
    flags = np.stack([omitted[name] for name in omitted], axis=1) if omitted else np.zeros((count, 0), np.bool_)
    maps = join_texts(texts, count)
    table = table if maps is None else table.append_column(UNREPRESENTABLE, maps)
    table = table.append_column(OP, pa.repeat(pa.scalar(UPSERT), count))
    if not flags.any():
        return table
    counts = flags.sum(axis=1)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    names = pa.array(list(omitted), pa.string()).take(pa.array(np.nonzero(flags)[1]))
    table = table.append_column(
        UNCHANGED, pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), names)
    )
    # All omitted values of a row come from the same earlier row.
    origins = np.max(np.stack([np.where(omitted[name], net.origins[name], -1) for name in omitted], axis=1), axis=1)
    keys, cells, _ = touched
    places = pc.index_in(net.touched, value_set=keys).to_numpy(zero_copy_only=False)
    at = pa.array(np.where(origins < 0, 0, places[np.maximum(origins - first, 0)]), mask=origins < 0)
    arrays = [_array(cells.column(name).take(at)) for name in key]
    origin = pa.StructArray.from_arrays(arrays, key, mask=pa.array(origins < 0))
    return table.append_column(ORIGIN, origin)


def _conformed(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=wanted)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
