"""What stores keep besides phases: schema versions, destination tables, and whose progress a position is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import IllegalTransition
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.source.lineage import Lineage


class WorkerKind(StrEnum):
    """The two sorts of workers that have progress."""

    APPLY = "apply"
    TABLE_SYNC = "table_sync"


@dataclass(frozen=True, slots=True)
class WorkerType:
    """Whose progress: apply's, or that of the worker that copies one table."""

    kind: WorkerKind
    table_id: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is WorkerKind.TABLE_SYNC) != (self.table_id is not None):
            raise ValueError("a table sync worker, and only that, belongs to a table")

    @classmethod
    def apply(cls) -> WorkerType:
        """The worker that follows all tables."""
        return cls(WorkerKind.APPLY)

    @classmethod
    def table_sync(cls, table_id: int) -> WorkerType:
        """The worker that copies a table and catches up."""
        return cls(WorkerKind.TABLE_SYNC, table_id)


@dataclass(frozen=True, slots=True)
class StoredProgress:
    """A stored position with the lineage it belongs to, which the server must confirm before it is used."""

    position: Lsn
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class TableSchemaVersion:
    """A table's schema and the order key of the first change that has it: `snapshot_id` in the words of the seeds."""

    snapshot_id: OrderKey
    schema: TableSchema

    @property
    def table_id(self) -> int:
        return self.schema.table_id

    @property
    def version(self) -> str:
        """Its name in the spool (`Segment.version`)."""
        return str(self.snapshot_id)


@dataclass(frozen=True, slots=True)
class TableSchemaRetention:
    """What pruning must leave: the newest version at or before `snapshot_id`, and all that are newer."""

    snapshot_id: OrderKey

    @classmethod
    def at(cls, progress: Lsn, metadata: DestinationTableMetadata | None) -> TableSchemaRetention:
        """For a table whose changes below `progress` are in: also what its destination has, or may go back to."""
        needed = [OrderKey(progress, 0)]
        if metadata is not None:
            needed.append(metadata.snapshot_id)
            if metadata.previous_snapshot_id is not None:
                needed.append(metadata.previous_snapshot_id)
        return cls(min(needed))


class DestinationTableStatus(StrEnum):
    """Whether the destination's table has the schema that its metadata names."""

    APPLYING = "applying"
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class DestinationTableMetadata:
    """What a source table is at the destination.

    A change of schema is stored twice: Applying before the destination is touched, Applied after. What is found
    Applying at a start was interrupted, and is finished (`finish`) or taken back (`undo`) by the destination.
    """

    destination_table_id: str
    snapshot_id: OrderKey
    """The schema version that is applied, or is being applied."""
    status: DestinationTableStatus
    replication_mask: tuple[bool, ...]
    """Per column of that version: whether it is replicated."""
    previous_snapshot_id: OrderKey | None = None
    """While applying: the version before; None when the table is being created."""
    previous_replication_mask: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.status is DestinationTableStatus.APPLIED and self.previous_snapshot_id is not None:
            raise ValueError("only a change that is being applied has a version before")
        if (self.previous_snapshot_id is None) != (self.previous_replication_mask is None):
            raise ValueError("the version before has a mask, and only that")

    @classmethod
    def create(
        cls, destination_table_id: str, snapshot_id: OrderKey, replication_mask: tuple[bool, ...]
    ) -> DestinationTableMetadata:
        """To be stored before the destination creates its table."""
        return cls(destination_table_id, snapshot_id, DestinationTableStatus.APPLYING, replication_mask)

    @property
    def interrupted(self) -> bool:
        """At a start: whether a change was begun and not finished."""
        return self.status is DestinationTableStatus.APPLYING

    def begin(self, snapshot_id: OrderKey, replication_mask: tuple[bool, ...]) -> DestinationTableMetadata:
        """To be stored before the destination changes its table."""
        if self.interrupted:
            raise IllegalTransition("the change of schema before was interrupted: finish it or take it back first")
        return replace(
            self,
            snapshot_id=snapshot_id,
            replication_mask=replication_mask,
            status=DestinationTableStatus.APPLYING,
            previous_snapshot_id=self.snapshot_id,
            previous_replication_mask=self.replication_mask,
        )

    def finish(self) -> DestinationTableMetadata:
        """To be stored when the destination has the new schema."""
        return replace(
            self,
            status=DestinationTableStatus.APPLIED,
            previous_snapshot_id=None,
            previous_replication_mask=None,
        )

    def undo(self) -> DestinationTableMetadata | None:
        """To be stored when the destination has the schema from before; None: there was no table yet."""
        if not self.interrupted:
            raise IllegalTransition("only an interrupted change of schema can be taken back")
        if self.previous_snapshot_id is None or self.previous_replication_mask is None:
            return None
        return DestinationTableMetadata(
            self.destination_table_id,
            self.previous_snapshot_id,
            DestinationTableStatus.APPLIED,
            self.previous_replication_mask,
        )


@dataclass(frozen=True, slots=True)
class AppliedDestinationTableMetadata:
    """Destination metadata of which nothing is under way."""

    destination_table_id: str
    snapshot_id: OrderKey
    replication_mask: tuple[bool, ...]


def check_metadata(current: DestinationTableMetadata | None, new: DestinationTableMetadata) -> None:
    """Refuse to go back to an older schema, except by undoing an interrupted change; a replay may ask for it."""
    if current is None or new.snapshot_id >= current.snapshot_id:
        return
    if current.interrupted and new == current.undo():
        return
    raise IllegalTransition(
        f"the destination has schema version {current.snapshot_id}, which is newer than {new.snapshot_id}",
        hint="An older description was read again; what is there stays.",
    )
