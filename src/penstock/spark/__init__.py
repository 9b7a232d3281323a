"""Spark: the session, tasks, and types. With the data source, the only package that imports it."""

from penstock.spark.session import PYTHON_DAEMON, SparkSettings, build_session
from penstock.spark.tasks import SparkTasks

__all__ = ["PYTHON_DAEMON", "SparkSettings", "SparkTasks", "build_session"]
