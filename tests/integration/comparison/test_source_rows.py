"""The second way to read the source gives the same rows as the first, for every type, and the same digests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.changes.segment import UNREPRESENTABLE
from penstock.comparison.digest import digest_cells
from penstock.comparison.source_rows import SourceReader, parse_csv
from penstock.copy import CopyRows, CopySettings
from penstock.errors import DecodeError, TableRewritten
from penstock.source import Role, connect
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes
from tests.integration.copy.conftest import PUBLICATION, Source, read
from tests.integration.copy.test_values import ROWS, fill, same

SMALL = CopySettings(range_bytes=8 << 13, chunk_bytes=3000)


@pytest.fixture
def source(database: Any) -> Iterator[Source]:
    made = Source(database)
    yield made
    made.close()


def read_again(rows: CopyRows) -> pa.Table:
    reader = SourceReader(rows.reader)
    return pa.Table.from_batches(
        [batch for part in rows.ranges for batch in reader.read(part)], schema=reader.arrow_schema
    )


@pytest.mark.trap(31)
@pytest.mark.parametrize(
    "types",
    [
        TypeSettings(),
        TypeSettings(out_of_range=OutOfRange.CLAMP, numeric=NumericPolicy.DECIMAL, unknown_types=UnknownTypes.BYTES),
        TypeSettings(out_of_range=OutOfRange.TEXT, numeric=NumericPolicy.DOUBLE),
        TypeSettings(out_of_range=OutOfRange.NULL),
    ],
    ids=lambda types: types.out_of_range.value,
)
def test_every_value_is_the_same_on_both_paths(source: Source, types: TypeSettings) -> None:
    with connect(source.settings, Role.CHECK) as connection:
        connection.execute("set search_path = public")
        fill(connection)
        connection.execute(f"create publication {PUBLICATION} for table t")
        rows = source.prepare(types=types, settings=SMALL)
        copied, again = read(rows).sort_by("id"), read_again(rows).sort_by("id")
        again.validate(full=True)
        assert again.num_rows == ROWS
        assert again.schema == copied.schema
        for number, name in enumerate(copied.column_names):
            left, right = copied.column(name).combine_chunks(), again.column(name).combine_chunks()
            if name == UNREPRESENTABLE:
                assert left.to_pylist() == right.to_pylist()
            else:
                assert same(left, right), name
            assert np.array_equal(digest_cells(left, number), digest_cells(right, number)), name


def test_the_column_list_and_the_row_filter_of_the_publication_hold(source: Source) -> None:
    source.execute('create table t (id int primary key, secret text, "odd ""name" text)')
    source.execute("insert into t select i, 'x', nullif(i % 3, 0)::text from generate_series(1, 10) i")
    source.execute(f'create publication {PUBLICATION} for table t (id, "odd ""name") where (id > 4)')
    found = read_again(source.prepare()).sort_by("id")
    assert found.column_names == ["id", 'odd "name', UNREPRESENTABLE]
    assert found.column(0).to_pylist() == [5, 6, 7, 8, 9, 10]
    assert found.column(1).to_pylist() == ["2", None, "1", "2", None, "1"]


@pytest.mark.parametrize("columns", ["v text", "v text, w int", ""])
def test_rows_of_nothing_are_rows(source: Source, columns: str) -> None:
    source.execute(f"create table t ({columns}); create publication {PUBLICATION} for table t")
    source.execute("alter table t replica identity full")
    source.execute("insert into t select from generate_series(1, 3)")
    if columns:
        source.execute("insert into t values (''), ('\\.'), (E'\\n'), (E'a\\r\\n\"b\"')")
    found = read_again(source.prepare())
    assert found.num_rows == (7 if columns else 3)
    if columns:
        assert found.column("v").to_pylist() == [None, None, None, "", "\\.", "\n", 'a\r\n"b"']


def test_an_empty_table_has_no_rows(source: Source) -> None:
    source.execute(f"create table t (id int primary key); create publication {PUBLICATION} for table t")
    assert read_again(source.prepare()).num_rows == 0


@pytest.mark.trap(17)
def test_partitions_are_read_with_their_own_columns(source: Source) -> None:
    source.execute("create table t (id int primary key, a text, b int) partition by range (id)")
    source.execute("create table t1 partition of t for values from (0) to (10)")
    source.execute("create table t2 (b int, gone int, id int not null, a text)")
    source.execute("alter table t2 drop gone; alter table t attach partition t2 for values from (10) to (20)")
    source.execute("insert into t select i, 'a' || i, i * 2 from generate_series(1, 19) i")
    source.execute(f"create publication {PUBLICATION} for table t with (publish_via_partition_root = true)")
    found = read_again(source.prepare()).sort_by("id")
    assert found.to_pylist() == [
        {"id": number, "a": f"a{number}", "b": 2 * number, UNREPRESENTABLE: None} for number in range(1, 20)
    ]


@pytest.mark.trap(21)
def test_a_table_that_was_rewritten_is_an_error_and_not_empty(source: Source) -> None:
    source.execute(f"create table t (id int primary key); create publication {PUBLICATION} for table t")
    source.execute("insert into t values (1)")
    rows = source.prepare()
    source.execute("truncate t")
    with pytest.raises(TableRewritten):
        read_again(rows)


def test_a_byte_order_mark_is_part_of_the_value() -> None:
    text = "\ufeffa,1\n\ufeffb,2\n".encode()
    found = parse_csv(text, [pa.string(), pa.int32()], "public.t")
    assert found.column(0).to_pylist() == ["\ufeffa", "\ufeffb"]


def test_what_cannot_be_read_does_not_show_its_value() -> None:
    with pytest.raises(DecodeError) as caught:
        parse_csv(bytearray(b"secret\n"), [pa.int32()], "public.t")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
