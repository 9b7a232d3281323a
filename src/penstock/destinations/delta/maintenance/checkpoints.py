"""Checkpoints, written by delta-rs: they keep deletion vectors, and leave out tombstones that the retention covers."""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from penstock.destinations.delta.checkpoint import last_checkpoint_hint
from penstock.destinations.delta.storage import Storage
from penstock.errors import DestinationUnavailable


def write_checkpoint(storage: Storage) -> int:
    """A checkpoint of the newest version, from which readers begin from now on; gives its version. Runs in a task."""
    try:
        table = DeltaTable(storage.url, storage_options=dict(storage.options) or None)
        table.create_checkpoint()
    except (DeltaError, OSError) as error:
        raise DestinationUnavailable(
            f"{storage.url}: no checkpoint could be written ({type(error).__name__})",
            hint="The table is complete without it, and it is tried again; if it never works, look at the log's files.",
        ) from error
    return table.version()


def commits_since_checkpoint(storage: Storage, version: int) -> int:
    """How many commits a reader has to read besides the newest checkpoint."""
    hint = last_checkpoint_hint(storage)
    return version + 1 if hint is None else max(0, version - hint)
