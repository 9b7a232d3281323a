"""Changes by logical replication: the stream's spool as a `ChangeCapture`.

The capture process writes whole transactions to the spool before anything here reads them, so the spool is the engine's
queue, too: durable, and bounded by the disk instead of by a number of changes. `WalCapture` hands out its changes from
the last confirmed position on. A transaction that is too large for one piece comes in several, and the position moves
past it with the last.

Confirming stores progress first and then releases the spool and the slot: after a crash in between, changes are
delivered again and never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock import failpoints
from penstock.changes.batch import EventBatch, build_batch
from penstock.changes.steps import Segment, Truncation
from penstock.documents.base import Acks, Change, ChangeCapture, Receiver, SnapshotTable
from penstock.documents.builder import PostgresDocuments
from penstock.documents.images import Changes, changes_in_pieces
from penstock.documents.snapshot import read_snapshot
from penstock.errors import TablesAltered
from penstock.lsn import Lsn, distance, reaches
from penstock.schema import ReplicaIdentity, TableSchema
from penstock.source.connections import SourceSettings
from penstock.source.lineage import Ancestry, current_position
from penstock.source.patterns import TableName
from penstock.spool import Entry, SpoolReader
from penstock.state import Store
from penstock.workers import ApplyStatus

IDLE_SECONDS = 0.2
"""How long `receive` waits for changes by default."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Whole transactions that are confirmed together."""

    status: ApplyStatus
    """At its end; counters are since the start of the process, without batches that have no changes."""
    server: Ancestry | None = None
    """The server that took over before them; None if none did."""


