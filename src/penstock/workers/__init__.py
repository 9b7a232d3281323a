"""The threads that move data: one apply worker for all tables, and one table sync worker per table that is copied."""

from penstock.workers.apply import ApplyStatus, ApplyWorker, ErrorHold
from penstock.workers.batches import BatchSettings
from penstock.workers.board import Board
from penstock.workers.copies import SyncPool
from penstock.workers.cuts import Cuts, CutStep
from penstock.workers.lifecycle import Lifecycle
from penstock.workers.table_sync import CopyStatus, SnapshotWait, TableSync

__all__ = [
    "ApplyStatus",
    "ApplyWorker",
    "BatchSettings",
    "Board",
    "CopyStatus",
    "CutStep",
    "Cuts",
    "ErrorHold",
    "Lifecycle",
    "SnapshotWait",
    "SyncPool",
    "TableSync",
]
