"""The bigquery destination without a server: its options, its encoding of rows, its columns and its errors."""

from __future__ import annotations

import datetime
import pickle
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError
from google.cloud.bigquery_storage_v1 import types
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.changes.batch import Rows
from penstock.changes.segment import UNREPRESENTABLE, segment_layout
from penstock.changes.steps import Segment
from penstock.destinations.bigquery import BigQueryDestination
from penstock.destinations.bigquery.connection import connect, failure
from penstock.destinations.bigquery.layout import Kind, Layout, column_name, follow
from penstock.destinations.bigquery.protobuf import descriptor, encode_rows, message_of
from penstock.destinations.bigquery.tasks import sequence_number
from penstock.errors import ConfigError, DestinationUnavailable, PenstockError, SchemaNotFollowed, TableRejected
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.testing.destinations.contract import INT8, LINES, ORDERS

LIST = pa.struct([("list", pa.list_(pa.struct([("element", pa.int64())])))])
CELLS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
EVERYTHING = pa.table(
    {
        "c1": pa.array([1, None, -5, 2**62], pa.int64()),
        "c2": pa.array(["x" * 300, None, "", "é"]),
        "c3": pa.array([1.5, None, float("inf"), -0.0]),
        "c4": pa.array([True, False, None, True]),
        "c5": pa.array([datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31), datetime.date(1970, 1, 1)]),
        "c6": pa.array([datetime.datetime(2020, 1, 2, 3, 4, 5, 6), None, None, None], pa.timestamp("us")),
        "c7": pa.array([1_577_934_245_000_006, None, -1, None], pa.int64()).cast(pa.timestamp("us", "UTC")),
        "c8": pa.array([Decimal("0.00000001"), None, Decimal("-1234567.5"), None], pa.decimal128(38, 8)),
        "c9": pa.array([b"\0\1", None, b"", b"z"]),
        "c10": pa.array([datetime.time(1, 2, 3, 4), None, None, None], pa.time64("us")),
        "c11": pa.array(
            [{"list": [{"element": 1}, {"element": None}]}, None, {"list": []}, {"list": [{"element": -1}]}], LIST
        ),
        "c12": pa.array([[{"key": "c1", "value": "x"}], None, [], [{"key": "a", "value": "b"}, {"key": "c"}]], CELLS),
        **{f"c{number}": pa.array([number] * 4) for number in range(13, 40)},  # tags of two bytes
    }
)


def decoded(rows: pa.Table) -> list[Any]:
    """The rows as the protobuf library reads them."""
    file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="rows", syntax="proto2")
    file.message_type.append(descriptor(rows.schema))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("rows.Row"))
    found = types.ProtoRows.pb().FromString(message_of(encode_rows(rows))).serialized_rows
    return [message.FromString(each) for each in found]


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 3), (2, 1), (0, 0)])
def test_columns_become_the_rows_that_the_protobuf_library_reads(first, count):
    part = EVERYTHING.slice(first, count)
    rows = decoded(part)
    assert len(rows) == count
    for row, wanted in zip(rows, part.to_pylist(), strict=True):
        present = {field.name for field, _ in row.ListFields()}
        scalars = {name for name, value in wanted.items() if value is not None and name not in ("c11", "c12")}
        assert present - {"c11", "c12"} == scalars
        for name in sorted(scalars & {"c1", "c2", "c3", "c4", "c9", "c13", "c39"}):
            assert getattr(row, name) == wanted[name]
        if wanted["c5"] is not None:
            assert row.c5 == (wanted["c5"] - datetime.date(1970, 1, 1)).days
        if wanted["c8"] is not None:
            assert Decimal(row.c8) == wanted["c8"]
        assert row.HasField("c11") == (wanted["c11"] is not None)
        elements = [each.element if each.HasField("element") else None for each in row.c11.list]
        assert elements == [each["element"] for each in (wanted["c11"] or {"list": []})["list"]]
        assert [(each.key, each.value) for each in row.c12] == [
            (each["key"], each["value"] or "") for each in wanted["c12"] or []
        ]
    if first == 0 and count:
        assert (rows[0].c6, rows[0].c7, rows[0].c10) == (
            "2020-01-02 03:04:05.000006",
            1_577_934_245_000_006,
            "01:02:03.000004",
        )


def test_a_sequence_number_is_the_order_key_at_which_changes_end():
    key = OrderKey(Lsn(0xAB), 9)
    segment = Segment(1, "public.t", "v", "file", 1, 1, key, key)
    assert sequence_number([Rows(ORDERS, "v", (segment,))]) == "AB/A"
    cut = replace(segment, until=Lsn(0xAC))
    assert sequence_number([Rows(ORDERS, "v", (cut,))]) == "AC/0"


def layout_of(schema: TableSchema, kind: Kind = Kind.MIRROR) -> Layout:
    found = segment_layout(schema)
    return Layout(kind, schema, pa.schema([found.arrow_schema.field(column.field_name) for column in found.columns]))


def test_rows_come_back_as_they_were():
    schema = TableSchema(
        1,
        "public",
        "t",
        (
            Column("id", 1, PostgresType(23, "int4"), identity=True, primary_key_position=1),
            Column("tags", 2, PostgresType(1009, "_text")),
            Column("price", 4, PostgresType(1700, "numeric"), type_modifier=(10 << 16 | 2) + 4),
        ),
    )
    types_ = pa.schema([("id", pa.int32()), ("tags", pa.list_(pa.string())), ("price", pa.decimal128(10, 2))])
    layout = Layout(Kind.MIRROR, schema, types_)
    rows = pa.table([[1, 2, 3], [["a", None], [], None], [Decimal("1.50"), None, Decimal("-2.00")]], schema=types_)
    texts = {"price": pa.array([None, "NaN", None])}
    stored = layout.physical(rows, texts)
    assert stored.column_names == ["c1", "c2", "c4", UNREPRESENTABLE]
    back = layout.restored(stored.to_batches()[0])
    assert back.select(["id", "tags", "price"]).to_pylist() == rows.to_pylist()
    assert back.column(UNREPRESENTABLE).to_pylist() == [None, [("price", "NaN")], None]


