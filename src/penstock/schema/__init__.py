"""Schemas: Postgres types, columns and tables."""

from penstock.schema.table import Column, ReplicaIdentity, TableSchema, quote_identifier, quote_literal
from penstock.schema.types import (
    PostgresType,
    TypeKind,
    numeric_precision_scale,
    resolve_domain,
)

__all__ = [
    "Column",
    "PostgresType",
    "ReplicaIdentity",
    "TableSchema",
    "TypeKind",
    "numeric_precision_scale",
    "quote_identifier",
    "quote_literal",
    "resolve_domain",
]
