"""Segments become the columns of a stream's data frame, also those from before a change of the schema."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.segment import pack_unsent, segment_layout
from penstock.changes.steps import Truncation
from penstock.datasource.rows import Envelope, TableForm, shape_truncation
from penstock.errors import SourceError
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.values import TypeSettings

np = pytest.importorskip("numpy")

INT, TEXT, FLOAT = (PostgresType(oid, name) for oid, name in ((23, "int4"), (25, "text"), (701, "float8")))
AT = datetime(2026, 1, 2, tzinfo=UTC)
BEFORE = TableSchema(
    1, "public", "t", (Column("id", 1, INT, identity=True), Column("a", 2, INT), Column("gone", 3, TEXT))
)
AFTER = TableSchema(
    1, "public", "t", (Column("id", 1, INT, identity=True), Column("c", 2, TEXT), Column("new", 4, TEXT))
)


def segment(schema: TableSchema, types: TypeSettings, **columns: list[Any]) -> pa.Table:
    """Two changes: an insert, and an update that omits the second column."""
    layout = segment_layout(schema, types)
    omitted = np.zeros((2, len(schema.columns)), np.bool_)
    omitted[1, 1] = True
    cells: dict[str, Any] = {
        "_op": [1, 2],
        "_commit_lsn": [10, 20],
        "_ordinal": [0, 1],
        "_commit_time": [AT, AT],
        "_xid": [5, 6],
        "_unchanged": pack_unsent(omitted),
        "_old": [None, {"id": columns["id"][0]}],
    }
    given = cells | columns
    return pa.table([pa.array(given[field.name], field.type) for field in layout.arrow_schema], layout.arrow_schema)


def test_the_columns_of_the_table_come_first_and_omitted_values_are_named() -> None:
    form = TableForm(BEFORE, TypeSettings())
    rows = form.shape(segment(BEFORE, form.types, id=[1, 2], a=[7, None], gone=["x", None]), BEFORE)
    assert rows.column_names[:4] == ["id", "a", "gone", "_op"]
    first, second = rows.select(["id", "a", "gone", "_op", "_unchanged", "_old"]).to_pylist()
    assert first == {"id": 1, "a": 7, "gone": "x", "_op": "insert", "_unchanged": [], "_old": None}
    assert second == {"id": 2, "a": None, "gone": None, "_op": "update", "_unchanged": ["a"], "_old": {"id": 1}}


def test_rows_from_before_a_change_of_the_schema_fit_by_the_numbers_of_columns() -> None:
    form = TableForm(AFTER, TypeSettings())
    rows = form.shape(segment(BEFORE, form.types, id=[1, 2], a=[7, None], gone=["x", None]), BEFORE)
    assert rows.select(["id", "c", "new", "_unchanged"]).to_pylist() == [
        {"id": 1, "c": "7", "new": None, "_unchanged": ["new"]},
        {"id": 2, "c": None, "new": None, "_unchanged": ["c", "new"]},
    ]


def test_values_that_do_not_fit_into_a_new_type_are_refused_without_being_shown() -> None:
    form = TableForm(BEFORE, TypeSettings())
    rows = segment(AFTER, form.types, id=[1, 2], c=["secret", None], new=[None, None])
    with pytest.raises(SourceError, match="the type of a was changed") as error:
        form.shape(rows, AFTER)
    assert "secret" not in str(error.value)


def test_what_changed_is_named() -> None:
    form = TableForm(BEFORE, TypeSettings())
    assert form.differences(BEFORE) == []
    assert form.differences(AFTER) == [
        *("a was renamed to c", "gone was dropped", "new was added", "the type of c was changed")
    ]


def test_an_envelope_has_what_was_sent_as_text() -> None:
    form = Envelope(TypeSettings(as_text=True))
    rows = form.shape(segment(BEFORE, form.types, id=["1", "2"], a=["7", None], gone=[None, "y"]), BEFORE)
    first, second = rows.select(["_table", "_op", "_key", "_row", "_old", "_unchanged"]).to_pylist()
    assert first == {
        "_table": "public.t",
        "_op": "insert",
        "_key": [("id", "1")],
        "_row": [("id", "1"), ("a", "7"), ("gone", None)],
        "_old": None,
        "_unchanged": [],
    }
    assert second["_row"] == [("id", "2"), ("gone", "y")], "what was omitted is not NULL"
    assert (second["_old"], second["_unchanged"]) == ([("id", "1")], ["a"])


@pytest.mark.parametrize("form", [TableForm(BEFORE, TypeSettings()), Envelope(TypeSettings(as_text=True))])
def test_a_truncate_is_a_row_without_values(form: Any) -> None:
    step = Truncation(1, "public.t", OrderKey(Lsn(30), 2), 1_000_000, 7, cascade=False, restart_identity=False)
    [batch] = shape_truncation(step, form)
    [row] = batch.to_pylist()
    assert (row["_op"], row["_commit_lsn"], row["_ordinal"], row["_xid"]) == ("truncate", 30, 2, 7)
    assert not any(row.get(name) for name in ("id", "a", "gone", "_key", "_row", "_old"))
