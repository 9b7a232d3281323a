"""The contract of a destination: what Penstock calls, when, and what the answers mean.

Write one by implementing `Destination`; nothing has to be inherited. Whoever thinks in rows starts from
`penstock.destinations.rows.RowDestination` instead. The reference to read is `penstock.destinations.parquet`; the suite
that every destination must pass is `penstock.testing.destinations`.

The life of a table, as its destination sees it:

    drop_table_for_copy(schema, attempt)    fence what came before; old rows may stay readable
    write_table_rows(schema, rows)          the table as it was at `rows.position`, whole
    write_events(batch) …                   changes from there on, forever
    drop_table_for_copy(schema, another)    and again, when the table has to be copied anew

**Repeats.** After a crash every call may come again, also when it had succeeded: a batch with the same boundaries, or
with others. Whoever records a position together with the data leaves out what that covers (`penstock.lsn.is_in`, never
a comparison of its own) and has every change exactly once. Whoever cannot gets changes at least once, in order.

**Zombies.** A process that lost its lease, or a Spark task that runs twice, may still write when its successor works
already. What belongs to an earlier attempt of a copy must not land in a later one, which is why attempts have names.

**Durable** means that the data is there after a power cut. The source forgets what was said to be durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from penstock.changes.batch import EventBatch
from penstock.destinations.refusals import concerns_all_tables
from penstock.errors import PenstockError
from penstock.lsn import Lsn
from penstock.schema import TableSchema

if TYPE_CHECKING:
    from penstock.copy import rows as postgres_rows
    from penstock.state import Store

    def postgres_rows_are_copy_rows(rows: postgres_rows.CopyRows) -> CopyRows:
        return rows


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a destination can do; decided once, before anything is written."""

    records_position: bool = False
    """It stores the position together with the data, atomically: replays change nothing (exactly once)."""
    updates_rows: bool = False
    """It keeps a mirror: updates and deletes find their rows. Otherwise it keeps every change."""
    keeps_old_rows_while_copying: bool = False
    """Until a new copy is whole, readers see the rows of the old one."""
    fills_added_columns: bool = False
    """Rows that are there get the value of a column that is added, where all have the same (`Column.missing`)."""


class Tasks(Protocol):
    """Runs functions where the data work is done: Spark tasks, or this process in tests."""

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """One job over all items, results in their order.

        `function` and items pickle. An exception in one task fails the whole job, so where several tables share a
        job errors are returned as values.
        A task may run twice, also at the same time: it writes new files and changes none.
        """
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Jobs that this thread starts inside belong to a table's copy: they leave room for the changes of others."""
        ...


class CopyRange(Protocol):
    """A piece of a table that is copied; `index` identifies it within its attempt."""

    @property
    def index(self) -> int: ...


class RangeReader(Protocol):
    """Reads ranges; the part of `CopyRows` that is shipped to tasks."""

    def read(self, part: Any, /) -> Iterator[pa.RecordBatch]:
        """The rows of one range, the same each time. Raises when the snapshot or the table behind it is gone."""
        ...


class CopyRows(Protocol):
    """A table as it was at a boundary, in ranges that can be read in parallel. All of it pickles.

    The one that reads Postgres is `penstock.copy.rows.CopyRows`, which can also be a Spark data frame.
    """

    @property
    def schema(self) -> TableSchema: ...
    @property
    def attempt(self) -> str: ...
    @property
    def position(self) -> Lsn:
        """The boundary of the snapshot: changes that it does not cover come as events."""
        ...

    @property
    def arrow_schema(self) -> pa.Schema:
        """Of every batch, also if there is none: the table's columns as in segments, and `_unrepresentable`."""
        ...

    @property
    def ranges(self) -> Sequence[CopyRange]:
        """Each row is in exactly one; may be empty, and so may each of them."""
        ...

    @property
    def reader(self) -> RangeReader: ...

    def arrow(self) -> Iterator[pa.RecordBatch]:
        """All ranges, one after the other, in this process."""
        ...


class SourceRows(Protocol):
    """Asks the source for rows as they are now; pickles, and is used in tasks."""

    def fetch(self, schema: TableSchema, keys: pa.Table) -> pa.Table:
        """The rows that have these keys now, in any order; a key whose row is not there is left out.

        `keys` has the key columns, and `_unrepresentable` where some of their cells need it. Both tables have the names
        and types of segments, the answer always with `_unrepresentable`.
        """
        ...


@dataclass(frozen=True, slots=True)
class DestinationContext:
    """What a destination gets at start-up."""

    pipeline_id: str
    lineage: str
    """Names server, timeline and slot; positions of another lineage mean nothing."""
    store: Store
    tasks: Tasks
    epoch: int = 0
    """Of the lease: it grows with every process that takes over, so a lower one belongs to a process that lost it."""
    continues: str | None = None
    """After a failover: the lineage that the server was shown to continue; its positions count too."""
    session: Any = None
    """The Spark session; None where there is none."""
    source_rows: SourceRows | None = None
    """For rows that arrive without some of their cells and replace none; None where nobody can be asked."""

    def knows(self, lineage: str) -> bool:
        """Whether positions of this lineage mean something here."""
        return lineage in (self.lineage, self.continues)


