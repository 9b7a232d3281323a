"""Arrow types of segments as Spark's, and back. By name, without Spark: `penstock.changes.frames`."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as spark

from penstock.changes.frames import spark_columns, spark_type_name
from penstock.copy.frames import exchange_batch, exchange_type

__all__ = [
    "exchange_batch",
    "exchange_type",
    "from_spark_schema",
    "from_spark_type",
    "spark_columns",
    "spark_type_name",
    "to_spark_schema",
    "to_spark_type",
]

_TIME_PRECISION = 6

_PAIRS: tuple[tuple[pa.DataType, spark.DataType], ...] = (
    (pa.bool_(), spark.BooleanType()),
    (pa.int8(), spark.ByteType()),
    (pa.int16(), spark.ShortType()),
    (pa.int32(), spark.IntegerType()),
    (pa.int64(), spark.LongType()),
    (pa.float32(), spark.FloatType()),
    (pa.float64(), spark.DoubleType()),
    (pa.string(), spark.StringType()),
    (pa.binary(), spark.BinaryType()),
    (pa.date32(), spark.DateType()),
    (pa.timestamp("us"), spark.TimestampNTZType()),
    (pa.timestamp("us", "UTC"), spark.TimestampType()),
    (pa.time64("us"), spark.TimeType(_TIME_PRECISION)),
)
_TO_SPARK = {
    **dict(_PAIRS),
    pa.large_string(): spark.StringType(),
    pa.large_binary(): spark.BinaryType(),
    pa.time64("ns"): spark.TimeType(_TIME_PRECISION),
}
_FROM_SPARK = {simple.simpleString(): arrow for arrow, simple in _PAIRS}


def to_spark_schema(schema: pa.Schema) -> spark.StructType:
    """The schema of the same columns in Spark."""
    return spark.StructType([_to_field(field) for field in schema])


def to_spark_type(arrow_type: pa.DataType) -> spark.DataType:
    """The type that holds the same values; `TypeError` for types that no codec gives."""
    if arrow_type in _TO_SPARK:
        return _TO_SPARK[arrow_type]
    if pa.types.is_decimal128(arrow_type):
        return spark.DecimalType(arrow_type.precision, arrow_type.scale)
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return spark.ArrayType(to_spark_type(arrow_type.value_type))
    if pa.types.is_map(arrow_type):
        return spark.MapType(to_spark_type(arrow_type.key_type), to_spark_type(arrow_type.item_type))
    if pa.types.is_struct(arrow_type):
        return spark.StructType([_to_field(field) for field in arrow_type])
    raise TypeError(f"Spark has no type for {arrow_type}")


def from_spark_schema(schema: spark.StructType) -> pa.Schema:
    """The schema of the same columns in Arrow, as segments have them."""
    return pa.schema([_from_field(field) for field in schema.fields])


def from_spark_type(spark_type: spark.DataType) -> pa.DataType:
    """The type that holds the same values; `TypeError` for types that segments do not have."""
    if spark_type.simpleString() in _FROM_SPARK:
        return _FROM_SPARK[spark_type.simpleString()]
    match spark_type:
        case spark.DecimalType():
            return pa.decimal128(spark_type.precision, spark_type.scale)
        case spark.ArrayType():
            return pa.list_(from_spark_type(spark_type.elementType))
        case spark.MapType():
            return pa.map_(from_spark_type(spark_type.keyType), from_spark_type(spark_type.valueType))
        case spark.StructType():
            return pa.struct([_from_field(field) for field in spark_type.fields])
        case _:
            raise TypeError(f"segments have no type for {spark_type.simpleString()}")


def _to_field(field: pa.Field) -> spark.StructField:
    return spark.StructField(field.name, to_spark_type(field.type), field.nullable)


def _from_field(field: spark.StructField) -> pa.Field:
    return pa.field(field.name, from_spark_type(field.dataType), nullable=field.nullable)
