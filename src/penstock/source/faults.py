"""Errors of the source as Penstock's named errors: the only module that interprets SQLSTATEs and messages.

The SQLSTATE decides if there is one, because messages may be in any language. Otherwise the text decides, by words that
are never translated (`wal_level`, `pg_hba.conf`, quoted names). libpq reports no SQLSTATE for a connection that failed
to open. An unknown reply then counts as a refused login if a password was sent, else as a server that is not ready.

Every message states what failed, where (`host:port/database`) and what the server reported; never a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import pq

from penstock.errors import (
    AuthenticationFailed,
    DatabaseMissing,
    PermissionDenied,
    PublicationMissing,
    QueryFailed,
    ServerUnavailable,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotUndecodable,
    SlotUnusable,
    SourceError,
    StatementInterrupted,
    TlsFailed,
    UnsupportedServer,
    WalLevelTooLow,
)
from penstock.observe.redact import redact, scrub

_PREFIX = re.compile(
    r"^(?:- host: .*?: (?=connection ))?(?:connection failed: )?(?:connection (?:to server )?(?:at|on) .*? failed: )?"
    r"(?:[^\s:]+:  )?",
    re.MULTILINE,
)
_SEVERAL = "Multiple connection attempts failed. All failures were:"
_SERVER_REPLY = re.compile(r"(?:failed: |^)[^\s:]+:  ", re.MULTILINE)
_PID = re.compile(r"\bPID (\d+)")
_NUMBER = re.compile(r"(?<![\w\"])(\d+)(?![\w\"])")
_WAL_SEGMENT = re.compile(r"\b[0-9A-F]{24}\b")
WAL_REMOVED = ("58P01", "XX000")
"""SQLSTATEs of a missing segment of WAL: that of a missing file, or, if the segment is removed while the server reads
it, whatever the last error of the system happened to be."""
_MISSING_CATALOG = re.compile(
    r"could not map filen(?:umber|ode) .* to relation OID|catalog is missing \d+ attribute\(s\) for relation OID"
    r"|unexpected duplicate for tablespace \d+, relfilen"
)

_LOGIN_TEXT = (
    "password authentication failed",
    "authentication failed for user",
    "no password supplied",
    "pg_hba.conf",
    "is not permitted to log in",
    "authentication method",
    "SASL authentication",
)
_TLS_TEXT = ("ssl", "tls", "certificate", "private key")
_GONE_TEXT = ("can no longer", "invalidated", "has never previously reserved wal")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an error happened, and the secrets that must not appear in its message."""

    where: str
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, connection: psycopg.Connection[Any] | pq.abc.PGconn) -> Place:
        """The place of a connection. Works for broken connections; closed ones have no location."""
        pgconn = connection.pgconn if isinstance(connection, psycopg.Connection) else connection
        try:
            host, port, database = (_decode(part) for part in (pgconn.host, pgconn.port, pgconn.db))
            public = {_decode(pgconn.user), database, host}
            secrets = frozenset({_decode(pgconn.password)} - public - {""})
        except psycopg.Error:
            return cls("a closed connection")
        return cls(format_location(host, port, database), secrets)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server, or libpq on its behalf, reported."""

    message: str
    sqlstate: str | None = None
    detail: str = ""
    hint: str = ""


def format_location(host: str, port: str, database: str) -> str:
    """`host:port/database`, for messages."""
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed or 'localhost'}:{port or '5432'}/{database}"


def classify(
    reply: Reply,
    place: Place,
    doing: str,
    *,
    slot: str | None = None,
    publication: str | None = None,
    connecting: bool = False,
    used_password: bool = False,
) -> SourceError:
    """Return the named error for a reply. `slot` and `publication` are what the statement was about, if anything."""
    kind, hint, facts = _kind(reply, slot, publication, connecting, used_password)
    said = (
        _one_line(_PREFIX.sub("", reply.message.partition(_SEVERAL)[2] or reply.message)) or "the server did not answer"
    )
    if reply.detail and reply.detail not in said:
        said = f"{said.rstrip('.')} ({_one_line(reply.detail).rstrip('.')})"
    message = redact(scrub(f"cannot {doing} ({place.where}): {said}", place.secrets))
    if hint is None and kind is QueryFailed and reply.hint:
        hint = redact(scrub(_one_line(reply.hint), place.secrets))
    return kind(message, hint=hint, where=place.where, sqlstate=reply.sqlstate, **facts)


def from_exception(error: psycopg.Error, place: Place, doing: str, **about: Any) -> SourceError:
    """The named error for an exception of psycopg; `about` as in `classify`."""
    diagnostics = error.diag
    reply = Reply(
        message=diagnostics.message_primary or str(error),
        sqlstate=error.sqlstate or diagnostics.sqlstate,
        detail=diagnostics.message_detail or "",
        hint=diagnostics.message_hint or "",
    )
    if reply.sqlstate is None and not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        # Our own mistake: a wrong parameter, a closed cursor. The text may quote anything, so secrets are removed.
        return QueryFailed(
            redact(scrub(f"cannot {doing} ({place.where}): {_one_line(str(error))}", place.secrets)),
            where=place.where,
            sqlstate=None,
        )
    return classify(reply, place, doing, **about)


def from_result(result: pq.abc.PGresult, place: Place, doing: str, **about: Any) -> SourceError:
    """The named error for a failed result of `psycopg.pq`."""

    def read(part: pq.DiagnosticField) -> str:
        return _decode(result.error_field(part))

    reply = Reply(
        message=read(pq.DiagnosticField.MESSAGE_PRIMARY) or _decode(result.error_message),
        sqlstate=read(pq.DiagnosticField.SQLSTATE) or None,
        detail=read(pq.DiagnosticField.MESSAGE_DETAIL),
        hint=read(pq.DiagnosticField.MESSAGE_HINT),
    )
    return classify(reply, place, doing, **about)


def from_notice(notice: pq.abc.PGresult, place: Place, doing: str, *, publication: str) -> SourceError | None:
    """Return the error that a notice stands for; None for harmless notices. For replication connections.

    Since PostgreSQL 18, a publication that does not exist at the decoded position is only a warning, and the server
    continues *without* the changes. If we ignored the warning, they would be lost silently.
    """
    state = _decode(notice.error_field(pq.DiagnosticField.SQLSTATE))
    message = _decode(notice.error_field(pq.DiagnosticField.MESSAGE_PRIMARY))
    if state != "55000" or not _mentions(message, publication, "publication"):
        return None
    detail = _decode(notice.error_field(pq.DiagnosticField.MESSAGE_DETAIL))
    said = classify(Reply(message, state, detail), place, doing)
    return PublicationMissing(said.message, where=place.where, sqlstate=state, publication=publication)


def from_connection(connection: pq.abc.PGconn, place: Place, doing: str, **about: Any) -> SourceError:
    """The named error for a connection that broke, from libpq's own message."""
    return classify(Reply(_decode(connection.error_message)), place, doing, **about)


