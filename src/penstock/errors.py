"""Every error that Penstock raises on purpose, in one tree.

Besides its message, each class says whether a worker retries it (`retry`) and what the operator can do (`hint`).
Errors keep their facts as attributes, survive pickling so that they can cross process boundaries, and never contain
a secret or the value of a cell.

    PenstockError
    ├── ConfigError                 a setting that cannot be used
    │   └── SpecificationInvalid    an index specification, with the file, line and column of each problem
    ├── NotReady                    the first start was refused, before it created anything
    ├── SourceError                 Postgres
    │   ├── ServerUnavailable       refused, starting, stopping or disconnected: retried
    │   ├── AuthenticationFailed
    │   ├── DatabaseMissing
    │   ├── TlsFailed
    │   ├── PermissionDenied
    │   ├── UnsupportedServer
    │   ├── WalLevelTooLow
    │   ├── PublicationMissing
    │   ├── PublicationChanged
    │   ├── SlotMissing
    │   ├── SlotInUse               has another reader, named by pid: retried
    │   ├── SlotLost
    │   ├── SlotUnusable            wrong plugin or database, or no free slots
    │   │   └── SlotUndecodable     the server cannot decode its own WAL from this slot
    │   │       └── SlotDiscarded   so Penstock drops it; a new start creates another
    │   ├── PositionAhead           a stored position that the server has not reached
    │   ├── LineageChanged          another system, timeline or slot
    │   │   └── LostInFailover      changes that a promoted or restored server does not have
    │   ├── SnapshotBlocked         open transactions, listed, block the snapshot: retried
    │   ├── SnapshotLost            the snapshot of a copy ended; the copy restarts
    │   ├── TableRewritten          rewritten, truncated or altered during its copy; the copy restarts
    │   ├── TablesAltered           by DDL since search indexes were compiled; compiled again
    │   ├── ValuesNotSent           the stream lacks values of existing rows, or which row a change is about
    │   ├── IdentitiesDiffer        partitions whose replica identities do not fit together
    │   ├── NotIdentified           a table that is left out: publishing it would make its updates and deletes fail
    │   ├── TableLocked             another session's lock blocks reads: retried
    │   └── QueryFailed
    │       └── StatementInterrupted  cancelled, timed out or deadlocked: retried
    ├── DecodeError                 bytes that do not follow the protocol
    ├── ValueOutOfRange             a value that its column cannot hold, under the policy `error`
    ├── SpoolError
    │   ├── SpoolInUse
    │   ├── SpoolCorrupt
    │   ├── SpoolDiskFull           retried
    │   ├── PositionGone            a reader asked for entries that were already deleted
    │   └── HoldBroken              the changes kept for a copy exceeded their budget
    ├── StateError                  phases, positions and the rest of the stored state
    │   ├── StateUnusable           a store that cannot be opened, read or written
    │   │   └── StateUnavailable    locked by another program, or on a disk that is full or disconnected: retried
    │   ├── StateNewer              written by a newer version of Penstock
    │   ├── LeaseHeld               another process, named, runs this pipeline: retried
    │   ├── LeaseLost               another process took over; this one stops writing
    │   └── IllegalTransition       a phase, version or position that cannot follow the current one
    ├── DestinationError            where changes are written
    │   ├── DestinationUnavailable  the whole destination is unreachable or full; all tables wait: retried
    │   ├── TableBusy               other writers keep committing to the table: retried
    │   ├── TakesLong               files have to be rewritten: the table's changes are written apart from the others
    │   ├── DestinationRefused      credentials, certificate or privileges refused
    │   ├── TableRejected           the destination cannot store a table or its changes
    │   │   └── SchemaNotFollowed   a change of the schema that needs a new copy
    │   ├── TableOwned              another pipeline writes this table
    │   ├── IndexUnusable           a search index was deleted, replaced, or its alias points elsewhere
    │   └── NotComparable           a table that cannot be compared with the source
    ├── DocumentsRejected           a search index rejected documents, under the policy `stop`
    ├── IndexIncomplete             a backfilled index has the wrong number of documents; it is rebuilt
    ├── TasksFailed                 Spark could not run a job: retried
    ├── SparkGone                   the Spark JVM ended
    ├── CaptureStopped              the capture process ended unexpectedly: restarted
    └── FailpointReached            a test asked for this error
"""

from __future__ import annotations

import re
import shlex
from enum import Enum
from typing import Any, ClassVar


class Retry(Enum):
    """What a worker does after an error."""

    TIMED = "timed"
    """Retry automatically, with back-off."""
    COPY = "copy"
    """Copy the table again: nothing else helps."""
    ALONE = "alone"
    """Write the table's changes by themselves, while other tables continue."""
    RESTART = "restart"
    """End the run: this process cannot continue, a new one can."""
    RECREATE = "recreate"
    """End the run: changes are lost. A new run copies the tables again, if `on_lost_slot` is `recreate`."""
    OPERATOR = "operator"
    """Stop and wait for the operator."""


