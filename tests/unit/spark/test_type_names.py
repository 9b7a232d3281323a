"""Names of types in Spark SQL, against the types that Spark itself makes of Arrow's."""

from __future__ import annotations

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.pandas.types import from_arrow_type

from penstock.changes.frames import has_time_type, spark_type_name
from penstock.values.datetimes import holds_times

TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.time64("us"),
    pa.time64("ns"),
    pa.decimal128(38, 10),
    pa.list_(pa.decimal128(5, 5)),
    pa.map_(pa.string(), pa.string()),
    pa.struct([pa.field("a", pa.int64(), nullable=False), ("b", pa.list_(pa.time64("us")))]),
]


@pytest.mark.parametrize("arrow_type", TYPES, ids=str)
def test_names_are_those_of_spark(arrow_type: pa.DataType) -> None:
    if holds_times(arrow_type) and not has_time_type(pyspark.__version__):
        pytest.skip("this Spark has no type for times")
    theirs = from_arrow_type(arrow_type, prefer_timestamp_ntz=True)
    assert spark_type_name(arrow_type).replace("`", "") == theirs.simpleString()


def test_foreign_types_are_refused() -> None:
    with pytest.raises(TypeError):
        spark_type_name(pa.duration("s"))
