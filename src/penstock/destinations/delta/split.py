"""Splits one table's part of a batch over tasks, if it is larger than a slice, and unites what they wrote.

Consecutive segments form groups of about equal size, one for each task. Every task applies its group to the table as
it was before the batch, as if there were no other group. It writes new rows, and notes which rows of the table its
changes replace and which keys they touch. Then the groups are united: a row of the table is dead if any group replaced
it, and a new row is dead if a later group touched its key. No task needs the changes of another one, so no row is moved
between tasks. A second job unites the groups, unless they touched so few keys that the driver does it sooner than a job
starts; of more than that it sees names of files only.

A group depends on the groups before it in one case only: it needs the row that a key had before, to fill in a value
that the server omitted, to keep a deleted row (mode `soft_delete`), or to remove one of several equal rows (a table
without a key), and an earlier group has touched that key. Such a group, and all groups after it, are applied again, by
one task, after those before it. So the result is always the same as that of one task that applies everything in order.
See docs/decisions/0029.

In mode `history` groups are independent, and there is nothing to unite.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.compaction import NetChanges
from penstock.changes.keys import fingerprints
from penstock.changes.steps import Truncation
from penstock.destinations.base import Tasks
from penstock.destinations.delta import tasks as table_tasks
from penstock.destinations.delta.actions import Add, VectorDescriptor
from penstock.destinations.delta.files import LiveFile
from penstock.destinations.delta.layout import Mode, TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.tasks import Draft, TableWork, apply_changes, memory_of, slices
from penstock.destinations.delta.vectors import read_vector, vector_file, write_vectors
from penstock.destinations.delta.write import LostRows, WrittenFiles
from penstock.destinations.refusals import unexpected
from penstock.errors import PenstockError
from penstock.observe.reports import may_end_here

logger = logging.getLogger(__name__)

GROUP_BYTES = table_tasks.SLICE_BYTES // 2
"""The least memory of a group: each one searches all files of the table, whatever its size."""
NOTES_FOLDER = "_penstock/split"
"""Where tasks leave notes for those that unite the groups. Vacuum removes what a crash leaves, as it does indexes."""
DRIVER_BYTES = 16 << 20
"""The most memory of the keys of groups that the driver unites itself. A job takes longer to start than this takes."""
PATIENCE = 16
"""How many large parts of a table are not split after one whose groups depended on each other."""
_CHECKED_KEYS = 4_000_000
"""Keys that a task compares at once; eight bytes each."""
_KEY, _NEEDED = "key", "needed"


@dataclass(frozen=True, slots=True)
class LostPart:
    """The rows of a file that are dead after a group."""

    file: LiveFile
    row_count: int
    """Rows in the whole file."""
    dead: VectorDescriptor
    """In `NOTES_FOLDER`."""


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """What the task of a group wrote."""

    added: tuple[Add, ...]
    lost: tuple[LostPart, ...]
    keys: tuple[str, ...]
    """Files in `NOTES_FOLDER` with the keys that its slices touched, in order."""
    has_needs: bool
    """True if it needs rows that some of these keys had before."""
    key_bytes: int = 0
    """The memory of these keys."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def notes(self) -> set[str]:
        """All files in `NOTES_FOLDER`."""
        vectors = (vector_file(part.dead) for part in self.lost)
        return {*self.keys, *(name for name in vectors if name is not None)}

    def part(self, paths: Container[str]) -> GroupFiles:
        """Return what concerns these files of the table."""
        return replace(
            self,
            added=tuple(add for add in self.added if add.path in paths),
            lost=tuple(part for part in self.lost if part.file.path in paths),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive changes of a part, for a task."""

    work: TableWork


@dataclass(frozen=True, slots=True)
class Dependence:
    """The question whether a group needs rows that earlier groups have touched, for a task."""

    table: str
    storage: Storage
    keys: tuple[str, ...]
    """Those of the group; files, as in `GroupFiles`."""
    earlier: tuple[str, ...]
    is_small: bool
    """True if the driver may answer it."""


@dataclass(frozen=True, slots=True)
class Union:
    """Groups to unite, for a task, and changes to apply after them."""

    work: TableWork
    """Its steps are the changes that come after the groups; its files are those of the table before the batch."""
    groups: tuple[GroupFiles, ...]
    """With some of the table's files; with all of them if there are changes to apply."""
    is_small: bool = False
    """True if the driver may unite them."""


@dataclass(frozen=True, slots=True)
class Split:
    """A part that is divided into groups."""

    work: TableWork
    groups: tuple[Group, ...]
    emptied: tuple[str, ...] = ()
    """The table's files, if a truncate has emptied them."""


_Item = TypeVar("_Item", Dependence, Union)
_Result = TypeVar("_Result")


class Splitter:
    """Writes the parts of a batch, and splits those that are large. Calls for one table never overlap."""

    def __init__(self) -> None:
        self._unsplit: dict[int, int] = {}
        """How many large parts of a table are not split from now on."""

    def write(
        self, tasks: Tasks, works: Sequence[TableWork], *, description: str
    ) -> list[WrittenFiles | PenstockError]:
        """Write each table's part of a batch; return, in order, what was written, or the error that stops the table."""
        splits = [self._split(tasks, work) for work in works]
        if not any(splits):
            return tasks.run(works, apply_changes, description=description)
        items = [(work,) if found is None else found.groups for work, found in zip(works, splits, strict=True)]
        outcomes = iter(tasks.run([each for some in items for each in some], apply_item, description=description))
        grouped = [[next(outcomes) for _ in some] for some in items]
        unions = {
            number: _Uniting(found, groups)
            for number, (found, each) in enumerate(zip(splits, grouped, strict=True))
            if found is not None and (groups := _leading_groups(each))
        }
        try:
            self._find_dependent(tasks, list(unions.values()))
            self._unite(tasks, list(unions.values()))
        finally:
            for work, each in zip(works, grouped, strict=True):
                notes = {name for outcome in each if isinstance(outcome, GroupFiles) for name in outcome.notes}
                notes_of(work.storage).delete(sorted(notes))
        return [unions[number].result if number in unions else _together(each) for number, each in enumerate(grouped)]

    def _split(self, tasks: Tasks, work: TableWork) -> Split | None:
        if not is_large(work.steps):
            return None
        left = self._unsplit.pop(work.table_id, 0)
        if left > 1:
            self._unsplit[work.table_id] = left - 1
        return None if left else split(work, tasks.parallel)

    def _find_dependent(self, tasks: Tasks, unions: Sequence[_Uniting]) -> None:
        """Let go of groups that depend on earlier ones, and of those after them."""
        asked = [
            (union, number) for union in unions for number, each in enumerate(union.groups) if number and each.has_needs
        ]
        questions = [union.question(number) for union, number in asked]
        description = _describe("compare", [question.table for question in questions])
        answers = _run(tasks, questions, is_dependent, description=description)
        for (union, number), answer in zip(asked, answers, strict=True):
            if isinstance(answer, PenstockError):
                union.outcomes.append(answer)
            elif answer:
                union.groups = union.groups[:number]
        for union in unions:
            if len(union.groups) < len(union.split.groups):
                self._unsplit[union.split.work.table_id] = PATIENCE

    def _unite(self, tasks: Tasks, unions: Sequence[_Uniting]) -> None:
        items = [(union, item) for union in unions if not union.outcomes for item in union.items(tasks.parallel)]
        description = _describe("unite", [item.work.table for _, item in items])
        outcomes = _run(tasks, [item for _, item in items], unite, description=description)
        for (union, _), outcome in zip(items, outcomes, strict=True):
            union.outcomes.append(outcome)


def _run(
    tasks: Tasks, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str
) -> list[_Result]:
    """Run the small items here, and one job over the others; return the results in order."""
    large = [item for item in items if not item.is_small]
    outcomes = iter(tasks.run(large, function, description=description) if large else [])
    return [function(item) if item.is_small else next(outcomes) for item in items]


def _leading_groups(outcomes: Sequence[WrittenFiles | GroupFiles | PenstockError]) -> list[GroupFiles]:
    """Return the groups before the first that failed: it may have needed rows of those before it."""
    groups: list[GroupFiles] = []
    for outcome in outcomes:
        if not isinstance(outcome, GroupFiles):
            break
        groups.append(outcome)
    return groups


def _together(outcomes: Sequence[WrittenFiles | GroupFiles | PenstockError]) -> WrittenFiles | PenstockError:
    """Return the first error, or all that was written."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, PenstockError)]
    return errors[0] if errors else WrittenFiles.all_of([each for each in outcomes if isinstance(each, WrittenFiles)])


def _describe(verb: str, tables: Sequence[str]) -> str:
    return f"{verb} groups of {', '.join(sorted(set(tables)))}"


@dataclass(slots=True)
class _Uniting:
    """A part while its groups are united."""

    split: Split
    groups: list[GroupFiles]
    """Those that stay as they are; they come before all others."""
    outcomes: list[WrittenFiles | PenstockError] = field(default_factory=list[WrittenFiles | PenstockError])

    def question(self, number: int) -> Dependence:
        work = self.split.work
        earlier = tuple(name for group in self.groups[:number] for name in group.keys)
        return Dependence(work.table, work.storage, self.groups[number].keys, earlier, self._is_small)

    @property
    def _is_small(self) -> bool:
        return sum(group.key_bytes for group in self.groups) <= DRIVER_BYTES

    def items(self, tasks: int) -> list[Union]:
        """Return the work for this number of tasks."""
        groups = tuple(self.groups)
        left = [group.work for group in self.split.groups[len(groups) :]]
        work = replace(self.split.work, steps=tuple(step for each in left for step in each.steps), stages=())
        if left:
            logger.info("groups depend on each other, applied in order table=%s groups=%d", work.table, len(left))
            return [Union(work, groups)]
        if self._is_small and work.deletion_vectors:
            return [Union(work, groups, is_small=True)]
        paths = {add.path for group in groups for add in group.added}
        paths |= {part.file.path for group in groups for part in group.lost}
        shares = [set(sorted(paths)[number::tasks]) for number in range(tasks)]
        return [Union(work, tuple(group.part(share) for group in groups)) for share in shares if share]

    @property
    def result(self) -> WrittenFiles | PenstockError:
        times = [WrittenFiles(seconds=dict(group.seconds)) for group in self.groups]
        written = _together([*self.outcomes, *times])
        if isinstance(written, PenstockError):
            return written
        return replace(written, removed=(*written.removed, *self.split.emptied))


def is_large(steps: Sequence[Rows | Truncation]) -> bool:
    """Return True if changes need more than one slice."""
    segments = [segment for step in steps if isinstance(step, Rows) for segment in step.segments]
    rows, size = sum(each.rows for each in segments), sum(map(memory_of, segments))
    return rows > table_tasks.SLICE_ROWS or size > table_tasks.SLICE_BYTES


def split(work: TableWork, tasks: int) -> Split | None:
    """Divide a part into groups for this number of tasks; None if one task has to apply it."""
    steps, stages, emptied = work.steps, work.stages, ()
    truncates = [number for number, step in enumerate(steps) if isinstance(step, Truncation)]
    if truncates and work.layout.mode is Mode.SOFT_DELETE:
        # Which rows a truncate finds depends on all changes before it.
        return None
    if truncates and work.layout.mode is Mode.MIRROR:
        # Rows before a truncate do not matter, neither in the lake nor in the batch.
        first = truncates[-1] + 1
        steps, stages, emptied = steps[first:], stages[first:], tuple(file.path for file in work.files)
        work = replace(work, steps=steps, stages=stages, files=())
    segments = [segment for step in steps if isinstance(step, Rows) for segment in step.segments]
    size = sum(map(memory_of, segments))
    count = min(tasks, len(segments), max(2, size // GROUP_BYTES))
    if count < 2 or not is_large(steps):
        return None
    groups = tuple(Group(replace(work, steps=some, stages=at)) for some, at in _groups(steps, stages, size / count))
    return Split(work, groups, emptied)


def _groups(
    steps: Sequence[Rows | Truncation], stages: Sequence[TableLayout], size: float
) -> Iterator[tuple[tuple[Rows | Truncation, ...], tuple[TableLayout, ...]]]:
    """Yield consecutive changes of about this size, with the stages of their steps."""
    some: list[tuple[Rows | Truncation, TableLayout]] = []
    total, border = 0, size
    for step, stage in zip(steps, stages, strict=True):
        if isinstance(step, Truncation):
            some.append((step, stage))
            continue
        first = 0
        for number, segment in enumerate(step.segments):
            # A segment belongs where most of it is.
            if total + memory_of(segment) / 2 > border and (some or number > first):
                some += [(replace(step, segments=step.segments[first:number]), stage)] if number > first else []
                yield tuple(each for each, _ in some), tuple(each for _, each in some)
                some, first = [], number
                border += size
            total += memory_of(segment)
        some.append((replace(step, segments=step.segments[first:]), stage))
    yield tuple(each for each, _ in some), tuple(each for _, each in some)


def apply_item(item: TableWork | Group) -> WrittenFiles | GroupFiles | PenstockError:
    """Apply a part or a group, in a task; errors are values."""
    if isinstance(item, TableWork):
        return apply_changes(item)
    if item.work.layout.mode is Mode.HISTORY:
        return apply_changes(item.work)
    try:
        return _apply_group(item.work)
    except Exception as error:
        return unexpected(item.work.table, error)


def _apply_group(work: TableWork) -> GroupFiles:
    parts = list(slices(work.steps))
    draft = Draft(work, is_large=len(parts) > 1)
    with _taking_notes(work.storage) as notes:
        for part in parts:
            may_end_here()
            assert isinstance(part, list)
            draft.apply(part, notes.add)
        added, lost = draft.unfinished
        vectors = write_vectors(notes_of(work.storage), [each.dead for each in lost])
    lost_parts = tuple(LostPart(each.file, each.row_count, vector) for each, vector in zip(lost, vectors, strict=True))
    return GroupFiles(added, lost_parts, tuple(notes.names), notes.has_needs, notes.key_bytes, draft.seconds)


@dataclass(slots=True)
class _Notes:
    """Writes the keys that slices touch."""

    storage: Storage
    names: list[str] = field(default_factory=list[str])
    has_needs: bool = False
    key_bytes: int = 0

    def add(self, net: NetChanges) -> None:
        if not len(net.touched):
            return
        if net.limits is None:
            keys, needed = net.touched, np.zeros(len(net.touched), np.bool_)
            needed[net.wanted()[0]] = True
        else:
            # Of several equal rows some are removed: that no other group removes the same ones is all that matters.
            keys, needed = pa.array(fingerprints(net.touched)), np.ones(len(net.touched), np.bool_)
        self.has_needs = self.has_needs or bool(needed.any())
        self.key_bytes += keys.nbytes
        batch = pa.record_batch({_KEY: keys, _NEEDED: pa.array(needed)})
        name = f"{uuid.uuid4()}.keys"
        with self.storage.create(name) as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self.names.append(name)


@contextmanager
def _taking_notes(storage: Storage) -> Iterator[_Notes]:
    """Delete the notes of a group that fails: the driver never learns their names."""
    notes = _Notes(notes_of(storage))
    try:
        yield notes
    except BaseException:
        notes.storage.delete(notes.names)
        raise


def notes_of(storage: Storage) -> Storage:
    """Return where the tasks of a table leave their notes."""
    return storage.child(NOTES_FOLDER)


def _read_notes(storage: Storage, name: str) -> pa.Table:
    with notes_of(storage).open(name) as source:
        return pa.ipc.open_stream(source).read_all().combine_chunks()


def _keys(notes: pa.Table) -> pa.Array:
    return notes.column(_KEY).chunk(0)


def is_dependent(item: Dependence) -> bool | PenstockError:
    """Return whether a group needs a row that earlier groups have touched, in a task; errors are values.

    Different keys with equal fingerprints count as the same one: then a group is applied again in vain.
    """
    try:
        return any(_is_touched(item, needed) for needed in _needed(item))
    except Exception as error:
        return unexpected(item.table, error)


def _needed(item: Dependence) -> Iterator[NDArray[np.int64]]:
    """Yield the fingerprints of the keys whose rows a group needs, many at a time."""
    some: list[NDArray[np.int64]] = []
    for name in item.keys:
        notes = _read_notes(item.storage, name)
        some.append(fingerprints(_keys(notes).filter(notes.column(_NEEDED).chunk(0))))
        if sum(map(len, some)) >= _CHECKED_KEYS:
            yield np.concatenate(some)
            some = []
    if some:
        yield np.concatenate(some)


def _is_touched(item: Dependence, needed: NDArray[np.int64]) -> bool:
    for name in item.earlier if len(needed) else ():
        may_end_here()
        if np.isin(fingerprints(_keys(_read_notes(item.storage, name))), needed).any():
            return True
    return False


def unite(item: Union) -> WrittenFiles | PenstockError:
    """Unite groups, and apply what comes after them, in a task; errors are values."""
    try:
        return _unite(item)
    except Exception as error:
        return unexpected(item.work.table, error)


def _unite(item: Union) -> WrittenFiles:
    work = item.work
    # The groups have searched the files of the table.
    draft = Draft(replace(work, files=()), is_large=True)
    storage = notes_of(work.storage)
    for number, group in enumerate(item.groups):
        for name in group.keys if number and work.layout.key else ():
            may_end_here()
            draft.remove(_keys(_read_notes(work.storage, name)))
        lost = [LostRows(part.file, part.row_count, read_vector(storage, part.dead), 0) for part in group.lost]
        draft.take(group.added, lost)
    if work.steps:
        draft.search(work.files)
        for part in slices(work.steps):
            may_end_here()
            assert isinstance(part, list)
            draft.apply(part)
    return draft.written()