_TABLE = "<table>"
RESYNC = f"penstock resync {_TABLE}"
"""In a hint: only a new copy of the table helps."""


def in_command(table: str, output: str | None = None) -> str:
    """Return the name of a table as the argument of a command to paste into a shell; `output` is one of several."""
    # `shlex.quote` also quotes letters that are not ASCII, which no shell needs.
    argument = table if re.fullmatch(r"[\w.-]+", table) else shlex.quote(table)
    return argument if output is None else f"{argument} --output {output}"


def with_hint(error: PenstockError) -> str:
    """Return the message of an error and its hint, as sentences."""
    end = "" if error.message.endswith((".", "?", "!", ";")) else "."
    return f"{error.message}{end} {error.hint}" if error.hint else error.message


def for_table(hint: str, table: str, output: str | None = None) -> str:
    """Return a hint with the name of its table filled in, as in `in_command`."""
    return hint.replace(_TABLE, in_command(table, output))


class PenstockError(Exception):
    """Base of all errors; `facts` become attributes and survive pickling."""

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
    """A setting is missing, unknown or contradicts another."""


class SpecificationInvalid(ConfigError):
    """An index specification cannot be used; `problems` gives the line, column and key path of each problem."""

    default_hint = (
        "docs/reference/index-specification.md describes every key. Correct the file, then run: penstock index check."
    )


class NotReady(PenstockError):
    """A start was refused because of what `penstock check` calls critical; nothing was created."""

    default_hint = "Run: penstock check. It lists every finding with its remedy."


class SourceError(PenstockError):
    """The source database reported an error."""


class ServerUnavailable(SourceError):
    """The server cannot be reached: it refuses connections, is starting or stopping, or dropped the connection."""

    retry = Retry.TIMED
    default_hint = "Check that the server is running and that the host and port are correct."


class AuthenticationFailed(SourceError):
    """The server rejected the user, the password or the client host."""

    default_hint = (
        "Check the user and password in the source URL, and pg_hba.conf's entries for this host and for replication."
    )


class DatabaseMissing(SourceError):
    """The server has no database with this name."""

    default_hint = "Check the database name at the end of the source URL."


class TlsFailed(SourceError):
    """The server and the client could not agree on an encrypted connection."""

    default_hint = "Check that sslmode and sslrootcert in the source URL match the server's TLS settings."


class PermissionDenied(SourceError):
    """The role lacks a privilege."""

    default_hint = "Grant the missing privilege; to list everything the role needs, run: penstock check."


class UnsupportedServer(SourceError):
    """This server version or variant cannot be a source."""

    default_hint = "Penstock needs PostgreSQL 13 or newer: a primary, or a standby running 16 or newer."


class WalLevelTooLow(SourceError):
    """`wal_level` is not `logical`."""

    default_hint = "Run: alter system set wal_level = 'logical'; then restart the server."


class PublicationMissing(SourceError):
    """The publication does not exist."""

    default_hint = "Create the publication, or set manage_publication = true to let Penstock create it."


class PublicationChanged(SourceError):
    """A table was dropped or removed from the publication, so its changes have a gap."""

    default_hint = f"Add the table to the publication again, then run: {RESYNC}."


class SlotMissing(SourceError):
    """The replication slot does not exist."""

    retry = Retry.RECREATE
    default_hint = (
        "The changes since the slot was dropped are lost. To create a new slot and copy the tables again, set "
        'on_lost_slot = "recreate" and run: penstock run.'
    )


class SlotInUse(SourceError):
    """Another connection is reading from the slot."""

    retry = Retry.TIMED
    default_hint = "A slot has one reader: stop the other one, or wait until the server notices that it disconnected."


class SlotLost(SourceError):
    """The server removed WAL that the slot needs or invalidated the slot, or another program moved the slot."""

    retry = Retry.RECREATE
    default_hint = (
        "The changes can no longer be read. To create a new slot and copy the tables again, set on_lost_slot = "
        '"recreate" and run: penstock run. If the slot fell behind, raise max_slot_wal_keep_size first.'
    )


class SlotUnusable(SourceError):
    """The slot exists or should be created, but Penstock cannot use it."""

    default_hint = "Choose another slot name, or drop the slot if no other program uses it."


class SlotUndecodable(SlotUnusable):
    """The server cannot decode its own WAL from the slot's position."""

    default_hint = (
        "This is a server defect that can occur when tables are created, truncated or rewritten while a slot is "
        'created. To copy the tables again, set on_lost_slot = "recreate" and run: penstock run. It drops the slot and '
        "ends; then run it again: penstock run."
    )


