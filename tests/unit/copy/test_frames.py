"""Arrow types as Spark's, by name."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.changes.frames import exchange_batch, spark_columns, spark_type_name


def test_types_have_names_in_spark() -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("odd `name`", pa.decimal128(12, 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("us")),
            ("clock", pa.time64("us")),
            ("list", pa.list_(pa.string())),
            ("map", pa.map_(pa.string(), pa.string())),
            ("old", pa.struct([("a", pa.int32())])),
        ]
    )
    assert spark_columns(schema) == (
        "`id` bigint, `odd ``name``` decimal(12,2), `at` timestamp, `local` timestamp_ntz, `clock` time(6), "
        "`list` array<string>, `map` map<string,string>, `old` struct<`a`:int>"
    )
    with pytest.raises(TypeError):
        spark_type_name(pa.duration("s"))


def test_times_are_exchanged_in_nanoseconds() -> None:
    batch = pa.record_batch(
        {"t": pa.array([1, None], pa.time64("us")), "l": pa.array([[2], None], pa.list_(pa.time64("us")))}
    )
    exchanged = exchange_batch(batch)
    assert exchanged.schema.types == [pa.time64("ns"), pa.list_(pa.time64("ns"))]
    assert exchanged.column(0).cast(pa.int64()).to_pylist() == [1000, None]
    plain = pa.record_batch({"a": [1]})
    assert exchange_batch(plain) is plain
