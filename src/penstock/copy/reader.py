"""Reads a range of a table inside a copy's snapshot, as Arrow, with the same types and values as capture.

The reader locks the table (ACCESS SHARE) and then checks that it is still as in the snapshot. After a rewrite (ALTER
TYPE, VACUUM FULL, CLUSTER) or a TRUNCATE, the old snapshot sees *no rows and no error*; after a change of columns it
would read the wrong ones. So each range checks by itself, and its lock lasts only while it reads: a lock for the whole
copy would block DDL, and everything that waits for the DDL.
"""

from __future__ import annotations

import select
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq
from psycopg.rows import tuple_row

from penstock.changes.segment import UNREPRESENTABLE, settle_rows, settled_columns
from penstock.changes.transform import TableTransform
from penstock.changes.wire import PADDING
from penstock.copy.binary import (
    TRAILER,
    TupleLayout,
    decode_tuples,
    select_expression,
    strip_header,
    tuple_layout,
)
from penstock.copy.plan import CopyRange, CopySettings
from penstock.copy.progress import RangeRead
from penstock.copy.resume import KeyRange
from penstock.errors import DecodeError, SourceError, TableLocked, TableRewritten
from penstock.observe.reports import tell
from penstock.schema import TableSchema, quote_identifier, resolve_domain
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import Place, from_exception, from_result, translated
from penstock.source.snapshots import enter_snapshot
from penstock.values import TypeSettings

_RENAME_ATTEMPTS = 5
_CONSUME_TIMES = 8
"""Reads of the socket before rows are taken: libpq's buffer grows accordingly, and polls become rare."""


# Unlike queries on the catalog's tables, these functions report the current state, not that of the snapshot.
_CURRENT_NAME = "select object_names from pg_catalog.pg_identify_object_as_address(1259::oid, %s::oid, 0)"
_CURRENT_STATE = """
    select t.object_names, pg_catalog.pg_relation_filenode(%(oid)s::oid)::int8,
           array(
               select c.object_names[3]
               from pg_catalog.unnest(%(attnums)s::int4[]) with ordinality a (attnum, position)
               cross join lateral pg_catalog.pg_identify_object_as_address(1259::oid, %(oid)s::oid, a.attnum) c
               order by a.position
           )
    from pg_catalog.pg_identify_object_as_address(1259::oid, %(oid)s::oid, 0) t
"""