class SlotDiscarded(SlotUndecodable):
    """The server cannot decode its own WAL from the slot, which Penstock therefore drops."""

    retry = Retry.RESTART
    default_hint = "A new run creates another slot. Run: penstock run."


class PositionAhead(SourceError):
    """A stored position is ahead of the server, which would silently send nothing from there."""

    retry = Retry.RECREATE
    default_hint = (
        "The server was restored or replaced. To copy the tables again from this server, set on_lost_slot = "
        '"recreate" and run: penstock run.'
    )


class LineageChanged(SourceError):
    """The stored positions belong to another server, timeline, database or slot."""

    default_hint = (
        "Positions are valid only on the server they came from. To copy the tables again, run: penstock teardown, "
        "then penstock run."
    )


class LostInFailover(LineageChanged):
    """The stored positions are beyond what this server has: changes were lost in a failover or a restore."""

    retry = Retry.RECREATE
    default_hint = (
        "The promoted standby did not have these changes. To copy the tables again from this server, set on_lost_slot "
        '= "recreate" and run: penstock run. To keep it from happening again, set synchronized_standby_slots on the '
        "primary (PostgreSQL 17)."
    )


class SnapshotBlocked(SourceError):
    """A snapshot waits for open transactions; `blockers` lists them."""

    retry = Retry.TIMED
    default_hint = "Wait for the listed transactions to end, or end them with pg_terminate_backend(pid)."


class SnapshotLost(SourceError):
    """The transaction that held the snapshot of a copy ended, so the copy cannot be completed."""

    retry = Retry.TIMED
    default_hint = "The copy restarts automatically; the server's log says why the session ended."


class TableRewritten(SourceError):
    """A table was rewritten, truncated, altered or dropped while it was being copied, so the copy could miss rows."""

    retry = Retry.TIMED
    default_hint = (
        "The copy restarts automatically; avoid DDL, TRUNCATE and VACUUM FULL on the table until the copy is complete."
    )


class TablesAltered(SourceError):
    """Tables of search indexes were altered since the indexes were compiled."""

    retry = Retry.TIMED
    default_hint = "Penstock compiles the indexes again automatically, and rebuilds those that need it."


class ValuesNotSent(SourceError):
    """The stream lacks values: those that DDL gave existing rows, or those that say which row a change is about."""

    retry = Retry.COPY
    default_hint = f"Copy the table again: {RESYNC}."


class IdentitiesDiffer(SourceError):
    """The partitions of a table have replica identities by which its rows cannot be found."""

    default_hint = "Give all partitions of the table the same replica identity; penstock check shows the statements."


class NotIdentified(SourceError):
    """A table is not published, because the server would reject its updates and deletes; `statements` change that."""

    default_hint = "Give the table a primary key or a replica identity; penstock check shows the statements."


class TableLocked(SourceError):
    """Another session holds a lock on the table that blocks reads."""

    retry = Retry.TIMED
    default_hint = (
        "Wait for the DDL on this table to finish, or end the session that holds the lock with "
        "pg_terminate_backend(pid)."
    )


class QueryFailed(SourceError):
    """The server rejected a statement for a reason that has no class of its own."""


class StatementInterrupted(QueryFailed):
    """The server ended a statement early: it was cancelled, timed out, deadlocked, or hit a disk error."""

    retry = Retry.TIMED
    default_hint = (
        "The server's log says why; exempt the Penstock role from statement_timeout and from tools that cancel long "
        "queries."
    )


class DecodeError(PenstockError):
    """Bytes do not follow the protocol; `offset` counts from the start of the message."""

    default_hint = (
        "Please report this with the server's version, but without the replication message: it may contain data."
    )

    def __init__(self, message: str, *, offset: int, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message, hint=hint, offset=offset, **facts)


class ValueOutOfRange(PenstockError):
    """A column cannot hold a value, under `out_of_range = "error"`; the error names only the table and column."""

    default_hint = 'Choose another out_of_range policy for this column; "keep" loses nothing.'


class SpoolError(PenstockError):
    """The spool could not be read or written."""


class SpoolInUse(SpoolError):
    """Another capture process is writing to this spool."""

    default_hint = "A spool has one writer: stop the other process, or set another spool.path."


class SpoolCorrupt(SpoolError):
    """The spool's records contradict each other."""

    default_hint = (
        "The spool is a cache and nothing is lost: stop the pipeline, delete the spool folder, and run: penstock run."
    )


class SpoolDiskFull(SpoolError):
    """The disk of the spool is full; capture stays connected and waits."""

    retry = Retry.TIMED
    default_hint = "Free space on the spool's disk; capture resumes automatically."


class PositionGone(SpoolError):
    """The entries after a position were already deleted from the spool."""

    default_hint = "Register the reader before it reads, or start it at the spool's first position."


