"""Compaction: small files, and files with many dead rows, become few files without them, while the table is written.

A task rewrites a group of files as they are at some version. Their live rows keep their order, so where a row went
needs no map that grows with the rows: it is the file's first row in the new one, plus the row's number, minus the dead
rows before it. When the new files are there, the rows that have died since are looked up by that rule and become the
vectors of the new files, in the same commit that exchanges the files. Whoever deletes rows meanwhile is never undone,
and never waits; compaction loses a race at most for the short time that this last step takes, and tries it again.

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

OPERATION = "OPTIMIZE"
_COMMIT_ATTEMPTS = 50
_SMALL_BYTES = 1 << 20
_TIER_FACTOR = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """What is worth rewriting."""

    target_bytes: int = 128 << 20
    """How large a file may become by merging; larger ones are left alone, unless many of their rows are dead."""
    min_files: int = 8
    """How many files of about one size are merged."""
    max_files: int = 256
    """How many are merged at most in one task."""
    dead_fraction: float = 0.3
    """From this part of dead rows on a file is rewritten by itself."""
    copied_bytes: int = 8 << 20
    """Files of a copy that are larger stay, until many of their rows are dead: how large they are follows from the
    source's table, of which they take a good part each, and rewriting a table that was just copied is of no use."""


@dataclass(frozen=True, slots=True)
class Group:
    """Files that become one; all of it pickles."""

    storage: Storage
    files: tuple[Add, ...]
    schema: pa.Schema
    layout: TableLayout | None = None
    """Of a table that a pipeline writes: its next batch looks for rows in the new file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was rewritten: as it was then, and where its rows are in the new file."""

    add: Add
    dead: Vector
    first_row: int
    row_count: int

    def new_rows(self, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Where rows that were alive then are now."""
        dead_before = np.searchsorted(self.dead.rows(), rows)
        return np.asarray(rows - dead_before.astype(np.uint64) + np.uint64(self.first_row), np.uint64)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a task made of a group."""

    sources: tuple[Source, ...]
    file: Add | None
    """None if no row was alive."""


def plan_compaction(storage: Storage, snapshot: Snapshot, settings: CompactionSettings | None = None) -> list[Group]:
    """The groups that are worth rewriting now; none in a table that is in shape."""
    settings = settings or CompactionSettings()
    tiers: dict[int, list[Add]] = {}
    chosen: list[tuple[Add, ...]] = []
    for add in snapshot.files.values():
        live_bytes = _live_bytes(add)
        if live_bytes < _small_bytes(add, settings):
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
    """Write the live rows of some files into one; runs in a task, and changes nothing that anybody sees."""
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
    """Rewrite what is worth it and commit it; None if there was nothing to do, or nothing left of it."""
    snapshot = log.refresh()
    groups = [] if snapshot is None else plan_compaction(log.storage, snapshot, settings)
    if not groups:
        return None
    with tasks.copying():
        rewritten = tasks.run(groups, rewrite_group, description=f"compact {table or log.storage.url}")
    return commit_rewritten(log, rewritten)


def commit_rewritten(log: DeltaLog, rewritten: Sequence[Rewritten]) -> Snapshot | None:
    """Exchange the files, with all deletions until now; None if somebody else had removed all of them."""
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
        logger.warning("compaction gave up: others were always faster table=%s", log.storage.url)
    _delete(log.storage, rewritten)
    return None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What one group does to the table as it is now."""

    old_files: tuple[Add, ...]
    new_file: Add | None
    """None if all its rows have died meanwhile."""
    dead: Vector


def _exchange(storage: Storage, snapshot: Snapshot, rewritten: Rewritten) -> _Exchange | None:
    """None if it cannot be done: all files of the group are gone, rows of them have come back to life, or some have
    died in a table that has no vectors to say so."""
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
    """The commit, and the vector files that were written for it."""
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
    """All rows of a file that are dead now; of a file that is gone, every one: its rows are elsewhere, or nowhere."""
    live = snapshot.files.get(source.add.path)
    if live is None:
        return Vector.of(np.arange(source.row_count, dtype=np.uint64))
    return source.dead if live.vector == source.add.vector else vector_of(storage, live)


def _delete(storage: Storage, rewritten: Iterable[Rewritten]) -> None:
    storage.delete([each.file.file for each in rewritten if each.file is not None])


def _merge(tier: list[Add], settings: CompactionSettings) -> tuple[list[tuple[Add, ...]], list[Add]]:
    """Groups of files of about one size, oldest first, each of a good size at most; and the files that are left."""
    if len(tier) < settings.min_files:
        return [], tier
    groups: list[list[Add]] = [[]]
    size = 0
    for add in sorted(tier, key=lambda each: (each.modification_time, each.path)):
        live_bytes = _live_bytes(add)
        if size + live_bytes > settings.target_bytes or len(groups[-1]) == settings.max_files:
            groups.append([])
            size = 0
        groups[-1].append(add)
        size += live_bytes
    merged = [tuple(group) for group in groups if len(group) > 1]
    return merged, [add for group in groups if len(group) == 1 for add in group]


def _small_bytes(add: Add, settings: CompactionSettings) -> int:
    """Below it a file is to become part of a larger one."""
    small = settings.target_bytes // 2
    return min(small, settings.copied_bytes) if add.file.startswith(COPY_PREFIX) else small


def _tier(live_bytes: int) -> int:
    """Files of one tier differ in size by less than a factor of eight, unless they are all small."""
    tier = 0
    while live_bytes >= _SMALL_BYTES:
        live_bytes //= _TIER_FACTOR
        tier += 1
    return tier


def _live_bytes(add: Add) -> int:
    return int(add.size * (1 - _dead_fraction(add)))


def _dead_fraction(add: Add) -> float:
    if add.vector is None:
        return 0.0
    rows = add.row_count
    return min(1.0, add.vector.cardinality / rows) if rows else 0.0
