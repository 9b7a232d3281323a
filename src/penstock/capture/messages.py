"""The rare messages of pgoutput, parsed one at a time with a checked cursor.

Inserts, updates, deletes, begins and commits come by the million and are read column at a time (`parcels.py`,
`waves.py`). No I/O; malformed bytes raise `DecodeError` with the offset from the start of the message.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import DecodeError
from penstock.lsn import Lsn
from penstock.source.columns import RelationColumn

POSTGRES_EPOCH_MICROSECONDS = 946_684_800_000_000
"""2000-01-01 UTC in Unix microseconds: the epoch of the server's timestamps."""


@dataclass(frozen=True, slots=True)
class Relation:
    """The shape of the rows of a table that follow."""

    table_id: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables that one statement truncated."""

    table_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What `pg_logical_emit_message` wrote."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Begins a run of messages of one open transaction."""

    xid: int
    first: bool


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction has committed."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    """Unix microseconds."""


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction, or one of its sub-transactions, was rolled back."""

    xid: int
    subtransaction_xid: int


def parse_relation(message: bytes, *, streamed: bool = False) -> Relation:
    """Read `R`."""
    cursor = _Cursor(message, b"R", streamed)
    table_id = cursor.uint(4, "relation")
    namespace = cursor.text("namespace") or "pg_catalog"
    name = cursor.text("relation name")
    identity = chr(cursor.uint(1, "replica identity"))
    if identity not in "dnfi":
        raise cursor.error("the replica identity is unknown", at=cursor.position - 1)
    columns = tuple(_relation_column(cursor) for _ in range(cursor.uint(2, "column count")))
    cursor.finish()
    return Relation(table_id, namespace, name, identity, columns)


def parse_truncate(message: bytes, *, streamed: bool = False) -> Truncate:
    """Read `T`."""
    cursor = _Cursor(message, b"T", streamed)
    count = cursor.uint(4, "table count")
    options = cursor.uint(1, "options")
    if count * 4 > cursor.remaining:
        raise cursor.error("the message is too short for its number of tables")
    table_ids = tuple(cursor.uint(4, "relation") for _ in range(count))
    cursor.finish()
    return Truncate(table_ids, cascade=bool(options & 1), restart_identity=bool(options & 2))


def parse_logical_message(message: bytes, *, streamed: bool = False) -> LogicalMessage:
    """Read `M`."""
    cursor = _Cursor(message, b"M", streamed)
    transactional = bool(cursor.uint(1, "flags") & 1)
    lsn = cursor.position_in_log("position")
    prefix = cursor.text("prefix", is_foreign=True)
    content = cursor.take(cursor.uint(4, "content length"), "content")
    cursor.finish()
    return LogicalMessage(transactional, lsn, prefix, content)


def parse_stream_start(message: bytes) -> StreamStart:
    """Read `S`."""
    cursor = _Cursor(message, b"S")
    start = StreamStart(xid=cursor.uint(4, "transaction"), first=cursor.uint(1, "first segment") == 1)
    cursor.finish()
    return start


def parse_stream_commit(message: bytes) -> StreamCommit:
    """Read `c`."""
    cursor = _Cursor(message, b"c")
    xid = cursor.uint(4, "transaction")
    cursor.uint(1, "flags")
    commit_lsn, end_lsn = cursor.position_in_log("commit position"), cursor.position_in_log("end position")
    commit_time = cursor.int(8, "commit time") + POSTGRES_EPOCH_MICROSECONDS
    if commit_time >= 1 << 63:
        raise cursor.error("the commit time is out of range")
    cursor.finish()
    return StreamCommit(xid, commit_lsn, end_lsn, commit_time)


def parse_stream_abort(message: bytes) -> StreamAbort:
    """Read `A`."""
    cursor = _Cursor(message, b"A")
    abort = StreamAbort(xid=cursor.uint(4, "transaction"), subtransaction_xid=cursor.uint(4, "sub-transaction"))
    cursor.finish()
    return abort


def _relation_column(cursor: _Cursor) -> RelationColumn:
    is_key = bool(cursor.uint(1, "column flags") & 1)
    name = cursor.text("column name")
    type_oid = cursor.uint(4, "column type")
    return RelationColumn(name, type_oid, cursor.int(4, "type modifier"), is_key)


class _Cursor:
    """Reads from left to right and never past the end."""

    __slots__ = ("_message", "position")

    def __init__(self, message: bytes, kind: bytes, streamed: bool = False) -> None:
        self._message = message
        self.position = 0
        if self.take(1, "kind") != kind:
            raise self.error(f"not a message of kind {kind.decode()}", at=0)
        if streamed:
            self.uint(4, "transaction")

    @property
    def remaining(self) -> int:
        return len(self._message) - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.remaining:
            raise self.error(f"the message ends inside its {what}")
        part = self._message[self.position : self.position + count]
        self.position += count
        return part

    def uint(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "big")

    def int(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "big", signed=True)

    def position_in_log(self, what: str) -> Lsn:
        value = self.int(8, what)
        if value < 0:
            raise self.error(f"the {what} is out of range", at=self.position - 8)
        return Lsn(value)

    def text(self, what: str, *, is_foreign: bool = False) -> str:
        """Read a text. Anyone may have written a foreign one, in any encoding."""
        end = self._message.find(b"\0", self.position)
        if end < 0:
            raise self.error(f"the {what} is not terminated")
        raw = self._message[self.position : end]
        try:
            text = raw.decode(errors="replace" if is_foreign else "strict")
        except UnicodeDecodeError as error:
            raise self.error(f"the {what} is not UTF-8", at=self.position + error.start) from None
        self.position = end + 1
        return text

    def finish(self) -> None:
        if self.remaining:
            raise self.error(f"{self.remaining} bytes follow the end of the message")

    def error(self, what: str, *, at: int | None = None) -> DecodeError:
        offset = self.position if at is None else at
        kind = self._message[:1].decode("ascii", "replace")
        return DecodeError(f"malformed {kind!r} message at offset {offset}: {what}", offset=offset)
