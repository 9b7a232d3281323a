"""The HTTP destination: tasks send one request per table and batch, in one job."""

from __future__ import annotations

import io
import json
import os
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, TableChanges
from penstock.destinations.base import (
    Capabilities,
    CopyRange,
    CopyRows,
    DestinationContext,
    RangeReader,
    WriteHandle,
    WriteResult,
    completed,
)
from penstock.destinations.batch_events import leave_out
from penstock.destinations.http.bodies import BodyFormat, changes_body, copy_body
from penstock.destinations.http.client import Endpoint, Refused, Secret
from penstock.destinations.refusals import fenced_copy, foreign_table, unexpected, unusable
from penstock.destinations.row_groups import group_batches
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema
from penstock.schema.table import schema_to_json

FORMAT = 1
_PART_BYTES = 8 << 20
_ANOTHER = "another one"


@dataclass(frozen=True, slots=True)
class _CopyTask:
    """What all ranges of a copy share."""

    endpoint: Endpoint
    format: BodyFormat
    schema: TableSchema
    attempt: str
    position: Lsn
    arrow_schema: pa.Schema
    key: str


@dataclass(frozen=True, slots=True)
class _ChangesTask:
    """A table's part of a batch."""

    endpoint: Endpoint
    format: BodyFormat
    batch: EventBatch
    """Without its tables."""
    changes: TableChanges
    path: str
    attempt: str | None
    key: str


