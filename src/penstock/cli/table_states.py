"""Where the tables of an output stand, as far as it is stored: for `tables`, `status` and `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text

from penstock.cli.configured import table_names
from penstock.config import Config, OutputChoice
from penstock.errors import RESYNC, Retry, for_table
from penstock.lsn import Lsn, furthest
from penstock.observe import scrub
from penstock.state import Errored, LeaseInfo, Ready, Store, StoredPhase, SyncDone


@dataclass(frozen=True, slots=True)
class TableError:
    """Why a table stopped, and what can be done."""

    reason: str
    solution: str | None
    command: str | None
    """What a person runs when the cause is gone."""
    since: str
    next_retry: str | None
    attempts: int
    position_lost: bool

    def lines(self, table: str) -> list[Text]:
        """For people, with an empty line behind."""
        lines = [Text.assemble((f"{table} stopped", "bold"), f" at {self.since}: {self.reason}")]
        solution, call = for_table(self.solution or "", table), f"penstock {self.command} {table}"
        if solution:
            lines.append(Text(f"  {solution}"))
        if self.command and call not in solution:
            lines.append(Text(f"  then: {call}"))
        elif self.next_retry:
            lines.append(Text(f"  it is tried again by itself at {self.next_retry}"))
        return [*lines, Text()]


@dataclass(frozen=True, slots=True)
class TableState:
    """One table of one output; as JSON it has the same names."""

    table: str
    id: int
    output: str
    phase: str
    position: str | None
    """Up to where the table is durable."""
    error: TableError | None


def table_states(config: Config, output: OutputChoice, store: Store) -> list[TableState]:
    """All tables, by name."""
    stored = store.get_stored_progress()
    positions: dict[int, Lsn] = {}
    if stored is not None:
        store.use_lineage(stored.lineage)
        positions = dict(store.get_table_positions())
    names = table_names(config, store)
    found = [
        TableState(
            table=names.get(table_id, f"oid {table_id}"),
            id=table_id,
            output=output.name,
            phase=phase.name,
            position=_text(_position(phase, positions.get(table_id), stored.position if stored else None)),
            error=_error(config, phase),
        )
        for table_id, phase in store.get_table_replication_states().items()
    ]
    return sorted(found, key=lambda state: state.table)


def driver_facts(driver: LeaseInfo | None) -> dict[str, Any] | None:
    """Who runs the pipeline, for machines; None if nobody does."""
    if driver is None:
        return None
    return {"host": driver.host, "pid": driver.pid, "since": driver.since.isoformat(timespec="seconds")}


def _position(phase: StoredPhase, own: Lsn | None, progress: Lsn | None) -> Lsn | None:
    match phase:
        case Ready() | SyncDone():
            known = [each for each in (own, progress) if each is not None]
            return furthest(*known) if known else None
        case Errored():
            return phase.position
        case _:
            return None


def _error(config: Config, phase: StoredPhase) -> TableError | None:
    if not isinstance(phase, Errored):
        return None
    next_retry = phase.retry_policy.next_retry
    return TableError(
        reason=scrub(phase.reason, config.secrets),
        solution=None if phase.solution is None else scrub(phase.solution, config.secrets),
        command=_command(phase),
        since=phase.since.isoformat(timespec="seconds"),
        next_retry=next_retry.isoformat(timespec="seconds") if next_retry else None,
        attempts=phase.attempts,
        position_lost=phase.position_lost,
    )


def _command(phase: Errored) -> str | None:
    if phase.position_lost or RESYNC in (phase.solution or ""):
        return "resync"
    return "rollback" if phase.retry_policy.retry is Retry.OPERATOR else None


def _text(position: Lsn | None) -> str | None:
    return None if position is None else str(position)
