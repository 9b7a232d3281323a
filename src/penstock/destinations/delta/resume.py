"""Resumes copies: a record for each file that is done, and the rows that changed since the copy began.

A task that has written ranges puts a record into `_penstock/copies/<copy>/`: which blocks of the source they cover, and
the files. The next attempt takes these files over and reads the other ranges. Then one task goes through the changes
since the copy began, in slices: it removes all rows with the keys of a slice, and reads them again in the snapshot.
Only the last commit makes any of it part of the table; then the records are deleted. Until then vacuum leaves the files
of recorded attempts alone (`recorded_attempts`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from penstock import failpoints
from penstock.changes.compaction import touched_keys
from penstock.copy.plan import CopyRange as HeapRange
from penstock.copy.plan import Leaf
from penstock.copy.progress import RangeRead
from penstock.copy.resume import Blocks, FinishedRanges, ResumableCopy, cell_texts, key_ranges
from penstock.destinations.base import RangeReader, Tasks
from penstock.destinations.delta.actions import Add, from_json, to_json
from penstock.destinations.delta.copy import CopiedFile, CopyTarget, RangeGroup, write_parts, write_ranges
from penstock.destinations.delta.files import LiveFile
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.tasks import Draft, TableWork, read_steps, slices
from penstock.destinations.delta.write import WrittenFiles
from penstock.destinations.refusals import raised, unexpected
from penstock.errors import PenstockError, TableRewritten
from penstock.observe.reports import current_listener, listening

COPIES_FOLDER = "_penstock/copies"
_ATTEMPT = 8
"""Letters of an attempt in the names of its files."""
_READ_THREADS = 8


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """What to record of the ranges of a copy; pickles."""

    copy: str
    fingerprint: str
    layout: str
    """Files with other columns cannot be taken over."""

    @classmethod
    def of(cls, resumable: ResumableCopy, layout: TableLayout) -> RangeRecord:
        return cls(resumable.copy, resumable.fingerprint, layout_digest(layout))


@dataclass(frozen=True, slots=True)
class RecordedFiles:
    """The files of finished ranges."""

    layout: str
    files: tuple[CopiedFile, ...]


def layout_digest(layout: TableLayout) -> str:
    """Identify the columns of files."""
    facts = [layout.mode.value, sorted(layout.names.items()), str(layout.schema), sorted(layout.times)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def write_and_record(
    reader: RangeReader, target: CopyTarget, record: RangeRecord | None, group: RangeGroup
) -> list[CopiedFile]:
    """Write some ranges, and record that they are done once they are durable."""
    if record is None:
        return write_ranges(reader, target, group)
    outer, changed = current_listener(), 0

    def hear(report: object) -> None:
        nonlocal changed
        changed += report.changed_cells if isinstance(report, RangeRead) else 0
        if outer is not None:
            outer(report)

    with listening(hear):
        files = write_ranges(reader, target, group)
    content = {
        "fingerprint": record.fingerprint,
        "layout": record.layout,
        "blocks": [part.blocks for part in group.ranges if isinstance(part, HeapRange)],
        "changed_cells": changed,
        "files": [{**to_json(file.add), "texts": file.has_texts, "rows": file.row_count} for file in files],
    }
    # Named by attempt and range: a task that runs twice replaces its record by one that is as good.
    name = f"{target.attempt[:_ATTEMPT]}-{group.ranges[0].index:06d}.json"
    try:
        target.storage.put(f"{COPIES_FOLDER}/{record.copy}/{name}", json.dumps(content).encode())
    except Exception as error:
        raise unexpected(target.table, error) from None
    failpoints.reach("after_finished_ranges")
    return files


def read_finished(log: DeltaLog, copy: str) -> list[FinishedRanges]:
    """Return the recorded ranges of a copy whose files exist; none if they are or were part of the table."""
    storage = log.storage
    folder = f"{COPIES_FOLDER}/{copy}"
    paths = sorted(file.path for file in storage.list(folder) if file.path.endswith(".json"))
    if not paths:
        return []
    present = _present(storage)
    # Each read of an object store waits for its answer.
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="delta-copies") as pool:
        contents = list(pool.map(storage.get, paths))
    found = [_parsed(content) for content in contents if content is not None]
    snapshot, removals = log.read_removals() or (None, {})
    committed = {*removals, *(() if snapshot is None else snapshot.stored_files())}
    if any(file.add.file in committed for each in found for file in each.files.files):
        # The copy was committed: vacuum no longer spares its files.
        return []
    return [each for each in found if all(file.add.file in present for file in each.files.files)]


def require_present(table: str, storage: Storage, files: Iterable[CopiedFile]) -> None:
    """Raise if a file was deleted, for example because somebody deleted the records that protect it."""
    present = _present(storage)
    if any(file.add.file not in present for file in files):
        raise TableRewritten(f"{table}: files of its unfinished copy were deleted", table=table)


def _present(storage: Storage) -> set[str]:
    return {file.path for file in storage.list()}


def forget_copies(storage: Storage, *, but: str | None = None) -> None:
    """Delete the records of copies that are complete, or that nobody continues."""
    kept = f"{COPIES_FOLDER}/{but}/"
    paths = [file.path for file in storage.list(COPIES_FOLDER)]
    storage.delete([path for path in paths if but is None or not path.startswith(kept)])


def recorded_attempts(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the first letters of the attempts that have records, given all files of a table."""
    names = (path.rpartition("/")[2] for path in paths if path.startswith(f"{COPIES_FOLDER}/"))
    return tuple({name[:_ATTEMPT] for name in names})


