"""The stream itself: which batches there are, and what their tasks read.

Spark calls all methods but `read` in one process that it keeps for a run of a query, one at a time: `latestOffset`,
then `initialOffset` (only for the first batch), `partitions`, and `commit` of a batch after the next one was logged. At
a restart it first calls `partitions` with the last offset of the checkpoint twice, so that a reader learns where it is.
`stop` is not called if a query is stopped; the process is ended instead.

An offset is a boundary between transactions. A batch between two of them has the same changes whenever it is planned,
because the spool or the slot still has them: the slot moves only when Spark commits.

A copy cannot be read again: its snapshot ends with the process. Whether the sink has it, and how much of it, is not
known. So its batch is empty when it is repeated, and the next batch has a truncate and another copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyspark
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from penstock.changes.frames import exchange_with, spark_columns, spark_type_name
from penstock.changes.segment import COMMIT_LSN
from penstock.changes.steps import Entry, Segment, Truncation
from penstock.copy.plan import CopyRange
from penstock.copy.reader import RangeReader
from penstock.copy.rows import prepare_copy
from penstock.datasource.feed import Feed, FeedSettings, Position
from penstock.datasource.options import (
    OF_STREAMS,
    explained,
    find_table,
    parse_count,
    parse_options,
    parse_types,
    split_names,
)
from penstock.datasource.rows import Envelope, Form, TableForm, emptied, read_segment, shape_copied, shape_truncation
from penstock.errors import ConfigError, PublicationChanged, ServerUnavailable, SourceError
from penstock.lsn import Lsn, distance, furthest, is_in, reaches
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.lineage import current_position
from penstock.source.patterns import TableName, TablePattern
from penstock.source.publications import inspect_publication, published_attnums, published_tables
from penstock.source.slots import check_slot_name
from penstock.source.snapshots import Snapshot, take_snapshot
from penstock.values import TypeSettings

LATEST, SNAPSHOT = "latest", "snapshot"
HEARTBEAT_BYTES = 16 << 20
HEARTBEAT_SECONDS = 60.0
"""Without changes of its tables, a query has an empty batch after so much WAL of others, or so long after the last one,
if there was any WAL: only a batch makes Spark commit the one before, and lets the slot move."""
BATCH_BYTES = 1 << 30
"""Bytes of captured files that a batch covers, unless one entry has more: after a restart without the spool, all of a
batch has to fit into it again."""
LEAST_TASK_BYTES, TASK_BYTES = 8 << 20, 32 << 20
"""Bytes of rows that one task reads, in memory. Every core gets a share of a batch, unless starting a task would take
longer than reading it."""
_WAIT_SECONDS = 0.1
_CAPTURE_SECONDS = 3600.0
"""How long a batch waits for capture to read the slot again, after a restart without the spool."""
_LOOK_SECONDS = 30.0
"""How often the publication is looked at."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream. Pickles."""

    feed: FeedSettings
    table: str | None
    """None for several tables, in one form."""
    start: str | Lsn
    max_rows: int | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StreamOptions:
        others = ("table", "tables", "publication", "startingPosition", "maxRowsPerBatch", "spoolLocation")
        given = parse_options(options, ("url", "slot"), others)
        if bool(given.get("table")) is bool(given.get("tables")):
            raise ConfigError("a stream of format(\"penstock\") needs either the option 'table' or 'tables'")
        check_slot_name(given["slot"])
        source = SourceSettings(given["url"])
        table = given.get("table")
        types = parse_types(given) if table else TypeSettings(as_text=True)
        patterns = tuple(split_names(given["tables"])) if not table else ()
        for pattern in patterns:
            TablePattern(pattern)
        return cls(
            FeedSettings(
                source,
                patterns,
                given["slot"],
                given.get("publication") or given["slot"],
                types,
                given.get("spoollocation"),
            ),
            table,
            _parse_start(given.get("startingposition", LATEST)),
            parse_count(given, "maxRowsPerBatch"),
        )

    def describe(self, connection: psycopg.Connection[Any]) -> Form:
        """Return the columns of the frame, as the catalog has them now."""
        if self.table is None:
            return Envelope(self.feed.types)
        return TableForm(self._published(connection, find_table(connection, self.table)), self.feed.types)

    def columns(self) -> str:
        """Return the columns of the frame in Spark's notation."""
        with closing(connect(self.feed.source, Role.CATALOG)) as connection:
            return spark_columns(_shown(self.describe(connection)))

    def _published(self, connection: psycopg.Connection[Any], oid: int) -> TableSchema:
        """Return a table with the columns that the server sends, or would send."""
        table = load_table(connection, oid)
        if table is None:
            raise ConfigError(f"the table {self.table} was just dropped")
        publication = inspect_publication(connection, self.feed.publication)
        attnums = None
        if publication is not None:
            members = {each.oid: each for each in published_tables(connection, publication.name)}
            if oid in members:
                attnums = published_attnums(table, members[oid], publication)
        types = load_types(connection, [each.type_oid for each in table.live_attributes])
        return schema_from_catalog(table, types, attnums)


