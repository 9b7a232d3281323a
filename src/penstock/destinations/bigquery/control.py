"""The control table: one row for each table of a pipeline says what BigQuery has of it.

It is a table with change types itself, and an append to it is the commit of a batch or a copy. Its sequence number
begins with the lease and the process that writes, so a process that was replaced changes nothing here, however late its
append arrives. Readers ask for the row with the highest number.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from google.cloud import bigquery
from google.cloud.bigquery.table import PrimaryKey, TableConstraints

from penstock.destinations.bigquery.append import append_changes
from penstock.destinations.bigquery.connection import Connection
from penstock.destinations.bigquery.layout import Kind, Layout, fields_of
from penstock.destinations.refusals import unusable
from penstock.lsn import Lsn
from penstock.schema.table import schema_from_json, schema_to_json

CONTROL = "penstock_tables"
FORMAT = 1
CHANGE_TYPE, CHANGE_SEQUENCE = "_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER"
UPSERT, DELETE = "UPSERT", "DELETE"

_COLUMNS = pa.schema(
    [
        pa.field("pipeline", pa.string()),
        pa.field("table_id", pa.int64()),
        pa.field("target", pa.string()),
        pa.field("source", pa.string()),
        pa.field("attempt", pa.string()),
        pa.field("lineage", pa.string()),
        pa.field("generation", pa.string()),
        pa.field("position", pa.string()),
        pa.field("upto", pa.string()),
        pa.field("stream", pa.string()),
        pa.field("stream_rows", pa.int64()),
        pa.field("ahead", pa.int64()),
        pa.field("total", pa.int64()),
        pa.field("layout", pa.string()),
        pa.field("format", pa.int64()),
        pa.field("epoch", pa.int64()),
        pa.field("writer", pa.int64()),
        pa.field("number", pa.int64()),
    ]
)
_NEWEST = (
    "qualify row_number() over (partition by pipeline, table_id order by epoch desc, writer desc, number desc) = 1"
)


@dataclass(frozen=True, slots=True)
class Record:
    """What BigQuery has of a table."""

    table_id: int
    target: str
    """The view."""
    source: str
    """Namespace and name, for people."""
    attempt: str
    lineage: str
    generation: str | None = None
    """The physical table that the view shows; of the copy before while there is no position."""
    position: Lsn | None = None
    upto: Lsn | None = None
    """No change after this one was ever appended to the generation, not even by a batch that failed."""
    stream: str | None = None
    """To which rows are appended; None for mirrors."""
    stream_rows: int = 0
    """How many rows the stream had at the position."""
    ahead: int = 0
    """How many rows after the position are in streams before this one."""
    total: int = 0
    """How many rows the generation had at the position; not for mirrors."""
    layout: Layout | None = None


class Control:
    """The control table of a dataset."""

    def __init__(self, connection: Connection, pipeline: str, epoch: int) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._epoch = epoch
        self._writer = 0
        self._number = 0
        self._lock = threading.Lock()

    def open(self) -> dict[int, Record]:
        """Create the table if it does not exist, take over from earlier processes, and return the records."""
        table = bigquery.Table(self._connection.reference(CONTROL), schema=fields_of(_COLUMNS))
        key = PrimaryKey(columns=["pipeline", "table_id"])
        table.table_constraints = TableConstraints(primary_key=key, foreign_keys=None)
        table.clustering_fields = ["pipeline", "table_id"]
        table.description = "What Penstock has written to this dataset. Do not change it."
        self._connection.client.create_table(table, exists_ok=True)
        rows = self._rows("pipeline = @pipeline", self._parameters())
        newer = [row["format"] for row in rows if row["format"] > FORMAT]
        if newer:
            raise unusable(f"{CONTROL} was written by a newer version (format {max(newer)})", hint="Run that version.")
        self._writer = max((row["writer"] for row in rows), default=0) + 1
        return {row["table_id"]: _record(row) for row in rows if row["attempt"]}

    def owner(self, target: str) -> tuple[str, int] | None:
        """Return the pipeline and the table that a view belongs to."""
        found = self._rows("target = @target", [bigquery.ScalarQueryParameter("target", "STRING", target)])
        return next(((row["pipeline"], row["table_id"]) for row in found if row["attempt"]), None)

    def write(self, records: Sequence[Record]) -> None:
        """Record tables, all of them at once."""
        self._append([_row(record) for record in records])

    def forget(self, record: Record) -> None:
        """Record that a table no longer exists here: the row stays, without an attempt."""
        self._append([_row(replace(record, attempt="", target="", generation=None, position=None))])

    def is_newest(self, table_id: int) -> bool:
        """Return True if no other process has recorded the table since."""
        parameters = [*self._parameters(), bigquery.ScalarQueryParameter("table_id", "INT64", table_id)]
        found = self._rows("pipeline = @pipeline and table_id = @table_id", parameters)
        return all((row["epoch"], row["writer"]) <= (self._epoch, self._writer) for row in found)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:  # one for each table of a batch
            with self._lock:
                self._number += 1
                number = self._number
            sequence = f"{self._epoch:X}/{self._writer:X}/{number:X}"
            row |= {"pipeline": self._pipeline, "format": FORMAT, "epoch": self._epoch, "writer": self._writer}
            row |= {"number": number, CHANGE_TYPE: UPSERT, CHANGE_SEQUENCE: sequence}
        if rows:
            with_changes = _COLUMNS.append(pa.field(CHANGE_TYPE, pa.string()))
            table = pa.Table.from_pylist(rows, with_changes.append(pa.field(CHANGE_SEQUENCE, pa.string())))
            append_changes(self._connection, CONTROL, [table], what=CONTROL)

    def _parameters(self) -> list[Any]:
        return [bigquery.ScalarQueryParameter("pipeline", "STRING", self._pipeline)]

    def _rows(self, condition: str, parameters: Sequence[Any]) -> list[Any]:
        return find_rows(self._connection, condition, parameters)


def find_rows(connection: Connection, condition: str, parameters: Sequence[Any]) -> list[Any]:
    """Return rows of the control table, the newest of each table."""
    newest = f"select * from {connection.quoted(CONTROL)} where true {_NEWEST}"
    return list(connection.run(f"select * from ({newest}) where {condition}", parameters))


def find_record(connection: Connection, table_id: int, target: str) -> Record | None:
    """Return what any pipeline has recorded of a table; if there are several, the one that has this view."""
    parameters = [bigquery.ScalarQueryParameter("table_id", "INT64", table_id)]
    found = [_record(row) for row in find_rows(connection, "table_id = @table_id", parameters) if row["generation"]]
    return next((each for each in found if each.target == target), found[0] if found else None)


def _row(record: Record) -> dict[str, Any]:
    layout = record.layout
    return {
        "table_id": record.table_id,
        "target": record.target,
        "source": record.source,
        "attempt": record.attempt,
        "lineage": record.lineage,
        "generation": record.generation,
        "position": None if record.position is None else str(record.position),
        "upto": None if record.upto is None else str(record.upto),
        "stream": record.stream,
        "stream_rows": record.stream_rows,
        "ahead": record.ahead,
        "total": record.total,
        "layout": None if layout is None else _layout_text(layout),
    }


def _record(row: Any) -> Record:
    text = row["layout"]
    return Record(
        row["table_id"],
        row["target"],
        row["source"],
        row["attempt"],
        row["lineage"],
        row["generation"],
        None if row["position"] is None else Lsn.parse(row["position"]),
        None if row["upto"] is None else Lsn.parse(row["upto"]),
        row["stream"],
        row["stream_rows"],
        row["ahead"],
        row["total"],
        None if text is None else _layout(json.loads(text)),
    )


def _layout_text(layout: Layout) -> str:
    types = base64.b64encode(layout.types.remove_metadata().serialize()).decode()
    record = {"kind": layout.kind.value, "schema": schema_to_json(layout.schema), "types": types, "kept": layout.kept}
    return json.dumps(record)


def _layout(record: dict[str, Any]) -> Layout:
    types = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["types"])))
    kept = tuple((int(number), str(name)) for number, name in record["kept"])
    return Layout(Kind(record["kind"]), schema_from_json(record["schema"]), types, kept)
