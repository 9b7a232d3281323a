"""Writing entries of the spool to a destination as a batch, for the apply worker and for table sync workers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, build_batch
from penstock.changes.segment import Settled, refused_columns, require_exact_key, settled_columns
from penstock.changes.steps import CellsChanged, Message, Truncation
from penstock.changes.transform import TableRules, TableTransform, Transforms
from penstock.destinations.base import Destination, TableResult
from penstock.errors import RESYNC, ConfigError, PenstockError, SchemaNotFollowed, ValuesNotSent
from penstock.lsn import Lsn, OrderKey, is_in, reaches
from penstock.observe.batches import current_batch
from penstock.observe.reports import listening
from penstock.observe.tally import ROWS, Tally
from penstock.schema import ReplicaIdentity, TableSchema
from penstock.source.ddl_messages import parse_rewrite
from penstock.source.ddl_trigger import REWRITE_PREFIX
from penstock.source.lineage import Ancestry
from penstock.spool import Entry, SpoolReader
from penstock.state import Store, TableSchemaVersion
from penstock.values import TypeSettings

logger = logging.getLogger(__name__)

OPERATIONS = ("insert", "update", "delete")
"""What `Segment.operations` counts."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The limits of a batch."""

    max_rows: int = 500_000
    max_bytes: int = 128 << 20
    interval: float = 0.5
    """Seconds between two batches, unless more than one batch is waiting."""


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a batch."""

    batch: EventBatch
    durable: dict[int, Lsn]
    """How far each table is durable now, without tables that failed or were only accepted."""
    failed: dict[int, PenstockError]


class BatchWriter:
    """Writes batches. Used by one thread only, because readers of the spool are not shared."""

    def __init__(
        self,
        spool: Path,
        store: Store,
        destination: Destination,
        settings: BatchSettings,
        types: TypeSettings | None = None,
        transforms: Transforms | None = None,
        *,
        of_copy: bool = False,
        tally: Tally | None = None,
    ) -> None:
        """With `of_copy`, the batches complete a copy that can be repeated at no loss."""
        self._tally = tally or Tally()
        self._of_copy = of_copy
        self.reader = SpoolReader(spool)
        self._store = store
        self._destination = destination
        self._settings = settings
        self._accepted: dict[int, Lsn] = {}
        """How far the destination has accepted changes that are not durable yet; they are not sent again."""
        self._types = types or TypeSettings()
        self._transforms = transforms or Transforms()
        self._resolved: dict[tuple[TableRules, TableSchema], TableTransform] = {}

    def take(self, after: Lsn, limit: Lsn, tables: Sequence[int] | None = None) -> list[Entry]:
        """Return the entries between two boundaries that fit into a batch; at least one if there is any."""
        taken: list[Entry] = []
        rows = size = 0
        for entry in self.reader.entries(after, tables):
            rows += entry.rows
            size += entry.bytes
            if reaches(entry.begin, limit):
                break
            if taken and (rows > self._settings.max_rows or size > self._settings.max_bytes):
                break
            taken.append(entry)
        return taken

    def write(
        self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn], *, alone: bool = False
    ) -> Written:
        """Write the changes of these tables between two boundaries, each from its position, and wait for the result.

        `alone` is as in `EventBatch`. Changes that the destination accepted before are left out until it reports them
        as durable or failed.
        """
        with self._tally.batches.recorded("copy" if self._of_copy else "apply"):
            return self._write(entries, begin, end, positions, alone=alone)

    def _write(
        self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn], *, alone: bool
    ) -> Written:
        self.follow_server()
        unsent = self._leave_out_accepted(positions)
        failed: dict[int, PenstockError] = {}

        def transform_of(schema: TableSchema) -> TableTransform | None:
            try:
                require_exact_key(schema, self._types)
                return self._transform(schema)
            except ConfigError as error:
                failed[schema.table_id] = error  # so that none of its rows is sent
                return None

        with self._tally.timed("batch_seconds", "build"):
            batch = build_batch(
                entries,
                begin=begin,
                end=end,
                positions=unsent,
                schemas=self._schemas_at(unsent),
                schema_of=self.reader.load_schema,
                refused=self._refused_columns if self._types.can_refuse else None,
                settled=self._settled_columns if self._types.can_change else None,
                transform_of=transform_of,
            )
        durable = dict.fromkeys(positions, end)
        for changes in batch.tables:
            if (
                changes.table_id not in failed
                and (error := _values_not_sent(changes, self._destination, self._of_copy)) is not None
            ):
                failed[changes.table_id] = error
        rewritten = _rewritten(entries, unsent, end)
        if rewritten and self._destination.capabilities.allows_copies:
            failed |= rewritten
        for table_id in failed:
            durable.pop(table_id)
            self._accepted.pop(table_id, None)
        left = tuple(each for each in batch.tables if each.table_id not in failed)
        batch = replace(batch, tables=left, alone=alone)
        if not batch.tables and self._accepted.keys().isdisjoint(positions):
            return Written(batch, durable, failed)
        # Stored before the destination commits, so that a crash in between leaves no table with a schema that the store
        # does not know. Stored for the boundary `end`: the log determines the schema there, whether or not this batch
        # is committed, and a schema that the table had before may come back.
        for changes in batch.tables:
            if (change := changes.last_schema_change) is not None:
                self._store.store_table_schema(TableSchemaVersion(OrderKey(end, 0), change.new))
        self._describe(batch)
        with self._tally.timed("batch_seconds", "write"):
            outcomes = self._send(batch, positions)
        for table_id, outcome in outcomes.items():
            if outcome.error is not None:
                failed[table_id] = outcome.error
            if outcome.error is not None or not outcome.durable:
                durable.pop(table_id)
        self._count(batch, failed)
        return Written(batch, durable, failed)

    def _count(self, batch: EventBatch, failed: Mapping[int, PenstockError]) -> None:
        """Count what was written, by table and operation: from the files' own counts, so no row is read."""
        self._tally.count("batches")
        self._tally.count("transactions", by=batch.transactions)
        self._tally.add(batch.row_count, "batch_rows", bounds=ROWS)
        for changes in batch.tables:
            if changes.table_id in failed:
                continue
            operations: Counter[str] = Counter()
            size = 0
            for step in changes.steps:
                if isinstance(step, Truncation):
                    operations["truncate"] += 1
                for segment in step.segments if isinstance(step, Rows) else ():
                    size += segment.bytes
                    operations.update(dict(zip(OPERATIONS, segment.operations, strict=False)))
            self._tally.count("bytes", changes.table, by=size)
            for name, count in operations.items():
                self._tally.count("changes", changes.table, name, by=count)
            if (record := current_batch()) is not None:
                record.add_table(changes.table, operations)
                record.bytes += size

    def _describe(self, batch: EventBatch) -> None:
        """Note in the record of this batch what is written; a batch may be written in parts."""
        record = current_batch()
        if record is None:
            return
        record.position = str(batch.end)
        record.rows += batch.row_count
        record.transactions = max(record.transactions, batch.transactions)
        if batch.transactions:
            record.first_commit = batch.first_commit_time / 1e6
            record.last_commit = batch.last_commit_time / 1e6

    def write_columns(self, seen: TableSchema, columns: Mapping[int, str], at: Lsn) -> None:
        """Rename and drop columns of a table whose rows do not change, so that the stream does not bring its schema.

        `columns` has their names now, `seen` is the schema in which they were missing. Does nothing if the stream has
        brought another one since. Raises the error of the destination.
        """
        version = self._store.get_table_schema(seen.table_id, OrderKey(at, 0))
        if version is None or version.schema != seen:
            return
        kept = (column for column in seen.columns if column.attnum in columns)
        schema = replace(seen, columns=tuple(replace(each, name=columns[each.attnum]) for each in kept))
        self.follow_server()
        change = SchemaChange(seen, schema, str(OrderKey(at, 0)))
        changes = TableChanges(seen.table_id, str(seen), (change,))
        result = self._destination.write_events(EventBatch(at, at, 0, 0, 0, (changes,), alone=True)).result()
        error = result.of(seen.table_id).error
        if error is not None:
            raise error
        # Afterwards: if it is not stored, the catalog is still ahead of it, and the same happens again.
        self._store.store_table_schema(TableSchemaVersion(OrderKey(at, 0), schema))

    def follow_server(self) -> Ancestry:
        """Record positions under the lineage of the server that the entries came from; return the one in use.

        Called after entries were read and before they are written: after a failover, capture names the new server
        before its first entry, and positions up to there are valid on both.
        """
        found, known = self.reader.ancestry, self._store.ancestry
        if found is None or not found.follows(known):
            return known
        logger.info("following another server timeline=%d", found.current.timeline)
        self._store.use_lineage(found)
        return found

    def _leave_out_accepted(self, positions: Mapping[int, Lsn]) -> dict[int, Lsn]:
        """Return the position from which each table has changes to send."""
        for table_id, position in positions.items():
            # The table was copied again or retried since.
            if table_id in self._accepted and reaches(position, self._accepted[table_id]):
                del self._accepted[table_id]
        return {table_id: self._accepted.get(table_id, position) for table_id, position in positions.items()}

    def _send(self, batch: EventBatch, positions: Mapping[int, Lsn]) -> dict[int, TableResult]:
        """Return the results for the tables of a batch and for tables with accepted changes."""
        counts: dict[tuple[int, str], int] = {}

        def count(report: object) -> None:
            if isinstance(report, CellsChanged):
                place = report.table_id, report.path
                counts[place] = max(counts.get(place, 0), report.count)

        try:
            with listening(count):
                result = self._destination.write_events(batch).result()
        except BaseException:
            # Accepted changes may be lost, too: send all of them again.
            self._accepted.clear()
            raise
        outcomes = {changes.table_id: result.of(changes.table_id) for changes in batch.tables}
        for table_id in self._accepted.keys() & positions.keys() - outcomes.keys():
            # Not in the batch: only a result that names it counts.
            outcomes[table_id] = result.tables.get(table_id, TableResult(durable=False))
        sent = {changes.table_id for changes in batch.tables}
        for table_id, outcome in outcomes.items():
            if outcome.error is not None or outcome.durable:
                self._accepted.pop(table_id, None)
            elif table_id in sent:
                self._accepted[table_id] = batch.end
        totals: Counter[int] = Counter()
        for (table_id, _), changed in counts.items():
            totals[table_id] += changed if result.of(table_id).error is None else 0
        self._store.add_changed_cells(totals)
        return outcomes

    def _refused_columns(self, schema: TableSchema) -> tuple[str, ...]:
        return refused_columns(schema, self._types, self._transforms.excluded(schema))

    def _settled_columns(self, schema: TableSchema) -> Settled:
        return settled_columns(schema, self._types, self._transforms.excluded(schema))

    def _transform(self, schema: TableSchema) -> TableTransform | None:
        rules = self._transforms.of(schema.table_id, str(schema))
        if rules is None:
            return None
        if (rules, schema) not in self._resolved:
            found = self._transforms.resolve(schema, self._types)
            if found is None:
                return None
            require_exact_filter(found, self._destination)
            self._resolved[rules, schema] = found
        return self._resolved[rules, schema]

    def _schemas_at(self, positions: Mapping[int, Lsn]) -> dict[int, TableSchema]:
        """Return the schemas that the tables have at the destination: those stored for their positions."""
        stored = (self._store.get_table_schema(table_id, OrderKey(lsn, 0)) for table_id, lsn in positions.items())
        return {version.table_id: version.schema for version in stored if version is not None}


