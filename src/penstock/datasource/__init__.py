"""Postgres tables, and their changes, as data frames of your own Spark session: `format("penstock")`."""

from penstock.datasource.keeper import KeptSnapshot, snapshot
from penstock.datasource.registering import register

__all__ = ["KeptSnapshot", "register", "snapshot"]
