"""The rules for progress and restart, on plain values.

All positions are boundaries; `penstock.lsn` compares them. P is the apply worker's position, A the highest position
that was ever stored or handed to capture.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.lsn import Lsn, earliest, furthest
from penstock.state.phases import Catchup, DataSync, Errored, Ready, SyncDone, TableReplicationPhase


def followed_from(phase: SyncDone | Ready, position: Lsn) -> Lsn:
    """From where the apply worker writes a table's changes: from its position, and never from before the hand-over."""
    return furthest(position, phase.lsn) if isinstance(phase, SyncDone) else position


def held_at(phase: TableReplicationPhase, position: Lsn | None) -> Lsn | None:
    """Return where a table holds back progress, or None if it does not.

    `position` is the table sync worker's in Catchup and the apply worker's in SyncDone and Ready. It is None for a
    table in SyncDone that the apply worker has not taken over yet, which holds at the hand-over. An errored table holds
    where it stopped, until its position is lost. A copy that can be resumed holds the changes since it began.
    """
    match phase:
        case SyncDone(lsn):
            return lsn if position is None else followed_from(phase, position)
        case Catchup() | Ready():
            if position is None:
                raise ValueError(f"the position of a table in {phase.name} is not known")
            return position
        case Errored():
            resumption = phase.resumption
            return phase.position if phase.holds else None if resumption is None else resumption.since
        case DataSync(resumption):
            return None if resumption is None else resumption.since
        case _:
            return None


def progress(applied: Lsn, tables: Iterable[tuple[TableReplicationPhase, Lsn | None]]) -> Lsn:
    """Return the position that may be stored and then acknowledged: the minimum of P and of every table's hold.

    P bounds it: tables that are copied may hold nothing.
    """
    held = (held_at(phase, position) for phase, position in tables)
    return earliest(applied, *(position for position in held if position is not None))


def start_position(confirmed: Lsn, stored: Lsn | None) -> Lsn:
    """Return where replication starts: the later of the slot's position and the stored one.

    The stored position is ahead if its acknowledgement was lost. It must be of the same lineage
    (`penstock.source.lineage`).
    """
    return confirmed if stored is None else furthest(confirmed, stored)


def table_start(start: Lsn, recorded: Lsn | None) -> Lsn:
    """Return where a table starts: changes below its recorded position are skipped."""
    return start if recorded is None else furthest(start, recorded)
