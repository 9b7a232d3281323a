"""What happens to a table in order: rows, truncates, and what the source's own code said in between."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.lsn import OrderKey


@dataclass(frozen=True, slots=True)
class Segment:
    """A file with consecutive changes of one table in one schema version; see `penstock.changes.segment`."""

    table_id: int
    table: str
    """Namespace and name, for people."""
    version: str
    """Of the table's schema."""
    file: str
    """Relative to the spool."""
    rows: int
    bytes: int
    first: OrderKey
    last: OrderKey
    unrepresentable: int = 0
    """Rows with cells whose type cannot hold them; their texts are in `_unrepresentable`."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """A table was emptied. One TRUNCATE of several tables gives each of them one, with the same key."""

    table_id: int
    table: str
    key: OrderKey
    commit_time: int
    xid: int
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A logical message (`pg_logical_emit_message`) inside a transaction."""

    key: OrderKey
    commit_time: int
    xid: int
    prefix: str
    content: bytes


Step = Segment | Truncation | Message
