"""Every error that Penstock raises on purpose, as one tree.

Each class says two things besides its message: what a worker does about it (`retry`) and what a person can
try (`hint`). Errors carry their facts as attributes, survive pickling (they cross process borders), and never
contain a secret or the value of a cell.

    PenstockError
    ├── ConfigError                 what a person wrote cannot be used
    │   └── SpecificationInvalid    an index specification, with file, line and column of each problem
    ├── SourceError                 Postgres
    │   ├── ServerUnavailable       refused, starting, stopping, cut off: tried again
    │   ├── AuthenticationFailed
    │   ├── DatabaseMissing
    │   ├── TlsFailed
    │   ├── PermissionDenied
    │   ├── UnsupportedServer
    │   ├── WalLevelTooLow
    │   ├── PublicationMissing
    │   ├── PublicationChanged
    │   ├── SlotMissing
    │   ├── SlotInUse               another reader, named by pid: tried again
    │   ├── SlotLost
    │   ├── SlotUnusable            another plugin or database, no free slots
    │   │   └── SlotUndecodable     the server cannot decode its log from there on
    │   ├── PositionAhead           a stored position that the server has not reached
    │   ├── LineageChanged          another system, another timeline, another slot
    │   ├── SnapshotBlocked         open transactions, named, keep a snapshot from being taken: tried again
    │   ├── SnapshotLost            the snapshot of a copy is gone; the copy begins anew
    │   ├── TableRewritten          rewritten, emptied or altered while it was copied; the copy begins anew
    │   ├── ValuesNotSent           DDL gave rows that are there values which the stream does not carry
    │   ├── TableLocked             somebody holds a lock that keeps us from reading: tried again
    │   └── QueryFailed
    │       └── StatementInterrupted  cancelled, timed out, deadlocked: tried again
    ├── DecodeError                 bytes that are not what the protocol promises
    ├── ValueOutOfRange             a value that its column's type cannot hold, under the policy `error`
    ├── SpoolError
    │   ├── SpoolInUse
    │   ├── SpoolCorrupt
    │   ├── SpoolDiskFull           tried again
    │   ├── PositionGone            a reader asked for entries that were released
    │   └── HoldBroken              what was kept for a copying table outgrew its budget
    ├── StateError                  phases, positions and what else is remembered
    │   ├── StateUnusable           a store that cannot be opened, read or written
    │   ├── StateNewer              written by a newer Penstock
    │   ├── LeaseHeld               another process drives this pipeline, named: tried again
    │   ├── LeaseLost               another process took over; nothing more is written
    │   └── IllegalTransition       a phase, version or position that must not follow the one before
    ├── DestinationError            where changes land
    │   ├── DestinationUnavailable  out of reach: tried again
    │   ├── DestinationRefused      does not accept who asks
    │   ├── TableRejected           the destination does not take what was sent
    │   ├── TableOwned              another pipeline writes this table
    │   ├── IndexUnusable           a search index was deleted, replaced, or its name leads elsewhere
    │   └── NotComparable           what is there cannot be compared with the source
    ├── DocumentsRejected           a search index does not take some documents, under the policy `stop`
    ├── IndexIncomplete             an index that was filled has too few documents, or too many; it is built anew
    ├── TasksFailed                 Spark could not run a job: tried again
    ├── SparkGone                   its JVM has ended
    ├── CaptureStopped              the capture process ended by itself
    └── FailpointReached            a test asked for it
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar


class Retry(Enum):
    """What a worker does after an error."""

    TIMED = "timed"
    """Try again by itself, with back-off."""
    OPERATOR = "operator"
    """Stop and wait for a person."""


_TABLE = "<table>"
RESYNC = f"penstock resync {_TABLE}"
"""In hints that say so: only a new copy helps."""


def for_table(hint: str, table: str) -> str:
    """A hint with the name of the table that it is about."""
    return hint.replace(_TABLE, table)


class PenstockError(Exception):
    """Base of all errors; `facts` are kept as attributes and cross process borders."""

    retry: ClassVar[Retry] = Retry.OPERATOR
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.facts)


class ConfigError(PenstockError):
    """A setting is missing, unknown or contradictory."""


class SpecificationInvalid(ConfigError):
    """An index specification that cannot be used; `problems` has each with its line, column and key path."""

    default_hint = "docs/reference/index-specification.md describes every key."


class SourceError(PenstockError):
    """Something between us and the source database."""


class ServerUnavailable(SourceError):
    """The server cannot be reached now: refused, starting, stopping, or the connection was cut."""

    retry = Retry.TIMED
    default_hint = "Check that the server runs and that host and port are right; Penstock keeps trying."
    hint_for_one_try: ClassVar[str] = "Check that the server runs and that host and port are right."
    """What a worker would try again ends a command; its hint must not say otherwise."""


class AuthenticationFailed(SourceError):
    """The server does not accept the user, the password or the host (pg_hba.conf)."""

    default_hint = "Check user and password in the source URL, and pg_hba.conf for this host and for replication."


class DatabaseMissing(SourceError):
    """The server runs, but has no database of this name."""

    default_hint = "Check the database name at the end of the source URL."


class TlsFailed(SourceError):
    """The encrypted connection could not be made as asked."""

    default_hint = "Check sslmode and sslrootcert in the source URL against what the server offers."


class PermissionDenied(SourceError):
    """The role lacks a privilege."""

    default_hint = "Grant what is missing; `penstock check` lists all that the role needs."


class UnsupportedServer(SourceError):
    """A server version or variant that cannot be a source."""

    default_hint = "Penstock needs PostgreSQL 13 or newer, and a primary, or a standby from 16 on."


class WalLevelTooLow(SourceError):
    """`wal_level` is not `logical`."""

    default_hint = "Run: alter system set wal_level = 'logical'; then restart the server."


class PublicationMissing(SourceError):
    """The publication does not exist."""

    default_hint = "Create it, or let Penstock manage it (manage_publication = true)."


class PublicationChanged(SourceError):
    """The publication was changed in a way that leaves a gap for some table."""

    default_hint = "Copy the tables that are named again."


class SlotMissing(SourceError):
    """The replication slot does not exist."""

    default_hint = "Changes since it vanished are gone: create a new slot and copy the tables again."


class SlotInUse(SourceError):
    """Another connection reads from the slot."""

    retry = Retry.TIMED
    default_hint = "A slot has one reader. Stop the other one, or wait until the server notices that it is gone."


class SlotLost(SourceError):
    """The server has removed WAL that the slot needs, or has invalidated the slot."""

    default_hint = (
        "The changes cannot be read any more: drop the slot, create a new one and copy the tables again; "
        "raise max_slot_wal_keep_size if it fell behind."
    )


class SlotUnusable(SourceError):
    """The slot exists or should be created, but cannot serve us."""

    default_hint = "Use another slot name, or drop the slot if nobody needs it."


class SlotUndecodable(SlotUnusable):
    """The server cannot decode its own log from the slot's position on."""

    default_hint = (
        "A defect of the server, met when tables are emptied or rewritten while a slot is made. If no table depends on "
        'the slot yet, it is dropped: run again. Otherwise drop it and run with on_lost_slot = "recreate".'
    )


