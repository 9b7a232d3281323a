"""Snowflake: files are put on a stage and copied; mirrors are merged from a stage table, with the position in the same
transaction.

| module | |
|---|---|
| `connection` | the options, sessions made from them, and what their errors mean |
| `layout` | the columns of a table in Snowflake, and the view through which people read it |
| `control` | the table that records which generation and position each table has |
| `tasks` | what runs in tasks: staging a range, and writing a table's part of a batch |
| `reader` | reading the rows back |
| `destination` | the destination |
"""

from penstock.destinations.snowflake.destination import SnowflakeDestination

__all__ = ["SnowflakeDestination"]
