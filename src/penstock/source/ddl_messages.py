"""The messages of the DDL trigger: what they say, and whether the trigger sent them.

Any database user can emit a logical message with any prefix. So the trigger also inserts a row into its ledger, a table
that only its owner can write: the transaction and the digest of each message. A message counts if its transaction has
its digest in the ledger. A copy of a genuine message counts nowhere else, because another transaction has another
number. The ledger contains nothing secret: every role may read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.errors import DecodeError, StatementInterrupted
from penstock.lsn import Lsn, is_in
from penstock.schema import ReplicaIdentity
from penstock.source.columns import Attribute, CatalogTable
from penstock.source.faults import translated

VISIBLE_SECONDS = 5.0
"""How long to wait until queries see a transaction that the stream has already delivered."""
_OIDS, _ATTNUMS, _MODIFIERS = range(1 << 32), range(1 << 15), range(-1, 1 << 31)
_MALFORMED = (KeyError, TypeError, ValueError, ArithmeticError, RecursionError)

# The stream has the lower half of the transaction's number. It is near the newest one: within 2^31, as all numbers are.
_LEDGER = """
    select pg_catalog.pg_visible_in_snapshot(t.id, s),
           array(select l.digest from {ledger} l where l.xid = t.id),
           (select pg_catalog.max(l.at)::text from {ledger} l where l.digest = '')
    from pg_catalog.pg_current_snapshot() s
    cross join lateral (select pg_catalog.pg_snapshot_xmax(s)::text::int8 as number) newest
    cross join lateral (
        select (number + ((%s - number + 2147483648) & 4294967295) - 2147483648)::text::pg_catalog.xid8 as id
    ) t
"""

logger = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """What the ledger says about a transaction."""

    xid: int
    digests: frozenset[bytes]
    since: Lsn | None
    """Messages before this position are older than the ledger."""


class Ledger:
    """Tells the messages of a trigger from those of others. `name` is the schema and the name of its table."""

    def __init__(self, connection: psycopg.Connection[Any], name: tuple[str, str]) -> None:
        self._connection = connection
        self._statement = sql.SQL(_LEDGER).format(ledger=sql.Identifier(*name))
        self._last: _Sent | None = None
        self._warned = False

    def has(self, prefix: str, content: bytes, lsn: Lsn, xid: int) -> bool:
        """Return whether the trigger sent a message in this transaction.

        The stream may deliver a transaction before queries see it; waits for that. Raises `StatementInterrupted`, which
        is retried, if it takes long.
        """
        if self._last is None or self._last.xid != xid:
            self._last = self._load(xid)
        sent = self._last
        return message_digest(prefix, content) in sent.digests or (sent.since is not None and is_in(lsn, sent.since))

    def warn(self, lsn: Lsn, xid: int) -> None:
        """Log a message that is ignored; of many, only the first."""
        if not self._warned:
            logger.warning(
                "ignored a logical message that the ddl trigger did not send, or that cannot be read lsn=%s xid=%d; "
                "more of them are not logged",
                lsn,
                xid,
            )
        self._warned = True

    def _load(self, xid: int) -> _Sent:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while True:
            is_visible, digests, since = self._read(xid)
            if is_visible:
                return _Sent(xid, frozenset(map(bytes, digests)), None if since is None else Lsn.parse(since))
            if time.monotonic() > deadline:
                raise StatementInterrupted(
                    f"transaction {xid} is in the stream, but queries do not see it yet",
                    hint="It probably waits for a synchronous standby; Penstock keeps retrying.",
                )
            time.sleep(0.005)

    def _read(self, xid: int) -> tuple[Any, ...]:
        with (
            translated(self._connection, "read the ledger of the DDL trigger"),
            self._connection.cursor(row_factory=tuple_row) as cursor,
        ):
            try:
                row = cursor.execute(self._statement, [xid]).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
                # The trigger was removed meanwhile. No other message counts then.
                return True, (), None
        assert row is not None
        return row


def message_digest(prefix: str, content: bytes) -> bytes:
    """Return what the ledger has of a message."""
    return hashlib.sha256(prefix.encode() + content).digest()


def parse_rewrite(content: bytes) -> tuple[int, str]:
    """Parse a message about a rewritten table: the number and the name of the published table."""
    try:
        record: dict[str, Any] = json.loads(content)
        return _number(record["table"], _OIDS), str(record["name"])
    except _MALFORMED as error:
        raise _malformed(error) from None


def parse_announcement(content: bytes) -> CatalogTable:
    """Parse a table's description."""
    try:
        record: dict[str, Any] = json.loads(content)
        return CatalogTable(
            oid=_number(record["table"], _OIDS),
            namespace=str(record["namespace"]),
            name=str(record["name"]),
            kind=str(record["kind"]),
            persistence=str(record["persistence"]),
            replica_identity=ReplicaIdentity(record["identity"]),
            identity_attnums=tuple(_number(each, _ATTNUMS) for each in record["identity_key"] or ()),
            primary_key_attnums=tuple(_number(each, _ATTNUMS) for each in record["primary_key"] or ()),
            is_partition=bool(record["partition"]),
            partition_parent_oid=None,
            partition_root_oid=None,
            attributes=tuple(_attribute(*fields) for fields in record["attributes"] or ()),
            deferrable_key=bool(record.get("deferrable")),
        )
    except _MALFORMED as error:
        raise _malformed(error) from None


def _attribute(
    attnum: Any, name: Any, type_oid: Any, type_modifier: Any, dropped: Any, generated: Any, not_null: Any, filled: Any
) -> Attribute:
    return Attribute(
        _number(attnum, _ATTNUMS),
        str(name),
        _number(type_oid, _OIDS),
        _number(type_modifier, _MODIFIERS),
        bool(dropped),
        str(generated),
        bool(not_null),
        bool(filled),
    )


def _number(value: Any, allowed: range) -> int:
    number = int(value)
    if number not in allowed:
        raise ValueError
    return number


def _malformed(error: Exception) -> DecodeError:
    """The error without the content."""
    return DecodeError(f"the DDL trigger wrote a malformed message ({type(error).__name__})", offset=0)
