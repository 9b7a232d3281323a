"""Rejected documents: which one, why, since when, and how often. Never the body, only a hash of it.

A quarantined document is not in the index as it should be; the body that was there before may still be. It leaves the
quarantine in three ways. Its rows change and the sink takes the new body. A user asks for a retry: the output finds the
document in `wanted`, rebuilds it, and drops the entry if the sink takes it; if the sink rejects it again, the entry
stays with one more attempt and is no longer wanted. Or a user drops it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.documents.base import FailurePolicies, Observer, Rejection
from penstock.documents.side_tables import SideTables, open_side_tables
from penstock.lsn import Lsn

logger = logging.getLogger(__name__)

_SUFFIX = ".quarantine"
_COLUMNS = {
    "owner": "text",
    "index_name": "text",
    "id": "text",
    "reason": "text",
    "position": "int8",
    "body_hash": "text",
    "seen_at": "timestamptz",
}
_CREATE = """
    create table if not exists penstock_documents.quarantine (
        owner text not null, index_name text not null, id text not null, reason text not null, position int8,
        body_hash text not null, first_at timestamptz not null, last_at timestamptz not null, attempts int8 not null,
        wanted bool not null, primary key (owner, index_name, id)
    )
"""
_ADD = """
    insert into penstock_documents.quarantine as q
    select owner, index_name, id, reason, position, body_hash, seen_at, seen_at, 1, false from {rows} where true
    on conflict (owner, index_name, id) do update set
        reason = excluded.reason, position = excluded.position, body_hash = excluded.body_hash,
        last_at = excluded.last_at, attempts = q.attempts + 1, wanted = false
"""
_ENTRIES = """
    select index_name, id, reason, position, body_hash, first_at, last_at, attempts, wanted
    from penstock_documents.quarantine where owner = $1 and (cast($2 as text) is null or index_name = $2)
    order by last_at desc, index_name, id limit coalesce(cast($3 as int8), 9223372036854775807)
"""
_COUNTS = "select index_name, count(*) from penstock_documents.quarantine where owner = $1 group by index_name"
_WANTED = "select id from penstock_documents.quarantine where owner = $1 and index_name = $2 and wanted order by id"
_RETRY = "update penstock_documents.quarantine set wanted = true"
_DROP = "delete from penstock_documents.quarantine"
_CHOSEN = " where owner = $1 and index_name = $2"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A document that the sink rejected."""

    index: str
    id: str
    reason: str
    position: Lsn | None
    """The position of the stream; None if the index was being built."""
    body_hash: str
    """Tells whether the same body was rejected again."""
    first_at: datetime
    last_at: datetime
    attempts: int
    wanted: bool
    """A user asked for a retry that has not happened yet."""


def open_quarantine(state_url: str, owner: str) -> Quarantine:
    """Open the quarantine beside the state of this URL; `owner` is the output's id."""
    return Quarantine(open_side_tables(state_url, _SUFFIX), owner)


