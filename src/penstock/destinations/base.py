"""The contract of a destination: what Penstock calls, when, and what the answers mean.

To write a destination, implement `Destination`; there is nothing to inherit from. For a destination that works row by
row, subclass `penstock.destinations.rows.RowDestination` instead. `penstock.destinations.parquet` is the reference
implementation, and `penstock.testing.destinations` is the test suite that every destination must pass.

The life of a table, as its destination sees it:

    drop_table_for_copy(schema, attempt)    fence off earlier attempts; old rows may stay readable
    write_table_rows(schema, rows)          the whole table as of `rows.position`
    write_events(batch) …                   every change after that position
    drop_table_for_copy(schema, another)    the table has to be copied again

**Repeats.** After a crash Penstock may repeat any call, even one that succeeded; a batch may come again with the same
boundaries or with others. A destination that records a position together with the data skips the changes that the
position covers (`penstock.lsn.is_in`, never a comparison of its own) and so has every change exactly once. Any other
destination gets changes at least once, in order.

**Zombies.** A process that lost its lease, or a Spark task that runs twice, may still write while its successor works.
Writes of an earlier attempt must not reach the table of a later one; this is why attempts have names.

**Durable** means that the data survives a power failure. Penstock lets the source discard what a destination has
reported as durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from penstock.changes.batch import EventBatch
from penstock.copy.resume import FinishedRanges, ResumableCopy
from penstock.destinations.naming import FOLDERS
from penstock.destinations.refusals import concerns_all_tables
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema
from penstock.source.bounds import Bounds
from penstock.source.indexes import SourceIndex

if TYPE_CHECKING:
    from penstock.copy import rows as postgres_rows
    from penstock.state import Store

    def postgres_rows_are_copy_rows(rows: postgres_rows.CopyRows) -> CopyRows:
        return rows


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a destination can do; fixed before anything is written."""

    records_position: bool = False
    """It stores the position together with the data, atomically, so that a replay changes nothing (exactly once)."""
    updates_rows: bool = False
    """It mirrors the source: updates and deletes change existing rows. Otherwise it keeps every change, and goes on
    when rows change at the source without a change in the stream."""
    keeps_old_rows_while_copying: bool = False
    """Readers see the old rows until a new copy is complete."""
    fills_added_columns: bool = False
    """Existing rows get the value of an added column if it is the same for all of them (`Column.missing`)."""
    accepts_unknown_rows: bool = False
    """A delete of a row that it does not have changes nothing, and an update of such a row inserts it. Otherwise tables
    with a filter need `replica identity full`, so that changes say exactly when rows come and go."""
    loses_nothing_by_a_copy: bool = False
    """It has no rows but those of the source, so Penstock may copy a table again without being asked."""
    keeps_deleted_rows: bool = False
    """It keeps rows that are gone at the source, also in a new copy to the same place. So Penstock may copy a table
    again without being asked, but not to another place."""
    resumes_copies: bool = False
    """It is a `ResumingDestination`, for tables with a key."""

    @property
    def allows_copies(self) -> bool:
        """True if Penstock may copy a table again without being asked: nothing is lost."""
        return self.loses_nothing_by_a_copy or self.keeps_deleted_rows


class Tasks(Protocol):
    """Runs functions in Spark tasks, or in this process."""

    @property
    def elsewhere(self) -> bool:
        """True if tasks run on other machines, which may not see the files of this one."""
        ...

    @property
    def parallel(self) -> int:
        """How many tasks of a job of this thread run at the same time."""
        ...

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """Run one job over all items; return the results in the same order.

        `function` and the items must pickle. An exception in one task fails the whole job, so functions of a job that
        several tables share return errors as values. A task may run twice, even at the same time: it must write new
        files and change none.
        """
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Within the block, jobs of this thread take long: copies, and transactions of millions of rows.

        They leave room for the changes of other tables, and are cancelled when Penstock stops.
        """
        ...


class CopyRange(Protocol):
    """A part of a table to copy; `index` identifies it within its attempt."""

    @property
    def index(self) -> int: ...


class RangeReader(Protocol):
    """Reads ranges in tasks; the part of `CopyRows` that is sent to them."""

    def read(self, part: Any, /) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, the same on every call; raise if its snapshot or table no longer exists."""
        ...


