"""Types, protocols and properties of Delta tables; what is refused."""

from __future__ import annotations

import datetime
import json

import pyarrow as pa
import pytest

from penstock.destinations.delta.actions import Metadata, Protocol
from penstock.destinations.delta.schema import (
    OWNER,
    arrow_schema,
    column_names,
    delta_schema,
    delta_type,
    fit,
    merge_protocols,
    protocol_for,
    refuse_unknown,
    schema_string,
    table_configuration,
)
from penstock.errors import TableRejected
from tests.unit.destinations.delta.lake import SCHEMA

METADATA = Metadata("id", schema_string(SCHEMA))
EVERYTHING = pa.schema(
    [
        pa.field("flag", pa.bool_()),
        pa.field("tiny", pa.int8()),
        pa.field("small", pa.int16()),
        pa.field("whole", pa.int32()),
        pa.field("single", pa.float32()),
        pa.field("bytes", pa.binary()),
        pa.field("texts", pa.list_(pa.string())),
        pa.field("pairs", pa.map_(pa.string(), pa.decimal128(10, 3))),
        pa.field("both", pa.struct([pa.field("x", pa.timestamp("us")), pa.field("y", pa.date32())])),
        *SCHEMA,
    ]
)


def test_a_schema_comes_back_as_it_was() -> None:
    assert arrow_schema(schema_string(EVERYTHING)).equals(EVERYTHING)


@pytest.mark.parametrize(
    ("arrow", "stored"),
    [
        (pa.time64("us"), pa.string()),
        (pa.large_string(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.timestamp("ns", "Europe/Vienna"), pa.timestamp("us", "UTC")),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.list_(pa.time64("us")), pa.list_(pa.string())),
    ],
)
def test_types_that_delta_lacks_become_those_that_hold_the_same(arrow: pa.DataType, stored: pa.DataType) -> None:
    assert delta_type(arrow) == stored


@pytest.mark.parametrize(
    "arrow", [pa.null(), pa.uint64(), pa.decimal256(60, 2), pa.decimal128(5, -2), pa.duration("s")]
)
def test_types_without_a_place_are_refused(arrow: pa.DataType) -> None:
    with pytest.raises(TypeError, match="Delta"):
        delta_type(arrow)
    with pytest.raises(TypeError):
        schema_string(pa.schema([pa.field("c", arrow)]))


def test_rows_are_fitted_and_missing_columns_are_null() -> None:
    rows = pa.table({"t": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us"))})
    schema = pa.schema([pa.field("new", pa.int64()), *delta_schema(rows.schema)])
    fitted = fit(rows, schema)
    assert fitted.schema.equals(schema)
    assert fitted.to_pylist() == [{"new": None, "t": "01:02:03.000004"}, {"new": None, "t": None}]


def test_times_of_an_old_key_are_printed_like_those_of_columns() -> None:
    old = pa.array([{"at": datetime.time(12, 0, 0, 500_000)}, None], pa.struct([("at", pa.time64("us"))]))
    rows = pa.table({"_old": old})
    assert fit(rows, delta_schema(rows.schema)).to_pylist() == [{"_old": {"at": "12:00:00.5"}}, {"_old": None}]


@pytest.mark.trap(39)
def test_a_table_gets_only_the_features_that_it_needs() -> None:
    plain = pa.schema([pa.field("id", pa.int64()), pa.field("at", pa.timestamp("us", "UTC"))])
    assert protocol_for(plain, deletion_vectors=False) == Protocol(1, 2)
    assert protocol_for(plain).reader_features == {"deletionVectors"}
    nested = pa.schema([pa.field("m", pa.map_(pa.string(), pa.list_(pa.timestamp("us"))))])
    assert protocol_for(nested, deletion_vectors=False).writer_features == {"timestampNtz"}


def test_a_protocol_grows_and_never_shrinks() -> None:
    vectors = protocol_for(pa.schema([pa.field("id", pa.int64())]))
    both = protocol_for(SCHEMA)
    assert merge_protocols(both, vectors) is None
    assert merge_protocols(vectors, both) == both
    upgraded = merge_protocols(Protocol(1, 2), both)
    assert upgraded is not None
    assert upgraded.reader_features == both.reader_features
    assert upgraded.writer_features == both.writer_features | {"appendOnly", "invariants"}
    refuse_unknown("t", upgraded, METADATA)


@pytest.mark.trap(39)
@pytest.mark.parametrize(
    ("protocol", "named"),
    [
        (Protocol(3, 7, frozenset({"typeWidening"}), frozenset({"typeWidening"})), "typeWidening"),
        (Protocol(3, 7, frozenset(), frozenset({"rowTracking", "domainMetadata"})), "domainMetadata, rowTracking"),
        (Protocol(3, 7, frozenset({"variantType"}), frozenset({"variantType"})), "variantType"),
        (Protocol(2, 5), "reader version 2, writer version 5"),
        (Protocol(4, 8), "reader version 4, writer version 8"),
    ],
)
def test_unknown_features_are_refused_by_name(protocol: Protocol, named: str) -> None:
    with pytest.raises(TableRejected, match=named) as caught:
        refuse_unknown("public.items", protocol, METADATA)
    assert caught.value.hint


@pytest.mark.parametrize(
    "metadata",
    [
        Metadata("id", schema_string(SCHEMA), {"delta.appendOnly": "true"}),
        Metadata("id", schema_string(SCHEMA), partition_columns=("day",)),
        Metadata("id", json.dumps({"fields": [{"metadata": {"delta.invariants": "{}"}}]})),
    ],
)
def test_tables_that_we_would_break_are_refused(metadata: Metadata) -> None:
    with pytest.raises(TableRejected):
        refuse_unknown("public.items", Protocol(1, 2), metadata)


def test_columns_have_names_that_delta_takes() -> None:
    names = column_names(["id", "Id", "order date", "order,date", "ok_name", "größe"])
    assert names[0] == "id"
    assert names[4:] == ("ok_name", "größe")
    assert len({name.lower() for name in names}) == 6
    assert not any(letter in name for name in names for letter in " ,;{}()\n\t=")
    assert column_names(["order date"]) == names[2:3]


def test_properties_say_whose_table_it_is_and_how_long_things_stay() -> None:
    configuration = table_configuration("shop", log_retention_hours=24, file_retention_hours=0.5)
    assert configuration[OWNER] == "shop"
    assert configuration["delta.enableDeletionVectors"] == "true"
    assert configuration["delta.logRetentionDuration"] == "interval 86400 seconds"
    assert configuration["delta.deletedFileRetentionDuration"] == "interval 1800 seconds"
    assert "delta.enableDeletionVectors" not in table_configuration(
        "shop", deletion_vectors=False, log_retention_hours=1, file_retention_hours=1
    )
