"""Keys of rows: equal exactly if all cells are the same."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.changes.keys import row_keys


@pytest.mark.trap(31)
@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(4, pa.list_(pa.int64())),
        pa.nulls(4, pa.string()),
        pa.nulls(4, pa.date32()),
        pa.nulls(4, pa.decimal128(5, 2)),
        pa.nulls(4, pa.timestamp("us", "UTC")),
        pa.nulls(4, pa.time64("us")),
        pa.nulls(4, pa.float64()),
    ],
    ids=lambda column: str(column.type),
)
def test_cells_that_their_type_cannot_hold_are_told_apart_by_their_texts(column: pa.Array) -> None:
    keys = row_keys([pa.array([1, 1, 1, 1]), column], [None, pa.array([None, "", "a", "b"])]).to_pylist()
    assert len(set(keys)) == 4
    assert row_keys([pa.array([1]), column.slice(2, 1)], [None, pa.array(["a"])]).to_pylist() == keys[2:3]
    # Others of the batch do not matter.
    assert row_keys([pa.array([1]), column.slice(0, 1)]).to_pylist() == keys[:1]


def test_an_empty_list_is_not_null_and_lists_have_borders() -> None:
    lists = pa.array([None, [], [None], ["ab"], ["a", "b"], ["", "ab"]], pa.list_(pa.string()))
    assert len(set(row_keys([lists]).to_pylist())) == 6
    assert row_keys([lists.slice(3)]).to_pylist() == row_keys([lists]).to_pylist()[3:]