@dataclass(frozen=True, slots=True)
class TableResult:
    """What became of one table's part of a batch."""

    durable: bool = True
    """False: accepted. It is not sent again, unless a batch fails as a whole; it is durable when the answer to a later
    batch says so, which may name tables that are not in that batch. While nothing else happens such batches come
    without any table. Until then the source keeps it."""
    error: PenstockError | None = None
    """This table failed; the others are not concerned. Its position did not move: the part comes again, as a whole,
    when the table is tried again, and nothing after it comes before. The error's class says whether that happens by
    itself. A destination that records positions has written nothing of the part that readers can see."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The answer to a batch. A table that it does not name is durable."""

    tables: Mapping[int, TableResult] = field(default_factory=dict[int, TableResult])

    def of(self, table_id: int) -> TableResult:
        """The answer for one table."""
        return self.tables.get(table_id, TableResult())

    @classmethod
    def failures(cls, errors: Mapping[int, PenstockError]) -> WriteResult:
        """Return the answer of a batch in which these tables failed and all others are durable.

        Raises an error among them that concerns all tables (`refusals.concerns_all_tables`): returned as the error of a
        table, it would stop every table one by one instead of making the apply worker wait.
        """
        for error in errors.values():
            if concerns_all_tables(error):
                raise error
        return cls({table_id: TableResult(durable=False, error=error) for table_id, error in errors.items()})


class WriteHandle(Protocol):
    """A batch under way. One is enough for destinations that work while they are called: `completed`."""

    def result(self, timeout: float | None = None) -> WriteResult:
        """Wait for the answer; TimeoutError when it takes longer.

        Raises what concerns all tables: the destination is out of reach, or misconfigured. Then nothing is known to be
        durable, and the batch comes again.
        """
        ...


def completed(result: WriteResult | None = None) -> WriteHandle:
    """The handle of a batch that is written already."""
    future: Future[WriteResult] = Future()
    future.set_result(result or WriteResult())
    return future


class Destination(Protocol):
    """Where changes land.

    Methods are called on the driver, from several threads: `write_events` from the apply worker and from table sync
    workers that catch up, the copy methods from table sync workers, for different tables at the same time. For one
    table calls never overlap, and a batch's result is known before anything else is asked for one of its tables, unless
    that is the next batch of the same worker.
    """

    @property
    def name(self) -> str:
        """For logs and messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The same from the first call on, before `startup` too."""
        ...

    def startup(self, context: DestinationContext) -> None:
        """Called once, before anything else, with the lease held.

        Refuses what cannot work (no access, a format from the future, a foreign table) by an error that says what to
        do: this is the moment at which a person still looks.
        """
        ...

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """A new copy of the table begins: whatever an earlier attempt still writes must not land any more.

        Old rows may stay readable until the new copy is whole. Does nothing when there is nothing, nor when it is
        called again with the same attempt. `schema` is the table's as it is now. A table that belongs to another
        pipeline is refused.
        """
        ...

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """Write the table as it was at `rows.position`, durably; called once per attempt, also for an empty table.

        What tasks write is identified by (attempt, range, index), never by content: two equal batches of a table
        without a key are two batches. When it returns, the table exists with exactly these rows, and its recorded
        position is `rows.position`. When it raises, readers see nothing of it, and the next attempt has another name.
        """
        ...

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """Write a batch: whole transactions, for each table in order.

        Changes that a table's recorded position covers are left out. The next batch may come before this one's result
        is asked for. To raise here means the same as a handle that raises.
        """
        ...

    def position(self, table_id: int) -> Lsn | None:
        """The boundary that is recorded with a table's data; None if there is none, or it is of another lineage."""
        ...

    def shutdown(self) -> None:
        """Called once, after the last result; what was accepted and is not durable will come again."""
        ...


class PinnedTable(Protocol):
    """The rows of a table as they are now, and stay for whoever reads them, whatever is written meanwhile."""

    @property
    def schema(self) -> TableSchema:
        """The source's schema that the rows have: columns are followed by its attribute numbers."""
        ...

    @property
    def parts(self) -> Sequence[Any]:
        """Pieces that can be read in parallel; each row is in exactly one. They pickle."""
        ...

    @property
    def reader(self) -> RangeReader:
        """Reads a part: columns with the names that segments of `schema` have (`penstock.changes.segment`), and
        `_unrepresentable` where there is some. Types may be those of the destination, as long as they hold the same
        values. Pickles, and is what tasks are shipped."""
        ...

    def close(self) -> None:
        """Nobody reads it any more."""
        ...


@runtime_checkable
class ReadableDestination(Protocol):
    """A destination whose tables can be compared with the source; `startup` is not needed for it."""

    @property
    def keeps_versions(self) -> bool:
        """Whether what was pinned stays readable while the writer goes on; otherwise it waits until `close`."""
        ...

    def pin(self, schema: TableSchema) -> PinnedTable | None:
        """The table as it is at this moment; None if there is none. Nobody writes it while this is called.

        Called from another process than the one that writes; `schema` says which table is meant. Raises
        `NotComparable` where the rows are not those of the source, by intention.
        """
        ...
