"""Compaction: merges small files and files with many dead rows into few files, while the table is written.

A task rewrites a group of files as they are at some version. Live rows keep their order, so the new place of a row
needs no map that grows with the rows: it is the first row of its file in the new one, plus the row's number, minus the
dead rows before it. When the new files exist, the driver applies this rule to the rows that have died since; they
become the vectors of the new files, in the commit that replaces the files. Deletions made meanwhile are never undone
and never wait. Compaction can lose a race only during this short last step, and then repeats it.

Files are merged with files of about their size, so a row is rewritten a few times until its file is large enough, not
once per batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.destinations.base import Tasks
from penstock.destinations.delta.actions import Action, Add, CommitInfo
from penstock.destinations.delta.files import (
    COPY_PREFIX,
    create_data_file,
    iterate_data_file,
    now_milliseconds,
    vector_of,
)
from penstock.destinations.delta.index import prepare_index
from penstock.destinations.delta.layout import TableLayout, from_metadata
from penstock.destinations.delta.log import Committed, DeltaLog
from penstock.destinations.delta.schema import DELETION_VECTORS
from penstock.destinations.delta.snapshot import Snapshot
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, vector_file, write_vectors
from penstock.destinations.delta.write import WrittenFiles, require_seen

OPERATION = "OPTIMIZE"
_COMMIT_ATTEMPTS = 50
_SMALL_BYTES = 1 << 20
_TIER_FACTOR = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """Which files are worth rewriting."""

    target_bytes: int = 128 << 20
    """Maximum size of a merged file; larger files are left alone unless many of their rows are dead."""
    target_rows: int = 4_000_000
    """Maximum number of its rows: the task that builds the index of a file has all of its keys in memory."""
    min_files: int = 8
    """How many files of about one size are merged."""
    max_files: int = 256
    """Maximum number of files merged in one task."""
    dead_fraction: float = 0.3
    """A file with at least this fraction of dead rows is rewritten by itself."""
    copied_bytes: int = 8 << 20
    """Larger files of a copy stay until many of their rows are dead: their size follows from the source's table, and
    rewriting a table that was just copied gains nothing."""


@dataclass(frozen=True, slots=True)
class Group:
    """Files that become one. Pickles."""

    storage: Storage
    files: tuple[Add, ...]
    schema: pa.Schema
    layout: TableLayout | None = None
    """The layout, if a pipeline writes the table: its next batch searches the new file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was rewritten: its state at that time, and the place of its rows in the new file."""

    add: Add
    dead: Vector
    first_row: int
    row_count: int

    def new_rows(self, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the new places of rows that were live at that time."""
        dead_before = np.searchsorted(self.dead.rows(), rows)
        return np.asarray(rows - dead_before.astype(np.uint64) + np.uint64(self.first_row), np.uint64)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result of rewriting a group."""

    sources: tuple[Source, ...]
    file: Add | None
    """None if no row was live."""


def plan_compaction(storage: Storage, snapshot: Snapshot, settings: CompactionSettings | None = None) -> list[Group]:
    """Return the groups that are worth rewriting now."""
    settings = settings or CompactionSettings()
    tiers: dict[int, list[Add]] = {}
    chosen: list[tuple[Add, ...]] = []
    for add in snapshot.files.values():
        live_bytes = _live_bytes(add)
        if live_bytes < _small_bytes(add, settings) and _live_rows(add) < settings.target_rows // 2:
            tiers.setdefault(_tier(live_bytes), []).append(add)
        elif _dead_fraction(add) >= settings.dead_fraction:
            chosen.append((add,))
    for tier in tiers.values():
        merged, rest = _merge(tier, settings)
        chosen += merged
        chosen += [(add,) for add in rest if _dead_fraction(add) >= settings.dead_fraction]
    state = from_metadata(snapshot.metadata)
    layout = None if state is None else state.layout
    return [Group(storage, files, snapshot.schema, layout) for files in chosen]


def rewrite_group(group: Group) -> Rewritten:
    """Write the live rows of some files into one new file, which no reader sees yet; runs in a task."""
    sources: list[Source] = []
    dead = [vector_of(group.storage, add) for add in group.files]
    with create_data_file(group.storage, group.schema, prefix="compacted") as file:
        for add, vector in zip(group.files, dead, strict=True):
            first = file.rows
            for data in iterate_data_file(group.storage, add, group.schema, vector):
                if data.num_rows:
                    file.write(data)
            sources.append(Source(add, vector, first, file.rows - first + len(vector)))
    if not file.rows:
        group.storage.delete([file.name])
        return Rewritten(tuple(sources), None)
    if group.layout is not None:
        prepare_index(group.storage, group.layout, file.name)
    return Rewritten(tuple(sources), file.action(data_change=False))


def compact(
    log: DeltaLog, tasks: Tasks, settings: CompactionSettings | None = None, *, table: str = ""
) -> Snapshot | None:
    """Rewrite files that are worth it and commit; None if nothing was replaced."""
    snapshot = log.refresh()
    groups = [] if snapshot is None else plan_compaction(log.storage, snapshot, settings)
    if not groups:
        return None
    with tasks.copying():
        rewritten = tasks.run(groups, rewrite_group, description=f"compact {table or log.storage.url}")
    return commit_rewritten(log, rewritten)


def commit_rewritten(log: DeltaLog, rewritten: Sequence[Rewritten]) -> Snapshot | None:
    """Replace the files, with all deletions until now; None if another writer has removed all of them."""
    added = tuple(each.file for each in rewritten if each.file is not None)
    require_seen(log.storage.url, log.storage, WrittenFiles(added))
    snapshot = log.refresh()
    for _ in range(_COMMIT_ATTEMPTS):
        exchanges = [] if snapshot is None else [_exchange(log.storage, snapshot, each) for each in rewritten]
        usable = [each for each in exchanges if each is not None]
        if snapshot is None or not usable:
            break
        actions, vectors = _actions(log.storage, usable)
        answer = log.commit(snapshot, actions)
        if isinstance(answer, Committed):
            used = {each.new_file.path for each in usable if each.new_file is not None}
            _delete(log.storage, (each for each in rewritten if each.file is None or each.file.path not in used))
            return answer.snapshot
        log.storage.delete(vectors)
        snapshot = answer.snapshot
    else:
        logger.warning("compaction gave up after losing too many races table=%s", log.storage.url)
    _delete(log.storage, rewritten)
    return None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What one group replaces in the current version."""

    old_files: tuple[Add, ...]
    new_file: Add | None
    """None if all its rows have died meanwhile."""
    dead: Vector


def _exchange(storage: Storage, snapshot: Snapshot, rewritten: Rewritten) -> _Exchange | None:
    """Return the exchange for a group. None if it is impossible: all files of the group are gone, some of their rows
    are live again, or some have died in a table without vectors."""
    old_files = tuple(
        snapshot.files[source.add.path] for source in rewritten.sources if source.add.path in snapshot.files
    )
    died: list[Vector] = []
    for source in rewritten.sources:
        dead = _dead_now(storage, snapshot, source)
        if len(source.dead.difference(dead)):
            return None
        died.append(Vector.of(source.new_rows(dead.difference(source.dead).rows())))
    if not old_files:
        return None
    dead = Vector.EMPTY.union(*died)
    file = rewritten.file
    if file is None or len(dead) == file.row_count:
        return _Exchange(old_files, None, dead)
    if len(dead) and DELETION_VECTORS not in snapshot.protocol.writer_features:
        return None
    return _Exchange(old_files, file, dead)


def _actions(storage: Storage, exchanges: Sequence[_Exchange]) -> tuple[list[Action], list[str]]:
    """Return the commit, and the vector files that were written for it."""
    now = now_milliseconds()
    removes = [old.removed(now, data_change=False) for each in exchanges for old in each.old_files]
    kept = [(each.new_file, each.dead) for each in exchanges if each.new_file is not None]
    descriptors = iter(write_vectors(storage, [dead for _, dead in kept if len(dead)]))
    adds = [file.with_vector(next(descriptors), data_change=False) if len(dead) else file for file, dead in kept]
    counts = {"numRemovedFiles": str(len(removes)), "numAddedFiles": str(len(adds))}
    written = {vector_file(add.vector) for add in adds if add.vector is not None}
    actions: list[Action] = [CommitInfo(now, OPERATION, metrics=counts), *removes, *adds]
    return actions, sorted(path for path in written if path is not None)


def _dead_now(storage: Storage, snapshot: Snapshot, source: Source) -> Vector:
    """Return all rows of a file that are dead now. If the file is gone, all of its rows are: they have moved or were
    deleted."""
    live = snapshot.files.get(source.add.path)
    if live is None:
        return Vector.of(np.arange(source.row_count, dtype=np.uint64))
    return source.dead if live.vector == source.add.vector else vector_of(storage, live)


def _delete(storage: Storage, rewritten: Iterable[Rewritten]) -> None:
    storage.delete([each.file.file for each in rewritten if each.file is not None])


def _merge(tier: list[Add], settings: CompactionSettings) -> tuple[list[tuple[Add, ...]], list[Add]]:
    """Return groups of files of about one size, oldest first and limited in size, and the remaining files."""
    if len(tier) < settings.min_files:
        return [], tier
    groups: list[list[Add]] = [[]]
    size = rows = 0
    for add in sorted(tier, key=lambda each: (each.modification_time, each.path)):
        size, rows = size + _live_bytes(add), rows + _live_rows(add)
        if size > settings.target_bytes or rows > settings.target_rows or len(groups[-1]) == settings.max_files:
            groups.append([])
            size, rows = _live_bytes(add), _live_rows(add)
        groups[-1].append(add)
    merged = [tuple(group) for group in groups if len(group) > 1]
    return merged, [add for group in groups if len(group) == 1 for add in group]


def _small_bytes(add: Add, settings: CompactionSettings) -> int:
    """Return the size below which a file should be merged."""
    small = settings.target_bytes // 2
    return min(small, settings.copied_bytes) if add.file.startswith(COPY_PREFIX) else small


def _tier(live_bytes: int) -> int:
    """Return the tier of a size. Sizes of one tier differ by less than a factor of eight, unless they are all small."""
    tier = 0
    while live_bytes >= _SMALL_BYTES:
        live_bytes //= _TIER_FACTOR
        tier += 1
    return tier


def _live_bytes(add: Add) -> int:
    return int(add.size * (1 - _dead_fraction(add)))


def _live_rows(add: Add) -> int:
    return int((add.row_count or 0) * (1 - _dead_fraction(add)))


def _dead_fraction(add: Add) -> float:
    if add.vector is None:
        return 0.0
    rows = add.row_count
    return min(1.0, add.vector.cardinality / rows) if rows else 0.0
