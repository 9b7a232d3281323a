"""Follows partitions that came or went: copies these again, and leaves the rows of the others where they are.

The stream does not mention such rows, so Penstock takes a snapshot, as for a copy of the whole table, and brings the
table exactly to its position. There every row that is not within the bounds of an unchanged partition is replaced by
the rows that the other partitions have in the snapshot. docs/decisions/0017 explains why this is exact.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass, replace

from penstock import failpoints
from penstock.copy import CopyRows, CopySettings, prepare_copy
from penstock.destinations.base import PartDestination, Tasks
from penstock.errors import PenstockError, Retry, SchemaNotFollowed, SnapshotLost
from penstock.lsn import Lsn, earliest, reaches
from penstock.source.connections import SourceSettings
from penstock.source.shapes import TableShape, attached_leaves, silent_changes, unchanged_leaves
from penstock.source.snapshots import take_snapshot
from penstock.spool import Stopping
from penstock.state import Store
from penstock.values import TypeSettings
from penstock.workers.batches import BatchWriter

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 10.0
"""How long to wait for open transactions: meanwhile the table does not follow its changes."""


@dataclass(frozen=True, slots=True)
class PartitionCopy:
    """A new copy of the partitions that changed since `before`."""

    table_id: int
    table: str
    reason: str
    """What happened, after the table's name."""
    before: TableShape
    keep: bool
    """Rows that left the source with their partition stay; only those of attached partitions are copied."""
    source: SourceSettings
    publication: str
    store: Store
    destination: PartDestination
    tasks: Tasks
    copy: CopySettings
    types: TypeSettings
    stop: threading.Event

    def write(self, writer: BatchWriter, position: Lsn) -> Lsn:
        """Bring the table from its position to that of a snapshot, and replace rows there; return its position.

        A passing error leaves the table as it is: the next look at the catalog finds the difference again. Where only a
        copy of the whole table helps, raise `SchemaNotFollowed`.
        """
        reached = [position]
        try:
            with take_snapshot(self.source, timeout=SNAPSHOT_SECONDS, check=self._check) as snapshot:
                attempt = uuid.uuid4().hex
                rows = prepare_copy(
                    snapshot,
                    self.source,
                    self.publication,
                    self.table_id,
                    types=self.types,
                    settings=self.copy,
                    attempt=attempt,
                    with_bounds=True,
                )
                self._catch_up(writer, rows.position, reached)
                if writer.follow_server().current.timeline != snapshot.timeline:
                    raise SnapshotLost("capture reads another server than the one that has the snapshot")
                failpoints.reach("before_partitions")
                self._replace(rows)
        except PenstockError as error:
            if error.retry is Retry.TIMED:
                logger.warning("partitions could not be copied, retrying table=%s error=%s", self.table, error)
                return reached[0]
            logger.info("the whole table has to be copied table=%s because=%s", self.table, error.message)
            raise SchemaNotFollowed(f"{self.table}: {self.reason}", table=self.table) from error
        failpoints.reach("after_partitions")
        assert rows.shape is not None
        self.store.store_table_shapes({self.table_id: replace(rows.shape, known_as=self.before.known_as)})
        return rows.position

    def _catch_up(self, writer: BatchWriter, end: Lsn, reached: list[Lsn]) -> None:
        """Write the changes up to a boundary; `reached` has the table's position."""
        while not reaches(reached[0], end):
            self._check()
            captured = writer.reader.captured
            entries = writer.take(reached[0], end, [self.table_id])
            if entries:
                until = earliest(end, entries[-1].end)
                written = writer.write(entries, reached[0], until, {self.table_id: reached[0]}, alone=True)
                if self.table_id in written.failed:
                    raise written.failed[self.table_id]
                reached[0] = written.durable[self.table_id]
            elif captured is not None and reaches(captured, end):
                reached[0] = end
            else:
                writer.reader.wait(reached[0], 0.5)

    def _replace(self, rows: CopyRows) -> None:
        assert rows.shape is not None
        # The snapshot is newer than the reading that led here.
        for change in silent_changes(self.before, rows.shape, {}):
            if not change.of_partition and (change.moved or not change.in_stream):
                raise SchemaNotFollowed(f"{self.table}: {change.text}", table=self.table)
        if self.keep:
            copied = attached_leaves(self.before, rows.shape)
            if not copied <= rows.bounds.keys():
                raise SchemaNotFollowed(f"{self.table}: the bounds of its partitions are not comparable")
            bounds = copied
        else:
            bounds = unchanged_leaves(self.before, rows.shape) & rows.bounds.keys()
            copied = rows.shape.heaps.keys() - bounds
            if not bounds:
                raise SchemaNotFollowed(f"{self.table}: no partition is unchanged and has comparable bounds")
        ranges = tuple(each for each in rows.ranges if each.leaf.oid in copied)
        logger.info(
            "copying partitions table=%s position=%s reason=%s partitions=%d of=%d",
            *(self.table, rows.position, self.reason, len(copied), len(rows.shape.heaps)),
        )
        leaves = [rows.bounds[oid] for oid in sorted(bounds)]
        with self.tasks.copying():
            failpoints.reach("during_partitions")
            part = replace(rows, ranges=ranges)
            self.destination.replace_part(rows.schema, part, leaves, inside=not self.keep)

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopping
