"""Spark: the session, tasks and the Python worker daemon. The only package that imports pyspark, which is optional."""