class CopyRows(Protocol):
    """A table as it was at a boundary, in ranges that can be read in parallel. All of it pickles.

    `penstock.copy.rows.CopyRows` reads Postgres, and can also be turned into a Spark data frame.
    """

    @property
    def schema(self) -> TableSchema: ...
    @property
    def attempt(self) -> str: ...
    @property
    def position(self) -> Lsn:
        """The boundary of the snapshot; changes after it arrive as events."""
        ...

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of every batch, even if there is none: the columns as in segments, and `_unrepresentable`."""
        ...

    @property
    def ranges(self) -> Sequence[CopyRange]:
        """Each row is in exactly one range. There may be no ranges, and a range may have no rows."""
        ...

    @property
    def reader(self) -> RangeReader: ...
    @property
    def resumable(self) -> ResumableCopy | None:
        """What is done of the copy. Only a `ResumingDestination` gets one."""
        ...

    def arrow(self) -> Iterator[pa.RecordBatch]:
        """Read all ranges, one after the other, in this process."""
        ...


class SourceRows(Protocol):
    """Fetches current rows from the source, in tasks; pickles."""

    def fetch(self, schema: TableSchema, keys: pa.Table) -> pa.Table:
        """Return the rows that have these keys now, in any order; keys without a row are left out.

        `keys` has the key columns, and `_unrepresentable` if a cell needs it. Names and types are those of segments;
        the result always has `_unrepresentable`.
        """
        ...


@dataclass(frozen=True, slots=True)
class DestinationContext:
    """What a destination gets at startup."""

    pipeline_id: str
    store: Store
    tasks: Tasks
    epoch: int = 0
    """The number of the lease. It grows with every takeover: a lower one belongs to a process that lost the lease."""
    open_session: Callable[[], Any] = lambda: None
    """Returns `session`."""
    source_rows: SourceRows | None = None
    """For new rows with omitted values; None if the source cannot be queried."""
    take_folder: Callable[[TableSchema], str] = FOLDERS.table
    """Returns the folder for a copy that begins now. A `FolderDestination` calls this in `drop_table_for_copy`."""
    keeps_dropped_columns: Callable[[TableSchema], bool] = lambda _: False
    """Returns True if columns that the source drops stay at the destination, with NULL in new rows."""

    indexes_of: Callable[[TableSchema], Sequence[SourceIndex]] = lambda _: ()
    """Returns the indexes that a table has at the source besides its key."""
    transform_of: Callable[[TableSchema], str | None] = lambda _: None
    """Returns the `transform` of a table, in Spark SQL; None if it has none."""
    records_ddl: bool = False
    """The source records its DDL in the stream. Otherwise a name that moved to another column may come too early."""

    @property
    def session(self) -> Any:
        """The Spark session, or None without Spark. It is opened by the first call, which takes about two seconds."""
        return self.open_session()

    @property
    def lineage(self) -> str:
        """Identifies server, timeline and slot. Read it each time you record a position: a failover changes it."""
        return self.store.ancestry.current.name

    @property
    def continues(self) -> Mapping[str, Lsn]:
        """The lineages that led to this one, by failovers. Their positions are valid, each up to its end."""
        return self.store.ancestry.ends

    def knows(self, lineage: str, position: Lsn) -> bool:
        """Return True if a recorded position is part of the server's history; any other is meaningless."""
        end = self.continues.get(lineage)
        return lineage == self.lineage or (end is not None and reaches(end, position))


