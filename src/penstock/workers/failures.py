"""Turns an error into the state of a table: reason, solution, whether and when to retry, and whether to copy again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import psycopg

from penstock.destinations.base import Capabilities
from penstock.destinations.refusals import is_passing, unexpected
from penstock.errors import PenstockError, Retry, TableRewritten
from penstock.lsn import Lsn
from penstock.retry import Backoff
from penstock.source.faults import Place, from_exception
from penstock.state import Errored, RetryPolicy, TableReplicationPhase
from penstock.state.transitions import LONGEST_RETRY_SECONDS, fail

_LOSES_KEPT_ROWS = "The copy replaces the rows of former partitions that the destination has kept."


class Recopy(StrEnum):
    """What happens to a table whose schema change only a new copy can follow."""

    AUTOMATIC = "automatic"
    """It is copied again; readers see the old rows until the copy is complete."""
    STOP = "stop"
    """It stops until `penstock resync` asks for the copy."""


class Partitions(StrEnum):
    """What happens to the rows of a partition that is attached, detached, dropped or truncated."""

    MIRROR = "mirror"
    """They come and go as in the source: the table is copied again."""
    KEEP = "keep"
    """The destination keeps rows that leave the source with their partition."""


class DropColumn(StrEnum):
    """What happens to a column that the source has dropped."""

    FOLLOW = "follow"
    """It disappears."""
    KEEP = "keep"
    """It stays, with NULL in new rows."""


class DropTable(StrEnum):
    """What happens to the data of a table that the source has dropped."""

    KEEP = "keep"
    DROP = "drop"
    """The destination deletes the folder of the table."""


@dataclass(frozen=True, slots=True)
class SchemaChanges:
    """How a table follows changes of its schema."""

    recopy: Recopy = Recopy.AUTOMATIC
    recopy_max_bytes: int | None = None
    """A larger table stops instead."""
    partitions: Partitions = Partitions.MIRROR
    drop_column: DropColumn = DropColumn.FOLLOW
    drop_table: DropTable = DropTable.KEEP

    def allowed(self, capabilities: Capabilities, *, is_partitioned: bool) -> SchemaChanges:
        """The policy of a table at a destination.

        A new copy would lose what is kept there on purpose: changes, deleted rows, rows of former partitions.
        """
        keeps = self.partitions is Partitions.KEEP and is_partitioned
        return self if capabilities.allows_copies and not keeps else replace(self, recopy=Recopy.STOP)

    def keeps_place(self, capabilities: Capabilities) -> bool:
        """True if a table that is renamed stays where it is, unless `rename_table` says otherwise."""
        is_copied = self.recopy is Recopy.AUTOMATIC and self.recopy_max_bytes is None
        return not (is_copied and capabilities.loses_nothing_by_a_copy)

    def __str__(self) -> str:
        """What happens, for people."""
        limit = "" if self.recopy_max_bytes is None else f" up to {self.recopy_max_bytes:,} bytes"
        then = f"copied again{limit}" if self.recopy is Recopy.AUTOMATIC else "stopped until resync"
        parts = [f"{then} where a change cannot be followed"]
        if self.partitions is Partitions.KEEP:
            stopped = ", partitioned tables stopped until resync" if self.recopy is Recopy.AUTOMATIC else ""
            parts.append(f"rows of former partitions kept{stopped}")
        if self.drop_column is DropColumn.KEEP:
            parts.append("dropped columns kept")
        if self.drop_table is DropTable.DROP:
            parts.append("DELETED at the destination once dropped")
        return ", ".join(parts)


class Policies:
    """How each table follows changes of its schema.

    A table that was renamed keeps the policy of the name under which the config has it, unless its new name has a
    policy of its own or another table has the configured name now.
    """

    def __init__(
        self, default: SchemaChanges, of_tables: Mapping[str, SchemaChanges], known_as: Mapping[int, str] | None = None
    ) -> None:
        """`known_as` has what is stored of tables."""
        self._default = default
        self._of_tables = of_tables
        self._known_as = dict(known_as or {})
        self._owners: dict[str, int] = {}

    def remember(self, tables: Mapping[int, str]) -> None:
        """Learn the current names of all tables."""
        self._known_as.update({table_id: name for table_id, name in tables.items() if name in self._of_tables})
        self._owners = {name: table_id for table_id, name in tables.items()}

    def known_as(self, table_id: int) -> str | None:
        """Return the last name of a table under which the config had a policy for it; to be stored with the table."""
        return self._known_as.get(table_id)

    def of(self, table_id: int, name: str) -> SchemaChanges:
        """Return the policy of a table with this name."""
        former = self._known_as.get(table_id, name)
        if name not in self._of_tables and self._owners.get(former, table_id) == table_id:
            name = former
        return self._of_tables.get(name, self._default)


def as_error(error: BaseException) -> PenstockError:
    """Return a named error. For an unknown error only the class is kept, because libraries quote values in messages."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, psycopg.OperationalError):
        # These concern the connection or the server, not values.
        return from_exception(error, Place("the source"), "go on")
    if is_passing(error):
        return unexpected("the destination", error)
    return PenstockError(
        f"an unexpected {type(error).__name__}",
        hint="Please report this with the log; `penstock resync` copies the table again.",
    )


def errored(
    current: TableReplicationPhase,
    error: BaseException,
    *,
    position: Lsn | None,
    after: Errored | None = None,
    timed: bool = False,
    schema_changes: SchemaChanges | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Errored:
    """Return the phase of a table that has failed; `timed` retries whatever the error says.

    With `schema_changes`, its policy, the remedy says what a new copy would lose.
    """
    named = as_error(error)
    solution = named.hint
    if named.retry is Retry.COPY and schema_changes is not None and schema_changes.partitions is Partitions.KEEP:
        solution = f"{solution} {_LOSES_KEPT_ROWS}".lstrip()
    attempts = after.attempts + 1 if after else 0
    policy = RetryPolicy()
    # An error that ends the run is no reason to stop a table: the next process tries it again.
    heals = named.retry in (Retry.TIMED, Retry.RESTART)
    if timed or heals:
        delay = Backoff(first=1.0, longest=LONGEST_RETRY_SECONDS, attempt=attempts).next_delay()
        policy = RetryPolicy(Retry.TIMED, now() + timedelta(seconds=delay))
    return fail(
        current,
        reason=named.message,
        solution=solution or None,
        retry_policy=policy,
        at=now(),
        position=position,
        after=after,
        # Rows that changed in a way that the stream does not tell, or changes that are gone: only a new copy is right.
        resumes=heals and not isinstance(named, TableRewritten),
    )
