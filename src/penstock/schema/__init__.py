"""Schemas: Postgres types, columns and tables."""

from penstock.schema.table import Column, ReplicaIdentity, TableSchema, fold_case, quote_identifier, quote_literal
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
    "fold_case",
    "numeric_precision_scale",
    "quote_identifier",
    "quote_literal",
    "resolve_domain",
]
