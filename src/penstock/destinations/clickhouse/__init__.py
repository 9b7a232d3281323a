"""Writes tables of ClickHouse: the same rows, or every change."""

from penstock.destinations.clickhouse.destination import ClickHouseDestination

__all__ = ["ClickHouseDestination"]
