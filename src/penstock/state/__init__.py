"""What a pipeline remembers: phases, positions, schemas, progress, the lease and commands; three stores for it."""

from penstock.state.commands import Command, CommandKind, CommandStatus
from penstock.state.indexes import IndexBuild, IndexStatus, IndexWork, WorkKind
from penstock.state.lease import Lease, LeaseInfo
from penstock.state.memory import MemoryState, MemoryStore
from penstock.state.metadata import (
    AppliedDestinationTableMetadata,
    DestinationTableMetadata,
    DestinationTableStatus,
    StoredProgress,
    TableSchemaRetention,
    TableSchemaVersion,
    WorkerKind,
    WorkerType,
)
from penstock.state.opening import open_store
from penstock.state.phases import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Owner,
    PhaseRecord,
    Ready,
    RetryPolicy,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
)
from penstock.state.postgres import PostgresStore
from penstock.state.sqlite import SqliteStore
from penstock.state.store import Store
from penstock.state.stores import (
    CommandStore,
    DestinationStore,
    IndexStore,
    LeaseStore,
    MembershipStore,
    PipelineStore,
    SchemaStore,
    SharedStateStore,
    StateStore,
    TableLifecycleStore,
)

__all__ = [
    "AppliedDestinationTableMetadata",
    "Catchup",
    "Command",
    "CommandKind",
    "CommandStatus",
    "CommandStore",
    "DataSync",
    "DestinationStore",
    "DestinationTableMetadata",
    "DestinationTableStatus",
    "Errored",
    "FinishedCopy",
    "IndexBuild",
    "IndexStatus",
    "IndexStore",
    "IndexWork",
    "Init",
    "Lease",
    "LeaseInfo",
    "LeaseStore",
    "MembershipStore",
    "MemoryState",
    "MemoryStore",
    "Owner",
    "PhaseRecord",
    "PipelineStore",
    "PostgresStore",
    "Ready",
    "RetryPolicy",
    "SchemaStore",
    "SharedStateStore",
    "SqliteStore",
    "StateStore",
    "Store",
    "StoredPhase",
    "StoredProgress",
    "SyncDone",
    "SyncWait",
    "TableLifecycleStore",
    "TableReplicationPhase",
    "TableSchemaRetention",
    "TableSchemaVersion",
    "WorkKind",
    "WorkerKind",
    "WorkerType",
    "open_store",
]