@dataclass(frozen=True, slots=True)
class TableResult:
    """The result of one table's part of a batch."""

    durable: bool = True
    """False means accepted: the part is not sent again unless a whole batch fails. It becomes durable when the result
    of a later batch says so; that result may name tables that the batch does not contain. While there are no changes,
    Penstock sends batches without tables. Until the part is durable, the source keeps its changes."""
    error: PenstockError | None = None
    """This table failed; the others are not affected. Its position has not moved. Penstock sends the whole part again
    when the table is retried, and nothing after it before. The class of the error says whether Penstock retries by
    itself. A destination that records positions shows readers nothing of a failed part.

    Never an error that concerns all tables: raise that for the whole batch instead (`WriteHandle.result`)."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a batch. Tables that it does not name are durable."""

    tables: Mapping[int, TableResult] = field(default_factory=dict[int, TableResult])

    def of(self, table_id: int) -> TableResult:
        """Return the result of one table."""
        return self.tables.get(table_id, TableResult())

    @classmethod
    def failures(cls, errors: Mapping[int, PenstockError]) -> WriteResult:
        """Return the result of a batch in which these tables failed and all others are durable.

        If one of the errors concerns all tables (`refusals.concerns_all_tables`), raise it instead: returned for single
        tables, it would stop each of them, and after `error_hold` each would need a new copy.
        """
        for error in errors.values():
            if concerns_all_tables(error):
                raise error
        return cls({table_id: TableResult(durable=False, error=error) for table_id, error in errors.items()})


class WriteHandle(Protocol):
    """A batch in progress. Destinations that write synchronously return `completed(…)`."""

    def result(self, timeout: float | None = None) -> WriteResult:
        """Wait for the result; raise `TimeoutError` after `timeout` seconds.

        Raises an error that concerns all tables. `DestinationUnavailable` (unreachable, disk full) makes the apply
        worker wait and send the batch again; no table is stopped, and nothing is lost however long it takes. An error
        that is not retried, such as `ConfigError` (access denied), stops the output. Either way nothing of the batch
        counts as durable.
        """
        ...


def completed(result: WriteResult | None = None) -> WriteHandle:
    """Return the handle of a batch that is already written."""
    future: Future[WriteResult] = Future()
    future.set_result(result or WriteResult())
    return future


class Destination(Protocol):
    """Where a tables output writes.

    Penstock calls the methods on the driver, from several threads: `write_events` from the apply worker and from table
    sync workers that catch up, the copy methods from table sync workers, for different tables at the same time. Calls
    for one table never overlap. Penstock waits for the result of a batch before it makes another call for one of its
    tables; only the same worker's next batch may come earlier.
    """

    @property
    def name(self) -> str:
        """The name used in logs and messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Constant, and known before `startup`."""
        ...

    def startup(self, context: DestinationContext) -> None:
        """Prepare for work; called once, first, with the lease held.

        Raise an error that says what to do if the destination cannot work: no access, a newer format, another
        pipeline's data. At this moment the operator is still watching.
        """
        ...

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """Begin a new copy of a table: from now on, ignore what earlier attempts still write.

        Old rows may stay readable until the new copy is complete. Do nothing if the table does not exist or the
        attempt is the current one. `schema` is the table's current schema. Raise `TableOwned` if the table belongs to
        another pipeline.
        """
        ...

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """Write the table as it was at `rows.position`, durably; called once per attempt, even for an empty table.

        Identify what tasks write by attempt, range and number, never by content: two equal batches of a table without a
        key are two batches. On return the table has exactly these rows (and what `capabilities` say
        that it keeps), and its recorded position is `rows.position`.
        After an error readers see nothing of this copy, and the next attempt has another name.
        """
        ...

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """Write a batch of whole transactions, in order for each table.

        Skip changes that a table's recorded position covers. The next batch may come before the result of this one was
        read. An error raised here has the same meaning as one raised by the handle.
        """
        ...

    def position(self, table_id: int) -> Lsn | None:
        """Return the position recorded with a table's data; None if there is none or it is of another lineage."""
        ...

    def shutdown(self) -> None:
        """Stop; called once, after the last result. Changes that were accepted but not durable will be sent again."""
        ...


