"""Appending rows to a stream of the Storage Write API.

Chunks are sent one after the other, each when the one before is acknowledged, so a sender has one chunk in memory. If
the connection breaks before the answer, nobody knows whether BigQuery has the chunk. It is sent again: with a sequence
number the second one changes nothing, and with an offset BigQuery says that it has it already.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from google.api_core import exceptions
from google.cloud.bigquery_storage_v1 import types

from penstock.destinations.bigquery.connection import AWAY, Connection, failure
from penstock.destinations.bigquery.protobuf import descriptor, encode_rows, message_of
from penstock.destinations.refusals import rejected
from penstock.retry import Backoff

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2 << 20
REQUEST_BYTES = 9 << 20
"""BigQuery refuses requests of 10 MB."""
RETRY_SECONDS = 60.0
SETTLE_SECONDS = 120.0
"""A new table or column is not known to all servers at once; until then, they say that it does not exist."""
CALL_SECONDS = 300.0
DEFAULT_STREAM = "_default"


def append_changes(
    connection: Connection, table: str, rows: Iterable[pa.Table], *, what: str, settles: bool = False
) -> None:
    """Append rows with `_CHANGE_TYPE` to the default stream, in protobuf: Arrow cannot have change types.

    `settles` says that the columns have just changed, so that a refusal may pass.
    """
    stream = f"{connection.path(table)}/streams/{DEFAULT_STREAM}"
    with _Sender(connection, stream, what, settles) as sender:
        for part in rows:
            schema = types.ProtoSchema(proto_descriptor=descriptor(part.schema))
            for chunk in _chunks(part):
                for encoded in _requests(encode_rows(chunk), what):
                    data = types.AppendRowsRequest.ProtoData.pb()()
                    data.rows.MergeFromString(message_of(encoded))
                    data.writer_schema.CopyFrom(types.ProtoSchema.pb(schema))
                    sender.send(types.AppendRowsRequest(proto_rows=types.AppendRowsRequest.ProtoData.wrap(data)))


def append_rows(
    connection: Connection, stream: str, rows: Iterable[pa.Table], offset: int, *, what: str, settles: bool = False
) -> int:
    """Append rows to a committed stream in Arrow, the first one at `offset`; return how many rows there were.

    A second run with the same rows changes nothing. `settles` as in `append_changes`.
    """
    first = offset
    with _Sender(connection, stream, what, settles) as sender:
        for part in rows:
            schema = types.ArrowSchema(serialized_schema=part.schema.serialize().to_pybytes())
            for chunk in _chunks(part):
                batch = chunk.combine_chunks().to_batches()[0]
                content = types.ArrowRecordBatch(serialized_record_batch=batch.serialize().to_pybytes())
                data = types.AppendRowsRequest.ArrowData(writer_schema=schema, rows=content)
                sender.send(types.AppendRowsRequest(arrow_rows=data, offset=offset))
                offset += batch.num_rows
    return offset - first


def create_stream(connection: Connection, table: str) -> str:
    """Create a committed stream and return its name."""
    wanted = types.WriteStream(type_=types.WriteStream.Type.COMMITTED)
    deadline, backoff = time.monotonic() + SETTLE_SECONDS, Backoff()
    while True:
        try:
            made = connection.write_client.create_write_stream(parent=connection.path(table), write_stream=wanted)
            return str(made.name)
        except exceptions.NotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.next_delay())


def finalize_stream(connection: Connection, stream: str) -> int:
    """Close a stream for appends; return how many rows it has."""
    return int(connection.write_client.finalize_write_stream(name=stream).row_count)


class _Sender:
    """A connection to a stream that is made again when it breaks."""

    def __init__(self, connection: Connection, stream: str, what: str, settles: bool) -> None:
        self._unsettled = (exceptions.NotFound, exceptions.InvalidArgument) if settles else (exceptions.NotFound,)
        self._connection = connection
        self._stream = stream
        self._what = what
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: Any = None

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def send(self, request: Any) -> None:
        """Append a chunk; raise if BigQuery refuses it or stays away."""
        request.write_stream = self._stream
        began, backoff = time.monotonic(), Backoff(longest=5.0)
        while True:
            try:
                return self._send(request)
            except (*AWAY, *self._unsettled) as error:
                self._close()
                patience = SETTLE_SECONDS if isinstance(error, self._unsettled) else RETRY_SECONDS
                if time.monotonic() - began > patience:
                    raise failure(self._what, error) from None
                logger.log(backoff.log_level, "append is repeated table=%s error=%s", self._what, type(error).__name__)
                time.sleep(backoff.next_delay())

    def _send(self, request: Any) -> None:
        try:
            if self._answers is None:
                self._requests = queue.SimpleQueue()
                # Before the call, which waits for the first answer.
                self._requests.put(request)
                self._answers = self._connection.write_client.append_rows(
                    iter(self._requests.get, None),
                    timeout=CALL_SECONDS,
                    retry=None,
                    metadata=(("x-goog-request-params", f"write_stream={self._stream}"),),
                )
            else:
                self._requests.put(request)
            answer = next(self._answers, None)
        except exceptions.AlreadyExists:
            self._close()
            return
        if answer is None:
            raise exceptions.ServiceUnavailable("the stream ended")
        if answer.error.code:
            error = exceptions.from_grpc_status(answer.error.code, "refused")
            if not isinstance(error, exceptions.AlreadyExists):
                raise error

    def _close(self) -> None:
        self._requests.put(None)
        self._answers = None


def _chunks(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield rows in parts of about `CHUNK_BYTES`, the same ones in every run."""
    count = max(1, int(rows.num_rows * CHUNK_BYTES / max(rows.nbytes, 1)))
    for start in range(0, rows.num_rows, count):
        yield rows.slice(start, count)


def _requests(rows: pa.Array, what: str) -> Iterator[pa.Array]:
    """Yield encoded rows in parts that fit into a request: some rows may be much longer than others."""
    if rows.nbytes <= REQUEST_BYTES:
        yield rows
    elif len(rows) == 1:
        raise rejected(what, "a row is longer than the 10 MB that BigQuery takes", hint="Exclude its large columns.")
    else:
        yield from _requests(rows.slice(0, len(rows) // 2), what)
        yield from _requests(rows.slice(len(rows) // 2), what)
