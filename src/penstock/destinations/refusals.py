"""The errors of destinations: one function per situation, so that each has one text.

An error names tables, files and types of errors, but never the value of a cell, which exceptions of other libraries may
contain.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from penstock.errors import (
    RESYNC,
    ConfigError,
    DestinationUnavailable,
    IllegalTransition,
    LeaseLost,
    LineageChanged,
    PenstockError,
    SchemaNotFollowed,
    TableBusy,
    TableOwned,
    TableRejected,
    TakesLong,
    TasksFailed,
)
from penstock.state import Ready, Store, SyncDone

_Outcome = TypeVar("_Outcome")
_Arguments = ParamSpec("_Arguments")
_Mounted = TypeVar("_Mounted", bound="Mounted")
_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),
        *(errno.EACCES, errno.EPERM),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
"""Faults of a disk, machine or network that time or an operator heals: full, read-only, disconnected, out of handles.
They are never about the rows of a table."""
_MAKE_ROOM = "Check that this disk has room, is connected and may be written; Penstock keeps trying."
_MAKE_ROOM_FIRST = "Check that this disk has room, is connected and may be written, then run: penstock run."


def concerns_all_tables(error: PenstockError) -> bool:
    """Return True if no table can be written: the destination is unreachable, full or misconfigured.

    Such an error is raised for the whole batch, never returned for a table, so that the apply worker waits.
    """
    return isinstance(error, DestinationUnavailable | ConfigError)


def cannot_write(destination: str, error: OSError, *, hint: str) -> PenstockError:
    """A start could not write to the folder of a destination; `hint` is for a fault that needs a person."""
    what = f"{destination} cannot be written: {error.strerror}"
    if error.errno in _PASSING - {errno.EACCES, errno.EPERM}:
        return DestinationUnavailable(what, hint=_MAKE_ROOM_FIRST)
    return unusable(what, hint=hint)


def out_of_reach(destination: str, what: str) -> PenstockError:
    """The destination does not respond; retried."""
    return DestinationUnavailable(f"{destination} is unreachable: {what}")


def require_mounted(marker: Path | None) -> None:
    """Raise if a file that `startup` left in a folder is missing; None, for an object store, is always fine.

    The disk was probably unmounted. Files written to its mount point now would be lost when it is mounted again.
    """
    if marker is not None and not marker.exists():
        raise out_of_reach(str(marker.parent), f"{marker.name} is missing; is the disk mounted?")


class Mounted(Protocol):
    """A destination that may be a folder on a disk that can be unmounted."""

    @property
    def marker(self) -> Path | None:
        """A file that `startup` left in the folder; None if the destination is not a folder."""
        ...


def while_mounted(
    method: Callable[Concatenate[_Mounted, _Arguments], _Outcome],
) -> Callable[Concatenate[_Mounted, _Arguments], _Outcome]:
    """Let a method of a destination raise `DestinationUnavailable` if the disk is not mounted before or after it.

    While a disk is unmounted, files seem to be deleted. Such errors are not the fault of a table.
    """

    @wraps(method)
    def checked(self: _Mounted, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Outcome:
        require_mounted(self.marker)
        try:
            return method(self, *arguments, **named)
        finally:
            require_mounted(self.marker)

    return checked


def require_same_folder(marker: Path | None, store: Store) -> None:
    """Raise if tables were copied to a folder and `marker`, which the first start left there, is missing.

    The disk is probably not mounted yet. A new folder in its place would look as if all tables had been deleted.
    """
    if marker is not None and _is_lost(marker, store):
        raise DestinationUnavailable(
            f"{marker} is missing, although tables were copied there; is the disk mounted?",
            hint="Mount the disk, then start the pipeline again. If you deleted the tables: "
            f"mkdir -p {marker.parent} && echo '{{\"format\": 1}}' > {marker}, then start the pipeline and copy them "
            f"again: {RESYNC}.",
        )


def require_same_database(file: Path, store: Store) -> None:
    """Raise if tables were copied to a DuckDB file that no longer exists; a new one would look empty."""
    if _is_lost(file, store):
        raise DestinationUnavailable(
            f"{file} is missing, although tables were copied there; is the disk mounted?",
            hint="Mount the disk, then start the pipeline again. If you deleted the file: "
            f"python -c \"import duckdb; duckdb.connect('{file}')\", then start the pipeline and copy the tables "
            f"again: {RESYNC}.",
        )


def _is_lost(file: Path, store: Store) -> bool:
    phases = store.get_table_replication_states().values()
    return not file.exists() and any(isinstance(phase, SyncDone | Ready) for phase in phases)


def busy(table: str) -> PenstockError:
    """Other writers won every race for the next version; retried."""
    return TableBusy(f"{table}: other writers keep committing to this table", table=table)


def rejected(table: str, what: str, *, hint: str = "") -> PenstockError:
    """The destination cannot store a table or its changes."""
    return TableRejected(f"{table} was rejected: {what}", hint=hint, table=table)


def not_followed(table: str, what: str) -> PenstockError:
    """The schema changed so that only a new copy has the right rows."""
    return SchemaNotFollowed(f"{table}: {what}", table=table)


def gone_back(table: str) -> PenstockError:
    """The destination lost commits; the changes between may no longer exist anywhere else."""
    return SchemaNotFollowed(
        f"{table}: the destination has lost changes that it had; it was restored, or a standby that lagged took over",
        hint=f"Copy the table again: {RESYNC}.",
        table=table,
    )


def takes_long(table: str, what: str) -> PenstockError:
    """Other tables must not wait while this one is written."""
    return TakesLong(f"{table}: {what}", table=table)


def unusable(what: str, *, hint: str = "") -> PenstockError:
    """The destination cannot work with this configuration."""
    return ConfigError(what, hint=hint)


def foreign_table(table: str, owner: str, pipeline_id: str) -> PenstockError:
    """Another pipeline writes this table."""
    return TableOwned(
        f"{table} belongs to pipeline {owner!r} at the destination, so pipeline {pipeline_id!r} cannot write it",
        table=table,
        owner=owner,
    )


def fenced_copy(table: str, attempt: str) -> PenstockError:
    """A write of an earlier attempt came after a newer one had started."""
    return IllegalTransition(
        f"{table}: a newer copy has started, so attempt {attempt} can no longer write",
        hint="Nothing is lost: the newer copy has all rows.",
        table=table,
        attempt=attempt,
    )


def other_writer(table: str) -> PenstockError:
    """Another process of the same pipeline has taken the table over."""
    return LeaseLost(f"{table}: another process writes this table now")


def not_copied(table: str) -> PenstockError:
    """Changes came for a table that was never completely copied."""
    return IllegalTransition(
        f"{table} has no complete copy at the destination, so changes cannot be applied",
        hint=f"Copy the table again, even if its files were deleted: {RESYNC}.",
        table=table,
    )


def other_lineage(table: str, recorded: str, current: str) -> PenstockError:
    """The rows at the destination came from another server, timeline or slot."""
    return LineageChanged(
        f"{table} has a position of {recorded} at the destination, but the source is {current}",
        hint=f"Copy the table again: {RESYNC}.",
        table=table,
        stored=recorded,
        current=current,
    )


def unknown_row(table: str, what: str) -> PenstockError:
    """A change does not match the rows at the destination."""
    return PenstockError(
        f"{table}: {what}",
        hint=f"The copy and the changes contradict each other. Copy the table again, and please report this: {RESYNC}.",
        table=table,
    )


def unreadable(table: str, table_id: int, error: BaseException) -> PenstockError:
    """The changes of a table cannot be read from the spool."""
    if isinstance(error, MemoryError):
        return _out_of_memory(table)
    if is_passing(error):
        return DestinationUnavailable(f"{table}: its changes cannot be read: {_said(error)}", table=table)
    return PenstockError(
        f"{table}: its changes cannot be read from the spool ({type(error).__name__})",
        hint="Check the spool's disk. While the pipeline is stopped, you can delete the spool without losing anything.",
        table=table,
        table_id=table_id,
    )


def unexpected(table: str, error: BaseException) -> PenstockError:
    """Return the error of a table for any exception; only its type is named, since its text may contain values."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, MemoryError):
        return _out_of_memory(table)
    if is_passing(error):
        return DestinationUnavailable(f"{table}: {_said(error)}", hint=_MAKE_ROOM, table=table)
    if isinstance(error, OSError):
        return PenstockError(f"{table}: {_said(error)}", table=table)
    return PenstockError(
        f"{table}: {type(error).__name__} while writing",
        hint="The destination's log may have details; the text of the error is left out because it may contain data.",
        table=table,
    )


def _out_of_memory(table: str) -> PenstockError:
    """A task could not get memory: that of Arrow's, too. Retried, since other tasks may have used it up."""
    return TasksFailed(
        f"{table}: a task ran out of memory",
        hint="Give Python workers more memory: raise memory in [spark], or spark.executor.memoryOverhead and "
        "spark.executor.pyspark.memory; or lower batch.max_rows in [pipeline].",
        table=table,
    )


def raised(outcome: _Outcome | PenstockError) -> _Outcome:
    """Return the outcome of a task; raise it if it is an error."""
    if isinstance(outcome, PenstockError):
        raise outcome
    return outcome


def is_passing(error: BaseException) -> bool:
    """Return True for a fault of a disk, machine or network that time or an operator heals."""
    return isinstance(error, OSError) and (error.errno in _PASSING or isinstance(error, TimeoutError))


def _said(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return type(error).__name__
    reason = error.strerror or type(error).__name__
    return reason if error.filename is None else f"{reason} ({error.filename})"
