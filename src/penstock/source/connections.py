"""Connections to the source: their settings, session parameters and timeouts.

A value must have the same text on every connection, so each session fixes the settings that affect text: ISO dates,
time zone UTC, `extra_float_digits` 3, bytea as hex, and so on. `search_path` is `pg_catalog`: the server then qualifies
names in expressions, and our statements name every schema. `row_security` is off, as in `pg_dump`: a policy that would
hide rows is an error, not a smaller copy.

The settings travel as `options`, so `reset all` returns to them. Environment variables that libpq sends separately
(`PGDATESTYLE`, `PGTZ`) override them; `_pin` corrects that after connecting.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.errors import ConfigError, ServerUnavailable
from penstock.source.faults import Place, format_location, from_connection, from_exception, from_result

PINNED_PARAMETERS: Mapping[str, str] = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "search_path": "pg_catalog",
    "row_security": "off",
    # The server reports some losses only as warnings: see faults.from_notice.
    "client_min_messages": "warning",
}
"""Settings of every session, regardless of server, database, role and URL."""

NO_TIMEOUTS: Mapping[str, str] = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""For long sessions: replication, and the session that keeps a snapshot."""

CATALOG_LIMITS: Mapping[str, str] = {"lock_timeout": "2000", "statement_timeout": "30000"}
"""For catalog queries while changes are applied: DDL on one table must not delay the others."""

# The version that introduced a timeout; older servers refuse these in `options`.
_LATER_TIMEOUTS = (("idle_session_timeout", 140000), ("transaction_timeout", 170000))

# Settings that the server reports by itself, and their values after connecting.
_REPORTED = {"DateStyle": "ISO", "IntervalStyle": "postgres", "TimeZone": "UTC", "client_encoding": "UTF8"}

_SECRET_PARAMETERS = ("password", "sslpassword", "oauth_client_secret")
_NAME_LIMIT = 63


class Role(StrEnum):
    """What a connection is for; part of its `application_name`."""

    CAPTURE = "capture"
    CATALOG = "catalog"
    CHECK = "check"
    COPY = "copy"
    DESTINATION = "destination"
    DOCUMENTS = "documents"
    SLOT = "slot"
    SNAPSHOT = "snapshot"
    STATE = "state"
    TAIL = "tail"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How to reach the source. The URL is secret and never printed; print `location` instead.

    Settings in the URL (`connect_timeout`, `keepalives_idle`, `sslmode`, …) override the fields here, except for those
    that the session needs. Its `options` come before ours, and its `application_name` replaces the prefix.
    """

    url: str = field(repr=False)
    """A libpq connection string, `postgresql://…` or `key=value …`; libpq's environment variables complete it."""
    connect_timeout: float = 10.0
    """Seconds for each host."""
    application_name: str = "penstock"
    keepalives_idle: int = 30
    keepalives_interval: int = 10
    keepalives_count: int = 3

    @property
    def silence_seconds(self) -> int:
        """Seconds without a sign of life after which a connection is closed."""
        return self.keepalives_idle + self.keepalives_interval * self.keepalives_count

    def __post_init__(self) -> None:
        given = self.parameters()
        # An unencoded "@" or "/" in a password moves the rest of it into the host, the port or the database name, and
        # these are shown.
        in_path = self.url.partition("://")[2].partition("?")[0].partition("/")[2]
        ports = given.get("port", "").replace(",", "")
        if "@" in given.get("host", "") or "@" in in_path or not (ports == "" or ports.isdecimal()):
            raise _unreadable()

    def __str__(self) -> str:
        return self.location

    def parameters(self) -> dict[str, str]:
        """The URL as libpq reads it."""
        try:
            return {name: str(value) for name, value in conninfo_to_dict(self.url).items() if value is not None}
        except psycopg.Error as error:
            raise _unreadable(_public_reason(self.url, str(error))) from None

    @property
    def location(self) -> str:
        """`host:port/database`, for messages."""
        given = self.parameters()
        defaults = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
        value = {name: given.get(name) or os.environ.get(variable, "") for name, variable in defaults.items()}
        host = value["host"] or given.get("hostaddr", "")
        return format_location(host, value["port"], value["dbname"] or value["user"])

    @property
    def place(self) -> Place:
        """The location, with the secrets that must not appear in a message."""
        given = self.parameters()
        public = {given.get(name, "") for name in ("user", "dbname", "host")}
        secrets = {given.get(name, "") for name in _SECRET_PARAMETERS} | {os.environ.get("PGPASSWORD", "")}
        return Place(self.location, frozenset(secrets - public - {""}))


