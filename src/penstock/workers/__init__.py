"""The threads that move data: one apply worker for all tables, and one table sync worker per table that is copied."""

from penstock.workers.apply import ApplyStatus, ApplyWorker, ErrorHold, HoldLimits, Outage, Outages
from penstock.workers.apply_hold import ApplyHold, HoldStep
from penstock.workers.batches import BatchSettings
from penstock.workers.board import Board
from penstock.workers.copies import SyncPool
from penstock.workers.failures import DropColumn, DropTable, Partitions, Recopy, SchemaChanges
from penstock.workers.lifecycle import Lifecycle
from penstock.workers.table_sync import CopyStatus, SnapshotWait, TableSync, TableSyncView

__all__ = [
    "ApplyHold",
    "ApplyStatus",
    "ApplyWorker",
    "BatchSettings",
    "Board",
    "CopyStatus",
    "DropColumn",
    "DropTable",
    "ErrorHold",
    "HoldLimits",
    "HoldStep",
    "Lifecycle",
    "Outage",
    "Outages",
    "Partitions",
    "Recopy",
    "SchemaChanges",
    "SnapshotWait",
    "SyncPool",
    "TableSync",
    "TableSyncView",
]
