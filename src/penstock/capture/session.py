"""A replication connection: starts at a position, reads messages, and answers the server on its own timer.

The session reads from libpq's buffer, message by message, into parcels. Between reads it sleeps for some milliseconds:
the server fills the socket meanwhile, and whole buffers are read at once. This makes it faster than a reader that wakes
up for every message. After a moment without messages it waits on the socket instead.

Answers depend only on the clock and the acknowledged position. While the queue is full, nothing is read but answers
continue: the server sees a slow reader, not a dead one.
"""

from __future__ import annotations

import logging
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psycopg
from psycopg import pq

from penstock.capture.messages import POSTGRES_EPOCH_MICROSECONDS
from penstock.capture.parcels import Parcel, ParcelQueue
from penstock.changes.wire import PADDING
from penstock.errors import DecodeError, ServerUnavailable
from penstock.lsn import Lsn, furthest, reaches
from penstock.schema import quote_identifier, quote_literal
from penstock.source.connections import SourceSettings, connect_replication
from penstock.source.faults import Place, from_connection, from_notice, from_result

logger = logging.getLogger(__name__)

PARCEL_BYTES = 1 << 20
NAP_SECONDS = 0.008
IDLE_SECONDS = 0.1
"""After this long without messages, wait on the socket."""
END_SECONDS = 2.0
"""How long the server may take to end the replication after the last answer."""
_MESSAGE, _KEEPALIVE = b"wk"
_STREAMING_SINCE = 140000


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options for pgoutput."""

    slot: str
    publications: tuple[str, ...]
    streaming: bool = True
    """The server sends transactions that exceed its memory before they end (14 and newer)."""
    messages: bool = False


class ReplicationSession:
    """Owns its connection. `read` runs in one thread and calls `acknowledged` from that thread only."""

    def __init__(self, settings: SourceSettings, options: StartOptions) -> None:
        self.connection = connect_replication(settings)
        self._options = options
        self._place = Place.of(self.connection)
        self._received = Lsn(0)
        self._answered = Lsn(0)
        self._answered_at = 0.0
        self._asked = False
        self._notice: Exception | None = None
        self.connection.notice_handler = self._take_notice

    def start(self, position: Lsn) -> None:
        """Start with the first commit that starts at or after `position`."""
        connection = self.connection
        result = connection.exec_(self._start_command(position).encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._failure(result, "start replication")
        connection.nonblocking = 1
        self._received = position
        logger.info("replication started slot=%s position=%s", self._options.slot, position)

    def read(
        self,
        queue: ParcelQueue,
        acknowledged: Callable[[], Lsn],
        stop: threading.Event,
        *,
        answer_seconds: float,
        silence_seconds: float,
    ) -> None:
        """Read until `stop`. Raises if the connection ends, or if the server does not answer a request."""
        last_message = last_bytes = time.monotonic()
        while not stop.is_set():
            silence = time.monotonic() - max(last_message, last_bytes)
            if silence >= silence_seconds:
                raise ServerUnavailable(
                    f"the server has been silent for {silence:.0f} s ({self._place.where})", where=self._place.where
                )
            self._answer(acknowledged(), answer_seconds, ask=silence >= answer_seconds)
            if not queue.has_room and not queue.wait_for_room(min(0.1, answer_seconds / 4)):
                # The server is not silent: we are not reading.
                last_message = time.monotonic()
                continue
            arrived, drained = self._read_parcel(queue)
            now = time.monotonic()
            if arrived:
                last_message = now
            if drained and now - last_message < IDLE_SECONDS:
                time.sleep(NAP_SECONDS)
            elif drained:
                readable, _, _ = select.select([self.connection.socket], [], [], min(0.1, answer_seconds / 4))
                if readable:
                    # Perhaps a part of a long message.
                    last_bytes = time.monotonic()

    def finish(self, acknowledged: Lsn) -> None:
        """Send a last answer and close the connection."""
        try:
            self._send_answer(acknowledged)
            self.connection.put_copy_end()
            self._read_out()
        except psycopg.Error:
            logger.debug("the connection was closed before the last answer")
        self.close()

    def _read_out(self) -> None:
        """Read and discard what the server sends until it ends, too, for at most `END_SECONDS`.

        A connection that is closed with unread data is reset, and then the server discards the answer.
        """
        connection, deadline = self.connection, time.monotonic() + END_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            is_flushed = connection.flush() == 0
            length, _ = connection.get_copy_data(1)
            if length < 0:
                return
            if length == 0:
                select.select([connection.socket], [] if is_flushed else [connection.socket], [], left)
                connection.consume_input()

    def close(self) -> None:
        """Close the connection."""
        self.connection.finish()

    def _read_parcel(self, queue: ParcelQueue) -> tuple[bool, bool]:
        """Move at most a parcel of messages into the queue; return whether any came, and whether there are no more."""
        get, consume = self.connection.get_copy_data, self.connection.consume_input
        raw = bytearray()
        lengths: list[int] = []
        count = lengths.append
        just_consumed = False
        try:
            # The only loop over messages in Python: libpq hands them out one at a time.
            while len(raw) < PARCEL_BYTES:
                length, message = get(1)
                if length > 0:
                    just_consumed = False
                    if message[0] == _MESSAGE:
                        raw += message
                        count(length)
                    else:
                        self._put(queue, raw, lengths)
                        self._take_keepalive(queue, message)
                        return True, False
                elif length < 0:
                    raise self._end_of_copy()
                elif just_consumed:
                    break
                else:
                    consume()
                    just_consumed = True
        except psycopg.Error:
            raise from_connection(self.connection, self._place, "read changes", slot=self._options.slot) from None
        arrived, drained = bool(lengths), len(raw) < PARCEL_BYTES
        self._put(queue, raw, lengths)
        return arrived, drained

    def _put(self, queue: ParcelQueue, raw: bytearray, lengths: list[int]) -> None:
        if self._notice is not None:
            # Changes are missing from here on. What came before is read again after the problem is fixed.
            raise self._notice
        if lengths:
            last = len(raw) - lengths[-1]
            self._received = furthest(self._received, Lsn(int.from_bytes(raw[last + 1 : last + 9], "big")))
            raw += PADDING
            queue.put(Parcel(raw, np.array(lengths, np.int64)))

    def _take_keepalive(self, queue: ParcelQueue, message: memoryview) -> None:
        if message[0] != _KEEPALIVE or len(message) != 18:
            raise DecodeError("a message is neither a change nor a keepalive", offset=0)
        position = Lsn(int.from_bytes(message[1:9], "big"))
        self._received = furthest(self._received, position)
        self._asked = self._asked or message[17] == 1
        queue.put(position)

    def _answer(self, acknowledged: Lsn, answer_seconds: float, *, ask: bool = False) -> None:
        """Report our position to the server if it asked, if the position changed, or if it is time.

        `ask` makes the server answer at once: a connection that broke silently looks like a quiet one.
        """
        elapsed = time.monotonic() - self._answered_at
        news = elapsed >= 0.1 and not reaches(self._answered, acknowledged)
        if self._asked or news or elapsed >= answer_seconds:
            try:
                self._send_answer(acknowledged, ask=ask)
            except psycopg.Error:
                raise from_connection(self.connection, self._place, "answer the server") from None

    def _send_answer(self, acknowledged: Lsn, *, ask: bool = False) -> None:
        # The flushed position is sent once, and 0 ("unknown") otherwise: on shutdown, a server waits until its client
        # has flushed everything if it knows that position, and else only until the client has received everything.
        flushed = Lsn(0) if reaches(self._answered, acknowledged) else acknowledged
        self._answered = furthest(self._answered, acknowledged)
        clock = time.time_ns() // 1000 - POSTGRES_EPOCH_MICROSECONDS
        received = furthest(self._received, self._answered)
        self.connection.put_copy_data(struct.pack(">cQQQqB", b"r", received, flushed, flushed, clock, ask))
        self.connection.flush()
        self._answered_at = time.monotonic()
        self._asked = False

    def _end_of_copy(self) -> Exception:
        result = self.connection.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return self._failure(result, "read changes")
        return ServerUnavailable(f"the server ended replication ({self._place.where})", where=self._place.where)

    def _failure(self, result: pq.abc.PGresult, doing: str) -> Exception:
        options = self._options
        return from_result(result, self._place, doing, slot=options.slot, publication=options.publications[0])

    def _take_notice(self, notice: pq.abc.PGresult) -> None:
        """Since PostgreSQL 18, the server only warns when it omits the changes of a missing publication."""
        error = from_notice(notice, self._place, "read changes", publication=self._options.publications[0])
        if error is not None:
            self._notice = error

    def _start_command(self, position: Lsn) -> str:
        options = self._options
        names = ",".join(map(quote_identifier, options.publications))
        streaming = options.streaming and self.connection.server_version >= _STREAMING_SINCE
        parameters = {"proto_version": "2" if streaming else "1", "publication_names": names}
        if streaming:
            parameters["streaming"] = "on"
        if options.messages and self.connection.server_version >= _STREAMING_SINCE:
            parameters["messages"] = "true"
        quoted = ", ".join(f"{key} {quote_literal(value)}" for key, value in parameters.items())
        return f"START_REPLICATION SLOT {quote_identifier(options.slot)} LOGICAL {position} ({quoted})"