class PositionAhead(SourceError):
    """A stored position is ahead of the server: from there it would deliver nothing and say nothing."""

    default_hint = "The server was restored or replaced: copy the tables again, with a new slot."


class LineageChanged(SourceError):
    """Stored positions belong to another system, timeline or slot than the one that answers."""

    default_hint = "Positions of one server mean nothing on another: copy the tables again."


class SnapshotBlocked(SourceError):
    """A snapshot waits for transactions that do not end; `blockers` names them."""

    retry = Retry.TIMED
    default_hint = "A snapshot is taken when the transactions before it have ended: wait for them, or end them."


class SnapshotLost(SourceError):
    """The transaction that kept a copy's snapshot has ended: what was copied so far cannot be completed."""

    retry = Retry.TIMED
    default_hint = "The copy begins anew by itself; see the server's log for why the session ended."


class TableRewritten(SourceError):
    """A table was rewritten, emptied, altered or dropped between a copy's snapshot and its reading.

    Rows would be missing without a word, so the whole attempt is void.
    """

    retry = Retry.TIMED
    default_hint = "The copy begins anew by itself; keep DDL, TRUNCATE and VACUUM FULL away from it while it runs."


class ValuesNotSent(SourceError):
    """DDL gave rows that are there already values which the stream does not carry."""

    default_hint = f"Copy the table again: {RESYNC}."


class TableLocked(SourceError):
    """Another session holds a lock on the table that readers wait for."""

    retry = Retry.TIMED
    default_hint = "Wait for the DDL on this table to end, or end the session that holds the lock."


class QueryFailed(SourceError):
    """The server refused a statement for a reason that has no class of its own."""


class StatementInterrupted(QueryFailed):
    """The server ended a statement before it was done: cancelled, timed out, in a deadlock, or by a failing disk."""

    retry = Retry.TIMED
    default_hint = "The server's log says by whom; statement_timeout and watchers of long queries should spare copies."


class DecodeError(PenstockError):
    """Bytes that do not follow the protocol; `offset` counts from the start of the message."""

    default_hint = "Please report this with the server's version; the message itself may contain data."

    def __init__(self, message: str, *, offset: int, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message, hint=hint, offset=offset, **facts)