@dataclass(frozen=True, slots=True)
class _Copied:
    """What one task reads of the copy."""

    form: Form
    reader: RangeReader
    part: CopyRange
    position: Lsn
    time: int

    def read(self) -> Iterator[pa.RecordBatch]:
        for batch in self.reader.read(self.part):
            yield from shape_copied(batch, self.reader.schema, self.form, self.position, self.time)


@dataclass(frozen=True, slots=True)
class _Changed:
    """What one task reads of the changes: steps in order, segments with their schemas."""

    form: Form
    steps: tuple[tuple[Segment, TableSchema] | Truncation, ...]

    def read(self) -> Iterator[pa.RecordBatch]:
        for step in self.steps:
            if isinstance(step, Truncation):
                yield from shape_truncation(step, self.form)
            else:
                yield from read_segment(*step, self.form)


_Work = _Copied | _Changed


class _Part(InputPartition):
    value: _Work


class ChangesReader(DataSourceStreamReader):
    """Plans the batches of a stream, and reads in their tasks."""

    def __init__(self, options: StreamOptions, columns: list[tuple[str, str]], cores: int = 1) -> None:
        self._options = options
        self._columns = columns
        self._cores = cores
        self._planner: _Planner | None = None

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        with explained(OF_STREAMS):
            return self._open(None).latest().to_offset()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        with explained(OF_STREAMS):
            return self._open(None).initial().to_offset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with explained(OF_STREAMS):
            begin, until = Position.from_offset(start), Position.from_offset(end)
            planner = self._open(until)
            planner.see(until)
            return [] if start == end else [_Part(each) for each in planner.plan(begin, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: _Work = partition.value
        _, exchange = exchange_with(pyspark.__version__, work.form.columns())
        with explained(OF_STREAMS):
            yield from map(exchange, work.read())

    def commit(self, end: dict[str, Any]) -> None:
        with explained(OF_STREAMS):
            self._open(Position.from_offset(end)).commit(Position.from_offset(end))

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _open(self, seen: Position | None) -> _Planner:
        if self._planner is None:
            self._planner = _Planner(self._options, self._columns, self._cores, seen)
        return self._planner


class _Planner:
    """The state of a stream in the process that plans."""

    def __init__(
        self, options: StreamOptions, columns: list[tuple[str, str]], cores: int, seen: Position | None
    ) -> None:
        self._options = options
        self._cores = cores
        # Read before the catalog: rows of other columns from before this position are older than the frame.
        self._as_of = current_position(options.feed.source)
        with closing(connect(options.feed.source, Role.CATALOG)) as connection:
            self._form = options.describe(connection)
            self._table_id = find_table(connection, options.table) if options.table is not None else None
        # Spark does not quote the names of a struct's fields here.
        shown = [(field.name, spark_type_name(field.type).replace("`", "")) for field in _shown(self._form)]
        if [(name, type_.replace("`", "")) for name, type_ in columns] != shown:
            raise SourceError(
                f"the columns of {options.table or 'the stream'} are not those that the data frame was made with",
                hint="Call load() again; a schema of your own must name the columns and types of the stream.",
            )
        settings, schema = options.feed, None
        if isinstance(self._form, TableForm):
            schema = self._form.schema
            settings = replace(settings, patterns=(TableName(schema.namespace, schema.name).quoted,))
        self._patterns = [TablePattern(text) for text in settings.patterns]
        self._wanted: dict[str, bool] = {}
        self._differences: dict[tuple[int, str], list[str]] = {}
        start = options.start if isinstance(options.start, Lsn) else None
        self._feed = Feed(settings, seen, start=start, schema=schema)
        self._last: Position | None = seen if seen is not None and not seen.is_copy else None
        """The furthest offset that Spark has seen."""
        self._last_at = self._looked_at = time.monotonic()
        self._looked = Lsn(0)
        self._has_more = False
        """More rows than the last batch has are captured already."""
        self._target: Lsn | None = None
        self._snapshot: Snapshot | None = None
        self._has_planned = self._is_unpublished = False
        self._lacks_copy = seen is not None and self._feed.lacks_copy(seen)

    def close(self) -> None:
        self._release()
        self._feed.close()

    def see(self, position: Position) -> None:
        """Note an offset that is in Spark's checkpoint: later ones must not be before it."""
        if position.is_copy or (self._last is not None and not reaches(position.lsn, self._last.lsn)):
            return
        self._last = position

    def initial(self) -> Position:
        """Return where a new query begins. A first batch that is planned again must begin in the same place."""
        start = self._options.start
        if start == SNAPSHOT:
            return Position(Lsn(0), is_copy=True)
        return self._feed.position(self._first())

    def _first(self) -> Lsn:
        start = self._options.start
        if not isinstance(start, Lsn):
            return self._feed.start
        if not reaches(start, self._feed.start):
            raise SourceError(
                f"slot {self._options.feed.slot!r} is at {self._feed.start}, after the startingPosition {start}: "
                "it does not have the changes in between",
                hint=f"Use startingPosition = '{self._feed.start}' or later, or 'snapshot'.",
            )
        return start

    def latest(self) -> Position:
        """Return where the next batch ends; the last offset again if there is nothing to do."""
        if self._lacks_copy or (self._last is None and self._options.start == SNAPSHOT):
            self._last = self._take_snapshot()
        if self._last is not None and self._snapshot is not None and not self._has_planned:
            return self._last
        self._release()
        begin = self._last.lsn if self._last is not None else self._first()
        self._catch_up(begin)
        captured = self._looked = self._feed.captured()
        if not reaches(captured, begin):
            return self._moved(begin)
        end = self._bounded(begin, captured)
        self._has_more = end is not None and end != captured
        self._look(is_idle=end is None)
        if end is None:
            due = time.monotonic() - self._last_at >= HEARTBEAT_SECONDS
            if not due and distance(begin, captured) < HEARTBEAT_BYTES:
                return self._moved(begin)
            end = captured
        return self._moved(end)

    def _moved(self, lsn: Lsn) -> Position:
        if self._last is None or self._last.lsn != lsn:
            self._last = self._feed.position(lsn)
            self._last_at = time.monotonic()
        return self._last

    def _catch_up(self, begin: Lsn) -> None:
        """Wait for a moment for changes; at first, until all is captured that is committed now.

        So one batch of `availableNow` has everything. Capture may have to wait for Spark, though.
        """
        if self._target is None:
            self._target = current_position(self._options.feed.source)
            while not reaches(self._feed.captured(), self._target) and not self._feed.is_stuck:
                enough = self._options.max_rows
                if enough is not None and self._row_count(begin) >= enough:
                    break
                self._feed.reader.wait(self._feed.captured(), _WAIT_SECONDS)
        elif not self._has_more:
            self._feed.reader.wait(self._looked, _WAIT_SECONDS)

    def _entries(self, begin: Lsn) -> list[Entry]:
        return [] if self._feed.reader.begin is None else self._feed.reader.entries(begin)

    def _row_count(self, begin: Lsn) -> int:
        return sum(_row_count(list(self._steps(entry))) for entry in self._entries(begin))

    def _steps(self, entry: Entry) -> Iterator[Segment | Truncation]:
        for step in entry.steps:
            if isinstance(step, Segment | Truncation) and self._is_wanted(step):
                yield step

    def _is_wanted(self, step: Segment | Truncation) -> bool:
        if self._table_id is not None:
            return step.table_id == self._table_id
        if step.table not in self._wanted:
            names = TableName.possible(step.table)
            self._wanted[step.table] = any(each.matches(name) for name in names for each in self._patterns)
        return self._wanted[step.table]

    def _bounded(self, begin: Lsn, captured: Lsn) -> Lsn | None:
        """Return where a batch from `begin` ends: before a change of the schema, and after enough rows.

        None if it would have no rows.
        """
        most = self._options.max_rows
        count = size = 0
        for entry in self._entries(begin):
            if size and size + entry.bytes > BATCH_BYTES:
                return entry.begin
            size += entry.bytes
            steps = [each for step in self._steps(entry) if (each := _between(step, begin)) is not None]
            for step in steps:
                if isinstance(step, Segment) and (changed := self._changed(step)):
                    boundary = step.first.commit_lsn
                    if count or any(is_in(_first_commit(each), boundary) for each in steps):
                        return boundary
                    raise self._different(step, changed)
            if most is not None and steps and count + _row_count(steps) >= most:
                return _cut(steps, entry.end, most - count, has_rows=count > 0)
            count += _row_count(steps)
        return captured if count else None

    def _changed(self, segment: Segment) -> list[str]:
        """Return how the schema of a segment differs from the frame's, if it is newer than the frame."""
        if is_in(segment.first.commit_lsn, self._as_of):
            return []
        version = (segment.table_id, segment.version)
        if version not in self._differences:
            self._differences[version] = self._form.differences(self._feed.reader.schema(segment))
        return self._differences[version]

    def _different(self, segment: Segment, changed: Sequence[str]) -> SourceError:
        return SourceError(
            f"{segment.table} has other columns from {segment.first.commit_lsn} on than the data frame: "
            f"{', '.join(changed)}. The query has processed everything before",
            hint="Start the query again from its checkpoint: load() then has the new columns, and nothing is lost.",
            table=segment.table,
        )

    def _look(self, *, is_idle: bool) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            self._feed.require_published()
        except ServerUnavailable:
            # Capture reconnects.
            return
        except PublicationChanged:
            # What was captured before comes first; but a table may still be published, with fewer operations.
            if is_idle or self._is_unpublished:
                raise
            self._is_unpublished = True

    def plan(self, begin: Position, end: Position) -> list[_Work]:
        """Return the tasks of a batch."""
        self._has_planned = True
        is_copy = begin.is_copy or end.copies > 0
        if self._snapshot is None and (is_copy or self._lacks_copy):
            # Changes do not come before the copy either: with `availableNow`, Spark asks for the end of the next batch
            # before it repeats one.
            self._feed.note_copy(lacking=end)
            self._lacks_copy = True
            return []
        if is_copy:
            return self._plan_copy(is_first=begin.is_copy)
        if not reaches(end.lsn, begin.lsn):
            raise SourceError(
                f"Spark plans a batch from {begin.lsn} back to {end.lsn}: this version of Spark did not say where the "
                "checkpoint is",
                hint="Use Spark 4.1.",
            )
        deadline = time.monotonic() + _CAPTURE_SECONDS
        # After a restart, capture may have to read the slot again.
        while not reaches(self._feed.captured(), end.lsn):
            if self._feed.is_stuck or time.monotonic() > deadline:
                raise SourceError(
                    f"capture did not reach {end.lsn}, the end of a batch of the checkpoint",
                    hint="Free space on the disk of 'spoolLocation', or check the server's load, and start again.",
                )
            self._feed.reader.wait(self._feed.captured(), _WAIT_SECONDS)
        entries = self._entries(begin.lsn)
        steps: list[tuple[Segment, TableSchema] | Truncation] = []
        for entry in entries:
            for step in self._steps(entry):
                narrowed = _between(step, begin.lsn, end.lsn)
                if isinstance(narrowed, Segment):
                    steps.append((narrowed, self._feed.reader.schema(narrowed)))
                elif narrowed is not None:
                    steps.append(narrowed)
        sizes = [0 if isinstance(step, Truncation) else step[0].memory for step in steps]
        return [_Changed(self._form, tuple(steps[first:last])) for first, last in deal_out(sizes, self._cores)]

    def commit(self, end: Position) -> None:
        """Let the slot move: the batch up to here is in Spark's log of commits."""
        if not end.is_copy:
            self._feed.advance(end.lsn)

    def _plan_copy(self, *, is_first: bool) -> list[_Work]:
        """Return the tasks of a copy, after a truncate unless it is the first."""
        snapshot = self._snapshot
        assert snapshot is not None
        membership = self._feed.membership
        works: list[_Work] = []
        now = time.time_ns() // 1000
        for table_id in self._feed.settings.matches(membership):
            rows = prepare_copy(
                snapshot, self._options.feed.source, self._options.feed.publication, table_id, types=self._form.types
            )
            if changed := self._form.differences(rows.schema):
                raise SourceError(
                    f"{rows.schema} was altered after load(): {', '.join(changed)}", hint="Start the query again."
                )
            if not is_first:
                works.append(_Changed(self._form, (emptied(table_id, str(rows.schema), snapshot.position, now),)))
            works += [_Copied(self._form, rows.reader, part, snapshot.position, now) for part in rows.ranges]
        return works

    def _take_snapshot(self) -> Position:
        """Take a snapshot for the next batch; return where it ends."""
        self._snapshot = take_snapshot(self._options.feed.source, check=self._feed.capture.check)
        self._feed.note_copy(lacking=None)
        self._lacks_copy = self._has_planned = False
        copies = 0 if self._last is None else self._last.copies
        return replace(self._feed.position(self._snapshot.position), copies=copies + 1)

    def _release(self) -> None:
        """End the snapshot: Spark asks for the next batch, so the copy is done."""
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None


def deal_out(sizes: Sequence[int], cores: int) -> Iterator[tuple[int, int]]:
    """Divide steps of these sizes among tasks; return the first and last step of each."""
    enough = min(TASK_BYTES, max(LEAST_TASK_BYTES, -(-sum(sizes) // cores)))
    first = size = 0
    for number, each in enumerate(sizes, 1):
        size += each
        if size >= enough or number == len(sizes):
            yield first, number
            first, size = number, 0


def _between(step: Segment | Truncation, begin: Lsn, end: Lsn | None = None) -> Segment | Truncation | None:
    """Return the part of a step between two boundaries; None if there is none."""
    if isinstance(step, Segment):
        return step.between(begin, end)
    commit = step.key.commit_lsn
    return None if is_in(commit, begin) or (end is not None and not is_in(commit, end)) else step


def _row_count(steps: Sequence[Segment | Truncation]) -> int:
    return sum(step.rows if isinstance(step, Segment) else 1 for step in steps)


def _first_commit(step: Segment | Truncation) -> Lsn:
    """Return a position that no change of a step comes before."""
    if isinstance(step, Truncation):
        return step.key.commit_lsn
    first = step.first.commit_lsn
    return first if step.after is None else furthest(step.after, first)


def _cut(steps: Sequence[Segment | Truncation], end: Lsn, most: int, *, has_rows: bool) -> Lsn:
    """Return the boundary after at most `most` rows of an entry that ends at `end`.

    A batch has whole transactions, and at least one: `has_rows` says whether it already has.
    """
    commits = np.sort(np.concatenate([_commits(step) for step in steps]))
    transactions, first_rows = np.unique(commits, return_index=True)
    last_rows = np.append(first_rows[1:], len(commits))
    count = max(int(np.searchsorted(last_rows, most, side="right")), 0 if has_rows else 1)
    # A boundary at the commit of a transaction is before it.
    return end if count >= len(transactions) else Lsn(int(transactions[count]))


def _commits(step: Segment | Truncation) -> NDArray[np.int64]:
    if isinstance(step, Segment):
        return step.read([COMMIT_LSN]).column(COMMIT_LSN).to_numpy()
    return np.array([int(step.key.commit_lsn)], np.int64)


def _shown(form: Form) -> pa.Schema:
    return exchange_with(pyspark.__version__, form.columns())[0]


def _parse_start(text: str) -> str | Lsn:
    if text.lower() in (LATEST, SNAPSHOT):
        return text.lower()
    try:
        return Lsn.parse(text)
    except ValueError:
        raise ConfigError(
            f"the option 'startingPosition' should be 'latest', 'snapshot', or a position like 16/B374D848: {text!r}"
        ) from None