class HoldBroken(SpoolError):
    """The changes kept for a table during its copy exceeded `copy_max_bytes`; only that copy stops."""

    default_hint = f"Raise spool.copy_max_bytes or wait for a quieter time, then run: {RESYNC}."


class StateError(PenstockError):
    """The stored state could not be used."""


class StateUnusable(StateError):
    """The state store cannot be opened, read or written."""

    default_hint = "Check the state URL, that its folder exists and is writable, and that the disk has free space."


class StateUnavailable(StateUnusable):
    """The state cannot be read or written now: another program locks it, or its disk is full or disconnected."""

    retry = Retry.TIMED
    default_hint = (
        "End the program that locks the state, or check its disk. Penstock retries until its lease expires after 30 "
        "seconds, and then stops; when the state can be written again, run: penstock run."
    )


class StateNewer(StateError):
    """A newer version of Penstock wrote the state, and this version could damage it."""

    default_hint = "Run the newer version; to go back, restore a backup of the state made before the upgrade."


class LeaseHeld(StateError):
    """Another process runs this pipeline; `host`, `pid` and `since` identify it."""

    retry = Retry.TIMED
    default_hint = "Stop the other process, or wait: if it has died, its lease expires within 30 seconds."


class LeaseLost(StateError):
    """This process does not hold the lease of the pipeline, so its writes are refused."""

    retry = Retry.RESTART
    default_hint = (
        "Another process took over, or this one was disconnected for too long. If no other process runs the pipeline,"
        " run: penstock run."
    )


class IllegalTransition(StateError):
    """A table cannot go from its current phase, schema version or position to the requested one."""


class DestinationError(PenstockError):
    """The destination reported an error."""


class DestinationUnavailable(DestinationError):
    """The whole destination cannot be written: it does not respond, or its disk is full. All tables wait."""

    retry = Retry.TIMED
    default_hint = "Check that the destination is running and reachable from here."


class TableBusy(DestinationError):
    """Other writers commit to this table so often that Penstock cannot."""

    retry = Retry.TIMED
    default_hint = "Find out which other program writes this table; Penstock keeps retrying."


class TakesLong(DestinationError):
    """A table's changes take so long to write that other tables must not wait for them."""

    retry = Retry.ALONE
    default_hint = "Penstock writes the table by itself, while the others continue."


class DestinationRefused(DestinationError):
    """The destination rejected the user, the password or the certificate, or the user lacks a privilege."""

    default_hint = "Check the user, the password, the certificates and the user's privileges at the destination."


class TableRejected(DestinationError):
    """The destination cannot store a table or its changes."""


class SchemaNotFollowed(TableRejected):
    """The schema of a table changed in a way that its rows at the destination cannot follow."""

    retry = Retry.COPY
    default_hint = f"Copy the table again, with its new columns: {RESYNC}."


class TableOwned(DestinationError):
    """Another pipeline writes this table at the destination."""

    default_hint = "A table has one writer: use another path, or remove the table at the destination."


class IndexUnusable(DestinationError):
    """A search index was deleted, replaced or closed, or its alias points elsewhere."""

    default_hint = "Restart Penstock, or run `penstock index rebuild`; either builds the index again."


class NotComparable(DestinationError):
    """A table cannot be compared with the source: it cannot be read back, or it does not hold a copy of the rows."""


class DocumentsRejected(PenstockError):
    """A search index rejected documents and its policy is to stop; nothing of the batch was acknowledged."""

    default_hint = (
        'Fix the cause named in the message, or set failure_policy = "skip" to quarantine such documents, then run: '
        "penstock run."
    )


class IndexIncomplete(PenstockError):
    """A backfilled index does not contain the documents that were written to it; Penstock rebuilds it."""

    retry = Retry.TIMED
    default_hint = "If this repeats, check whether another program writes to the index or deletes from it."


class TasksFailed(PenstockError):
    """Spark could not run a job: executors were lost, or they could not run the task."""

    retry = Retry.TIMED
    default_hint = "Check Spark's log; every machine of a cluster needs the same versions of Penstock and Python."


class SparkGone(PenstockError):
    """The Spark JVM ended, so the pipeline cannot run tasks."""

    retry = Retry.RESTART
    default_hint = "Run: penstock run. It resumes where it stopped; the machine's log says whether memory ran out."


class CaptureStopped(PenstockError):
    """The capture process ended unexpectedly."""

    retry = Retry.TIMED
    default_hint = "Penstock restarts it from the end of the spool; the log lines above say why it ended."


def _rebuild(kind: type[PenstockError], message: str, hint: str, facts: dict[str, Any]) -> PenstockError:
    return kind(message, hint=hint, **facts)


class FailpointReached(PenstockError):
    """A test requested an error at this point; see `penstock.failpoints`."""

    retry = Retry.TIMED
