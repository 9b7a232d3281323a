"""Table schemas as JSON, for files and stores."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from penstock.schema.table import Column, ReplicaIdentity, TableSchema
from penstock.schema.types import PostgresType, TypeKind


def schema_to_json(schema: TableSchema) -> dict[str, Any]:
    """Plain dictionaries and lists."""
    return {
        "table_id": schema.table_id,
        "namespace": schema.namespace,
        "name": schema.name,
        "replica_identity": schema.replica_identity.value,
        "columns": [
            {field.name: getattr(column, field.name) for field in fields(column)} | {"type": _type_to_json(column.type)}
            for column in schema.columns
        ],
    }


def schema_from_json(record: dict[str, Any]) -> TableSchema:
    """What `schema_to_json` gave."""
    columns = tuple(Column(**(column | {"type": _type_from_json(column["type"])})) for column in record["columns"])
    return TableSchema(
        table_id=record["table_id"],
        namespace=record["namespace"],
        name=record["name"],
        columns=columns,
        replica_identity=ReplicaIdentity(record["replica_identity"]),
    )


def _type_to_json(type_: PostgresType) -> dict[str, Any]:
    record: dict[str, Any] = {field.name: getattr(type_, field.name) for field in fields(type_)}
    record["kind"] = type_.kind.value
    for part in ("element", "base"):
        if record[part] is not None:
            record[part] = _type_to_json(record[part])
    return record


def _type_from_json(record: dict[str, Any]) -> PostgresType:
    changed: dict[str, Any] = {"kind": TypeKind(record["kind"])}
    changed |= {part: _type_from_json(record[part]) for part in ("element", "base") if record[part] is not None}
    return PostgresType(**(record | changed))