class _State(StrEnum):
    """SQLSTATEs that are handled specially."""

    UNDEFINED_TABLE = "42P01"
    UNDEFINED_COLUMN = "42703"
    LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class RangeReader:
    """What a task needs besides its range: small, picklable, and without open resources."""

    source: SourceSettings
    snapshot: str
    """The name of a snapshot that another session keeps."""
    schema: TableSchema
    """As it was in the snapshot: the columns that are read, which are those that are published and not excluded."""
    types: TypeSettings = field(default_factory=TypeSettings)
    row_filter: str | None = None
    """The publication's expression."""
    settings: CopySettings = field(default_factory=CopySettings)
    transform: TableTransform | None = None
    """What the table's settings make of the rows."""
    where: str | None = None
    """The expression of the table's settings."""

    @property
    def output(self) -> TableSchema:
        """The schema of the rows that are returned."""
        return self.schema if self.transform is None else self.transform.output

    @property
    def arrow_schema(self) -> pa.Schema:
        """Schema of every batch: the columns as in segments (`penstock.changes.segment`), then `_unrepresentable`."""
        schema = tuple_layout(self.schema, self.types).arrow_schema
        return schema if self.transform is None else self.transform.arrow_schema(schema)

    def read(self, part: CopyRange | KeyRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, in batches of about `settings.chunk_bytes`; no batch if it has no rows.

        Opens its own connection and closes it at the end, even if the iterator is not exhausted. After `TableRewritten`
        and `SnapshotLost`, all ranges have to be read again, in another snapshot.
        """
        layout = tuple_layout(self.schema, self.types.keeping())
        settled = settled_columns(self.schema, self.types)
        row_count = changed_cells = 0
        with closing(connect(self.source, Role.COPY, parameters=self.settings.session_parameters)) as connection:
            name = self.lock(connection, part)
            columns = [quote_identifier(column.column.name) for column in layout.columns]
            where = self.condition(part)
            for batch in read_columns(connection, layout, columns, f"only {name}", where, self.settings):
                row_count += batch.num_rows
                if settled and batch.column(UNREPRESENTABLE).null_count < batch.num_rows:
                    rows, changed = settle_rows(pa.Table.from_batches([batch]), settled)
                    batch = rows.combine_chunks().to_batches()[0]
                    changed_cells += changed
                yield batch if self.transform is None else self.transform.rows(batch)
        tell(RangeRead(part.index, row_count, changed_cells))

    def condition(self, part: CopyRange | KeyRange) -> str:
        """Return the condition for the rows of a range; empty for all."""
        filters = [f"({each})" for each in (self.row_filter, self.where) if each]
        return " and ".join(filter(None, [part.condition, *filters]))

    def lock(self, connection: psycopg.Connection[Any], part: CopyRange | KeyRange) -> str:
        """Enter the snapshot and lock the heap; return its quoted name. The heap may be renamed until it is locked."""
        with connection.cursor(row_factory=tuple_row) as cursor:
            for _ in range(_RENAME_ATTEMPTS):
                enter_snapshot(connection, self.snapshot)
                with translated(connection, f"read {self.schema}"):
                    names = _fetch(cursor, _CURRENT_NAME, [part.leaf.oid])[0]
                if names is None:
                    raise self._changed("was dropped")
                name = ".".join(quote_identifier(part_of_name) for part_of_name in names)
                types = self._read_nothing(connection, cursor, name)
                if types is not None and self._compare(connection, cursor, part, names, types):
                    return name
                connection.execute("rollback")
        raise self._changed("was renamed repeatedly")

    def _read_nothing(
        self, connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any], name: str
    ) -> list[int] | None:
        """Take the lock that reading takes. Return the types of the columns; None if the table does not exist."""
        columns = ", ".join(quote_identifier(column.name) for column in self.schema.columns)
        place = Place.of(connection)
        doing = f"read {self.schema}"
        try:
            cursor.execute(f"select {columns} from only {name} limit 0".encode())  # noqa: S608 (quoted)
        except psycopg.Error as error:
            said = from_exception(error, place, doing)
            match error.sqlstate:
                case _State.UNDEFINED_TABLE:
                    return None
                case _State.UNDEFINED_COLUMN:
                    raise self._changed("had a column dropped or renamed") from None
                case _State.LOCK_NOT_AVAILABLE:
                    raise TableLocked(said.message, where=place.where, table=str(self.schema)) from None
                case _:
                    raise said from None
        return [column.type_code for column in cursor.description or ()]

    def _compare(
        self,
        connection: psycopg.Connection[Any],
        cursor: psycopg.Cursor[Any],
        part: CopyRange | KeyRange,
        names: list[str],
        types: list[int],
    ) -> bool:
        """Return False if the name belongs to another heap; raise if the heap changed since the snapshot."""
        leaf = part.leaf
        with translated(connection, f"read {self.schema}"):
            found = _fetch(cursor, _CURRENT_STATE, {"oid": leaf.oid, "attnums": list(leaf.attnums)})
        current_names, filenode, columns = found
        if current_names != names:
            return False
        if filenode != leaf.filenode:
            raise self._changed("was rewritten or truncated")
        if columns != [column.name for column in self.schema.columns]:
            raise self._changed("had columns renamed")
        # The server describes a domain as its base type.
        wanted = [resolve_domain(column.type, -1)[0].oid for column in self.schema.columns]
        if types != wanted:
            raise self._changed("had column types changed")
        return True

    def _changed(self, what: str) -> TableRewritten:
        message = f"{self.schema} {what} after the snapshot of its copy was taken"
        return TableRewritten(message, table=str(self.schema), table_id=self.schema.table_id)


def read_columns(
    connection: psycopg.Connection[Any],
    layout: TupleLayout,
    columns: Sequence[str],
    table: str,
    where: str,
    settings: CopySettings,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table that meet a condition, in the connection's transaction.

    `columns` are the quoted names of the layout's columns there, and `table` is what stands after FROM.
    """
    selected = ", ".join(map(select_expression, layout.forms, columns))
    query = f"copy (select {selected} from {table}{f' where {where}' if where else ''}) to stdout (format binary)"  # noqa: S608 (quoted)
    return _stream(connection, query, layout, settings)


def _stream(
    connection: psycopg.Connection[Any], query: str, layout: TupleLayout, settings: CopySettings
) -> Iterator[pa.RecordBatch]:
    """Run a binary COPY and decode its data, a chunk at a time."""
    pace = _Pace(settings.max_bytes_per_second)
    is_first, ended = True, False
    for raw, lengths in copy_out(connection, query, settings.chunk_bytes, f"copy {layout.table}"):
        if is_first:
            is_first = False
            _strip_header(raw, lengths)
        ended = bool(lengths) and lengths[-1] == len(TRAILER) and raw.endswith(TRAILER)
        if ended:
            del raw[-len(TRAILER) :], lengths[-1]
        if lengths:
            size = len(raw)
            raw += PADDING
            yield decode_tuples(raw, np.frombuffer(lengths, np.int64), layout)
            pace.wait(size)
    if not ended:
        raise DecodeError("the binary COPY ended without its trailer", offset=0)


def _strip_header(raw: bytearray, lengths: array[int]) -> None:
    """Remove the stream's header from the first message, which may also contain a row."""
    with memoryview(raw) as whole, whole[: lengths[0]] as message, strip_header(message) as rest:
        header = lengths[0] - len(rest)
    del raw[:header]
    lengths[0] -= header
    if not lengths[0]:
        del lengths[0]


def copy_out(
    connection: psycopg.Connection[Any], query: str, chunk_bytes: int, doing: str
) -> Iterator[tuple[bytearray, array[int]]]:
    """Run a COPY to stdout. Yield its messages, joined into chunks of about `chunk_bytes`, with their lengths."""
    place = Place.of(connection)
    try:
        yield from _chunks(connection.pgconn, query, chunk_bytes, place, doing)
    except psycopg.Error as error:
        raise from_exception(error, place, doing) from None


def _chunks(
    connection: pq.abc.PGconn, query: str, chunk_bytes: int, place: Place, doing: str
) -> Iterator[tuple[bytearray, array[int]]]:
    poll = _start(connection, query, place, doing)
    get, consume = connection.get_copy_data, connection.consume_input
    raw, lengths = bytearray(), array("q")
    size = 0
    # The only loop over rows in Python, because libpq returns them one at a time. Copying each row immediately keeps it
    # in the processor's cache and takes a third of the time of joining them later.
    while True:
        length, message = get(1)
        if length > 0:
            raw += message
            lengths.append(length)
            size += length
            if size >= chunk_bytes:
                yield raw, lengths
                raw, lengths, size = bytearray(), array("q"), 0
        elif length == 0:
            poll.poll()
            for _ in range(_CONSUME_TIMES):
                consume()
        else:
            break
    result = connection.get_result()
    if result is None or result.status != pq.ExecStatus.COMMAND_OK:
        raise _failure(result, place, doing)
    if lengths:
        yield raw, lengths


def _start(connection: pq.abc.PGconn, query: str, place: Place, doing: str) -> select.poll:
    """Begin a COPY; return the poll object of its socket."""
    poll = select.poll()
    poll.register(connection.socket, select.POLLIN)
    connection.send_query(query.encode())
    connection.flush()
    while connection.is_busy():
        poll.poll()
        connection.consume_input()
    result = connection.get_result()
    if result is None or result.status != pq.ExecStatus.COPY_OUT:
        raise _failure(result, place, doing)
    return poll


def _failure(result: pq.abc.PGresult | None, place: Place, doing: str) -> SourceError:
    if result is None:
        return SourceError(f"cannot {doing} ({place.where}): the server did not answer", where=place.where)
    return from_result(result, place, doing)


class _Pace:
    """Limits the rate by sleeping."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._start = time.monotonic()
        self._bytes = 0

    def wait(self, size: int) -> None:
        if self._rate:
            self._bytes += size
            ahead = self._bytes / self._rate - (time.monotonic() - self._start)
            if ahead > 0:
                time.sleep(ahead)


def _fetch(cursor: psycopg.Cursor[Any], query: str, parameters: Any) -> tuple[Any, ...]:
    row = cursor.execute(query.encode(), parameters).fetchone()
    return row if row is not None else (None,)
