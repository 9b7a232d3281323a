"""The quarantine in an SQLite file, for pipelines whose state is in one: a file of its own beside it."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from penstock.documents.base import Rejection
from penstock.documents.quarantine.contract import Quarantined
from penstock.errors import StateUnusable
from penstock.lsn import Lsn

_BUSY_SECONDS = 10.0

_SETUP = """
    create table if not exists quarantine (
        owner text not null, index_name text not null, id text not null, reason text not null, position integer,
        body_hash text not null, first_at text not null, last_at text not null, attempts integer not null,
        wanted integer not null, primary key (owner, index_name, id)
    ) without rowid
"""
_ADD = """
    insert into quarantine values (:owner, :index, :id, :reason, :position, :body_hash, :now, :now, 1, 0)
    on conflict (owner, index_name, id) do update set
        reason = excluded.reason, position = excluded.position, body_hash = excluded.body_hash,
        last_at = excluded.last_at, attempts = attempts + 1, wanted = 0
"""
_ENTRIES = """
    select index_name, id, reason, position, body_hash, first_at, last_at, attempts, wanted from quarantine
    where owner = ?1 and (?2 is null or index_name = ?2) order by last_at desc, index_name, id limit ifnull(?3, -1)
"""
_COUNTS = "select index_name, count(*) from quarantine where owner = ? group by index_name"
_RETRY = """
    update quarantine set wanted = 1
    where owner = ?1 and index_name = ?2 and (?3 is null or id in (select value from json_each(?3))) returning id
"""
_WANTED = "select id from quarantine where owner = ? and index_name = ? and wanted order by id"
_DROP = """
    delete from quarantine
    where owner = ?1 and index_name = ?2 and (?3 is null or id in (select value from json_each(?3)))
"""


class SqliteQuarantine:
    """See `QuarantineStore`. The file is created if it is not there; its folder is not."""

    def __init__(self, path: Path, owner: str) -> None:
        self._path = path
        self._owner = owner
        self._lock = threading.Lock()
        with self._translated("open"):
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute(_SETUP)

    def add(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """See `QuarantineStore`."""
        now = datetime.now(UTC).isoformat()
        rows = [
            {
                "owner": self._owner,
                "index": each.index,
                "id": each.id,
                "reason": each.reason,
                "position": None if position is None else int(position),
                "body_hash": each.body_hash,
                "now": now,
            }
            # A document may be refused twice in a batch, by a range and by a change.
            for each in {(each.index, each.id): each for each in rejections}.values()
        ]
        with self._translated("write"):
            self._connection.execute("begin immediate")
            try:
                self._connection.executemany(_ADD, rows)
            except BaseException:
                self._connection.execute("rollback")
                raise
            self._connection.execute("commit")

    def entries(self, index: str | None = None, *, limit: int | None = None) -> list[Quarantined]:
        """See `QuarantineStore`."""
        with self._translated("read"):
            rows = self._connection.execute(_ENTRIES, [self._owner, index, limit]).fetchall()
        return [
            Quarantined(
                index=row[0],
                id=row[1],
                reason=row[2],
                position=None if row[3] is None else Lsn(row[3]),
                body_hash=row[4],
                first_at=datetime.fromisoformat(row[5]),
                last_at=datetime.fromisoformat(row[6]),
                attempts=row[7],
                wanted=bool(row[8]),
            )
            for row in rows
        ]

    def counts(self) -> dict[str, int]:
        """See `QuarantineStore`."""
        with self._translated("read"):
            return dict(self._connection.execute(_COUNTS, [self._owner]).fetchall())

    def retry(self, index: str, ids: Sequence[str] | None = None) -> list[str]:
        """See `QuarantineStore`."""
        with self._translated("write"):
            found = self._connection.execute(_RETRY, [self._owner, index, _array(ids)]).fetchall()
        return sorted(each for (each,) in found)

    def wanted(self, index: str) -> list[str]:
        """See `QuarantineStore`."""
        with self._translated("read"):
            return [each for (each,) in self._connection.execute(_WANTED, [self._owner, index]).fetchall()]

    def drop(self, index: str, ids: Sequence[str] | None = None) -> int:
        """See `QuarantineStore`."""
        with self._translated("write"):
            return self._connection.execute(_DROP, [self._owner, index, _array(ids)]).rowcount

    def close(self) -> None:
        """See `QuarantineStore`."""
        self._connection.close()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise StateUnusable(f"cannot {doing} the quarantine in {str(self._path)!r}: {error}") from None


def _array(ids: Sequence[str] | None) -> str | None:
    return None if ids is None else json.dumps(list(ids))