def test_a_view_has_the_names_of_the_source():
    query = layout_of(ORDERS).view("`p.d.g`")
    assert "c1 as `id`" in query
    assert "c2 as `note`" in query
    assert "when 'c3' then 'due'" in query


@pytest.mark.parametrize("name", ["größe", "a.b", "_TABLE_x", "x`y", "", "9lives", "_CHANGE_TYPE"])
def test_names_that_bigquery_refuses_are_replaced(name):
    assert column_name(name) != name
    assert column_name(name).isidentifier()
    assert column_name("plain_Name1") == "plain_Name1"


def test_renamed_and_dropped_columns_only_change_the_view():
    before = layout_of(ORDERS)
    key, note, due = ORDERS.columns
    schema = replace(ORDERS, columns=(key, replace(note, name="remark")))
    types_ = pa.schema([("id", pa.int64()), ("remark", pa.string())])
    after = follow("public.orders", before, schema, types_, keep_dropped=False)
    assert after.view("t").count("c2 as `remark`") == 1
    assert "c3 as" not in after.view("t")
    kept = follow("public.orders", before, schema, types_, keep_dropped=True)
    assert "c3 as `due`" in kept.view("t")
    assert due.name == "due"


def test_a_schema_change_that_rows_do_not_show_demands_a_copy():
    before = layout_of(ORDERS)
    key, note, due = ORDERS.columns
    number = (key, replace(note, type=INT8), due)
    filled = (*ORDERS.columns, Column("amount", 4, INT8, missing="7"))
    for columns in (number, filled, (replace(key, primary_key_position=None, identity=False), note, due)):
        changed = layout_of(replace(ORDERS, columns=columns))
        with pytest.raises(SchemaNotFollowed):
            follow("public.orders", before, changed.schema, changed.types, keep_dropped=False)
    bag = layout_of(LINES, Kind.BAG)
    more = layout_of(replace(LINES, columns=(*LINES.columns, Column("amount", 4, INT8))), Kind.BAG)
    with pytest.raises(SchemaNotFollowed):
        follow("audit.lines", bag, more.schema, more.types, keep_dropped=False)


def test_a_wider_number_needs_no_copy():
    key, note, due = ORDERS.columns
    narrow = replace(ORDERS, columns=(replace(key, type=PostgresType(23, "int4")), note, due))
    before, after = layout_of(narrow), layout_of(ORDERS)
    assert follow("public.orders", before, ORDERS, after.types, keep_dropped=False) == after


def test_a_key_of_floats_is_refused_before_the_copy():
    key, note, due = ORDERS.columns
    schema = replace(ORDERS, columns=(replace(key, type=PostgresType(701, "float8")), note, due))
    with pytest.raises(TableRejected, match="primary key"):
        layout_of(schema).require_storable()
    layout_of(schema, Kind.HISTORY).require_storable()


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (exceptions.ServiceUnavailable("x"), DestinationUnavailable),
        (exceptions.TooManyRequests("x"), DestinationUnavailable),
        (exceptions.ResourceExhausted("x"), DestinationUnavailable),
        (exceptions.Forbidden("x", errors=[{"reason": "quotaExceeded"}]), DestinationUnavailable),
        (exceptions.Forbidden("x", errors=[{"reason": "accessDenied"}]), ConfigError),
        (exceptions.PermissionDenied("x"), ConfigError),
        (exceptions.Unauthenticated("x"), ConfigError),
        (DefaultCredentialsError("x"), ConfigError),
        (ConnectionResetError("x"), DestinationUnavailable),
        (exceptions.NotFound("x"), TableRejected),
        (exceptions.BadRequest("secret value"), TableRejected),
        (exceptions.InvalidArgument("secret value"), TableRejected),
    ],
)
def test_errors_say_what_to_do_and_no_values(error, meaning):
    found = failure("public.orders", error)
    assert type(found) is meaning
    assert "secret" not in str(found)
    assert isinstance(found, PenstockError)


def test_credentials_are_read_once_and_never_shown(tmp_path):
    file = tmp_path / "key.json"
    file.write_text('{"private_key": "hush"}')
    connection = connect("p", "d", None, str(file), None, None)
    assert "hush" not in repr(connection)
    assert pickle.loads(pickle.dumps(connection)) == connection
    with pytest.raises(ConfigError, match="service account"):
        _ = connection.client
    with pytest.raises(ConfigError, match="cannot be read"):
        connect("p", "d", None, str(tmp_path / "missing"), None, None)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "soft_delete"},
        {"max_staleness": "soon"},
        {"max_staleness": "2d"},
        {"endpoint": "127.0.0.1:9050", "storage_endpoint": "127.0.0.1:9060"},
        {"endpoint": "http://127.0.0.1:9050"},
    ],
)
def test_wrong_options_are_refused_early(options):
    with pytest.raises(ConfigError):
        BigQueryDestination("p", "d", **options)


def test_modes_differ_in_what_they_promise():
    assert BigQueryDestination("p", "d").capabilities.updates_rows
    history = BigQueryDestination("p", "d", mode="history")
    assert not history.capabilities.updates_rows
    assert not history.capabilities.loses_nothing_by_a_copy
