"""What a pipeline asks of its store, as Protocols whose docstrings are the contract.

Whoever writes a store of their own implements these, and runs `penstock.testing.stores.StoreContract` over it; or
implements only `records.Database` and gets the rest from `store.Store`.

**For all of them.** Synchronous; called from many threads at once (apply, table sync workers, the pipeline, commands,
status), so thread-safe. Writes go to the database first and then to the cache; reads come from the cache and do not
wait for writes. When a write returns it is durable; when it raises, it may have happened only if the error says that
the database could not be reached, and may then simply be repeated. A change of several tables is atomic.

**Who writes.** Only the holder of the lease: all writes but `add_command` raise `LeaseLost` without it, and when
another process has taken it. Readers elsewhere (`penstock tables`) see what was stored when they loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from penstock.errors import LeaseLost
from penstock.lsn import Lsn, OrderKey
from penstock.source.lineage import Lineage
from penstock.source.publications import Membership
from penstock.state.commands import Command, CommandKind, CommandStatus
from penstock.state.indexes import IndexBuild, IndexWork, WorkKind
from penstock.state.lease import DEFAULT_TTL, Lease, LeaseInfo
from penstock.state.metadata import (
    AppliedDestinationTableMetadata,
    DestinationTableMetadata,
    StoredProgress,
    TableSchemaRetention,
    TableSchemaVersion,
    WorkerType,
)
from penstock.state.phases import PhaseRecord, StoredPhase, TableReplicationPhase


@runtime_checkable
class SchemaStore(Protocol):
    """Versions of tables' schemas, each valid from the order key of a change on."""

    def get_table_schema(self, table_id: int, snapshot_id: OrderKey) -> TableSchemaVersion | None:
        """The version with the largest key not after `snapshot_id`; None if the table has none.

        Called by workers and destinations for every batch. Answered from the cache only where that has every version.
        """
        ...

    def get_table_schemas(self) -> list[TableSchemaVersion]:
        """All versions of all tables."""
        ...

    def load_table_schemas(self) -> int:
        """Fill the cache from the database; called once at start, may be called again. Gives the number of versions."""
        ...

    def store_table_schema(self, table_schema: TableSchemaVersion) -> TableSchemaVersion:
        """Keep a version; one with the same key is replaced. Called by table sync at the snapshot and by apply when a
        change arrives with a new schema; repeated by every replay."""
        ...

    def prune_table_schemas(self, table_schema_retentions: Mapping[int, TableSchemaRetention]) -> int:
        """Of each table keep the newest version not after its retention and all newer ones; gives the number removed.

        Called by apply now and then, after progress was stored (`TableSchemaRetention.at`). Tables not named keep all.
        """
        ...