@contextmanager
def translated(connection: psycopg.Connection[Any], doing: str, **about: Any) -> Iterator[None]:
    """Raise psycopg's exceptions inside the block as named errors; `about` as in `classify`."""
    place = Place.of(connection)
    try:
        yield
    except psycopg.Error as error:
        # "from None": psycopg's text and pgconn may hold secrets.
        raise from_exception(error, place, doing, **about) from None


def _kind(
    reply: Reply, slot: str | None, publication: str | None, connecting: bool, used_password: bool
) -> tuple[type[SourceError], str | None, dict[str, Any]]:
    if reply.sqlstate:
        return _kind_by_state(reply, reply.sqlstate, slot, publication)
    if connecting:
        return _kind_of_failed_connect(reply.message, used_password), _connect_hint(reply.message), {}
    return ServerUnavailable, None, {}


def _kind_by_state(
    reply: Reply, state: str, slot: str | None, publication: str | None
) -> tuple[type[SourceError], str | None, dict[str, Any]]:
    text = f"{reply.message} {reply.detail}"
    about_publication = _mentions(text, publication, "publication")
    about_slot = not about_publication and _mentions(text, slot, "replication slot")
    match state:
        case "42501":
            return PermissionDenied, None, {}
        case "3D000" | "57P04":
            return DatabaseMissing, None, {}
        case "42704" if about_publication:
            return PublicationMissing, None, {"publication": publication}
        case "42704" if about_slot:
            return SlotMissing, None, {"slot": slot}
        case "55006" if about_slot:
            return SlotInUse, None, {"slot": slot, "pid": parse_pid(text)}
        case "42710" if about_slot:
            return SlotUnusable, None, {"slot": slot}
        case "53400":
            return SlotUnusable, "Raise max_replication_slots (needs a restart), or drop unused slots.", {}
        case state if state in WAL_REMOVED and _WAL_SEGMENT.search(text):
            return SlotLost, None, {"slot": slot}
        case "XX000" if _MISSING_CATALOG.search(text):
            return SlotUndecodable, None, {"slot": slot}
        case "55000":
            return _kind_of_wrong_state(text, slot)
        case "53300":
            return ServerUnavailable, "Raise max_connections or max_wal_senders, or close unused connections.", {}
        case "57P01" | "57P02" | "57P03" | "57P05":
            return ServerUnavailable, None, {}
        case "57014" | "40001" | "40P01" | "25P03" | "25P04" | "58030":
            return StatementInterrupted, None, {}
    if state.startswith("28"):
        return AuthenticationFailed, None, {}
    if state.startswith("53") or (state.startswith("08") and state != "08P01"):
        return ServerUnavailable, None, {}
    return QueryFailed, None, {}


