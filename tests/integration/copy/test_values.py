"""A copied row equals the same row captured, for every type and every value that lakes find hard."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from penstock.capture import CaptureSettings
from penstock.changes.segment import UNREPRESENTABLE, segment_layout
from penstock.copy import CopySettings
from penstock.errors import ValueOutOfRange
from penstock.lsn import Lsn
from penstock.source import Role, SourceSettings, connect
from penstock.source.slots import create_slot
from penstock.spool import SpoolReader, SpoolSettings
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes, apply_policy
from tests.integration.copy.conftest import PUBLICATION, Source, read
from tests.support.oracle import capture_until, current_position
from tests.support.samples import Sample, available_samples

ROWS = 60


def fill(connection: psycopg.Connection[Any]) -> list[Sample]:
    """A table with a column for each type, and in each the awkward values, others, and NULLs."""
    samples = available_samples(connection)
    random = Random(5)
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(f"c{number}"), sql.SQL(sample.type))
        for number, sample in enumerate(samples)
    )
    connection.execute(sql.SQL("create table t (id int primary key, {}, all_null date)").format(columns))
    for row in range(ROWS):
        values: list[str | None] = [
            sample.values[row] if row < len(sample.values) else sample.value(random) for sample in samples
        ]
        if row % 7 == 6:
            values = [None if random.random() < 0.5 else value for value in values]
        if row % 10 == 9:
            values = [
                sample.large(random) if sample.large else value for sample, value in zip(samples, values, strict=True)
            ]
        marks = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(sample.type))
            for sample, value in zip(samples, values, strict=True)
        )
        connection.execute(sql.SQL("insert into t values ({}, {}, null)").format(row, marks))
    return samples


def same(left: pa.ChunkedArray | pa.Array, right: pa.ChunkedArray | pa.Array) -> bool:
    """Equal to the last bit, NaN included."""
    left, right = (each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in (left, right))
    if pa.types.is_floating(left.type):
        bits = pa.int32() if left.type == pa.float32() else pa.int64()
        left, right = left.view(bits), right.view(bits)
    elif pa.types.is_list(left.type) and pa.types.is_floating(left.type.value_type):
        return same(left.flatten(), right.flatten()) and left.value_lengths().equals(right.value_lengths())
    return left.equals(right)


def server_texts(connection: psycopg.Connection[Any], column: str) -> list[str | None]:
    """What replication sends: the type's own output."""
    query = sql.SQL("copy (select {} from t order by id) to stdout").format(sql.Identifier(column))
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        copy.set_types(["text"])
        return [row[0] for row in copy.rows()]


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
def test_copied_values_equal_the_servers_text_decoded(any_source: Source, types: TypeSettings) -> None:
    with connect(any_source.settings, Role.CHECK) as connection:
        connection.execute("set search_path = public")
        samples = fill(connection)
        connection.execute(f"create publication {PUBLICATION} for table t")
        rows = any_source.prepare(types=types, settings=CopySettings(range_bytes=8 << 13, chunk_bytes=3000))
        assert len(rows.ranges) > 1
        copied = read(rows).sort_by("id")
        copied.validate(full=True)
        assert copied.num_rows == ROWS
        kept = [dict(entries or ()) for entries in copied.column(UNREPRESENTABLE).to_pylist()]
        for column in segment_layout(rows.schema, types).columns:
            text = pa.array(server_texts(connection, column.column.name), pa.large_string())
            decoded = column.codec.decode(text)
            array, texts = apply_policy(decoded, text, types.out_of_range, table="t", column=column.column.name)
            what = f"{column.column.name} {samples[column.index - 1].type if column.index <= len(samples) else ''}"
            assert same(copied.column(column.field_name), array), what
            assert [cells.get(column.field_name) for cells in kept] == (
                [None] * ROWS if texts is None else texts.to_pylist()
            ), what


@pytest.mark.trap(31)
def test_copied_rows_equal_captured_rows(source: Source, tmp_path: Path) -> None:
    slot = f"s_{source.database.name}"
    with connect(source.settings, Role.SLOT) as connection:
        connection.execute("set search_path = public")
        connection.execute(f"create publication {PUBLICATION} for all tables")
        create_slot(connection, slot)
        fill(connection)
        end = current_position(connection)
        connection.execute("create table unpublished ()")
    settings = CaptureSettings(
        SourceSettings(source.database.dsn), slot, PUBLICATION, SpoolSettings(tmp_path, min_free_bytes=0)
    )
    capture_until(settings, end)
    reader = SpoolReader(tmp_path)
    segments = [step for entry in reader.entries(reader.begin or Lsn(0)) for step in entry.steps]
    captured = pa.concat_tables([reader.read(step) for step in segments], promote_options="default").sort_by("id")
    copied = read(source.prepare()).sort_by("id")
    schema = reader.schema(segments[0])
    assert schema.columns == source.prepare().schema.columns
    for column in (*segment_layout(schema).columns,):
        name = column.field_name
        assert copied.schema.field(name).type == captured.schema.field(name).type
        assert same(copied.column(name), captured.column(name)), name
    as_dicts = [
        [dict(cells or ()) for cells in table.column(UNREPRESENTABLE).to_pylist()] for table in (copied, captured)
    ]
    assert as_dicts[0] == as_dicts[1]


@pytest.mark.trap(31)
def test_moments_at_every_border_are_exact(source: Source) -> None:
    borders = (
        "select unnest(array['infinity', '-infinity', '4713-11-24 BC', '0044-03-15 12:34:56.7 BC', '0001-12-31 BC', "
    )
    borders += "'0001-01-01', '0001-01-01 00:00:00.000001', '1969-12-31 23:59:59.999999', '1970-01-01', '2000-01-01', "
    borders += "'9999-12-31 23:59:59.999999', '10000-01-01', '294276-12-31 23:59:59.999999']) as v"
    source.execute(
        "create table t as select v, v::timestamp as a, v::timestamptz as b, v::timestamp::date as c "
        f"from ({borders}) x"
    )
    source.execute("insert into t (v, c) values ('last date', '5874897-12-31'), ('nothing', null)")
    source.execute(f"create publication {PUBLICATION} for table t")
    copied = read(source.prepare())
    with source.database.connect(options="-c timezone=UTC") as connection:
        texts = connection.execute("select v, a::text, b::text, c::text from t").fetchall()
    found = copied.to_pylist()
    for row, (name, *expected) in zip(found, texts, strict=True):
        kept = dict(row[UNREPRESENTABLE] or ())
        for column, text in zip("abc", expected, strict=True):
            if text is None or column in kept:
                assert (row[column], kept.get(column)) == (None, text), name
            else:
                spelled = str(np.datetime64(row[column].replace(tzinfo=None) if column != "c" else row[column], "us"))
                assert spelled.split("T")[0] == text.split(" ")[0], name
    assert sum(bool(row[UNREPRESENTABLE]) for row in found) == 8


def test_a_value_that_does_not_fit_stops_the_copy_under_the_policy_error(source: Source) -> None:
    source.execute("create table t as select 'infinity'::timestamptz as at")
    source.execute(f"create publication {PUBLICATION} for table t")
    with pytest.raises(ValueOutOfRange, match=r"t\.at"):
        read(source.prepare(types=TypeSettings(out_of_range=OutOfRange.ERROR)))