class WalCapture(ChangeCapture, Receiver):
    """Reads a spool for one output. One thread receives; any thread may confirm, or read `status`."""

    def __init__(
        self,
        name: str,
        spool: Path,
        source: SourceSettings,
        store: Store,
        position: Lsn,
        documents: PostgresDocuments,
        *,
        max_changes: int = 10_000,
        piece_changes: int = 20_000,
    ) -> None:
        """`name` is the reader's name in the spool, and `position` where it begins if it has no progress.

        At most about `max_changes` changes are received at once; larger transactions in pieces of `piece_changes`.
        """
        self.documents = documents
        """What is compiled now: it says which columns of which tables are read."""
        self._name = name
        self._reader = SpoolReader(spool)
        self._source = source
        self._store = store
        self._max_changes = max_changes
        self._piece_changes = piece_changes
        self._acks: Acks[_Run] = Acks(self._advance)
        self._confirmed = self._delivered = _Run(ApplyStatus(position, position, 0, 0, 0))
        self._pieces: Iterator[Change] | None = None
        self._versions: set[tuple[int, str]] = set()

    @property
    def status(self) -> ApplyStatus:
        """Positions and counters."""
        return self._confirmed.status

    # See `ChangeCapture`. Publication and slot exist before a spool does, so there is nothing to prepare.

    def resumes(self) -> bool:
        return self._store.get_replication_progress() is not None

    def opened(self) -> Receiver:
        self._acks.forget()
        self._pieces = None
        self._delivered = self._confirmed
        return self

    def live(self) -> Iterator[Change]:
        """See `ChangeCapture`. Does not end by itself."""
        self.opened()
        while True:
            change = self.receive()
            if change is not None:
                yield change

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        return read_snapshot(self._source, self.documents.catalog, tables)

    def barrier(self) -> Callable[[], bool]:
        now = current_position(self._source)
        return lambda: reaches(self._confirmed.status.applied, now)

    def lag(self) -> int:
        return distance(self._confirmed.status.applied, current_position(self._source))

    # See `Receiver`

    @property
    def is_empty(self) -> bool:
        captured = self._reader.captured
        return self._pieces is None and (captured is None or reaches(self._delivered.status.applied, captured))

    @property
    def is_finished(self) -> bool:
        return False

    def receive(self, timeout: float | None = None) -> Change | None:
        """See `Receiver`. Raises `TablesAltered` once if rows have a schema that was not compiled."""
        if self._pieces is None:
            if not self._reader.wait(self._delivered.status.applied, IDLE_SECONDS if timeout is None else timeout):
                return None
            self._reader.forget(self._confirmed.status.applied)
            entries = _gather(
                self._reader.entries(self._delivered.status.applied), self.documents.names, self._max_changes
            )
            self._require_compiled(entries)
            self._pieces = self._deliver(entries)
        return next(self._pieces)

    def _deliver(self, entries: Sequence[Entry]) -> Iterator[Change]:
        batch = self._batch(entries)
        server = self._reader.ancestry
        is_new_server = server is not None and server.follows(self._store.ancestry)
        before, end = self._delivered.status, entries[-1].end
        status = ApplyStatus(
            end,
            end,
            before.changes + batch.row_count,
            before.batches + (batch.row_count > 0),
            max(before.last_commit_time, batch.last_commit_time),
        )
        run = self._delivered = _Run(status, server if is_new_server else None)
        last: Changes | None = None
        for changes in changes_in_pieces(batch, self.documents.wanted, self._piece_changes):
            if last is not None:
                yield Change(last, self._acks.expect(), end)
            last = changes
        unidentified = frozenset(
            name
            for (table_id, version), name in self._versions_in(entries).items()
            if not _is_identified(self._reader.load_schema(table_id, version), name, self.documents)
        )
        self._pieces = None
        last = replace(last or Changes(), unidentified=unidentified, is_new_server=is_new_server)
        yield Change(last, self._acks.expect(run), end)

    def _batch(self, entries: Sequence[Entry]) -> EventBatch:
        tables = {step.table_id for entry in entries for step in entry.steps if isinstance(step, Segment | Truncation)}
        return build_batch(
            entries,
            begin=self._delivered.status.applied,
            end=entries[-1].end,
            positions=dict.fromkeys(tables, self._delivered.status.applied),
            schemas={},
            schema_of=self._reader.load_schema,
        )

    def _require_compiled(self, entries: Sequence[Entry]) -> None:
        """Raise `TablesAltered` if rows have a new schema that differs from the compiled one."""
        altered: set[str] = set()
        catalog = self.documents.catalog
        for (table_id, version), name in self._versions_in(entries).items():
            if (table_id, version) in self._versions:
                continue
            self._versions.add((table_id, version))
            schema = self._reader.load_schema(table_id, version)
            known = catalog.table(catalog.top(name)).columns
            if not _is_identified(schema, name, self.documents) or any(
                each.name not in known or known[each.name].type.oid != each.type.oid for each in schema.columns
            ):
                altered.add(str(name))
        if altered:
            raise TablesAltered(f"{', '.join(sorted(altered))} changed since the indexes were compiled")

    def _versions_in(self, entries: Sequence[Entry]) -> dict[tuple[int, str], TableName]:
        """Return the schemas of the rows in these entries: table id and version, with the table's name."""
        names = self.documents.names
        return {
            (step.table_id, step.version): names[step.table_id]
            for entry in entries
            for step in entry.steps
            if isinstance(step, Segment) and step.table_id in names
        }

    def _advance(self, run: _Run) -> None:
        if run.server is not None:
            self._store.use_lineage(run.server)
        self._store.upsert_replication_progress(run.status.applied)
        failpoints.reach("after_documents_progress")
        self._reader.readers.advance(self._name, run.status.applied)
        failpoints.reach("after_documents_acknowledge")
        self._confirmed = run


def _is_identified(schema: TableSchema, name: TableName, documents: PostgresDocuments) -> bool:
    """Return True if the server sends at least the old values that were compiled for.

    The schema of a partitioned table that is published as a whole does not show this: its partitions decide.
    """
    if name in documents.catalog.tables and documents.catalog.table(name).leaves:
        return True
    wanted = documents.wanted[name]
    is_full = schema.replica_identity is ReplicaIdentity.FULL
    sent = {each.name for each in schema.columns if is_full or each.identity}
    return sent >= wanted.identity.intersection(wanted.columns)


def _gather(entries: Sequence[Entry], tables: Container[int], limit: int) -> list[Entry]:
    """Return the first entries with about `limit` changes of these tables."""
    taken: list[Entry] = []
    count = 0
    for entry in entries:
        taken.append(entry)
        for step in entry.steps:
            if isinstance(step, Segment) and step.table_id in tables:
                count += step.rows
            elif isinstance(step, Truncation) and step.table_id in tables:
                count += 1
        if count >= limit:
            break
    return taken