class Quarantine:
    """The rejected documents of one output. The output and commands use it at the same time; every call is durable."""

    def __init__(self, tables: SideTables, owner: str) -> None:
        self._tables = tables
        self._owner = owner
        tables.create(_CREATE + tables.keyed, "prepare the quarantine")

    def add(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Quarantine documents. One that is already quarantined gets one more attempt and is no longer wanted."""
        now = datetime.now(UTC)
        at = None if position is None else int(position)
        # A document may be rejected twice in a batch: by a range and by a change.
        last = {(each.index, each.id): each for each in rejections}.values()
        rows = [(self._owner, each.index, each.id, each.reason, at, each.body_hash, now) for each in last]
        if rows:
            columns = [list(each) for each in zip(*rows, strict=True)]
            self._tables.run_on_rows(_ADD, _COLUMNS, columns, "write to the quarantine")

    def entries(self, index: str | None = None, *, limit: int | None = None) -> list[Quarantined]:
        """Return the quarantined documents of one index or of all, the last rejected first."""
        rows = self._tables.run(_ENTRIES, [self._owner, index, limit], "read the quarantine")
        return [
            Quarantined(
                index=row[0],
                id=row[1],
                reason=row[2],
                position=None if row[3] is None else Lsn(row[3]),
                body_hash=row[4],
                first_at=_time(row[5]),
                last_at=_time(row[6]),
                attempts=row[7],
                wanted=bool(row[8]),
            )
            for row in rows
        ]

    def counts(self) -> dict[str, int]:
        """Return how many documents of each index are quarantined; indexes with none are left out."""
        return dict(self._tables.run(_COUNTS, [self._owner], "read the quarantine"))

    def retry(self, index: str, ids: Sequence[str] | None = None) -> list[str]:
        """Ask for a retry of these documents, or of all of an index; returns the ids that are quarantined."""
        return sorted(self._run(_RETRY, index, ids))

    def wanted(self, index: str) -> list[str]:
        """Return the documents for which a user asked for a retry."""
        found = self._tables.run(_WANTED, [self._owner, index], "read the quarantine")
        return [id_ for (id_,) in found]

    def drop(self, index: str, ids: Sequence[str] | None = None) -> int:
        """Forget these documents, or all of an index; returns how many there were."""
        return len(self._run(_DROP, index, ids))

    def close(self) -> None:
        """Close connections and files; may be called twice."""
        self._tables.close()

    def _run(self, action: str, index: str, ids: Sequence[str] | None) -> list[str]:
        """Apply this action to documents of an index, and return their ids."""
        text = action + _CHOSEN
        parameters: list[object] = [self._owner, index]
        if ids is not None:
            text += f" and id in (select k.value from {self._tables.each('$3')})"  # noqa: S608 (a parameter)
            parameters.append(list(ids))
        return [id_ for (id_,) in self._tables.run(f"{text} returning id", parameters, "write to the quarantine")]


class Rejections:
    """Decides what happens to rejected documents: stop, or quarantine them. Any thread may call."""

    def __init__(self, policies: FailurePolicies, quarantine: Quarantine | None, observer: Observer) -> None:
        self._policies = policies
        self._quarantine = quarantine
        self._observer = observer
        self._lock = threading.Lock()
        self._quarantined: dict[str, frozenset[str]] = {}

    def load(self) -> None:
        """Load which documents are quarantined."""
        found: dict[str, set[str]] = {}
        for each in self._quarantine.entries() if self._quarantine is not None else ():
            found.setdefault(each.index, set()).add(each.id)
        with self._lock:
            self._quarantined = {index: frozenset(ids) for index, ids in found.items()}

    @property
    def quarantined(self) -> Mapping[str, frozenset[str]]:
        """The ids of quarantined documents by index. A task that writes one of them reports it."""
        with self._lock:
            return dict(self._quarantined)

    def handle(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Quarantine documents, or raise `DocumentsRejected`; decides about all before it acts on one."""
        self._policies.raise_fatal(rejections)
        self.quarantine(rejections, position)

    def quarantine(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Quarantine documents, whatever the policy."""
        if not rejections:
            return
        if self._quarantine is not None:
            self._quarantine.add(rejections, position)
        with self._lock:
            for each in rejections:
                self._quarantined[each.index] = self._quarantined.get(each.index, frozenset()) | {each.id}
        for each in rejections:
            logger.warning("document quarantined index=%s reason=%s", each.index, each.reason)
            self._observer.on_document_quarantined(each)

    def release(self, index: str, ids: Sequence[str]) -> None:
        """Drop documents from the quarantine: the index has them now."""
        if ids and self._quarantine is not None:
            self._quarantine.drop(index, ids)
            with self._lock:
                self._quarantined[index] = self._quarantined.get(index, frozenset()).difference(ids)
            logger.info("sink accepted quarantined documents index=%s count=%d", index, len(ids))

    def forget(self, index: str, ids: Collection[str]) -> None:
        """Drop ids that no longer belong to a document."""
        if ids and self._quarantine is not None:
            self._quarantine.drop(index, sorted(ids))
            logger.info("quarantined ids no longer belong to a document index=%s count=%d", index, len(ids))

    def wanted(self, index: str) -> list[str]:
        """Return the documents for which a user asked for a retry."""
        return [] if self._quarantine is None else self._quarantine.wanted(index)


def _time(stored: datetime | str) -> datetime:
    return datetime.fromisoformat(stored) if isinstance(stored, str) else stored
