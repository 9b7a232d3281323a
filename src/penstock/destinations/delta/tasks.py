"""What tasks do for a table: apply its part of a batch, and write files again in a new layout.

`apply_changes` compacts the changes, finds the rows that they replace, fills omitted values and writes files, all in
one task. So a batch is one job however many tables it has, and only names of files and counts go back to the driver.
The steps could be split by keys or files, but each takes a fraction of a second for a batch, and another Spark job
costs as much as all of them.

`rewrite_file` writes one file again: with an added column whose constant the source keeps in its catalog, with another
name or type of a column, or without a dropped column whose name comes back. The batch that brings the new layout
replaces the files in its own commit, so readers see all of it or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact
from penstock.changes.steps import Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import LiveFile, dead_rows
from penstock.destinations.delta.fill import fill
from penstock.destinations.delta.index import FileMatch, find_rows
from penstock.destinations.delta.layout import DELETED_AT, Mode, TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector
from penstock.destinations.delta.write import (
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
        match work.layout.mode:
            case Mode.HISTORY:
                return _append(work)
            case Mode.MIRROR:
                return _mirror(work)
            case Mode.SOFT_DELETE:
                return _keep_deleted(work)
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
    rows = history_rows(work.steps, work.stages, work.layout)
    watch.lap("read")
    add = write_rows(work.storage, work.layout, rows) if rows.num_rows else None
    watch.lap("write")
    return WrittenFiles(added=() if add is None else (add,), row_count=rows.num_rows, seconds=watch.seconds)


def _mirror(work: TableWork) -> WrittenFiles:
    """Apply changes in mode `mirror`. Rows before a truncate do not matter, neither in the lake nor in the batch."""
    watch = _Watch()
    truncates = [number for number, step in enumerate(work.steps) if isinstance(step, Truncation)]
    steps = _rows(work.steps[truncates[-1] + 1 :] if truncates else work.steps)
    files = () if truncates else work.files
    gone = tuple(file.path for file in work.files) if truncates else ()
    if not steps:
        return WrittenFiles(removed=gone, seconds=watch.seconds)
    changes = _read(work, steps)
    watch.lap("read")
    net = compact(changes, work.layout.key)
    watch.lap("compact")
    matches = find_rows(work.storage, work.layout, files, net.touched, net.limits)
    watch.lap("match")
    written = _write(work, net, matches, watch)
    return replace(written, removed=(*gone, *written.removed))


def _keep_deleted(work: TableWork) -> WrittenFiles:
    """Apply changes in mode `soft_delete`: deleted rows stay."""
    if any(isinstance(step, Truncation) for step in work.steps):
        return _truncate_softly(work)
    watch = _Watch()
    changes = _read(work, _rows(work.steps))
    watch.lap("read")
    net = compact(changes, work.layout.key, keep_deleted=True)
    watch.lap("compact")
    matches = find_rows(work.storage, work.layout, work.files, net.touched, net.limits)
    watch.lap("match")
    return _write(work, net, matches, watch)


def _truncate_softly(work: TableWork) -> WrittenFiles:
    """Apply truncates, which delete all rows: every file is rewritten, once for all of them."""
    watch = _Watch()
    truncates = [step for step in work.steps if isinstance(step, Truncation)]
    pending: list[tuple[pa.Table, pa.Array | None]] = []
    matches: list[FileMatch] = []
    for number, steps in enumerate(_between_truncates(work.steps)):
        if not steps:
            continue
        net = compact(_read(work, steps), work.layout.key, keep_deleted=True)
        # After a truncate no old row is live, but a deleted one may have the key of a new one.
        found = find_rows(work.storage, work.layout, work.files, net.touched, net.limits)
        matches += found
        complete = fill(net, () if number else found, work.storage, work.layout, work.source)
        rows = assemble(complete, work.layout)
        keys = None if complete.keys is None else net.touched.take(pa.array(complete.keys))
        pending = [_without(rows_before, keys_before, net.touched) for rows_before, keys_before in pending]
        if number < len(truncates):
            rows = _deleted(rows, truncates[number].commit_time)
        pending.append((rows, keys))
    added = [write_rows(work.storage, work.layout, rows, keys) for rows, keys in pending if rows.num_rows]
    buried = _by_file(matches)
    for file in work.files:
        dead = dead_rows(work.storage, file).union(buried.get(file.path, Vector.EMPTY))
        again = rewrite(work.storage, work.layout, file, dead, deleted_at=truncates[0].commit_time)
        added += [] if again is None else [again]
    watch.lap("write")
    row_count = sum(rows.num_rows for rows, _ in pending)
    removed = tuple(file.path for file in work.files)
    return WrittenFiles(added=tuple(added), removed=removed, row_count=row_count, seconds=watch.seconds)


def _write(work: TableWork, net: NetChanges, matches: Sequence[FileMatch], watch: _Watch) -> WrittenFiles:
    complete = fill(net, matches, work.storage, work.layout, work.source)
    watch.lap("fill")
    added: list[Add] = []
    if len(complete.images):
        keys = None if complete.keys is None else net.touched.take(pa.array(complete.keys))
        added.append(write_rows(work.storage, work.layout, assemble(complete, work.layout), keys))
    watch.lap("write")
    written = bury(work.storage, matches) if work.deletion_vectors else _copy_on_write(work, matches)
    watch.lap("bury")
    return replace(written, added=(*added, *written.added), row_count=len(complete.images), seconds=watch.seconds)


def _copy_on_write(work: TableWork, matches: Sequence[FileMatch]) -> WrittenFiles:
    """Rewrite every file that loses a row, for readers that do not support vectors."""
    added = [
        rewrite(work.storage, work.layout, match.file, match.dead.union(Vector.of(match.rows))) for match in matches
    ]
    return WrittenFiles(
        added=tuple(add for add in added if add is not None),
        removed=tuple(match.file.path for match in matches),
        dead_count=sum(len(match.rows) for match in matches),
    )


def _read(work: TableWork, steps: Sequence[Rows]) -> ChangeColumns:
    try:
        changes = read_changes(steps, work.layout.source, work.constants)
    except PenstockError:
        raise
    except Exception as error:
        raise unreadable(work.table, work.table_id, error) from error
    return changes.fitted(work.layout.renames, work.layout.fit)


def _rows(steps: Sequence[Rows | Truncation]) -> list[Rows]:
    return [step for step in steps if isinstance(step, Rows)]


def _between_truncates(steps: Sequence[Rows | Truncation]) -> list[list[Rows]]:
    """Return the rows before the first truncate, between the first and the second, and so on."""
    parts: list[list[Rows]] = [[]]
    for step in steps:
        if isinstance(step, Truncation):
            parts.append([])
        else:
            parts[-1].append(step)
    return parts


def _without(rows: pa.Table, keys: pa.Array | None, touched: pa.Array) -> tuple[pa.Table, pa.Array | None]:
    """Return the rows whose keys were not touched again."""
    if keys is None:
        return rows, None
    keep = pc.invert(pc.is_in(keys, value_set=touched))
    return rows.filter(keep), keys.filter(keep)


def _deleted(rows: pa.Table, moment: int) -> pa.Table:
    """Return rows with the time of a truncate, unless they were deleted before it."""
    times = pc.fill_null(rows.column(DELETED_AT), pa.scalar(moment, pa.timestamp("us", "UTC")))
    return rows.set_column(rows.schema.get_field_index(DELETED_AT), DELETED_AT, times)


def _by_file(matches: Sequence[FileMatch]) -> dict[str, Vector]:
    found: dict[str, Vector] = {}
    for match in matches:
        found[match.file.path] = found.get(match.file.path, Vector.EMPTY).union(Vector.of(match.rows))
    return found