@runtime_checkable
class StateStore(Protocol):
    """Phases, positions and destination tables."""

    def get_table_replication_state(self, table_id: int) -> StoredPhase | None:
        """A table's stored phase; None if the table is not known. SyncWait and Catchup are never stored."""
        ...

    def get_table_replication_states(self) -> Mapping[int, StoredPhase]:
        """All of them; the mapping does not change afterwards."""
        ...

    def load_table_replication_states(self) -> int:
        """Fill the cache; called once at start. Gives the number of tables."""
        ...

    def update_table_replication_states(self, updates: Mapping[int, TableReplicationPhase]) -> None:
        """Set several phases, all or none. `IllegalTransition` unless each may follow the stored one
        (`transitions.check_stored`); setting what is stored already changes nothing, so it may be repeated."""
        ...

    def update_table_replication_state(self, table_id: int, state: TableReplicationPhase) -> None:
        """Set one phase."""
        ...

    def rollback_table_replication_state(self, table_id: int) -> StoredPhase:
        """Let an Errored table go on (`transitions.roll_back`), and say from which phase.

        `IllegalTransition` for a table that is not Errored, and where its position is lost. Called for the command
        `rollback` and for timed retries.
        """
        ...

    def get_table_replication_history(self, table_id: int) -> list[PhaseRecord]:
        """The latest phases of a table, oldest first; at least 20 are kept. Read from the database."""
        ...

    def use_lineage(self, lineage: Lineage, *, continues: Lineage | None = None) -> None:
        """Say whose positions are read and written from now on; called at start, before any of the methods below.

        After a failover `continues` names the lineage that the server was shown to continue (`verify_lineage`); what
        was stored for it now counts for the new one.
        """
        ...

    def get_stored_progress(self) -> StoredProgress | None:
        """Apply's progress with its lineage, whichever that is: what `source.lineage.verify_lineage` is asked about."""
        ...

    def get_replication_progress(self, worker_type: WorkerType) -> Lsn | None:
        """A worker's progress in this lineage; that of another one is not returned."""
        ...

    def upsert_replication_progress(
        self, worker_type: WorkerType, flush_lsn: Lsn, *, table_positions: Mapping[int, Lsn] | None = None
    ) -> Lsn:
        """Store progress, and positions of tables with it, in one transaction; gives what is stored: never less.

        Called by apply after what lies below is durable at the destination, and before the slot is acknowledged.
        `LineageChanged` over progress of another lineage: that has to be deleted first.
        """
        ...

    def delete_replication_progress(self, worker_type: WorkerType) -> None:
        """Forget progress, of whatever lineage: *before* a new slot is created."""
        ...

    def get_table_position(self, table_id: int) -> Lsn | None:
        """How far a table is durable, as far as stored, in this lineage; changes below are skipped at a restart."""
        ...

    def get_table_positions(self) -> Mapping[int, Lsn]:
        """All of them."""
        ...

    def upsert_table_positions(self, positions: Mapping[int, Lsn]) -> Mapping[int, Lsn]:
        """Store positions of tables, all or none; gives what is stored, which never moves back."""
        ...

    def get_destination_table_metadata(self, table_id: int) -> DestinationTableMetadata | None:
        """What a table is at the destination."""
        ...

    def get_applied_destination_table_metadata(self, table_id: int) -> AppliedDestinationTableMetadata | None:
        """The same, only if no change of schema is under way; None otherwise."""
        ...

    def get_interrupted_destination_tables(self) -> Mapping[int, DestinationTableMetadata]:
        """Tables whose change of schema was begun and not finished; asked by the destination at its start."""
        ...

    def load_destination_tables_metadata(self) -> int:
        """Fill the cache; called once at start. Gives the number of tables."""
        ...

    def store_destination_table_metadata(self, table_id: int, metadata: DestinationTableMetadata) -> None:
        """Keep it: Applying before the destination is touched, Applied after. `IllegalTransition` for an older version
        than the stored one, unless that undoes an interrupted change."""
        ...

    def delete_destination_table_metadata(self, table_id: int) -> None:
        """Forget it: when an interrupted creation is undone."""
        ...


@runtime_checkable
class TableLifecycleStore(Protocol):
    """Forgetting."""

    def clear_table_copy_state(self, table_id: int) -> None:
        """Forget destination metadata, schema versions, position and table-sync progress; the phase stays.

        Called by table sync before each copy, after `drop_table_for_copy` has succeeded; may be repeated.
        """
        ...

    def delete_table_pipeline_state(self, table_id: int) -> None:
        """Forget all about a table that left the publication; the destination's data is not touched."""
        ...

    def reset_replication(self) -> None:
        """All tables to Init, all progress and positions deleted, in one transaction: the slot was lost, or the server
        is another one. Schemas and destination metadata stay until each copy clears them."""
        ...

    def delete_pipeline_state(self) -> None:
        """Forget everything but the lease; for teardown."""
        ...


@runtime_checkable
class LeaseStore(Protocol):
    """One driver per pipeline."""

    def acquire_lease(
        self,
        *,
        ttl: float = DEFAULT_TTL,
        wait: float = 0.0,
        take_over: bool = False,
        on_lost: Callable[[LeaseLost], None] | None = None,
    ) -> Lease:
        """Become the driver, for this store object; renewed in the background until `release_lease` or `close`.

        `LeaseHeld`, with host, pid and since, if another process is, after waiting for it up to `wait` seconds. The
        lease of a process that has ended on this machine is free at once, any other after its `ttl`. With `take_over`
        nobody is asked: the other process is fenced off, and finds out within a third of its `ttl`. `on_lost` is called
        from a thread of the lease's own, at most once. All caches are filled anew afterwards.
        """
        ...

    def release_lease(self) -> None:
        """Give it back; this store writes nothing more. May be repeated."""
        ...

    def get_lease(self) -> LeaseInfo | None:
        """Who drives the pipeline; None if nobody does. Read from the database."""
        ...