def taken_over(table: str, resumable: ResumableCopy, record: RangeRecord) -> list[CopiedFile]:
    """Return the files of earlier attempts; raise if they have other columns than the table would get now."""
    recorded: list[RecordedFiles] = [each.files for each in resumable.finished]
    if any(each.layout != record.layout for each in recorded):
        raise TableRewritten(f"{table}: the destination stores its columns in another way than before", table=table)
    return [file for each in recorded for file in each.files]


def reread_changed(
    tasks: Tasks,
    reader: RangeReader,
    resumable: ResumableCopy,
    target: CopyTarget,
    files: Sequence[CopiedFile],
    *,
    deletion_vectors: bool,
) -> list[CopiedFile]:
    """Replace all rows that changed since the copy began by those of the snapshot; return the files of the table."""
    failpoints.reach("before_reread")
    steps = tuple(resumable.changes())
    if not steps:
        return list(files)
    live = tuple(LiveFile.of(file.add) for file in files)
    table_id = target.layout.source.table_id
    work = TableWork(table_id, target.table, target.storage, target.layout, steps, live, deletion_vectors)
    again = Reread(reader, target, resumable.leaves, work)
    (outcome,) = tasks.run([again], reread, description=f"copy changed rows of {target.table}")
    written, new = raised(outcome)
    return _after(files, written, new)


@dataclass(frozen=True, slots=True)
class Reread:
    """The work of the task that reads changed rows again; pickles."""

    reader: RangeReader
    target: CopyTarget
    leaves: tuple[Leaf, ...]
    work: TableWork


def reread(again: Reread) -> tuple[WrittenFiles, list[CopiedFile]] | PenstockError:
    """Remove the rows of all keys that changed, and write those that the snapshot has; errors are values."""
    try:
        work, layout = again.work, again.work.layout
        draft = Draft(work)
        new: list[CopiedFile] = []
        names = {layout.names[column.attnum]: column for column in layout.source.columns}
        for steps in slices(work.steps):
            assert isinstance(steps, list)
            keys, cells, texts = touched_keys(read_steps(work, steps), layout.key)
            draft.remove(keys)
            cell = [cell_texts(cells.column(name), texts.get(name)) for name in layout.key]
            parts = key_ranges(again.leaves, [names[name] for name in layout.key], cell)
            # By their bytes: the server may also find rows that it considers equal, but which did not change.
            for file in write_parts(again.reader, again.target, parts, 0, only=keys):
                draft.add(file.add, file.row_count)
                new.append(file)
        return draft.written(), new
    except Exception as error:
        return unexpected(again.work.table, error)


def _after(files: Sequence[CopiedFile], written: WrittenFiles, new: Sequence[CopiedFile]) -> list[CopiedFile]:
    """Return files with the vectors that they got, without those that have no rows left, and with new ones."""
    vectors, gone = dict(written.vectors), set(written.removed)
    known = {file.add.path: file for file in (*files, *new)}
    kept = [
        replace(file, add=file.add.with_vector(vectors[file.add.path])) if file.add.path in vectors else file
        for file in files
        if file.add.path not in gone
    ]
    has_texts = any(file.has_texts for file in known.values())
    for add in written.added:
        before = known.get(add.path)
        # Without vectors, the rest of a file is a new one.
        kept.append(CopiedFile(add, has_texts, 0) if before is None else replace(before, add=add))
    return kept


def _parsed(content: bytes) -> FinishedRanges:
    record = json.loads(content)
    files: list[CopiedFile] = []
    for each in record["files"]:
        add = from_json({"add": each["add"]})
        assert isinstance(add, Add)
        files.append(CopiedFile(add, each["texts"], each["rows"]))
    return FinishedRanges(
        record["fingerprint"],
        tuple(Blocks(*blocks) for blocks in record["blocks"]),
        sum(file.row_count for file in files),
        record["changed_cells"],
        RecordedFiles(record["layout"], tuple(files)),
    )
