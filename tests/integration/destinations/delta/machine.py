"""Random lives of a table: rows come and go, copies begin anew, and maintenance runs at any moment.

The model is the set of ids: a row follows from its id. After every step our own reader must see it, whether it has
followed the log or opens it afresh; at the end, and now and then before, other readers must.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.destinations.delta.files import write_data_file
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.cleanup import Vacuum, clean_log, vacuum, write_checkpoint
from penstock.destinations.delta.maintenance.compaction import (
    CompactionSettings,
    Rewritten,
    commit_rewritten,
    plan_compaction,
    rewrite_group,
)
from penstock.destinations.delta.maintenance.pins import Pin, WritesInFlight, pin_version, release_pin
from penstock.destinations.delta.storage import LocalStorage
from penstock.testing.destinations import LocalTasks
from tests.integration.destinations.delta.readers import read_with_delta_rs, read_with_polars
from tests.unit.destinations.delta.lake import LakeTable, make_rows

_CLOCK_STEP = 0.05
"""Files get their time from a clock that moves in steps."""

Judge = Callable[[Path, int | None], pa.Table]


class LakeMachine(RuleBasedStateMachine):
    """`judge` reads a table at a version; None is the newest."""

    judge: ClassVar[Judge]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-lake-"))
        self.table = LakeTable(LocalStorage(self.folder / "items"))
        self.rows: set[int] = set()
        self.next_id = 0
        self.attempts = 1
        self.writes = WritesInFlight()
        self.compacting: tuple[list[Rewritten], ExitStack] | None = None
        self.pinned: list[tuple[Pin, set[int]]] = []

    @initialize(count=st.integers(0, 60))
    def create(self, count: int) -> None:
        self.table.create(self._new_ids(count))

    @rule(count=st.integers(1, 40))
    def append(self, count: int) -> None:
        self.table.append(self._new_ids(count))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), most=st.booleans())
    def delete(self, data: st.DataObject, most: bool) -> None:
        chosen = self._choose(data, most)
        self.table.delete(chosen)
        self.rows -= chosen

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        """The old rows die and the new ones come in the same commit."""
        chosen = self._choose(data, False)
        added = write_data_file(self.table.storage, make_rows(sorted(chosen)))
        self.table.write(lambda snapshot: [*self.table.delete_actions(snapshot, sorted(chosen)), added])

    @rule(count=st.integers(0, 30))
    def copy(self, count: int) -> None:
        self.attempts += 1
        self.rows = set()
        self.table.copy(self._new_ids(count), attempt=str(self.attempts))

    @precondition(lambda self: self.compacting is None)
    @rule(min_files=st.sampled_from([2, 3]))
    def begin_compaction(self, min_files: int) -> None:
        settings = CompactionSettings(min_files=min_files, dead_fraction=0.1)
        stack = ExitStack()
        stack.enter_context(self.writes.writing())
        groups = plan_compaction(self.table.storage, self.table.snapshot, settings)
        self.compacting = LocalTasks().run(groups, rewrite_group, description="compact"), stack

    @precondition(lambda self: self.compacting is not None)
    @rule()
    def finish_compaction(self) -> None:
        assert self.compacting is not None
        rewritten, stack = self.compacting
        commit_rewritten(DeltaLog(self.table.storage), rewritten)
        stack.close()
        self.compacting = None

    @rule()
    def checkpoint(self) -> None:
        write_checkpoint(self.table.storage)

    @rule()
    def clean_log(self) -> None:
        clean_log(self.table.storage, older_than_seconds=-1)

    @rule()
    def vacuum(self) -> None:
        vacuum(Vacuum(self.table.storage, -1, self.writes.oldest() - _CLOCK_STEP))

    @precondition(lambda self: len(self.pinned) < 2)
    @rule()
    def pin(self) -> None:
        pin = pin_version(self.table.storage, self.table.snapshot.version, seconds=3600, reason="machine")
        self.pinned.append((pin, set(self.rows)))

    @precondition(lambda self: self.pinned)
    @rule()
    def release(self) -> None:
        release_pin(self.table.storage, self.pinned.pop(0)[0])

    @rule()
    def read_with_others(self) -> None:
        for rows in (read_with_polars(self.folder / "items"), read_with_delta_rs(self.folder / "items")):
            assert rows.equals(make_rows(sorted(self.rows)))

    @invariant()
    def our_reader_agrees(self) -> None:
        if self.table.log.snapshot is None:
            return
        assert self.table.ids() == sorted(self.rows)
        fresh = DeltaLog(self.table.storage)
        assert fresh.refresh() == self.table.log.snapshot
        for pin, rows in self.pinned:
            assert self.table.ids(fresh.read_at(pin.version)) == sorted(rows)

    def teardown(self) -> None:
        try:
            if self.table.log.snapshot is not None:
                self.read_with_others()
                judge = type(self).judge
                assert judge(self.folder / "items", None).equals(make_rows(sorted(self.rows)))
                for pin, rows in self.pinned:
                    assert judge(self.folder / "items", pin.version).equals(make_rows(sorted(rows)))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _new_ids(self, count: int) -> list[int]:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        self.rows.update(ids)
        return ids

    def _choose(self, data: st.DataObject, most: bool) -> set[int]:
        chosen: set[int] = data.draw(st.sets(st.sampled_from(sorted(self.rows)), min_size=1, max_size=20))
        return self.rows - chosen if most and len(self.rows) > len(chosen) else chosen


def machine_with(judge: Judge) -> type[Any]:
    """The machine with a judge; Hypothesis makes the instances itself."""
    return type("JudgedLakeMachine", (LakeMachine,), {"judge": staticmethod(judge)})