def connect(
    settings: SourceSettings, role: Role, *, parameters: Mapping[str, str] | None = None
) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection for statements, in autocommit. `parameters` are further settings (see `NO_TIMEOUTS`)."""
    extra = dict(parameters or {})
    conninfo = build_conninfo(settings, role, extra)
    try:
        connection = psycopg.connect(conninfo, autocommit=True)
        try:
            _pin(connection.pgconn, extra)
        except BaseException:
            connection.close()
            raise
    except psycopg.Error as error:
        used_password = bool(error.pgconn is not None and error.pgconn.used_password)
        raise from_exception(error, settings.place, "connect", connecting=True, used_password=used_password) from None
    return connection


def connect_replication(settings: SourceSettings, role: Role = Role.CAPTURE) -> pq.abc.PGconn:
    """Open a replication connection (`replication=database`) without session timeouts; the caller finishes it."""
    conninfo = build_conninfo(settings, role, dict(NO_TIMEOUTS), replication=True)
    attempts = _split_hosts(conninfo)
    for attempt in attempts[:-1]:
        try:
            return _connect_replication(attempt, settings)
        except ServerUnavailable:
            continue
    return _connect_replication(attempts[-1], settings)


def build_conninfo(
    settings: SourceSettings, role: Role, parameters: Mapping[str, str], *, replication: bool = False
) -> str:
    """The conninfo of one connection; it contains the password."""
    given = settings.parameters()
    prefix = given.pop("application_name", None) or settings.application_name
    options = given.pop("options", None) or os.environ.get("PGOPTIONS", "")
    session = {**PINNED_PARAMETERS, **parameters}
    ours = " ".join(f"-c {name}={_escape_option(value)}" for name, value in session.items())
    values: dict[str, Any] = {
        "connect_timeout": max(1, round(settings.connect_timeout)),
        "keepalives_idle": settings.keepalives_idle,
        "keepalives_interval": settings.keepalives_interval,
        "keepalives_count": settings.keepalives_count,
        # No keepalives are sent while an answer is outstanding: without this a statement could wait forever.
        "tcp_user_timeout": 1000
        * (settings.keepalives_idle + settings.keepalives_interval * settings.keepalives_count),
        **given,
        "application_name": application_name(prefix, role),
        "client_encoding": "UTF8",
        # The server takes the last of several settings of one name.
        "options": f"{options} {ours}".strip(),
    }
    values.pop("replication", None)
    if replication:
        values["replication"] = "database"
    return make_conninfo("", **values)


def application_name(prefix: str, role: Role) -> str:
    """`prefix:role` in at most 63 bytes; the prefix is shortened."""
    suffix = f":{role.value}".encode()
    head = prefix.encode()[: _NAME_LIMIT - len(suffix)]
    return head.decode("utf-8", "ignore") + suffix.decode()


def run_command(
    connection: pq.abc.PGconn, command: str, doing: str, *, timeout: float | None = 30.0, **about: Any
) -> list[tuple[str | None, ...]]:
    """Run one statement or replication command on a `pq` connection and return its rows as text.

    Waits at most `timeout` seconds; after a timeout the connection can only be finished. Not for commands that start a
    COPY. `about` as in `faults.classify`.
    """
    place = Place.of(connection)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        connection.send_query(command.encode())
        while connection.flush():
            _wait(connection, select.POLLOUT | select.POLLIN, deadline, place, doing)
        rows: list[tuple[str | None, ...]] = []
        failed: pq.abc.PGresult | None = None
        while True:
            while connection.is_busy():
                _wait(connection, select.POLLIN, deadline, place, doing)
                connection.consume_input()
            result = connection.get_result()
            if result is None:
                break
            if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                failed = failed or result
                if result.status != pq.ExecStatus.FATAL_ERROR:
                    break
            rows = [
                tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
                for row in range(result.ntuples)
            ]
    except psycopg.Error as error:
        raise from_exception(error, place, doing, **about) from None
    if failed is not None:
        raise from_result(failed, place, doing, **about)
    return rows


def _connect_replication(conninfo: str, settings: SourceSettings) -> pq.abc.PGconn:
    timeout = float(conninfo_to_dict(conninfo).get("connect_timeout") or 0)
    deadline = time.monotonic() + timeout if timeout > 0 else None
    place, doing = settings.place, "open a replication connection"
    connection = pq.PGconn.connect_start(conninfo.encode())
    try:
        while True:
            status = pq.PollingStatus.FAILED
            if connection.status != pq.ConnStatus.BAD:
                status = connection.connect_poll()
            if status == pq.PollingStatus.OK:
                break
            if status == pq.PollingStatus.FAILED:
                raise from_connection(connection, place, doing, connecting=True, used_password=connection.used_password)
            events = select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT
            _wait(connection, events, deadline, place, doing)
        _pin(connection, NO_TIMEOUTS)
    except psycopg.Error as error:
        connection.finish()
        raise from_exception(error, place, doing, connecting=True) from None
    except BaseException:
        connection.finish()
        raise
    return connection


def _pin(connection: pq.abc.PGconn, parameters: Mapping[str, str]) -> None:
    """Set what `options` could not: settings that the environment overrode, and settings of newer servers."""
    statements = [
        f"set {name.lower()} = '{wanted}'"
        for name, wanted in _REPORTED.items()
        if not _text(connection.parameter_status(name.encode()) or b"").startswith(wanted)
    ]
    if parameters.get("statement_timeout") == "0":
        statements += [f"set {name} = 0" for name, since in _LATER_TIMEOUTS if connection.server_version >= since]
    if statements:
        run_command(connection, "; ".join(statements), "set up the session")


def _wait(connection: pq.abc.PGconn, events: int, deadline: float | None, place: Place, doing: str) -> None:
    poll = select.poll()
    poll.register(connection.socket, events)
    remaining = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(remaining):
        raise ServerUnavailable(
            f"cannot {doing} ({place.where}): the server did not answer in time", where=place.where, sqlstate=None
        )


def _split_hosts(conninfo: str) -> list[str]:
    """One conninfo per host, because libpq applies no time limit to its list of hosts when polled."""
    values = conninfo_to_dict(conninfo)
    lists = {name: str(values[name]).split(",") for name in ("host", "hostaddr", "port") if values.get(name)}
    count = max((len(items) for name, items in lists.items() if name != "port"), default=1)
    if count == 1:
        return [conninfo]
    chosen: Sequence[dict[str, str]] = [
        {name: items[index] if len(items) > 1 else items[0] for name, items in lists.items()} for index in range(count)
    ]
    return [make_conninfo("", **{**values, **choice}) for choice in chosen]


def _public_reason(url: str, reason: str) -> str:
    """libpq's message if it quotes no part of the password: it must be the same for the URL without credentials."""
    scheme, separator, rest = url.partition("://")
    if not separator or "password" in rest.rpartition("@")[2]:
        return ""
    try:
        conninfo_to_dict(f"{scheme}://{rest.rpartition('@')[2]}")
    except psycopg.Error as error:
        return reason if str(error) == reason else ""
    return ""


def _unreadable(reason: str = "") -> ConfigError:
    return ConfigError(
        f"the source URL is not a valid connection string{f': {reason.strip()}' if reason else ''}",
        hint="Write postgresql://user@host:5432/database; percent-encode special characters in the password.",
    )


def _escape_option(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def _text(value: bytes | None) -> Any:
    return None if value is None else value.decode("utf-8", "replace")
