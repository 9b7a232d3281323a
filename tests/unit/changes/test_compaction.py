"""The net effect of a batch against the same changes applied one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.batch import Rows
from penstock.changes.columns import read_changes
from penstock.changes.compaction import LIVE, KnownRows, compact, keys_of
from penstock.changes.events import Unchanged
from penstock.changes.segment import field_names, join_texts, split_texts
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import batch_events
from penstock.destinations.mirror import MirrorTable
from penstock.schema import TableSchema
from penstock.testing.destinations.script import ScriptedSource
from tests.support.examples import examples
from tests.unit.changes.random_changes import KEYED, SCHEMAS, RandomTable


class Lake:
    """Rows in memory, changed by net effects only."""

    def __init__(self, schema: TableSchema, rows: pa.Table) -> None:
        self.schema = schema
        self.names = list(field_names(schema))
        self.rows = rows.select(self.names)
        self.texts = dict(split_texts(rows))

    def apply(self, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, Truncation):
                self.rows, self.texts = self.rows.slice(0, 0), {}
            elif isinstance(step, Rows):
                self._apply(step)

    def _apply(self, step: Rows) -> None:
        key = [name for name, column in zip(self.names, self.schema.columns, strict=True) if column in self.schema.key]
        net = compact(read_changes([step], self.schema), key)
        keys = keys_of(self.rows, self.texts, key or self.names, whole=not key).to_pylist()
        touched = net.touched.to_pylist()
        places: dict[Any, list[int]] = {}
        for row, each in enumerate(keys):
            places.setdefault(each, []).append(row)
        gone = []
        for number, each in enumerate(touched):
            found = places.get(each, [])
            if net.limits is not None:
                assert len(found) >= net.limits[number], "a row to remove is not there"
                found = found[: net.limits[number]]
            gone += found
        codes, columns = net.wanted()
        known = [code for code in codes if places.get(touched[code])]
        at = pa.array([places[touched[code]][0] for code in known], pa.int64())
        before = KnownRows(
            np.array(known, np.int64),
            self.rows.select(columns).take(at),
            {name: texts.take(at) for name, texts in self.texts.items()},
        )
        net = net.located(before)
        assert net.incomplete()[1] == []
        rows, texts = net.rows()
        keep = np.setdiff1d(np.arange(self.rows.num_rows), gone)
        kept = self._with_map(self.rows, self.texts).take(pa.array(keep))
        merged = pa.concat_tables([kept, self._with_map(rows, texts)])
        self.rows, self.texts = merged.select(self.names), dict(split_texts(merged))

    def _with_map(self, rows: pa.Table, texts: Any) -> pa.Table:
        maps = join_texts(texts, rows.num_rows)
        maps = pa.nulls(rows.num_rows, pa.map_(pa.string(), pa.string())) if maps is None else maps
        return rows.append_column("_unrepresentable", maps)

    def as_pylist(self) -> list[Any]:
        maps = [dict(each or ()) for each in self._with_map(self.rows, self.texts)["_unrepresentable"].to_pylist()]
        cells = self.rows.to_pylist()
        return sorted((repr(sorted((row | texts).items())) for row, texts in zip(cells, maps, strict=True)))


def expected(mirror: MirrorTable) -> list[Any]:
    table = mirror.arrow()
    names = [name for name in table.column_names if name != "_unrepresentable"]
    texts = table["_unrepresentable"].to_pylist() if "_unrepresentable" in table.column_names else []
    texts = texts or [None] * table.num_rows
    cells = table.select(names).to_pylist()
    return sorted(repr(sorted((row | dict(each or ())).items())) for row, each in zip(cells, texts, strict=True))


@pytest.mark.trap(25, 26, 27, 29)
@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from(SCHEMAS),
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), max_size=4),
)
def test_a_batch_has_the_effect_of_its_changes(seed: int, schema: TableSchema, plan: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = ScriptedSource(Path(folder))
        table = RandomTable(schema, Random(seed))
        first = table.fill(6)
        copy = source.copy(schema, first)
        mirror = MirrorTable(schema, first)
        lake = Lake(schema, pa.Table.from_batches(list(copy.arrow()), schema=copy.arrow_schema))
        for batch_plan in plan:
            for changes in batch_plan:
                table.transact(source, changes)
            batch = source.batch()
            for event in batch_events(batch):
                mirror.apply(event)
            for changes in batch.tables:
                lake.apply(list(changes.steps))
            assert lake.as_pylist() == expected(mirror)


@pytest.mark.trap(25)
def test_a_long_chain_of_images_is_followed_to_its_end(tmp_path: Path) -> None:
    """A hot row with a large text that is never sent: by doubling, not step by step."""
    source = ScriptedSource(tmp_path)
    with source.transaction() as transaction:
        for number in range(3_000):
            row = {"id": number + 1, "note": Unchanged, "detail": "d", "due": None, "factor": 1.0, "numbers": None}
            transaction.update(KEYED, row, old={"id": number})
    (changes,) = source.batch().tables
    net = compact(read_changes([step for step in changes.steps if isinstance(step, Rows)], KEYED), ["id"])
    codes, columns = net.wanted()
    assert columns == ["note"]
    assert net.touched.take(pa.array(codes)).to_pylist() == [0]
    before = KnownRows(codes, pa.table({"note": ["large"]}))
    rows, _ = net.located(before).rows()
    assert rows.select(["id", "note"]).to_pylist() == [{"id": 3_000, "note": "large"}]


def test_a_new_row_without_its_cells_is_incomplete(tmp_path: Path) -> None:
    """A row filter's transition comes as an insert; there is no row from before."""
    source = ScriptedSource(tmp_path)
    with source.transaction() as transaction:
        transaction.insert(
            KEYED, {"id": 1, "note": Unchanged, "detail": "d", "due": None, "factor": None, "numbers": None}
        )
        transaction.insert(KEYED, {"id": 2, "note": "n", "detail": "d", "due": None, "factor": None, "numbers": None})
    (changes,) = source.batch().tables
    net = compact(read_changes([step for step in changes.steps if isinstance(step, Rows)], KEYED), ["id"])
    net = net.located(KnownRows(np.zeros(0, np.int64), pa.table({})))
    rows, columns = net.incomplete()
    assert (rows.tolist(), columns) == ([0], ["note"])
    complete = net.completed(KnownRows(rows, pa.table({"note": ["from the source"]})))
    assert complete.rows()[0]["note"].to_pylist() == ["from the source", "n"]


