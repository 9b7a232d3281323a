"""Values and keys in Avro, with the ids that a schema registry gave to their schemas."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.segment import field_names
from penstock.destinations.kafka.avro_cells import BYTES, avro_cells, join, numbers, text, union_type
from penstock.destinations.kafka.json_format import Source, penstock_version
from penstock.destinations.kafka.messages import Origin, Side
from penstock.destinations.postgres.encoding import Cells
from penstock.schema import Column, TableSchema, resolve_domain
from penstock.values.cells import large_text

_ABSENT, _PRESENT = pa.scalar(b"\x00", BYTES), pa.scalar(b"\x02", BYTES)
_SOURCE = (
    *(("version", "string"), ("connector", "string"), ("name", "string"), ("ts_ms", "long"), ("snapshot", "string")),
    *(("db", "string"), ("sequence", "string"), ("ts_us", "long"), ("ts_ns", "long"), ("schema", "string")),
    *(("table", "string"), ("txId", "long"), ("lsn", "long")),
)
_EXTRA = (("__op", "string"), ("__table", "string"), ("__lsn", "long"), ("__ordinal", "long"), ("__ts_ms", "long"))


@dataclass(frozen=True, slots=True)
class AvroFormat:
    """Debezium's envelope, or the row alone, in Avro."""

    source: Source
    key_id: int
    value_id: int
    flat: bool

    def keys(self, schema: TableSchema, cells: Sequence[Cells], count: int) -> pa.Array:
        """See `Format`."""
        return join(_prefix(self.key_id), *(avro_cells(each) for each in cells))

    def values(
        self, schema: TableSchema, before: Side | None, after: Side | None, operations: pa.Array, origin: Origin
    ) -> pa.Array:
        """See `Format`."""
        letters, times = text(pc.cast(operations, pa.large_string())), _array(origin.commit_time)
        seconds = numbers(pc.divide(times, 1000).to_numpy(zero_copy_only=False))
        lsn, ordinal = (numbers(each.to_numpy(zero_copy_only=False)) for each in (origin.commit_lsn, origin.ordinal))
        if self.flat:
            side = before if after is None else after
            columns = [_ABSENT] * len(schema.columns) if side is None else self._cells(side)
            is_deleted = after is None and before is not None
            return join(
                *(_prefix(self.value_id), *columns, letters, _text(str(schema)), lsn, ordinal, seconds),
                _text("true" if is_deleted else "false"),
            )
        lsns, ordinals = (pc.cast(each, pa.large_string()) for each in (origin.commit_lsn, origin.ordinal))
        first, middle, last, nothing = (large_text(each) for each in ('["', '","', '"]', ""))
        sequence = pc.binary_join_element_wise(first, lsns, middle, ordinals, last, nothing)
        now = time.time_ns() // 1000
        return join(
            *(_prefix(self.value_id), self._row(before), self._row(after)),
            *(_text(penstock_version()), _text("postgresql"), _text(self.source.name), seconds),
            *(_text("true" if origin.snapshot else "false"), _text(self.source.database), text(sequence)),
            numbers(times.to_numpy(zero_copy_only=False)),
            numbers(pc.multiply(times, 1000).to_numpy(zero_copy_only=False)),
            *(_text(schema.namespace), _text(schema.name), numbers(origin.xid.to_numpy(zero_copy_only=False)), lsn),
            *(letters, _number(now // 1000), _number(now), _number(now * 1000), _ABSENT),
        )

    def _cells(self, side: Side) -> list[pa.Array]:
        omitted = side.omitted
        return [
            avro_cells(cells, (omitted[number], self.source.unavailable) if number in omitted else None)
            for number, cells in enumerate(side.cells)
        ]

    def _row(self, side: Side | None) -> pa.Array | pa.Scalar:
        if side is None:
            return _ABSENT
        whole = join(_PRESENT, *self._cells(side))
        return whole if side.valid is None else pc.if_else(pa.array(side.valid), whole, _ABSENT)


def key_schema(schema: TableSchema, name: str, arrow: pa.Schema) -> str:
    """Return the Avro schema of the keys of a table."""
    return json.dumps(_record("Key", name, _fields(schema, schema.key, arrow)))


def value_schema(schema: TableSchema, name: str, arrow: pa.Schema, *, flat: bool) -> str:
    """Return the Avro schema of the values of a table."""
    columns = _fields(schema, schema.columns, arrow)
    if flat:
        extra = [{"name": each, "type": kind} for each, kind in (*_EXTRA, ("__deleted", "string"))]
        return json.dumps(_record("Value", name, [*columns, *extra]))
    row, namespace = _record("Value", name, columns), avro_name(name)
    source = {"type": "record", "name": "Source", "namespace": "io.debezium.connector.postgresql"}
    fields = [
        {"name": "before", "type": ["null", row], "default": None},
        {"name": "after", "type": ["null", f"{namespace}.Value"], "default": None},
        {"name": "source", "type": source | {"fields": [{"name": each, "type": kind} for each, kind in _SOURCE]}},
        {"name": "op", "type": "string"},
        *({"name": each, "type": "long"} for each in ("ts_ms", "ts_us", "ts_ns")),
        {"name": "transaction", "type": ["null", "string"], "default": None},
    ]
    return json.dumps(_record("Envelope", name, fields))


def avro_name(name: str) -> str:
    """Return a name that Avro allows, parts separated by dots."""
    parts = (re.sub(r"[^A-Za-z0-9_]", "_", part) for part in name.split("."))
    return ".".join(part if re.match(r"[A-Za-z_]", part) else f"_{part}" for part in parts)


def _record(kind: str, name: str, fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "record", "name": kind, "namespace": avro_name(name), "fields": list(fields)}


def _fields(schema: TableSchema, columns: Sequence[Column], arrow: pa.Schema) -> list[dict[str, Any]]:
    names = zip(field_names(schema), schema.columns, strict=True)
    kinds = {column.attnum: arrow.field(name).type for name, column in names}
    fields: list[dict[str, Any]] = []
    for column in columns:
        name = avro_name(column.name.replace(".", "_"))
        if any(each["name"] == name for each in fields):
            # Different columns may have the same name after the replacement.
            name = f"{name}_{column.attnum}"
        kind = union_type(kinds[column.attnum], resolve_domain(column.type, -1)[0])
        fields.append({"name": name, "type": kind, "default": None})
    return fields


def _prefix(schema_id: int) -> pa.Scalar:
    return pa.scalar(b"\x00" + struct.pack(">I", schema_id), BYTES)


def _text(value: str) -> pa.Scalar:
    return text(pa.array([value], pa.large_string()))[0]


def _number(value: int) -> pa.Scalar:
    return numbers(pa.array([value], pa.int64()).to_numpy())[0]


def _array(column: pa.Array) -> pa.Array:
    return pc.cast(column, pa.int64())
