"""The bodies of requests: Arrow IPC streams, or JSON objects on lines.

An Arrow body has one stream per step, one after the other. The metadata of a stream's schema names the step:
`penstock.step` is `rows`, `schema` or `truncate`. Most bodies have one stream of rows. In JSON lines, every step is an
object with an `op`. Either way a body is a file that can be sent again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges
from penstock.changes.events import Begin, Commit, Relation
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import copied_rows, read_segment, table_events
from penstock.destinations.json_lines import copied_row_to_json, event_to_json
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json

STEP = "penstock.step"
SCHEMA = "penstock.schema"
KEY = "penstock.key"
_IN_MEMORY = 32 << 20


class BodyFormat(StrEnum):
    """How rows are sent."""

    ARROW = "arrow"
    """Typed, by columns, fast: `application/vnd.apache.arrow.stream`."""
    NDJSON = "ndjson"
    """For receivers without Arrow; row by row, slow: `application/x-ndjson`."""

    @property
    def content_type(self) -> str:
        return "application/vnd.apache.arrow.stream" if self is BodyFormat.ARROW else "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class BodyStep:
    """A step of an Arrow body, as a receiver reads it."""

    step: str
    """`rows`, `schema` or `truncate`."""
    schema: TableSchema | None
    """The schema of the rows, or the new schema."""
    rows: pa.Table | None
    key: OrderKey | None
    """The order key of a truncate."""


def changes_body(format_: BodyFormat, batch: EventBatch, table: TableChanges) -> AbstractContextManager[IO[bytes]]:
    """Return the body of a table's part of a batch; it contains every change."""

    def write(file: IO[bytes]) -> None:
        if format_ is BodyFormat.ARROW:
            for step in table.steps:
                _write_step(file, step)
            return
        # Cold: a receiver that asks for JSON lines gets single rows.
        for event in table_events(batch, table, None):
            if isinstance(event, Relation):
                _write_line(file, relation_to_json(event.table))
            elif not isinstance(event, Begin | Commit):
                _write_line(file, event_to_json(event) or "")

    return _body(write)


def copy_body(
    format_: BodyFormat, schema: TableSchema, position: Lsn, batches: Iterable[pa.RecordBatch], arrow_schema: pa.Schema
) -> AbstractContextManager[IO[bytes]]:
    """Return the body of a part of a copy."""

    def write(file: IO[bytes]) -> None:
        if format_ is BodyFormat.ARROW:
            _write_stream(file, _rows_metadata(schema), pa.Table.from_batches(list(batches), schema=arrow_schema))
            return
        for batch in batches:
            for row in copied_rows(batch, schema):
                _write_line(file, copied_row_to_json(schema, row, position))

    return _body(write)


def read_bodies(file: IO[bytes]) -> Iterator[BodyStep]:
    """Yield the steps of an Arrow body, as a receiver in Python would."""
    content = pa.py_buffer(file.read())
    stream = pa.BufferReader(content)
    while stream.tell() < len(content):
        with pa.ipc.open_stream(stream) as reader:
            table = reader.read_all()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        schema = schema_from_json(json.loads(metadata[SCHEMA])) if SCHEMA in metadata else None
        key = None
        if KEY in metadata:
            lsn, _, ordinal = metadata[KEY].partition(" ")
            key = OrderKey(Lsn.parse(lsn), int(ordinal))
        yield BodyStep(metadata[STEP], schema, table if metadata[STEP] == "rows" else None, key)


def relation_to_json(schema: TableSchema) -> str:
    """Return the line that describes the rows that follow it."""
    record: dict[str, Any] = {"op": "relation", "schema": schema.namespace, "table": schema.name}
    return json.dumps(record | {"definition": schema_to_json(schema)}, ensure_ascii=False, separators=(",", ":"))


def _write_step(file: IO[bytes], step: Rows | Truncation | SchemaChange) -> None:
    match step:
        case Rows():
            for segment in step.segments:
                _write_stream(file, _rows_metadata(step.schema), read_segment(segment))
        case SchemaChange():
            metadata = {STEP: "schema", SCHEMA: json.dumps(schema_to_json(step.new))}
            _write_stream(file, metadata, pa.table({}))
        case Truncation():
            metadata = {STEP: "truncate", KEY: f"{step.key.commit_lsn} {step.key.ordinal}"}
            _write_stream(file, metadata, pa.table({}))


def _rows_metadata(schema: TableSchema) -> dict[str, str]:
    return {STEP: "rows", SCHEMA: json.dumps(schema_to_json(schema))}


def _write_stream(file: IO[bytes], metadata: Mapping[str, str], table: pa.Table) -> None:
    schema = table.schema.with_metadata(dict(metadata))
    with pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(table.replace_schema_metadata(dict(metadata)))


def _write_line(file: IO[bytes], line: str) -> None:
    file.write(line.encode() + b"\n")


@contextmanager
def _body(write: Callable[[IO[bytes]], None]) -> Iterator[IO[bytes]]:
    """Keep the body in memory while it is small."""
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        write(file)
        yield file