def test_deleted_rows_can_be_kept(tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path)
    row = {"id": 1, "note": "n", "detail": "d", "due": None, "factor": None, "numbers": None}
    with source.transaction() as transaction:
        transaction.insert(KEYED, row)
        transaction.update(KEYED, row | {"id": 2, "detail": "moved"}, old={"id": 1})
        transaction.delete(KEYED, {"id": 7})
        transaction.delete(KEYED, {"id": 8})
    (changes,) = source.batch().tables
    steps = [step for step in changes.steps if isinstance(step, Rows)]
    net = compact(read_changes(steps, KEYED), ["id"], keep_deleted=True)
    codes, columns = net.wanted()
    assert sorted(net.touched.take(pa.array(codes)).to_pylist()) == [7, 8]
    assert columns == ["id", "note", "detail", "due", "factor", "numbers"]
    seven = [code for code in codes if net.touched[int(code)].as_py() == 7]
    before = pa.table({name: [7 if name == "id" else None] for name in columns})
    net = net.located(KnownRows(np.array(seven), before))
    assert net.gone_at is not None
    rows, _ = net.rows()
    pairs = zip(rows.to_pylist(), net.gone_at, strict=True)
    seen = {cells["id"]: (cells["detail"], gone != LIVE) for cells, gone in pairs}
    assert seen == {1: ("d", True), 2: ("moved", False), 7: (None, True)}
