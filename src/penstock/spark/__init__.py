"""Spark: the session, tasks and the Python worker daemon. pyspark is optional."""
