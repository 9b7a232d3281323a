"""Finds a destination by the name in the config; its module is imported only when it is needed.

create_destination("parquet", {"path": "/lake"})
create_destination("my_package.my_module:MyDestination", {"anything": 1})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.destinations.base import Destination
from penstock.registry import Registered, Registry

DESTINATIONS: Mapping[str, Registered] = {
    "delta": Registered("penstock.destinations.delta.destination:DeltaDestination", extra="delta"),
    "bigquery": Registered("penstock.destinations.bigquery.destination:BigQueryDestination", extra="bigquery"),
    "memory": Registered("penstock.destinations.memory:MemoryDestination"),
    "snowflake": Registered("penstock.destinations.snowflake.destination:SnowflakeDestination", extra="snowflake"),
    "stdout": Registered("penstock.destinations.stdout:StdoutDestination"),
    "parquet": Registered("penstock.destinations.parquet:ParquetDestination"),
    "postgres": Registered("penstock.destinations.postgres:PostgresDestination"),
    "spark": Registered("penstock.destinations.spark:SparkDestination", extra="spark"),
    "http": Registered("penstock.destinations.http:HttpDestination"),
    "kafka": Registered("penstock.destinations.kafka.destination:KafkaDestination", extra="kafka"),
    "clickhouse": Registered("penstock.destinations.clickhouse.destination:ClickHouseDestination", extra="clickhouse"),
    "duckdb": Registered("penstock.destinations.duckdb:DuckDbDestination", extra="duckdb"),
}

_METHODS = ("startup", "drop_table_for_copy", "write_table_rows", "write_events", "position", "shutdown")
_CONTRACT = "See penstock.destinations.base.Destination, or start from penstock.destinations.rows.RowDestination."


def create_destination(type_: str, options: Mapping[str, Any] | None = None) -> Destination:
    """Create a destination from its type and options, without starting it."""
    return _registry().create(type_, options)


def load_destination(type_: str) -> type[Any]:
    """Return the class for a name or for `module:Class`."""
    return _registry().load(type_)


def _registry() -> Registry:
    return Registry("destination", DESTINATIONS, _METHODS, _CONTRACT)
