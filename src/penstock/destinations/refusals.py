"""The errors of destinations: one function per situation, so that each says the same everywhere.

An error names tables, files and types of errors; never the value of a cell, which the texts of other people's
exceptions may contain.
"""

from __future__ import annotations

import errno
from pathlib import Path

from penstock.errors import (
    RESYNC,
    ConfigError,
    DestinationUnavailable,
    IllegalTransition,
    LeaseLost,
    LineageChanged,
    PenstockError,
    TableBusy,
    TableOwned,
    TableRejected,
)

_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
"""Faults of a disk, machine or network that time or an operator heals: full, read-only, disconnected, out of handles.
They are never about one table."""
_MAKE_ROOM = "Check that this disk has room and is connected; Penstock keeps trying."


def concerns_all_tables(error: PenstockError) -> bool:
    """Return True if no table can be written: the destination is unreachable, full or misconfigured.

    Such an error is raised for the whole batch, never returned for a table, so that the apply worker waits.
    """
    return isinstance(error, DestinationUnavailable | ConfigError)


def out_of_reach(destination: str, what: str) -> PenstockError:
    """The destination does not answer now; tried again."""
    return DestinationUnavailable(f"{destination} is out of reach: {what}")


def require_mounted(marker: Path | None) -> None:
    """Raise if a file that `startup` left in a folder is gone; None, in an object store, is always fine.

    The disk was probably unmounted. What is written to its mount point now would be lost when it comes back.
    """
    if marker is not None and not marker.exists():
        raise out_of_reach(str(marker.parent), f"{marker.name} is missing; is the disk mounted?")


def busy(table: str) -> PenstockError:
    """Other writers were faster, again and again; tried again."""
    return TableBusy(f"{table}: other writers keep committing to this table", table=table)


def rejected(table: str, what: str, *, hint: str = "") -> PenstockError:
    """The destination does not take what was sent; a person has to look."""
    return TableRejected(f"{table} was rejected: {what}", hint=hint, table=table)


def unusable(what: str, *, hint: str = "") -> PenstockError:
    """The destination cannot work as it is configured."""
    return ConfigError(what, hint=hint)


def foreign_table(table: str, owner: str, pipeline_id: str) -> PenstockError:
    """Another pipeline writes this table."""
    return TableOwned(
        f"{table} belongs to pipeline {owner!r} at the destination; {pipeline_id!r} must not write it",
        table=table,
        owner=owner,
    )


def fenced_copy(table: str, attempt: str) -> PenstockError:
    """A write of an earlier attempt came after a newer one had begun."""
    return IllegalTransition(
        f"{table}: a newer copy has begun; attempt {attempt} must not write any more",
        hint="Nothing is lost: the newer copy has all rows.",
        table=table,
        attempt=attempt,
    )


def other_writer(table: str) -> PenstockError:
    """Another process of the same pipeline has taken the table over."""
    return LeaseLost(f"{table}: another process writes it now; what this one has written since does not count")


def not_copied(table: str) -> PenstockError:
    """Changes came for a table that has no copy here."""
    return IllegalTransition(
        f"{table} has no complete copy at the destination, so changes cannot be added to it",
        hint="Copy the table again; if its files were removed by hand, this brings them back.",
        table=table,
    )


def other_lineage(table: str, recorded: str, current: str) -> PenstockError:
    """What is there came from another server, timeline or slot."""
    return LineageChanged(
        f"{table} has positions of {recorded} at the destination, which mean nothing for {current}",
        hint=f"Copy the table again: {RESYNC}.",
        table=table,
        stored=recorded,
        current=current,
    )


def unknown_row(table: str, what: str) -> PenstockError:
    """A change does not fit the rows that are there."""
    return PenstockError(
        f"{table}: {what}",
        hint="The copy and the changes do not fit together: copy the table again, and please report it.",
        table=table,
    )


def unreadable(table: str, table_id: int, error: BaseException) -> PenstockError:
    """A table's changes cannot be read from the spool."""
    if is_passing(error):
        return DestinationUnavailable(f"{table}: its changes cannot be read now ({_said(error)})", table=table)
    return PenstockError(
        f"{table}: its changes cannot be read ({type(error).__name__})",
        hint="Check the spool's disk; the spool can be deleted while the pipeline is stopped, nothing is lost.",
        table=table,
        table_id=table_id,
    )


def unexpected(table: str, error: BaseException) -> PenstockError:
    """Wrap an error that nobody foresaw: it stops its table. Its text may hold values, so only its type is told."""
    if isinstance(error, PenstockError):
        return error
    if is_passing(error):
        return DestinationUnavailable(f"{table}: {_said(error)}", hint=_MAKE_ROOM, table=table)
    if isinstance(error, OSError):
        return PenstockError(f"{table}: {_said(error)}", table=table)
    return PenstockError(
        f"{table}: {type(error).__name__} while writing",
        hint="The destination's own log may say more; the text of the error is left out, as it may contain data.",
        table=table,
    )


def is_passing(error: BaseException) -> bool:
    """Return True for faults of a disk, machine or network that pass; the write is tried again until they have."""
    return isinstance(error, OSError) and (error.errno in _PASSING or isinstance(error, TimeoutError))


def _said(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return type(error).__name__
    reason = error.strerror or type(error).__name__
    return reason if error.filename is None else f"{reason} ({error.filename})"
