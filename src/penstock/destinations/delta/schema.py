"""Schemas and protocols: which Arrow types a Delta table holds, and which tables Penstock can read and write.

A table gets only the features that it needs, because each feature locks some readers out. Penstock rejects a table with
a feature that it does not know, because writing it could break it for other programs.

| Arrow | Delta |
|---|---|
| int8 … int64, float, double, bool, string, binary, date | the same |
| decimal128(p, s) | decimal(p,s) |
| timestamp with zone / without | timestamp / timestamp_ntz (feature `timestampNtz`) |
| time | string, as Postgres prints it: Delta has no type for it |
| list, map, struct | array, map, struct |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.destinations.delta.actions import Metadata, Protocol, compact_json
from penstock.destinations.refusals import rejected
from penstock.schema import fold_case
from penstock.values.datetimes import holds_times, print_times

OWNER = "penstock.owner"
"""The table property that names the pipeline that writes it."""
DELETION_VECTORS, TIMESTAMP_NTZ, V2_CHECKPOINT = "deletionVectors", "timestampNtz", "v2Checkpoint"
COLUMN_MAPPING, MAPPING_MODE = "columnMapping", "delta.columnMapping.mode"
_COLUMN_ID, _NAME_IN_FILES = "delta.columnMapping.id", "delta.columnMapping.physicalName"
_APPEND_ONLY, _INVARIANTS = "appendOnly", "invariants"
_READER_FEATURES = frozenset({DELETION_VECTORS, TIMESTAMP_NTZ, V2_CHECKPOINT, COLUMN_MAPPING})
_WRITER_FEATURES = _READER_FEATURES | {_APPEND_ONLY, _INVARIANTS}
_FILE_RETENTION = "delta.deletedFileRetentionDuration"
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 604800.0}
_INTERVAL = re.compile(rf"(?:interval )?(\d+) ({'|'.join(_SECONDS)})s?")
_DEFAULT_FILE_RETENTION = 604800.0
_LEGACY_READER, _LEGACY_WRITER = 1, 2
_FEATURE_READER, _FEATURE_WRITER = 3, 7

_PRIMITIVES: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
}
_FROM_PRIMITIVES = {name: arrow for arrow, name in _PRIMITIVES.items()}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_FORBIDDEN_IN_NAMES = re.compile(r"[ ,;{}()\n\t=]")
_DIGEST_LENGTH = 10


def delta_type(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type in which a Delta table holds these values; raise `TypeError` if there is none."""
    if arrow_type in _PRIMITIVES:
        return arrow_type
    if _is_decimal(arrow_type):
        return arrow_type
    if pa.types.is_large_string(arrow_type) or pa.types.is_time(arrow_type):
        return pa.string()
    if pa.types.is_large_binary(arrow_type) or pa.types.is_fixed_size_binary(arrow_type):
        return pa.binary()
    if pa.types.is_timestamp(arrow_type):
        return pa.timestamp("us", "UTC" if arrow_type.tz is not None else None)
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return pa.list_(delta_type(arrow_type.value_type))
    if pa.types.is_map(arrow_type):
        return pa.map_(delta_type(arrow_type.key_type), delta_type(arrow_type.item_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([field.with_type(delta_type(field.type)) for field in arrow_type])
    raise TypeError(f"a Delta table has no type for {arrow_type}")


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Return the same columns with Delta types, all nullable, because the source may drop a NOT NULL at any time."""
    return pa.schema([pa.field(field.name, delta_type(field.type)) for field in schema])


def fit(data: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the data with the columns and types of `schema`, a result of `delta_schema`; a missing column is NULL."""
    columns = [
        _cast(data[field.name], field.type)
        if field.name in data.column_names
        else pa.chunked_array([pa.nulls(data.num_rows, field.type)], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if column.type == wanted:
        return column
    if not holds_times(column.type):
        return column.cast(wanted)
    return pa.chunked_array([print_times(chunk) for chunk in column.chunks], wanted)


def schema_string(schema: pa.Schema, shown: Mapping[str, tuple[str, int]] | None = None) -> str:
    """Return the schema as in a table's metadata; raise `TypeError` for types that Delta cannot hold.

    `shown` maps the columns' names in files to the names that readers see, with their column ids.
    """
    fields = [_field_to_json(field) for field in schema]
    if shown is not None:
        for field in fields:
            name, number = shown[field["name"]]
            field |= {"name": name, "metadata": {_COLUMN_ID: number, _NAME_IN_FILES: field["name"]}}
    return compact_json({"type": "struct", "fields": fields})


def arrow_schema(text: str) -> pa.Schema:
    """Parse a schema that Penstock or another writer wrote; raise `TypeError` for types that Penstock does not know.

    Columns have the names that they have in files.
    """
    names = list(shown_names(text))
    fields = [_field_from_json(record) for record in json.loads(text)["fields"]]
    return pa.schema([field.with_name(name) for field, name in zip(fields, names, strict=True)])


def shown_names(text: str) -> dict[str, str]:
    """Return the names that readers see by the names in files, in the order of the schema."""
    records = json.loads(text)["fields"]
    return {record.get("metadata", {}).get(_NAME_IN_FILES, record["name"]): record["name"] for record in records}


def column_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns in a Delta table, where some characters are forbidden and case does not matter.

    A name with a forbidden character, or with capitals if another name differs only by case, gets a digest of itself as
    a suffix, so it stays the same when other columns are added or dropped.
    """
    counts = Counter(map(fold_case, names))
    return tuple(
        _with_digest(name)
        if _FORBIDDEN_IN_NAMES.search(name) or (counts[fold_case(name)] > 1 and name != fold_case(name))
        else name
        for name in names
    )


def protocol_for(schema: pa.Schema, *, deletion_vectors: bool = True, column_mapping: bool = False) -> Protocol:
    """Return the lowest protocol that readers and writers of this table need."""
    features: set[str] = {DELETION_VECTORS} if deletion_vectors else set()
    features |= {COLUMN_MAPPING} if column_mapping else set()
    if any(_has_timestamp_ntz(field.type) for field in schema):
        features.add(TIMESTAMP_NTZ)
    if not features:
        return Protocol(_LEGACY_READER, _LEGACY_WRITER)
    return Protocol(_FEATURE_READER, _FEATURE_WRITER, frozenset(features), frozenset(features))


def merge_protocols(present: Protocol, wanted: Protocol) -> Protocol | None:
    """Return a table's protocol when it needs more features; None if it suffices. Features are never removed."""
    reader = max(present.min_reader_version, wanted.min_reader_version)
    writer = max(present.min_writer_version, wanted.min_writer_version)
    reader_features = present.reader_features | wanted.reader_features
    writer_features = present.writer_features | wanted.writer_features
    if writer >= _FEATURE_WRITER and present.min_writer_version < _FEATURE_WRITER:
        # Spell out the features that the old version number implied.
        writer_features |= {_APPEND_ONLY, _INVARIANTS}
    merged = Protocol(reader, writer, reader_features, writer_features)
    return None if merged == present else merged


def table_configuration(
    owner: str, *, deletion_vectors: bool = True, log_retention_hours: float, file_retention_hours: float
) -> dict[str, str]:
    """Return the properties of a new table. Without its own retention, tombstones would fill its checkpoints."""
    configuration = {
        OWNER: owner,
        "delta.logRetentionDuration": _interval(log_retention_hours),
        _FILE_RETENTION: _interval(file_retention_hours),
    }
    if deletion_vectors:
        configuration["delta.enableDeletionVectors"] = "true"
    return configuration


def file_retention_seconds(configuration: Mapping[str, str]) -> float:
    """Return how long a table's removed files stay for readers of old versions."""
    match = _INTERVAL.fullmatch(configuration.get(_FILE_RETENTION, "").strip().lower())
    return _DEFAULT_FILE_RETENTION if match is None else int(match[1]) * _SECONDS[match[2]]


def refuse_unknown(table: str, protocol: Protocol, metadata: Metadata) -> None:
    """Raise `TableRejected` if the table requires something of its readers or writers that Penstock does not know."""
    reader = _unknown(protocol.min_reader_version, _LEGACY_READER, protocol.reader_features, _READER_FEATURES)
    writer = _unknown(protocol.min_writer_version, _LEGACY_WRITER, protocol.writer_features, _WRITER_FEATURES)
    unknown = sorted(reader | writer)
    if unknown:
        raise rejected(
            table,
            f"it has table features that Penstock does not know: {', '.join(unknown)}",
            hint="Use a separate table for Penstock, or remove the features with the tool that added them.",
        )
    if metadata.configuration.get(MAPPING_MODE, "none") not in ("none", "name"):
        raise rejected(table, "it maps columns by id", hint="Use a separate table for Penstock.")
    if metadata.partition_columns:
        raise rejected(table, "it is partitioned", hint="Use a separate table for Penstock.")
    if metadata.configuration.get("delta.appendOnly", "false").lower() == "true":
        raise rejected(table, "it is append-only", hint="Set its property delta.appendOnly to false.")
    if '"delta.invariants"' in metadata.schema_string:
        raise rejected(table, "one of its columns has an invariant", hint="Use a separate table for Penstock.")


def _with_digest(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{_FORBIDDEN_IN_NAMES.sub('_', name)}_{digest}"


def _unknown(version: int, legacy: int, features: frozenset[str], known: frozenset[str]) -> frozenset[str]:
    if version <= legacy:
        return frozenset()
    newest = _FEATURE_READER if legacy == _LEGACY_READER else _FEATURE_WRITER
    if version != newest:
        kind = "reader" if legacy == _LEGACY_READER else "writer"
        return frozenset({f"{kind} version {version}"})
    return features - known


def _interval(hours: float) -> str:
    return f"interval {max(1, round(hours * 3600))} seconds"


def _is_decimal(arrow_type: pa.DataType) -> bool:
    return pa.types.is_decimal128(arrow_type) and 0 <= arrow_type.scale <= arrow_type.precision


def _has_timestamp_ntz(arrow_type: pa.DataType) -> bool:
    if pa.types.is_timestamp(arrow_type):
        return arrow_type.tz is None
    if pa.types.is_map(arrow_type):
        return _has_timestamp_ntz(arrow_type.key_type) or _has_timestamp_ntz(arrow_type.item_type)
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return _has_timestamp_ntz(arrow_type.value_type)
    return pa.types.is_struct(arrow_type) and any(_has_timestamp_ntz(field.type) for field in arrow_type)


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": _type_to_json(field.type), "nullable": field.nullable, "metadata": {}}


def _type_to_json(arrow_type: pa.DataType) -> Any:
    if arrow_type in _PRIMITIVES:
        return _PRIMITIVES[arrow_type]
    if _is_decimal(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type):
        return {"type": "array", "elementType": _type_to_json(arrow_type.value_type), "containsNull": True}
    if pa.types.is_map(arrow_type):
        return {
            "type": "map",
            "keyType": _type_to_json(arrow_type.key_type),
            "valueType": _type_to_json(arrow_type.item_type),
            "valueContainsNull": True,
        }
    if pa.types.is_struct(arrow_type):
        return {"type": "struct", "fields": [_field_to_json(field) for field in arrow_type]}
    raise TypeError(f"a Delta table has no type for {arrow_type}")


def _field_from_json(record: Mapping[str, Any]) -> pa.Field:
    return pa.field(record["name"], _type_from_json(record["type"]), nullable=record["nullable"])


def _type_from_json(record: Any) -> pa.DataType:
    if isinstance(record, str):
        decimal = _DECIMAL.fullmatch(record)
        if decimal is not None:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if record in _FROM_PRIMITIVES:
            return _FROM_PRIMITIVES[record]
        raise TypeError(f"Penstock does not know the Delta type {record}")
    match record["type"]:
        case "array":
            return pa.list_(_type_from_json(record["elementType"]))
        case "map":
            return pa.map_(_type_from_json(record["keyType"]), _type_from_json(record["valueType"]))
        case "struct":
            return pa.struct([_field_from_json(field) for field in record["fields"]])
        case other:
            raise TypeError(f"Penstock does not know the Delta type {other}")
