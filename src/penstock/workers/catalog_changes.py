"""Follows what the catalog shows and the stream does not mention.

Rows come and go with partitions, ALTER TABLE computes values, columns of idle tables get other names. The coordinator
reads the shapes of all tables every few seconds (`penstock.source.shapes`); a difference to the shape that a table
follows leads to a new copy of the table, of some of its partitions, or to new columns; a destination that keeps every
change goes on, and the difference is noted. docs/decisions/0016, 0017 and 0019 give the reasons.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock import failpoints
from penstock.changes.transform import Transforms
from penstock.copy import CopySettings
from penstock.destinations.base import Destination, PartDestination, Tasks
from penstock.errors import PenstockError, SchemaNotFollowed
from penstock.lsn import Lsn, OrderKey, reaches
from penstock.source.connections import CATALOG_LIMITS, Role, SourceSettings, connect
from penstock.source.lineage import current_position
from penstock.source.shapes import SilentChange, TableShape, may_have_rows, silent_changes, vanished
from penstock.state import Errored, Ready, Store, SyncDone, TableReplicationPhase
from penstock.state.transitions import resync
from penstock.values import TypeSettings
from penstock.workers.apply import ApplyWorker
from penstock.workers.board import Board
from penstock.workers.failures import Partitions, Recopy, SchemaChanges, errored
from penstock.workers.partitions import PartitionCopy
from penstock.workers.solo import NewColumns

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    """What copies of partitions need to know."""

    source: SourceSettings
    publication: str
    copy: CopySettings
    types: TypeSettings
    records_ddl: bool
    """As in `DestinationContext`."""


class CatalogChanges:
    """Follows the catalog for one output; used by the coordinator's thread."""

    def __init__(
        self,
        settings: CatalogSettings,
        apply: ApplyWorker,
        board: Board,
        store: Store,
        destination: Destination,
        tasks: Tasks,
        stop: threading.Event,
        *,
        transforms: Transforms,
        policy_of: Callable[[int], SchemaChanges],
        known_as: Callable[[int], str | None],
    ) -> None:
        """`policy_of` returns how a table follows changes of its schema, `known_as` what `TableShape` says of it."""
        self._settings = settings
        self._apply = apply
        self._board = board
        self._store = store
        self._destination = destination
        self._tasks = tasks
        self._stop = stop
        self._transforms = transforms
        self._policy_of = policy_of
        self._known_as = known_as
        self.pending: set[int] = set()
        """Tables that do not follow yet what the last reading has shown."""
        self._awaited: dict[int, Lsn] = {}
        """Tables with other columns than before, and the position up to which the stream may bring them."""

    def notice(self, shapes: Mapping[int, TableShape], leaves: Mapping[int, Mapping[int, Lsn]]) -> None:
        """Copy tables again whose rows changed without a word in the stream since their copy or the last look."""
        # A changed row may stop a table before its cause is seen here: the row has values that the stream never sent.
        # Phases come first: a copy stores its shape before its table is followed. In the other order, a copy that ends
        # in between would seem to have none, and what happened since its snapshot would go unnoticed.
        followed = {table_id for table_id, phase in self._board.phases().items() if was_followed(phase)}
        known = self._store.get_table_shapes()
        processed: dict[int, TableShape] = {}
        changed: set[int] = set()
        for table_id in followed & shapes.keys():
            rules = self._transforms.in_force(table_id, self._board.name_of(table_id))
            before = known.get(table_id)
            now = replace(shapes[table_id], rules=rules, known_as=self._known_as(table_id))
            mentioned = leaves.get(table_id, {})
            if before is None:
                processed[table_id] = replace(now, former=frozenset(mentioned))
            elif before != now or vanished(before, now, mentioned):
                changed.add(table_id)
                changes = silent_changes(before, now, mentioned)
                if not self._destination.capabilities.updates_rows:
                    processed[table_id] = self._noted(table_id, now.following(before, mentioned), changes)
                elif self._follow_shape(table_id, before, now, changes):
                    processed[table_id] = now.following(before, mentioned)
        self.pending = changed - processed.keys()
        # Last, so that a table that was not processed is noticed again, even by the next process.
        self._store.store_table_shapes(processed)

    def copy_for(self, table_id: int, reason: str) -> None:
        """Copy a table again whose catalog may be ahead of the stream, in whatever phase it is."""
        phase, shape = self._board.phase(table_id), self._store.get_table_shapes().get(table_id)
        if was_followed(phase) and not self._destination.capabilities.updates_rows:
            if shape is not None:
                self._store.store_table_shapes({table_id: self._noted(table_id, shape, [SilentChange(reason)])})
        elif was_followed(phase):
            self.copy_again(table_id, reason)
        elif phase is not None:
            logger.info("copying a table again table=%s reason=%s", self._board.name_of(table_id), reason)
            self._board.set_phase(table_id, resync(reason))

    def copy_again(self, table_id: int, reason: str) -> bool:
        """Copy a table again, or stop it if its policy does not allow that; False if it is not followed any more."""
        name, policy = self._board.name_of(table_id), self._policy_of(table_id)
        error = SchemaNotFollowed(f"{name}: {reason}", table=name)
        if policy.recopy is Recopy.AUTOMATIC:
            logger.warning("table is copied again table=%s reason=%s", name, reason)
            self._board.set_phase(table_id, resync(error.message))
            failpoints.reach("after_recopy")
            return True
        positions = self._board.positions()

        def fail(phase: TableReplicationPhase) -> Errored | None:
            if table_id not in positions or not isinstance(phase, SyncDone | Ready):
                return None
            logger.error("table stopped table=%s reason=%s", name, reason, extra={"reported_as": "stopped"})
            return errored(phase, error, position=positions[table_id], schema_changes=policy)

        return self._board.alter(table_id, fail) is not None

    def _noted(self, table_id: int, shape: TableShape, changes: list[SilentChange]) -> TableShape:
        """Return the shape of a table whose destination keeps every change, with what no change tells of."""
        name, position = self._board.name_of(table_id), self._board.positions().get(table_id)
        for change in changes:
            if change.leaves:
                logger.info("rows are kept table=%s because=%s", name, change.text)
            elif not change.in_stream and (change.attached is None or self._brings_rows(change.attached)):
                logger.warning("rows changed without changes in the stream table=%s reason=%s", name, change.text)
                noted = shape.silent_change or f"{change.text}, before {position}"
                shape = replace(shape, silent_change=noted)
        return shape

    def _follow_shape(self, table_id: int, before: TableShape, now: TableShape, changes: list[SilentChange]) -> bool:
        """Return False if the table must be looked at again: its phase changed meanwhile."""
        policy = self._policy_of(table_id)
        if policy.partitions is Partitions.KEEP or not self._destination.capabilities.allows_copies:
            for change in (each for each in changes if each.leaves):
                logger.info("rows are kept table=%s because=%s", self._board.name_of(table_id), change.text)
            changes = [each for each in changes if not each.leaves]
        if policy.recopy is not Recopy.AUTOMATIC:
            changes = [each for each in changes if not each.in_stream]
        changes = [each for each in changes if each.attached is None or self._brings_rows(each.attached)]
        is_followed = isinstance(self._board.phase(table_id), SyncDone | Ready)
        # Bounds and names are those of the source, which rules may have changed.
        in_place = is_followed and self._rewrites and now.rules is None
        if changes and all(each.of_partition for each in changes) and in_place:
            self._copy_partitions(table_id, before, changes[0].text)
            return False  # it stores the shape that it has followed
        # Rules go by names: with another column of that name, other rows pass the filter, and others are hashed.
        exact = self._settings.records_ddl and now.rules is None
        if changes and all(each.in_stream and (exact or not each.moved) for each in changes) and is_followed:
            followed = self._stream_brought(table_id, now)
            if followed is not False:
                return followed is True
            version = self._store.get_table_schema(table_id, OrderKey(self._board.positions()[table_id], 0))
            if version is not None and in_place and not any(each.readded for each in changes):
                self._apply.write_apart(table_id, NewColumns(version.schema, now.columns).write)
                return False
        return not changes or self.copy_again(table_id, changes[0].text)

    @property
    def _rewrites(self) -> bool:
        return self._destination.capabilities.loses_nothing_by_a_copy and isinstance(self._destination, PartDestination)

    def _copy_partitions(self, table_id: int, before: TableShape, reason: str) -> None:
        if self._apply.is_apart(table_id):
            return
        settings, name = self._settings, self._board.name_of(table_id)
        logger.info("partitions changed table=%s reason=%s", name, reason)
        assert isinstance(self._destination, PartDestination)
        copy = PartitionCopy(
            table_id,
            name,
            reason,
            before,
            self._policy_of(table_id).partitions is Partitions.KEEP,
            settings.source,
            settings.publication,
            self._store,
            self._destination,
            self._tasks,
            settings.copy,
            settings.types,
            self._stop,
        )
        self._apply.write_apart(table_id, copy.write)

    def _stream_brought(self, table_id: int, now: TableShape) -> bool | None:
        """True if the stream has brought the columns of a shape; False if it has not: no row has changed since. None
        as long as that is not known, because changes from before the shape was read are still on their way."""
        position = self._board.positions().get(table_id)
        if position is None:
            return None
        version = self._store.get_table_schema(table_id, OrderKey(position, 0))
        columns = () if version is None else version.schema.columns
        renames = self._transforms.renames(table_id, self._board.name_of(table_id))
        expected = {attnum: renames.get(name, name) for attnum, name in now.columns.items()}
        if columns and {each.attnum: each.name for each in columns}.items() <= expected.items():
            self._awaited.pop(table_id, None)
            return True
        if self._apply.is_apart(table_id):
            return None
        if table_id not in self._awaited:
            self._awaited[table_id] = current_position(self._settings.source)
        if not reaches(position, self._awaited[table_id]):
            return None
        del self._awaited[table_id]
        return False

    def _brings_rows(self, heap: int) -> bool:
        """True if an attached partition has rows; in doubt, too."""
        try:
            with connect(self._settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
                return may_have_rows(connection, heap)
        except PenstockError:
            return True


def was_followed(phase: TableReplicationPhase | None) -> bool:
    """True if changes are applied to the table, or were until it stopped."""
    return isinstance(phase, SyncDone | Ready) or (isinstance(phase, Errored) and phase.position is not None)
