"""What tasks do for a table: apply its part of a batch, and write files again in a new layout.

`apply_changes` compacts the changes, finds the rows that they replace, fills omitted values and writes files, all in
one task. So a batch is one job however many tables it has, and only names of files and counts go back to the driver.
The steps could be split by keys or files, but each takes a fraction of a second for a batch, and another Spark job
costs as much as all of them. One transaction may be much larger than a batch should be, so a task applies it in slices
and never has more than one of them in memory. Where several tasks can run, each of them applies some of the slices
(`penstock.destinations.delta.split`).

`rewrite_file` writes one file again: with an added column whose constant the source keeps in its catalog, with another
name or type of a column, or without a dropped column whose name comes back. The batch that brings the new layout
replaces the files in its own commit, so readers see all of it or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import pyarrow as pa

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact
from penstock.changes.steps import Segment, Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import LiveFile, dead_rows
from penstock.destinations.delta.fill import fill
from penstock.destinations.delta.index import FileMatch, find_rows, index_folder, unmap_indexes
from penstock.destinations.delta.layout import Mode, TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import (
    LostRows,
    WrittenFiles,
    assemble,
    bury,
    history_rows,
    relay_file,
    rewrite,
    write_rows,
)
from penstock.destinations.refusals import unexpected, unreadable
from penstock.errors import PenstockError
from penstock.freed_memory import release_freed_memory
from penstock.observe.reports import may_end_here

SLICE_ROWS = 500_000
SLICE_BYTES = 64 << 20
"""The most that a task reads at once, in rows and in bytes of memory; more if one segment has more."""


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table's part of a batch, for a task."""

    table_id: int
    table: str
    storage: Storage
    """The storage of the table's folder."""
    layout: TableLayout
    """After the batch."""
    steps: tuple[Rows | Truncation, ...]
    files: tuple[LiveFile, ...]
    """All files of the table."""
    deletion_vectors: bool = True
    source: SourceRows | None = None
    constants: Mapping[str, pa.Scalar] = field(default_factory=dict[str, pa.Scalar])
    """The values of existing rows in columns that were added later, by names in segments."""
    stages: tuple[TableLayout, ...] = ()
    """The layout at each of the steps."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One file that a task writes again."""

    table: str
    storage: Storage
    before: TableLayout
    """The layout of the file."""
    layout: TableLayout
    """The new one."""
    file: LiveFile
    constants: Mapping[str, pa.Scalar]
    """The values of added columns, by their names in the lake and with the types that they have there."""


def apply_changes(work: TableWork) -> WrittenFiles | PenstockError:
    """Write a table's part of a batch; errors are values, so that one bad table does not fail the job of all."""
    try:
        return _append(work) if work.layout.mode is Mode.HISTORY else _apply(work)
    except Exception as error:
        return unexpected(work.table, error)


def rewrite_file(item: Rewrite) -> Add | PenstockError | None:
    """Write a file's live rows in the new layout; None if it has no live rows. Errors are values."""
    try:
        dead = dead_rows(item.storage, item.file)
        return relay_file(item.storage, item.file, dead, item.before, item.layout, item.constants)
    except Exception as error:
        return unexpected(item.table, error)


def rewrites(
    table: str,
    storage: Storage,
    before: TableLayout,
    layout: TableLayout,
    files: Sequence[LiveFile],
    constants: Mapping[str, pa.Scalar],
) -> tuple[Rewrite, ...]:
    """Return the work that brings files to a new layout; `constants` are by names in segments."""
    lake: dict[str, pa.Scalar] = {}
    if constants:
        named = pa.table({layout.renames[name]: pa.array([value], value.type) for name, value in constants.items()})
        fitted = layout.fit(named)
        lake = {name: fitted.column(name)[0] for name in fitted.column_names}
    return tuple(Rewrite(table, storage, before, layout, file, lake) for file in files)


