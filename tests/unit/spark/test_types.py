"""Arrow types of segments and Spark's types, both ways."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from penstock.changes.frames import spark_type_name
from penstock.spark.types import from_spark_schema, from_spark_type, to_spark_schema, to_spark_type

TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.time64("us"),
    pa.decimal128(38, 10),
    pa.list_(pa.decimal128(5, 5)),
    pa.map_(pa.string(), pa.string()),
    pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.list_(pa.time64("us")))]),
]


@pytest.mark.parametrize("arrow_type", TYPES, ids=str)
def test_types_come_back(arrow_type: pa.DataType) -> None:
    there = to_spark_type(arrow_type)
    assert from_spark_type(there) == arrow_type
    assert there.simpleString() == spark_type_name(arrow_type).replace("`", "")


def test_schemas_keep_names_and_nullability() -> None:
    schema = pa.schema([pa.field("a", pa.int32(), nullable=False), ("b c", pa.large_string())])
    there = to_spark_schema(schema)
    assert [(field.name, field.nullable) for field in there] == [("a", False), ("b c", True)]
    assert from_spark_schema(there).field("b c").type == pa.string()


def test_foreign_types_are_refused() -> None:
    with pytest.raises(TypeError):
        to_spark_type(pa.duration("s"))
    with pytest.raises(TypeError):
        from_spark_type(spark.DayTimeIntervalType())
