"""What a pipeline remembers: phases, positions, schemas, progress, the lease and commands; three stores for it."""

from penstock.state.commands import Command, CommandKind, CommandStatus, this_user
from penstock.state.indexes import IndexBuild, IndexStatus, IndexWork, WorkKind
from penstock.state.lease import Lease, LeaseInfo
from penstock.state.memory import MemoryState, MemoryStore
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
    Resumption,
    RetryPolicy,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
)
from penstock.state.postgres import PostgresStore
from penstock.state.progress import StoredProgress
from penstock.state.sqlite import SqliteStore
from penstock.state.store import Store
from penstock.state.tables import TableSchemaVersion

__all__ = [
    "Catchup",
    "Command",
    "CommandKind",
    "CommandStatus",
    "DataSync",
    "Errored",
    "FinishedCopy",
    "IndexBuild",
    "IndexStatus",
    "IndexWork",
    "Init",
    "Lease",
    "LeaseInfo",
    "MemoryState",
    "MemoryStore",
    "Owner",
    "PhaseRecord",
    "PostgresStore",
    "Ready",
    "Resumption",
    "RetryPolicy",
    "SqliteStore",
    "Store",
    "StoredPhase",
    "StoredProgress",
    "SyncDone",
    "SyncWait",
    "TableReplicationPhase",
    "TableSchemaVersion",
    "WorkKind",
    "open_store",
    "this_user",
]
