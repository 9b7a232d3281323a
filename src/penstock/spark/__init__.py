"""Spark: the session, tasks, and types. With the data source, the only package that imports it."""

from penstock.spark.session import SparkSettings, build_session
from penstock.spark.tasks import SparkTasks

__all__ = ["SparkSettings", "SparkTasks", "build_session"]
