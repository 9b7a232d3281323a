"""A table that random transactions change, in batches cut anywhere, and a model of its rows: for tests."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st

from penstock.changes.batch import EventBatch
from penstock.destinations.base import Tasks
from penstock.destinations.batch_events import batch_events
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import FOLDERS
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from tests.unit.changes.random_changes import RandomTable
from tests.unit.destinations.delta.reading import read_rows, read_table, replay_history

OPTIONS: list[dict[str, Any]] = [
    {},
    {"deletion_vectors": False},
    {"mode": "soft_delete"},
    {"mode": "soft_delete", "deletion_vectors": False},
    {"mode": "history"},
]


def frozen(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


class Model:
    """Rows by changes one by one, and those that are gone: the last state of a key, or each row of a table without."""

    def __init__(self, schema: TableSchema, rows: list[dict[str, Any]]) -> None:
        self.schema = schema
        self.mirror = MirrorTable(schema, rows)
        self.gone: list[dict[str, Any]] = []

    def apply(self, batch: EventBatch) -> None:
        for event in batch_events(batch):
            before = self.mirror.rows()
            self.mirror.apply(event)
            self._bury(before, self.mirror.rows())

    def _bury(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        if not self.schema.key:
            # An update to the same cells is a removal and a new row, too; it does not show here, nor in the lake.
            left = frozen(after)
            for row in before:
                if left[text := repr(sorted(row.items()))]:
                    left[text] -= 1
                else:
                    self.gone.append(row)
            return
        there = {self._key(row) for row in after}
        self.gone = [row for row in self.gone if self._key(row) not in there]
        self.gone += [row for row in before if self._key(row) not in there]

    def _key(self, row: dict[str, Any]) -> str:
        return repr([row[column.name] for column in self.schema.key])


class Follower:
    """A destination that is started again now and then, and gets batches twice."""

    def __init__(
        self, folder: Path, schema: TableSchema, options: dict[str, Any], random: Random, tasks: Tasks | None = None
    ) -> None:
        self.lake = folder / "lake"
        self.schema = schema
        self.tasks = tasks
        self.options = options
        self.random = random
        self.source = ScriptedSource(folder / "segments", segment_rows=random.choice([None, 3]))
        self.table = RandomTable(schema, random)
        first = self.table.fill(6)
        self.destination = self._open()
        self.destination.drop_table_for_copy(schema, "attempt-1")
        self.destination.write_table_rows(schema, self.source.copy(schema, first, ranges=2))
        self.model = Model(schema, first)
        self.cuts: list[Lsn] = [self.source.position]

    def step(self, transactions: list[int]) -> None:
        for changes in transactions:
            self.table.transact(self.source, changes)
        batch = self.source.batch()
        self.model.apply(batch)
        if self.random.random() < 0.3:
            self.destination = self._open()
        # Also together with what came before, which is in already.
        again = self.source.batch(self.random.choice(self.cuts), batch.end)
        for each in (batch, again) if self.random.random() < 0.5 else (again, batch):
            assert self.destination.write_events(each).result().tables == {}
        self.cuts.append(batch.end)
        if self.random.random() < 0.5:
            self.compact()
        self.check()

    def compact(self) -> None:
        log = DeltaLog(LocalStorage(self.lake / FOLDERS.table(self.schema)))
        compact(log, LocalTasks(), CompactionSettings(min_files=2, dead_fraction=0.1))

    def check(self) -> None:
        expected = self.model.mirror.rows()
        if self.options.get("mode") == "history":
            assert frozen(replay_history(self.lake, self.schema) or []) == frozen(expected)
            changes = read_table(self.lake, self.schema)
            assert changes is not None
            keys = list(zip(changes["_commit_lsn"].to_pylist(), changes["_ordinal"].to_pylist(), strict=True))
            keys = [key for key in keys if key[1] >= 0]
            assert len(keys) == len(set(keys)), "a change is there twice"
            return
        assert frozen(read_rows(self.lake, self.schema) or []) == frozen(expected)
        if self.options.get("mode") == "soft_delete":
            everything = frozen(read_rows(self.lake, self.schema, deleted=True) or [])
            if self.schema.key:
                assert everything == frozen([*expected, *self.model.gone])
            else:
                assert not frozen([*expected, *self.model.gone]) - everything

    def _open(self) -> DeltaDestination:
        destination = DeltaDestination(self.lake, maintenance=False, **self.options)
        destination.startup(make_context(tasks=self.tasks))
        return destination


def follow(
    seed: int, schema: TableSchema, options: dict[str, Any], plan: list[list[int]], tasks: Tasks | None = None
) -> None:
    """Compare readers with the model after each list of transactions, which are numbers of changes."""
    with tempfile.TemporaryDirectory() as folder:
        follower = Follower(Path(folder), schema, options, Random(seed), tasks)
        follower.check()
        for transactions in plan:
            follower.step(transactions)


PLANS = st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=4), min_size=1, max_size=4)
