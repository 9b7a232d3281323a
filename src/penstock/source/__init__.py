"""Postgres as a source: connections, catalog, publications, slots, lineage, checks."""

from penstock.source.catalog import load_attributes, load_table, load_types, schema_from_catalog
from penstock.source.columns import Attribute, CatalogTable, RelationColumn, build_schema, identify_columns
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect, connect_replication, run_command

__all__ = [
    "NO_TIMEOUTS",
    "Attribute",
    "CatalogTable",
    "RelationColumn",
    "Role",
    "SourceSettings",
    "build_schema",
    "connect",
    "connect_replication",
    "identify_columns",
    "load_attributes",
    "load_table",
    "load_types",
    "run_command",
    "schema_from_catalog",
]
