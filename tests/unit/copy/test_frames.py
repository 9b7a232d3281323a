"""Arrow types as Spark's, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pyarrow as pa
import pytest

from penstock.changes.frames import can_read_files, exchange_batch, frame_of, spark_columns, spark_type_name

TIMES = pa.time64("us")
WITH_TIMES = pa.record_batch(
    {
        "id": pa.array([1, 2]),
        "clock": pa.array([43_200_500_000, None], TIMES),
        "clocks": pa.array([[0, None], None], pa.list_(TIMES)),
        "_old": pa.array([{"id": 1, "clock": 86_399_999_999}, None], pa.struct([("id", pa.int64()), ("clock", TIMES)])),
    }
)


class Session:
    """Takes the place of a Spark session of one version; a frame is its columns and its rows."""

    sparkContext = SimpleNamespace(defaultParallelism=2)  # noqa: N815

    def __init__(self, version: str) -> None:
        self.version = version

    def range(self, start: int, end: int, step: int, partitions: int) -> Session:
        return self

    def mapInArrow(  # noqa: N802
        self, read: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], columns: str
    ) -> tuple[str, list[dict[str, object]]]:
        return columns, pa.Table.from_batches(read(iter([pa.record_batch({"id": [0]})]))).to_pylist()


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


@pytest.mark.parametrize("version", ["4.0.0", "4.0.5", "4.0.1-vendor-2"])
def test_times_are_text_where_spark_has_no_type_for_them(version: str) -> None:
    columns, rows = frame_of(Session(version), WITH_TIMES.schema, [WITH_TIMES], lambda batch: [batch])
    assert columns == "`id` bigint, `clock` string, `clocks` array<string>, `_old` struct<`id`:bigint,`clock`:string>"
    assert rows == [
        {"id": 1, "clock": "12:00:00.5", "clocks": ["00:00:00", None], "_old": {"id": 1, "clock": "23:59:59.999999"}},
        {"id": 2, "clock": None, "clocks": None, "_old": None},
    ]


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "4.10.0.dev3", "5.0.0"])
def test_times_are_times_where_spark_has_a_type_for_them(version: str) -> None:
    batch = WITH_TIMES.select(["clock", "clocks"])
    columns, rows = frame_of(Session(version), batch.schema, [batch], lambda batch: [batch])
    assert columns == "`clock` time(6), `clocks` array<time(6)>"
    assert rows == exchange_batch(batch).to_pylist()


def test_only_columns_of_times_keep_an_old_spark_from_reading_files() -> None:
    old, new = Session("4.0.5"), Session("4.1.0")
    assert can_read_files(new, WITH_TIMES.schema)
    assert can_read_files(old, WITH_TIMES.select(["id"]).schema)
    for name in ("clock", "clocks", "_old"):
        assert not can_read_files(old, WITH_TIMES.select([name]).schema)