class HttpDestination:
    """`type = "http"`: POSTs tables to your own service, as Arrow or as lines of JSON.

    | option | |
    |---|---|
    | `url` | where requests go; what they look like is in the protocol |
    | `format` | `arrow` (default) or `ndjson` |
    | `auth_env` | the environment variable that holds the credentials; they never appear in logs or errors |
    | `auth_header`, `auth_scheme` | default `Authorization` and `Bearer`; an empty scheme sends the value alone |
    | `headers` | further headers, which are not secret |
    | `timeout`, `retry_seconds` | for one attempt, and for all of them: 30 and 60 seconds |
    | `records_position` | the receiver stores positions with the data and answers them at the start: exactly once |
    """

    name = "http"

    def __init__(
        self,
        url: str,
        *,
        format: str = "arrow",  # noqa: A002  # the name of the option
        auth_env: str | None = None,
        auth_header: str = "Authorization",
        auth_scheme: str = "Bearer",
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        retry_seconds: float = 60.0,
        records_position: bool = False,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise unusable("the url of an http destination must start with http:// or https:// and a host")
        if parts.username is not None or parts.password is not None:
            raise unusable(
                "the url must not contain credentials",
                hint="Put them into an environment variable and name it in auth_env.",
            )
        try:
            self._format = BodyFormat(format)
        except ValueError:
            raise unusable(f"unknown format {format!r}", hint="Use arrow or ndjson.") from None
        self.capabilities = Capabilities(records_position=records_position)
        self._endpoint = Endpoint(
            url.rstrip("/"),
            tuple((headers or {}).items()),
            _credentials(auth_env, auth_header, auth_scheme),
            timeout,
            retry_seconds,
        )
        self._lock = threading.Lock()
        self._announcing = threading.Lock()
        self._announced = ""
        """The lineage that the receiver knows."""
        self._attempts: dict[int, str] = {}
        self._positions: dict[int, Lsn] = {}
        self._paths: dict[int, str] = {}
        self._context: DestinationContext | None = None

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        for version in context.store.get_table_schemas():
            self._paths[version.table_id] = _table_path(version.schema)
        answer = self._announce(context)
        if self.capabilities.records_position:
            self._take_positions(answer)

    def _announce(self, context: DestinationContext) -> Any:
        """Say whose changes follow; return the receiver's answer."""
        lineage = context.lineage
        identity = {"Penstock-Pipeline": context.pipeline_id, "Penstock-Lineage": lineage}
        headers = dict(self._endpoint.headers) | {name: _quote(value) for name, value in identity.items()}
        self._endpoint = replace(self._endpoint, headers=tuple(headers.items()))
        record = {
            "format": FORMAT,
            "pipeline": context.pipeline_id,
            "lineage": lineage,
            "continues": {name: str(end) for name, end in context.continues.items()},
            "epoch": context.epoch,
        }
        key = f"{context.pipeline_id}/{_quote(lineage)}/start"
        try:
            answer = self._post("/start", record, key, what=context.pipeline_id)
        except Refused:
            raise unusable(f"the receiver refused pipeline {context.pipeline_id!r}") from None
        self._announced = lineage
        return answer

    def _follow_server(self) -> None:
        """After a failover, announce the new lineage before anything of it is sent."""
        with self._announcing:
            if self._announced != self._started.lineage:
                self._announce(self._started)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        self._follow_server()
        path = f"{_table_path(schema)}/copies/{_quote(attempt)}"
        record = {"pipeline": self._started.pipeline_id, "lineage": self._started.lineage}
        try:
            self._post(path, record | {"table": schema_to_json(schema)}, self._key(path), what=str(schema))
        except Refused:
            raise foreign_table(str(schema), _ANOTHER, self._started.pipeline_id) from None
        with self._lock:
            self._attempts[schema.table_id] = attempt
            self._paths[schema.table_id] = _table_path(schema)
            self._positions.pop(schema.table_id, None)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        self._follow_server()
        path = f"{_table_path(schema)}/copies/{_quote(rows.attempt)}"
        task = _CopyTask(
            self._endpoint, self._format, schema, rows.attempt, rows.position, rows.arrow_schema, self._key(path)
        )
        sent = self._started.tasks.run(
            rows.ranges, partial(_send_range, rows.reader, task), description=f"copy {schema}"
        )
        parts = [name for names in sent for name in names]
        record = {"position": str(rows.position), "parts": parts, "table": schema_to_json(schema)}
        try:
            self._post(f"{path}/finish", record, f"{self._key(path)}/finish", what=str(schema))
        except Refused:
            raise fenced_copy(str(schema), rows.attempt) from None
        with self._lock:
            self._attempts[schema.table_id] = rows.attempt
            self._positions[schema.table_id] = rows.position

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        self._follow_server()
        errors: dict[int, PenstockError] = {}
        tasks: list[_ChangesTask] = []
        for changes in batch.tables:
            try:
                position = self.position(changes.table_id)
                changes = leave_out(changes, position, batch.begin)
                if changes.steps:
                    tasks.append(self._task(batch, changes))
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
        sent: list[PenstockError | None] = []
        if tasks:
            sent = self._started.tasks.run(tasks, _send_changes, description=f"post {len(tasks)} tables to {batch.end}")
        errors |= {task.changes.table_id: error for task, error in zip(tasks, sent, strict=True) if error is not None}
        with self._lock:
            for changes in batch.tables:
                before = self._positions.get(changes.table_id)
                if changes.table_id not in errors and (before is None or not reaches(before, batch.end)):
                    self._positions[changes.table_id] = batch.end
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """Return the position that the receiver last reported or acknowledged; None if it records none."""
        with self._lock:
            return self._positions.get(table_id) if self.capabilities.records_position else None

    def shutdown(self) -> None:
        """Do nothing: no connection stays open."""

    def _task(self, batch: EventBatch, changes: TableChanges) -> _ChangesTask:
        schemas = [step.schema for step in changes.steps if isinstance(step, Rows)]
        if schemas:
            self._paths[changes.table_id] = _table_path(schemas[-1])
        namespace, _, name = changes.table.partition(".")
        path = self._paths.get(changes.table_id, f"/tables/{_quote(namespace)}/{_quote(name)}")
        with self._lock:
            attempt = self._attempts.get(changes.table_id)
        empty = EventBatch(batch.begin, batch.end, 0, batch.first_commit_time, batch.last_commit_time, ())
        key = self._key(f"{path}/{_quote(attempt or '')}/{batch.begin}-{batch.end}")
        return _ChangesTask(self._endpoint, self._format, empty, changes, path, attempt, key)

    def _take_positions(self, answer: Any) -> None:
        try:
            tables = [
                (int(each["table_id"]), str(each["attempt"]), Lsn.parse(each["position"])) for each in answer["tables"]
            ]
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
            raise unusable(
                "the receiver's answer to /start has no positions, which records_position requires",
                hint='It must be {"tables": [{"table_id": …, "attempt": …, "position": "0/16B3748"}]}.',
            ) from None
        with self._lock:
            for table_id, attempt, position in tables:
                self._attempts[table_id], self._positions[table_id] = attempt, position

    def _post(self, path: str, record: dict[str, Any], key: str, *, what: str) -> Any:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        return self._endpoint.post(path, io.BytesIO(json.dumps(record).encode()), headers, what=what)

    def _key(self, rest: str) -> str:
        return f"{_quote(self._started.pipeline_id)}/{_quote(self._started.lineage)}{rest}"

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


def _send_changes(task: _ChangesTask) -> PenstockError | None:
    """Send a table's part of a batch, in a task."""
    changes = task.changes
    headers = {
        "Content-Type": task.format.content_type,
        "Idempotency-Key": task.key,
        "Penstock-Table-Id": str(changes.table_id),
        "Penstock-Begin": str(task.batch.begin),
        "Penstock-End": str(task.batch.end),
        "Penstock-Attempt": _quote(task.attempt or ""),
    }
    try:
        with changes_body(task.format, task.batch, changes) as body:
            task.endpoint.post(f"{task.path}/changes", body, headers, what=changes.table)
    except Refused:
        return fenced_copy(changes.table, task.attempt or "unknown")
    except Exception as error:
        return unexpected(changes.table, error)
    return None


def _send_range(reader: RangeReader, task: _CopyTask, part: CopyRange) -> list[str]:
    """Send a range in parts, in a task; return their names, which are the same in a second run."""
    names: list[str] = []
    path = f"{_table_path(task.schema)}/copies/{_quote(task.attempt)}/parts"
    try:
        for index, batches in enumerate(group_batches(reader.read(part), _PART_BYTES)):
            name = f"{part.index}-{index}"
            headers = {"Content-Type": task.format.content_type, "Idempotency-Key": f"{task.key}/{name}"}
            with copy_body(task.format, task.schema, task.position, batches, task.arrow_schema) as body:
                task.endpoint.post(f"{path}/{name}", body, headers, what=str(task.schema))
            names.append(name)
    except Refused:
        raise fenced_copy(str(task.schema), task.attempt) from None
    except Exception as error:
        raise unexpected(str(task.schema), error) from None
    return names


def _credentials(variable: str | None, header: str, scheme: str) -> tuple[str, Secret] | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise unusable(
            f"the environment variable {variable} (auth_env) is not set",
            hint="Set it to the receiver's credentials, for the process that runs the pipeline.",
        )
    return header, Secret(f"{scheme} {value}".strip())


def _table_path(schema: TableSchema) -> str:
    return f"/tables/{_quote(schema.namespace)}/{_quote(schema.name)}"


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="")