def _kind_of_wrong_state(text: str, slot: str | None) -> tuple[type[SourceError], str | None, dict[str, Any]]:
    lowered = text.lower()
    if "wal_level" in lowered and not any(part in lowered for part in _GONE_TEXT):
        return WalLevelTooLow, None, {}
    if "being synchronized from the primary" in lowered:
        # A standby that is about to be promoted: soon the slot is usable.
        return ServerUnavailable, "The server is still a standby. Penstock continues when it is promoted.", {}
    if "in recovery" in lowered or "on standby" in lowered:
        return UnsupportedServer, None, {}
    if any(part in lowered for part in _GONE_TEXT):
        return SlotLost, None, {"slot": slot}
    if "slot" in lowered or (slot is not None and f'"{slot}"' in text):
        return SlotUnusable, None, {"slot": slot}
    return QueryFailed, None, {}


def _kind_of_failed_connect(message: str, used_password: bool) -> type[SourceError]:
    lowered = message.lower()
    if any(part.lower() in lowered for part in _LOGIN_TEXT):
        return AuthenticationFailed
    if re.search(r'database ".*" does not exist', message):
        return DatabaseMissing
    if re.search(r'role ".*" does not exist', message):
        return AuthenticationFailed
    if "permission denied for database" in lowered or "must be superuser or replication role" in lowered:
        return PermissionDenied
    if "permission denied to start wal sender" in lowered:
        return PermissionDenied
    if _SERVER_REPLY.search(message):
        known = ("the database system is", "too many", "remaining connection slots", "number of requested standby")
        if used_password and not any(part in lowered for part in known):
            return AuthenticationFailed
        return ServerUnavailable
    cut = ("server closed the connection", "connection refused", "connection reset", "timeout", "syscall error: eof")
    if any(part in lowered for part in _TLS_TEXT) and not any(part in lowered for part in cut):
        return TlsFailed
    return ServerUnavailable


def _connect_hint(message: str) -> str | None:
    lowered = message.lower()
    if "pg_hba.conf" in lowered and ("no encryption" in lowered or "ssl off" in lowered):
        return "The server may require TLS (try sslmode=require), or pg_hba.conf has no entry for this user and host."
    if "replication" in lowered and ("permission denied" in lowered or "must be superuser" in lowered):
        return "Run: alter role <user> replication (on managed services, grant the provider's replication role)."
    if "number of requested standby" in lowered:
        return "Raise max_wal_senders (needs a restart), or close unused replication connections."
    return None


def is_lock_timeout(error: SourceError) -> bool:
    """Return True if the server gave up waiting for a lock: a retry may succeed."""
    return error.facts.get("sqlstate") == "55P03"


def parse_pid(text: str) -> int | None:
    """The process id in the server's message, whatever its language."""
    match = _PID.search(text)
    if match is None:
        numbers = _NUMBER.findall(re.sub(r'"[^"]*"|«[^»]*»|„[^“]*“', " ", text))
        return int(numbers[-1]) if len(numbers) == 1 else None
    return int(match[1])


def _mentions(text: str, name: str | None, word: str) -> bool:
    return word in text.lower() or (name is not None and name in text)


def _one_line(text: str) -> str:
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _decode(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
