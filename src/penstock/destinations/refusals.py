"""The errors of destinations: one function per situation, so that each says the same everywhere.

An error names tables, files and types of errors; never the value of a cell, which the texts of other people's
exceptions may contain.
"""

from __future__ import annotations

import errno

from penstock.errors import (
    RESYNC,
    ConfigError,
    DestinationUnavailable,
    IllegalTransition,
    LeaseLost,
    LineageChanged,
    PenstockError,
    TableOwned,
    TableRejected,
)

_PASSING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY),
    }
)
"""What is wrong with a disk or a machine for a while: full, cut off, out of handles."""
_MAKE_ROOM = "Look at the disk that it is about: room, and its connection; Penstock keeps trying."


def out_of_reach(destination: str, what: str, *, table: str | None = None) -> PenstockError:
    """The destination does not answer now; tried again."""
    return DestinationUnavailable(f"{destination} is out of reach: {what}", table=table)


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
    """Whether a disk or a machine may be well again soon: then nobody has to do anything but that."""
    return isinstance(error, OSError) and error.errno in _PASSING


def _said(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return type(error).__name__
    return f"{error.strerror or type(error).__name__} ({error.filename})"