Work = Callable[[BatchWriter, Lsn], Lsn]
"""Writes one table from its position on; returns its new position."""


def _rewritten(entries: Sequence[Entry], positions: Mapping[int, Lsn], end: Lsn) -> dict[int, PenstockError]:
    """Return the tables whose values ALTER TABLE computed again between their positions and a boundary.

    The rows that follow belong to values that the stream does not carry.
    """
    found: dict[int, PenstockError] = {}
    for step in (step for entry in entries for step in entry.steps if isinstance(step, Message)):
        if step.prefix.startswith(REWRITE_PREFIX) and is_in(step.key.commit_lsn, end):
            table_id, name = parse_rewrite(step.content)
            if table_id in positions and not is_in(step.key.commit_lsn, positions[table_id]):
                found[table_id] = SchemaNotFollowed(f"{name}: ALTER TABLE rewrote all rows", table=name)
    return found


def require_exact_filter(transform: TableTransform, destination: Destination) -> None:
    """Raise if a destination would get changes of rows that a filter has kept from it."""
    schema = transform.source
    is_exact = transform.filter is None or schema.replica_identity is ReplicaIdentity.FULL
    if not is_exact and not destination.capabilities.accepts_unknown_rows:
        raise ConfigError(
            f'the filter in [tables."{schema}"] needs replica identity full, because {destination.name} '
            "cannot tell which rows it never had",
            hint=f"Run: alter table {schema} replica identity full; then: {RESYNC}.",
            table=str(schema),
        )


def _values_not_sent(changes: TableChanges, destination: Destination, of_copy: bool) -> PenstockError | None:
    """Return why a schema change cannot be followed: existing rows would get NULL for a value that the server omitted,
    and the destination cannot fill it in. Return None if it can be followed. A destination that keeps every change
    goes on after its copy: it has what the server sent."""
    for step in changes.steps:
        if isinstance(step, SchemaChange) and step.old is not None:
            known = {column.attnum for column in step.old.columns}
            new = [each for each in step.new.columns if each.attnum not in known]
            # Columns are added at the end. One in between was there before, as a generated one, or its values are in
            # a later column here, because the catalog was ahead of the rows.
            late = {each.attnum for each in new if each.attnum < max(known, default=0)}
            lost = [
                each.name
                for each in new
                if each.attnum in late
                or (each.backfilled and (each.missing is None or not destination.capabilities.fills_added_columns))
            ]
            if lost and (of_copy or destination.capabilities.updates_rows):
                why = "that were not sent before" if late else "added with a default"
                return ValuesNotSent(
                    f"{changes.table}: the server did not send the values of existing rows for columns {why}: "
                    f"{', '.join(lost)}",
                    table=changes.table,
                )
    return None