@runtime_checkable
class ProbedDestination(Protocol):
    """A destination that can be tried before anything is created at the source."""

    def probe(self) -> None:
        """Write something, and remove it; called without `startup`. Raise what `startup` would raise."""
        ...


@runtime_checkable
class FolderDestination(Protocol):
    """A destination that keeps each table in a folder; `penstock.destinations.folders` decides in which one."""

    def folder_of(self, table_id: int) -> str | None:
        """Return the folder that has the rows of a table, relative to the destination; None if there is none."""
        ...

    def name_table(self, table_id: int, name: str) -> None:
        """Record the current name of a table for its readers; called after `startup`, when the name may have changed.

        Does nothing for a table that has no rows yet, or whose name is recorded.
        """
        ...

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """Return the path or URL of each table of a pipeline, by table id. Called without `startup`."""
        ...


@runtime_checkable
class ResumingDestination(Protocol):
    """A destination that keeps what an interrupted copy has read, for its next attempt.

    Its `write_table_rows` records ranges under `rows.resumable.copy` as soon as they are durable. It writes the ranges
    of `rows` and takes over those in `rows.resumable.finished`. If there are any of these, it then removes all rows
    whose keys occur in `rows.resumable.changes()`, and reads them again in the snapshot. Until its commit readers see
    nothing of this.
    """

    def finished_ranges(self, schema: TableSchema, copy: str) -> Sequence[FinishedRanges]:
        """Return what is recorded of a copy; called after `drop_table_for_copy`, before the snapshot is taken."""
        ...


@runtime_checkable
class PartDestination(Protocol):
    """A destination that can copy some partitions of a table again without touching the rows of the others."""

    def replace_part(self, schema: TableSchema, rows: CopyRows, leaves: Sequence[Bounds], *, inside: bool) -> None:
        """Replace some rows of a table by `rows`, as of `rows.position`, durably and at once for readers.

        With `inside`, the rows within the bounds of the `leaves` stay and all others go; without it, the rows within
        these bounds go and all others stay. The table has every change up to `rows.position` and none after it; on
        return this is its recorded position. Raise `SchemaNotFollowed` if the rows cannot be told apart.
        """
        ...


@runtime_checkable
class DroppingDestination(Protocol):
    """A destination that can delete the data of a table."""

    def drop_table(self, table_id: int) -> bool:
        """Delete the data of a table that no longer exists; return False if nothing here belongs to it.

        Called after `startup`, only if the config asks for it. After a crash it is called again.
        """
        ...


class PinnedTable(Protocol):
    """The rows of a table as they are now; later writes do not change what its reader sees."""

    @property
    def schema(self) -> TableSchema:
        """The source's schema of the rows; columns are identified by attribute number."""
        ...

    @property
    def arrow_schema(self) -> pa.Schema:
        """The names and types of the columns that `reader` yields."""
        ...

    @property
    def parts(self) -> Sequence[Any]:
        """Parts that can be read in parallel; each row is in exactly one. They pickle."""
        ...

    @property
    def reader(self) -> RangeReader:
        """Reads a part, in tasks; pickles.

        Columns have the names of segments of `schema` (`penstock.changes.segment`), with `_unrepresentable` if needed.
        Types may be the destination's own if they hold the same values: wider numbers, larger offsets, and text for
        times of day.
        """
        ...

    def close(self) -> None:
        """Release the rows after the last read."""
        ...


@runtime_checkable
class ReadableDestination(Protocol):
    """A destination whose tables `penstock verify` can compare with the source, without calling `startup`."""

    @property
    def keeps_versions(self) -> bool:
        """True if pinned rows stay readable during writes; otherwise the apply worker waits until `close`."""
        ...

    def pin(self, schema: TableSchema) -> PinnedTable | None:
        """Return the table as it is now, or None if it does not exist.

        Called in a different process than the one that writes, while that one does not write this table. Raise
        `NotComparable` if the destination intentionally holds other rows than the source.
        """
        ...
