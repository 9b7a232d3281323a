"""Where polling left off, remembered beside the state: in its Postgres database, or in a file next to SQLite's."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import StateUnusable
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.state.opening import file_beside

SUFFIX = ".polling"
_BUSY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PollPosition:
    """What was seen: everything below these marks, and some of what lies above."""

    order: int
    """Rises from poll to poll, whatever happens to the process."""
    xid: int
    """Transactions below this number had ended, and were looked at."""
    times: dict[str, int] = field(default_factory=dict[str, int])
    """Microseconds since 1970, by table: rows that were stamped before were looked at."""


class PollPositions(Protocol):
    """Keeps one position, durably."""

    def load(self) -> PollPosition | None:
        """The last one; None at the first start."""
        ...

    def store(self, position: PollPosition) -> None:
        """Durable when it returns. Called from the thread that confirms changes."""
        ...

    def forget(self) -> None:
        """The next start begins anew."""
        ...

    def close(self) -> None:
        """May be called twice."""
        ...


def open_positions(state_url: str, owner: str) -> PollPositions:
    """Beside the state that this URL names; `owner` is the output's id."""
    path = file_beside(state_url, SUFFIX)
    if path is not None:
        return SqlitePositions(path, owner)
    return PostgresPositions(SourceSettings(state_url), owner)


class SqlitePositions:
    """In an SQLite file of its own."""

    def __init__(self, path: str | Path, owner: str) -> None:
        self._owner = owner
        try:
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute(
                "create table if not exists positions (owner text primary key, position text not null)"
            )
        except sqlite3.Error as error:
            raise _unusable(error) from None

    def load(self) -> PollPosition | None:
        """See `PollPositions`."""
        try:
            found = self._connection.execute("select position from positions where owner = ?", [self._owner]).fetchone()
        except sqlite3.Error as error:
            raise _unusable(error) from None
        return None if found is None else _parse(found[0])

    def store(self, position: PollPosition) -> None:
        """See `PollPositions`."""
        try:
            self._connection.execute(
                "insert into positions values (?, ?) on conflict (owner) do update set position = excluded.position",
                [self._owner, json.dumps(asdict(position))],
            )
        except sqlite3.Error as error:
            raise _unusable(error) from None

    def forget(self) -> None:
        """See `PollPositions`."""
        try:
            self._connection.execute("delete from positions where owner = ?", [self._owner])
        except sqlite3.Error as error:
            raise _unusable(error) from None

    def close(self) -> None:
        """See `PollPositions`."""
        self._connection.close()


class PostgresPositions:
    """In the schema `penstock_documents` of the state's database; a connection for each call, since calls are rare."""

    def __init__(self, settings: SourceSettings, owner: str) -> None:
        self._settings = settings
        self._owner = owner
        self._run("create schema if not exists penstock_documents")
        self._run(
            "create table if not exists penstock_documents.polling_positions"
            " (owner text primary key, position text not null)"
        )

    def load(self) -> PollPosition | None:
        """See `PollPositions`."""
        found = self._run(
            "select position from penstock_documents.polling_positions where owner = %s", [self._owner], reads=True
        )
        return None if not found else _parse(found[0][0])

    def store(self, position: PollPosition) -> None:
        """See `PollPositions`."""
        self._run(
            "insert into penstock_documents.polling_positions values (%s, %s)"
            " on conflict (owner) do update set position = excluded.position",
            [self._owner, json.dumps(asdict(position))],
        )

    def forget(self) -> None:
        """See `PollPositions`."""
        self._run("delete from penstock_documents.polling_positions where owner = %s", [self._owner])

    def close(self) -> None:
        """See `PollPositions`."""

    def _run(self, text: str, parameters: list[Any] | None = None, *, reads: bool = False) -> list[Any]:
        with connect(self._settings, Role.STATE) as connection, translated(connection, "remember where polling is"):
            cursor = connection.execute(text.encode(), parameters)
            return cursor.fetchall() if reads else []


def _parse(text: str) -> PollPosition:
    return PollPosition(**json.loads(text))


def _unusable(error: sqlite3.Error) -> StateUnusable:
    return StateUnusable(f"where polling is cannot be remembered: {error}", hint="Look at the file beside the state.")
