"""Penstock: Postgres into lakehouse tables, databases and search documents, on Spark."""
