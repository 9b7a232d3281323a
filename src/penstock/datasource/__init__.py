"""Postgres tables as data frames of your own Spark session: `spark.read.format("penstock")`."""

from penstock.datasource.keeper import KeptSnapshot, snapshot
from penstock.datasource.registering import register

__all__ = ["KeptSnapshot", "register", "snapshot"]