class ValueOutOfRange(PenstockError):
    """A value that its column's type cannot hold, under `out_of_range = "error"`; names table and column only."""

    default_hint = 'Choose another out_of_range policy for this column ("keep" loses nothing).'


class SpoolError(PenstockError):
    """Something about the files between capture and its readers."""


class SpoolInUse(SpoolError):
    """Another capture process writes into this spool."""

    default_hint = "One spool has one writer: stop the other process or choose another folder."


class SpoolCorrupt(SpoolError):
    """The spool's own records contradict each other."""

    default_hint = "The spool is a cache: stop the pipeline, delete the folder and start again; nothing is lost."


class SpoolDiskFull(SpoolError):
    """No room on the spool's disk; capture waits, connected, until there is."""

    retry = Retry.TIMED
    default_hint = "Free some space on the spool's disk; capture goes on by itself."


class PositionGone(SpoolError):
    """The entries after a position were released already."""

    default_hint = "Register the reader before it reads, or start it from the spool's first position."


class HoldBroken(SpoolError):
    """What was kept for a copying table outgrew `copy_max_bytes`; only that copy stops."""

    default_hint = "Copy the table again when there are fewer changes, or raise copy_max_bytes."


class StateError(PenstockError):
    """Something about what the pipeline remembers."""


class StateUnusable(StateError):
    """The store cannot be opened, read or written."""

    default_hint = "Check the state URL, that its folder exists and can be written, and that its disk has room."


class StateNewer(StateError):
    """The state was written by a newer version of Penstock, which this one might damage."""

    default_hint = "Run the newer version; going back needs a copy of the state from before."


class LeaseHeld(StateError):
    """Another process drives this pipeline: `host`, `pid` and `since` say which."""

    retry = Retry.TIMED
    default_hint = "Stop the other process, or wait: the lease of one that is gone runs out by itself."


class LeaseLost(StateError):
    """This process does not drive the pipeline (any more): what it writes is refused."""

    default_hint = "Another process has taken over, or this one was cut off too long: stop it, or start it again."


class IllegalTransition(StateError):
    """A table cannot go from its phase, schema version or position to the one that was asked for."""


class DestinationError(PenstockError):
    """Something about where changes land."""


class DestinationUnavailable(DestinationError):
    """The destination does not answer now."""

    retry = Retry.TIMED
    default_hint = "Check that the destination runs and can be reached from here; Penstock keeps trying."


class DestinationRefused(DestinationError):
    """The destination does not accept the user, the password or the certificate, or the user lacks a privilege."""

    default_hint = "Check user, password and certificates, and what the user may do there."


class TableRejected(DestinationError):
    """The destination does not take what was sent of a table; a person has to look."""


class TableOwned(DestinationError):
    """Another pipeline writes this table at the destination."""

    default_hint = "One table has one writer: use different paths, or remove the table at the destination."


class IndexUnusable(DestinationError):
    """A search index is not as Penstock left it: deleted, replaced, closed, or its name leads elsewhere."""

    default_hint = "Start Penstock again, or run `penstock index rebuild`: what is missing is built anew."


class NotComparable(DestinationError):
    """What a destination holds cannot be compared with the source: it cannot be read back, or is something else."""


class DocumentsRejected(PenstockError):
    """An index refused documents for good, and its policy is to stop; nothing of the batch was acknowledged."""

    default_hint = (
        'Look at the index and the reason that is named; failure_policy = "skip" sets such documents aside instead.'
    )


class IndexIncomplete(PenstockError):
    """A generation of a search index does not have the documents that were written to it; another one is filled."""

    retry = Retry.TIMED
    default_hint = "If it comes again: look whether somebody else writes to the index, or deletes from it."


class TasksFailed(PenstockError):
    """Spark could not run a job: executors were lost, or what it was given cannot be run there."""

    retry = Retry.TIMED
    default_hint = "See Spark's own log; every machine of a cluster needs this version of Penstock and of Python."


class SparkGone(PenstockError):
    """Spark's JVM has ended under the pipeline, which can run nothing any more."""

    default_hint = "Start Penstock again: it goes on where it was. The machine's log says whether memory had run out."


class CaptureStopped(PenstockError):
    """The capture process ended without being asked to."""

    retry = Retry.TIMED
    default_hint = "See the log lines before; it is started again from where the spool ends."


def _rebuild(kind: type[PenstockError], message: str, hint: str, facts: dict[str, Any]) -> PenstockError:
    return kind(message, hint=hint, **facts)


class FailpointReached(PenstockError):
    """A test asked for an error at this point; see `penstock.failpoints`."""

    retry = Retry.TIMED
