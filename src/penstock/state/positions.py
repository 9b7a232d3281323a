"""How far everything is: the rules for progress, acknowledgement and restart, on plain values.

All positions are boundaries; `penstock.lsn` compares them. P is apply's own position, A the highest position that was
ever stored or handed to capture.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.lsn import Lsn, earliest, furthest
from penstock.state.phases import Catchup, Errored, Ready, SyncDone, TableReplicationPhase


def table_position(applied: Lsn, first_pending: Lsn | None) -> Lsn:
    """position(T): the boundary before the first change that is not durable yet; P if there is none.

    `first_pending` is the start of that change's commit record, which is a boundary too: it is not in itself.
    """
    return applied if first_pending is None else first_pending


def held_at(phase: TableReplicationPhase, position: Lsn | None) -> Lsn | None:
    """Where a table holds back progress; None if it does not.

    `position` is the worker's in Catchup and apply's in SyncDone and Ready; None for a table in SyncDone that apply
    has not taken over yet, which holds at the hand-over. An errored table holds where it stopped, until it is lost.
    """
    match phase:
        case SyncDone(lsn):
            return lsn if position is None else furthest(position, lsn)
        case Catchup() | Ready():
            if position is None:
                raise ValueError(f"the position of a table in {phase.name} is not known")
            return position
        case Errored():
            return phase.position if phase.holds else None
        case _:
            return None


def progress(applied: Lsn, tables: Iterable[tuple[TableReplicationPhase, Lsn | None]]) -> Lsn:
    """What may be stored, and then acknowledged: the minimum of P and of what every table is held at.

    Never beyond P: while all tables copy, a minimum over nothing would be everything.
    """
    held = (held_at(phase, position) for phase, position in tables)
    return earliest(applied, *(position for position in held if position is not None))


def acknowledgement(stored: Lsn, applied: Lsn, received: Lsn) -> Lsn:
    """What the server may forget: what is stored, and neither beyond P nor beyond what it has sent."""
    return earliest(stored, applied, received)


def start_position(confirmed: Lsn, stored: Lsn | None) -> Lsn:
    """Where replication starts: the stored position may lead (the acknowledgement was lost), and so may the slot's.

    Only for a stored position of the same lineage: see `penstock.source.lineage`.
    """
    return confirmed if stored is None else furthest(confirmed, stored)


def table_start(start: Lsn, recorded: Lsn | None) -> Lsn:
    """Where a table starts: what its destination, or the store, has recorded for it is skipped."""
    return start if recorded is None else furthest(start, recorded)
