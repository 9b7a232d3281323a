"""Cells that their type cannot hold, under `out_of_range = "error"`: whoever reads them is told, and nobody else."""

from __future__ import annotations

import pickle
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.changes.batch import EventBatch, Rows, build_batch
from penstock.changes.segment import (
    COMMIT_LSN,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Settled,
    count_unrepresentable,
    segment_layout,
    settle_rows,
)
from penstock.changes.steps import CellsChanged, Segment
from penstock.destinations.batch_events import batch_events
from penstock.errors import ValueOutOfRange
from penstock.lsn import Lsn, OrderKey
from penstock.observe.reports import listening
from penstock.schema import Column, PostgresType, TableSchema
from penstock.spool import Entry
from penstock.values import OutOfRange

SCHEMA = TableSchema(1, "public", "t", (Column("at", 1, PostgresType(1082, "date")),))
GOOD, BAD = Lsn(100), Lsn(200)


def batch(
    folder: Path, *, begin: int = 0, end: int = 300, refused: tuple[str, ...] = ("at",), settled: Settled = ()
) -> EventBatch:
    """A segment with a good row, and one that a date cannot hold."""
    rows = [
        {"_op": 1, "_commit_lsn": at, "_ordinal": 0, "_commit_time": 0, "_xid": 1, "at": None, UNREPRESENTABLE: kept}
        for at, kept in ((GOOD, None), (BAD, [("at", "infinity")]))
    ]
    fields = segment_layout(SCHEMA).arrow_schema.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
    path = folder / "s.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=fields), path)
    segment = Segment(1, "public.t", "v", str(path), 2, 100, OrderKey(GOOD, 0), OrderKey(BAD, 0), unrepresentable=1)
    return build_batch(
        [Entry(1, Lsn(0), Lsn(300), 2, 1, 1, (segment,))],
        begin=Lsn(begin),
        end=Lsn(end),
        positions={1: Lsn(begin)},
        schemas={1: SCHEMA},
        schema_of=lambda table_id, version: SCHEMA,
        refused=lambda schema: refused,
        settled=lambda schema: settled,
    )


def rows_of(found: EventBatch) -> Rows:
    (step,) = found.tables[0].steps
    assert isinstance(step, Rows)
    return step


@pytest.mark.trap(31, 33)
@pytest.mark.parametrize("columns", [None, ["at"], [COMMIT_LSN]])
def test_reading_a_refused_cell_raises_and_names_the_column(tmp_path, columns):
    segment = pickle.loads(pickle.dumps(rows_of(batch(tmp_path)))).segments[0]
    with pytest.raises(ValueOutOfRange, match="the types of these columns cannot hold: at") as raised:
        segment.read(columns)
    assert "infinity" not in f"{raised.value} {raised.value.hint} {raised.value.facts}"


def test_rows_that_are_not_meant_are_not_refused(tmp_path):
    (before,) = rows_of(batch(tmp_path, end=150)).segments
    assert before.read([COMMIT_LSN]).to_pylist() == [{COMMIT_LSN: GOOD}]
    assert before.read(["at"]).column_names == ["at"]


@pytest.mark.parametrize("refused", [(), ("other",)])
def test_other_policies_and_columns_refuse_nothing(tmp_path, refused):
    (segment,) = rows_of(batch(tmp_path, refused=refused)).segments
    assert segment.read().num_rows == 2


def test_whoever_reads_row_by_row_hears_of_which_table_it_is(tmp_path):
    with pytest.raises(ValueOutOfRange) as raised:
        list(batch_events(batch(tmp_path)))
    assert raised.value.table_id == 1


@pytest.mark.parametrize(
    ("policy", "value", "left"), [(OutOfRange.NULL, None, 0), (OutOfRange.CLAMP, date(9999, 12, 31), 0)]
)
@pytest.mark.parametrize("columns", [None, ["at"]])
def test_values_that_a_policy_changes_are_changed_when_they_are_read_and_counted(
    tmp_path, policy, value, left, columns
):
    found = batch(tmp_path, refused=(), settled=(("at", policy),))
    (segment,) = pickle.loads(pickle.dumps(rows_of(found))).segments
    reports: list[object] = []
    with listening(reports.append):
        rows = segment.read(columns)
    assert rows.column("at").to_pylist() == [None, value]
    assert count_unrepresentable(rows) == left
    assert reports == [CellsChanged(1, segment.path, 1)]


def test_the_old_row_is_changed_too_and_does_not_count():
    old = pa.array([{"at": None}], pa.struct([pa.field("at", pa.date32())]))
    texts = pa.array([[("_old.at", "-infinity"), ("other", "x")]], UNREPRESENTABLE_TYPE)
    rows, changed = settle_rows(
        pa.table({"at": pa.nulls(1, pa.date32()), "_old": old, UNREPRESENTABLE: texts}), (("at", OutOfRange.CLAMP),)
    )
    assert rows.column("_old").to_pylist() == [{"at": date(1, 1, 1)}]
    assert rows.column(UNREPRESENTABLE).to_pylist() == [[("other", "x")]]
    assert changed == 0
