"""Writes tables of another PostgreSQL database: the same rows, every change, or rows including deleted ones."""

from penstock.destinations.postgres.destination import PostgresDestination

__all__ = ["PostgresDestination"]