@runtime_checkable
class CommandStore(Protocol):
    """What people ask of a pipeline that may run elsewhere, or not at all now."""

    def add_command(
        self,
        kind: CommandKind,
        tables: Sequence[str] = (),
        *,
        options: Mapping[str, Any] | None = None,
        requested_by: str | None = None,
    ) -> Command:
        """Ask for something; by anybody, without a lease."""
        ...

    def take_commands(self) -> list[Command]:
        """All that wait, in order, accepted from now on; also those that an earlier driver accepted and did not answer,
        so carrying one out twice must do no harm. Called by the holder of the lease, about once a second."""
        ...

    def answer_command(self, number: int, status: CommandStatus, reason: str | None = None) -> Command:
        """Done, or refused with the reason; a second answer changes nothing."""
        ...

    def get_command(self, number: int) -> Command | None:
        """One command; asked again by who waits for the answer. Read from the database."""
        ...

    def get_commands(self) -> list[Command]:
        """All that are remembered, oldest first; at least 100 answered ones. Read from the database."""
        ...


@runtime_checkable
class MembershipStore(Protocol):
    """What was seen of publications; outlives a restart, or a table that was away meanwhile would have a gap."""

    def get_publication_membership(self, publication: str) -> Membership | None:
        """As it was last stored; None if it never was. Read from the database."""
        ...

    def store_publication_membership(self, publication: str, membership: Membership) -> None:
        """Called when all that follows from it is stored: what was not acted upon must be noticed again."""
        ...


@runtime_checkable
class IndexStore(Protocol):
    """How search indexes were built, and what is left to do for them. Read from the database, never from a cache."""

    def get_index_builds(self) -> Mapping[str, IndexBuild]:
        """The last build of every index that is known."""
        ...

    def store_index_build(self, build: IndexBuild) -> None:
        """Keep it; if it is another build than the one before, the ranges and removals of that one are forgotten."""
        ...

    def delete_index(self, index: str) -> None:
        """Forget all about an index."""
        ...

    def finish_index_ranges(self, index: str, build: str, documents: Mapping[int, int]) -> None:
        """These ranges of a build are durable, with so many documents; nothing, if another build has begun."""
        ...

    def get_index_ranges(self, index: str, build: str) -> Mapping[int, int]:
        """The ranges of a build that are done, with their documents."""
        ...

    def add_index_work(
        self, index: str, kind: WorkKind, details: Sequence[Mapping[str, Any]], *, changed: int = 0
    ) -> None:
        """Remember something to be done, in the order given; before the change that it comes from is acknowledged.

        `changed` documents are added to what the build of the index has counted.
        """
        ...

    def get_index_work(self, index: str, kind: WorkKind) -> list[IndexWork]:
        """What is to be done, oldest first."""
        ...

    def delete_index_work(self, index: str, numbers: Sequence[int]) -> None:
        """It is done."""
        ...


@runtime_checkable
class SharedStateStore(StateStore, Protocol):
    """For those who need state alone."""


@runtime_checkable
class DestinationStore(SchemaStore, StateStore, Protocol):
    """What a destination gets at its start: schemas and its own metadata, but no way to reset or remove."""


@runtime_checkable
class PipelineStore(
    SchemaStore, StateStore, TableLifecycleStore, LeaseStore, CommandStore, MembershipStore, IndexStore, Protocol
):
    """All that a pipeline needs."""

    @property
    def pipeline_id(self) -> str:
        """The pipeline whose state this is."""
        ...

    def close(self) -> None:
        """Give back the lease and all resources; may be called twice."""
        ...
