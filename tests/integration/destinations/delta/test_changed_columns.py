"""What readers see of a table before and after its columns and partitions changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import polars
import pyarrow as pa
import pytest

from penstock.destinations.naming import FOLDERS
from penstock.schema import Column
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, update, write
from tests.unit.destinations.delta.test_parts import between
from tests.unit.destinations.delta.test_rewrites import KEY, NOTE, REMARK, remark

Read = Callable[[], pa.Table]


def with_spark(session: Any, path: Path) -> Read:
    return lambda: session.read.format("delta").load(str(path)).toArrow()


def with_delta_rs(path: Path) -> Read:
    def read() -> pa.Table:
        query = deltalake.QueryBuilder().register("items", deltalake.DeltaTable(str(path)))
        return pa.table(query.execute("select * from items").read_all())

    return read


def with_polars(path: Path) -> Read:
    return lambda: polars.scan_delta(str(path)).collect().to_arrow()


def rows(read: Read, *names: str) -> dict[int, tuple[Any, ...]]:
    table = read()
    assert table.column_names == ["id", *names]
    return {row["id"]: tuple(row[name] for name in names) for row in table.to_pylist()}


@pytest.mark.parametrize("mapping", [False, True], ids=["files rewritten", "columns mapped"])
def test_readers_follow_columns_and_partitions(delta_spark: Any, tmp_path: Path, mapping: bool) -> None:
    lake, source = tmp_path / "lake", ScriptedSource(tmp_path / "segments")
    destination = copied(lake, source, column_mapping=mapping)
    path = lake / FOLDERS.table(ORDERS)
    readers = [with_spark(delta_spark, path), with_delta_rs(path), with_polars(path)]
    assert_durable(write(destination, update(source, 1, 2)))
    expected: dict[int, tuple[Any, ...]] = {number: ("new" if number in (1, 2) else "n", None) for number in range(10)}
    for read in readers:
        assert rows(read, "note", "due") == expected
    if mapping:
        # Polars cannot read the table any more, and says so.
        readers = readers[:2]

    with source.transaction() as transaction:
        transaction.insert(REMARK, remark(20, "renamed"))
        transaction.delete(REMARK, {"id": 3})
    assert_durable(write(destination, source.batch()))
    expected = {key: row for key, row in expected.items() if key != 3} | {20: ("renamed", None)}
    for read in readers:
        assert rows(read, "remark", "due") == expected
    if mapping:
        with pytest.raises(Exception, match="columnMapping"):
            with_polars(path)()

    destination.replace_part(REMARK, source.copy(REMARK, [remark(50, "part")]), [between(0, 8)], inside=True)
    expected = {key: row for key, row in expected.items() if key < 8} | {50: ("part", None)}
    for read in readers:
        assert rows(read, "remark", "due") == expected

    # A dropped column, and another one that gets its name.
    without = replace(ORDERS, columns=(KEY, replace(NOTE, name="remark")))
    again = replace(ORDERS, columns=(*without.columns, Column("due", 4, INT8)))
    with source.transaction() as transaction:
        transaction.insert(without, {"id": 60, "remark": "dropped"})
    assert_durable(write(destination, source.batch()))
    expected = {key: row[:1] for key, row in expected.items()} | {60: ("dropped",)}
    for read in readers:
        assert rows(read, "remark") == expected
    with source.transaction() as transaction:
        transaction.insert(again, {"id": 61, "remark": "again", "due": 7})
    assert_durable(write(destination, source.batch()))
    expected = {key: (*row, None) for key, row in expected.items()} | {61: ("again", 7)}
    for read in readers:
        assert rows(read, "remark", "due") == expected
