"""Tables in a DuckDB file or a DuckLake catalog: one task at a time writes, and rows commit with their positions."""

from penstock.destinations.duckdb.destination import DuckDbDestination

__all__ = ["DuckDbDestination"]
