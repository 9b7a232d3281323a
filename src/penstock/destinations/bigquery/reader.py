"""Reads the rows of a mirror back, for `penstock verify`.

A query copies the current rows into a table of its own, which expires after a day and is deleted by `close`. The
Storage Read API cannot read a table with change types directly, and a table that nobody writes can be read in parallel.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types

from penstock.destinations.bigquery.connection import Connection, translated
from penstock.destinations.bigquery.control import Record
from penstock.destinations.bigquery.layout import Kind, Layout
from penstock.schema import TableSchema

_MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class BigQueryReader:
    """Reads a stream of rows; pickles."""

    connection: Connection
    layout: Layout
    columns: bytes
    """The Arrow schema of the streams, serialized."""

    def read(self, part: str, /) -> Iterator[pa.RecordBatch]:
        """See `RangeReader`."""
        schema = pa.ipc.read_schema(pa.py_buffer(self.columns))
        with translated(str(self.layout.schema)):
            for answer in self.connection.read_client.read_rows(part):
                content = pa.py_buffer(answer.arrow_record_batch.serialized_record_batch)
                yield self.layout.restored(pa.ipc.read_record_batch(content, schema))


@dataclass(frozen=True, slots=True)
class PinnedBigQuery:
    """See `PinnedTable`."""

    schema: TableSchema
    reader: BigQueryReader
    parts: Sequence[str]
    table: str

    @property
    def arrow_schema(self) -> pa.Schema:
        """Return the names and types of the rows."""
        return self.reader.layout.restored_schema()

    def close(self) -> None:
        """Delete the copied rows."""
        connection = self.reader.connection
        with translated(str(self.schema)):
            connection.client.delete_table(connection.reference(self.table), not_found_ok=True)


def pin_generation(connection: Connection, record: Record, staleness: str | None) -> PinnedBigQuery:
    """Copy the current rows of a generation, with every change that was appended."""
    layout, generation = record.layout, record.generation
    assert layout is not None
    assert generation is not None
    is_stale = staleness is not None and layout.kind is Kind.MIRROR
    name = f"penstock_pin_{secrets.token_hex(6)}"
    if is_stale:
        _set_staleness(connection, generation, None)
    try:
        expires = "options (expiration_timestamp = timestamp_add(current_timestamp(), interval 1 day))"
        connection.run(
            f"create table {connection.quoted(name)} {expires} as {layout.current(connection.quoted(generation))}"
        )
    finally:
        if is_stale:
            _set_staleness(connection, generation, staleness)
    session = connection.read_client.create_read_session(
        parent=f"projects/{connection.project}",
        read_session=types.ReadSession(table=connection.path(name), data_format=types.DataFormat.ARROW),
        max_stream_count=_MOST_STREAMS,
    )
    parts = [stream.name for stream in session.streams]
    reader = BigQueryReader(connection, layout, session.arrow_schema.serialized_schema)
    return PinnedBigQuery(layout.schema, reader, parts, name)


def _set_staleness(connection: Connection, generation: str, staleness: str | None) -> None:
    table = connection.client.get_table(connection.reference(generation))
    table.max_staleness = staleness or "0-0 0 0:0:0"
    connection.client.update_table(table, ["max_staleness"])