@dataclass(slots=True)
class _Watch:
    """Measures how long the steps take."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._since
        self._since = now


def _append(work: TableWork) -> WrittenFiles:
    watch = _Watch()
    added: list[Add] = []
    row_count = 0
    for rows in history_rows(work.steps, work.stages, work.layout, SLICE_ROWS, SLICE_BYTES):
        may_end_here()
        if added:
            release_freed_memory()
        watch.lap("read")
        added.append(write_rows(work.storage, work.layout, rows))
        row_count += rows.num_rows
        watch.lap("write")
    return WrittenFiles(added=tuple(added), row_count=row_count, seconds=watch.seconds)


def _apply(work: TableWork) -> WrittenFiles:
    steps = work.steps
    if work.layout.mode is Mode.MIRROR:
        # Rows before a truncate do not matter, neither in the lake nor in the batch.
        truncates = [number for number, step in enumerate(steps) if isinstance(step, Truncation)]
        steps = steps[truncates[-1] :] if truncates else steps
    parts = list(slices(steps))
    draft = Draft(work, is_large=len(parts) > 1)
    for part in parts:
        may_end_here()
        if isinstance(part, Truncation):
            draft.truncate(part.commit_time)
        else:
            draft.apply(part)
    return draft.written()


class Draft:
    """A table while a batch is applied to it, in slices.

    Each slice finds the rows of those before it, as if these had been committed, so a slice may end anywhere in a
    transaction: the server checks keys after every change. Only what is left at the end becomes part of the table.
    """

    def __init__(self, work: TableWork, *, is_large: bool = False) -> None:
        """`is_large` says that there are several slices: what one of them frees must not be in memory with the next."""
        self._work = work
        self._is_large = is_large
        self._files = {file.path: file for file in work.files}
        self._new: dict[str, Add] = {}
        self._lost: dict[str, LostRows] = {}
        """Files that have lost rows, by path."""
        self._truncated: dict[str, int] = {}
        """In mode `soft_delete`, files whose rows a truncate has deleted, and when."""
        self._removed: list[str] = []
        self._row_count = 0
        self._watch = _Watch()

    def apply(self, steps: Sequence[Rows], note: Callable[[NetChanges], None] | None = None) -> None:
        """Apply consecutive changes; `note` is called with their net effect."""
        self._release()
        work, layout, watch = self._work, self._work.layout, self._watch
        changes = read_steps(work, steps)
        self._release()
        watch.lap("read")
        net = compact(changes, layout.key, keep_deleted=layout.mode is Mode.SOFT_DELETE)
        del changes
        watch.lap("compact")
        if note is not None:
            note(net)
            watch.lap("note")
        # A truncated row is not live, but it is replaced by a new row with its key.
        files = [file for path, file in self._files.items() if layout.key or path not in self._truncated]
        dead = {path: lost.dead for path, lost in self._lost.items()}
        index_folder(work.storage, layout).tidy([file.file for file in self._files.values()])
        matches = find_rows(work.storage, layout, files, net.touched, net.limits, dead)
        watch.lap("match")
        live = [match for match in matches if match.file.path not in self._truncated]
        self._lose(matches)
        self._release()
        touched, parts = net.touched, fill(net, live, work.storage, layout, work.source)
        # What is written needs the memory of what it was made from.
        del net, matches, live
        for complete in parts:
            watch.lap("fill")
            count = len(complete.images)
            if count:
                keys = None if complete.keys is None else touched.take(pa.array(complete.keys))
                rows = assemble(complete, layout)
                del complete
                self.add(write_rows(work.storage, layout, rows, keys), count)
                del rows, keys
            watch.lap("write")

    @property
    def seconds(self) -> dict[str, float]:
        """How long each step took."""
        return self._watch.seconds

    @property
    def unfinished(self) -> tuple[tuple[Add, ...], tuple[LostRows, ...]]:
        """The files with new rows, and those that have lost rows, for another draft to take over."""
        return tuple(self._new.values()), tuple(self._lost.values())

    def take(self, added: Sequence[Add], lost: Sequence[LostRows]) -> None:
        """Take over what is `unfinished` in another draft. What both have lost of a file is lost."""
        for add in added:
            self.add(add, add.row_count or 0)
        for each in lost:
            before = self._lost.get(each.file.path)
            dead = each.dead if before is None else before.dead.union(each.dead)
            known = 0 if each.file.vector is None else each.file.vector.cardinality
            self._lost[each.file.path] = LostRows(each.file, each.row_count, dead, len(dead) - known)

    def search(self, files: Sequence[LiveFile]) -> None:
        """Find rows in these files, too, from now on."""
        self._files |= {file.path: file for file in files}

    def remove(self, keys: pa.Array) -> None:
        """Remove all rows that have one of these keys."""
        dead = {path: lost.dead for path, lost in self._lost.items()}
        self._lose(find_rows(self._work.storage, self._work.layout, list(self._files.values()), keys, None, dead))

    def add(self, add: Add, row_count: int) -> None:
        """Add a file with new rows."""
        self._new[add.path] = add
        self._files[add.path] = LiveFile.of(add)
        self._row_count += row_count

    def _release(self) -> None:
        if self._is_large:
            unmap_indexes()
            release_freed_memory()

    def _lose(self, matches: Sequence[FileMatch]) -> None:
        for match in matches:
            path, before = match.file.path, self._lost.get(match.file.path)
            self._lost[path] = LostRows.of(match, before.count if before is not None else 0)
            self._drop_if_spent(path)

    def _drop_if_spent(self, path: str) -> None:
        """Forget a new file that has lost all its rows: a later slice need not search it."""
        lost = self._lost[path]
        if path in self._new and path not in self._truncated and len(lost.dead) == lost.row_count:
            del self._new[path], self._files[path], self._lost[path]
            self._row_count -= lost.count

    def truncate(self, moment: int) -> None:
        """Delete all rows; in mode `mirror`, before any change is applied."""
        if self._work.layout.mode is Mode.SOFT_DELETE:
            # A row that two truncates find is deleted by the first one.
            self._truncated = dict.fromkeys(self._files, moment) | self._truncated
        else:
            self._removed, self._files = [*self._files], {}

    def written(self) -> WrittenFiles:
        """Return what the commit does."""
        work = self._work
        again: list[Add | None] = []
        for path, moment in self._truncated.items():
            file, lost = self._files[path], self._lost.pop(path, None)
            dead = dead_rows(work.storage, file) if lost is None else lost.dead
            again.append(rewrite(work.storage, work.layout, file, dead, deleted_at=moment))
        self._release()
        written = bury(work.storage, work.layout, list(self._lost.values()), deletion_vectors=work.deletion_vectors)
        self._watch.lap("bury")
        vectors = dict(written.vectors)
        gone = {*self._removed, *self._truncated, *written.removed}
        new = [
            add.with_vector(vectors[path]) if path in vectors else add
            for path, add in self._new.items()
            if path not in gone
        ]
        return replace(
            written,
            added=(*new, *(add for add in again if add is not None), *written.added),
            vectors=tuple((path, vector) for path, vector in written.vectors if path not in self._new),
            removed=tuple(path for path in gone if path not in self._new),
            row_count=self._row_count - sum(lost.count for path, lost in self._lost.items() if path in self._new),
            seconds=self._watch.seconds,
        )


def slices(steps: Sequence[Rows | Truncation]) -> Iterator[Truncation | list[Rows]]:
    """Yield truncates, and the rows between them in parts of bounded size, in order."""
    for is_truncate, group in groupby(steps, lambda step: isinstance(step, Truncation)):
        if is_truncate:
            yield from (step for step in group if isinstance(step, Truncation))
            continue
        part: list[Rows] = []
        rows, size = 0, 0
        for step in group:
            assert isinstance(step, Rows)
            first = 0
            for number, segment in enumerate(step.segments):
                rows, size = rows + segment.rows, size + memory_of(segment)
                if (part or number > first) and (rows > SLICE_ROWS or size > SLICE_BYTES):
                    yield [*part, *_some(step, first, number)]
                    part, rows, size, first = [], segment.rows, memory_of(segment), number
            part += _some(step, first, len(step.segments))
        yield part


def memory_of(segment: Segment) -> int:
    # Segments of an earlier version do not say it.
    return max(segment.memory, segment.bytes)


def _some(step: Rows, first: int, end: int) -> list[Rows]:
    return [replace(step, segments=step.segments[first:end])] if first < end else []


def read_steps(work: TableWork, steps: Sequence[Rows]) -> ChangeColumns:
    """Read changes with the names and types of the lake."""
    try:
        changes = read_changes(steps, work.layout.source, work.constants)
    except PenstockError:
        raise
    except Exception as error:
        raise unreadable(work.table, work.table_id, error) from error
    return changes.fitted(work.layout.renames, work.layout.fit)
