"""BigQuery: mirrors by the change types of the Storage Write API, history by streams with offsets, copies by load jobs.

| module | |
|---|---|
| `connection` | the options, the clients made from them, and what their errors mean |
| `layout` | the columns of a table in BigQuery, and the view through which people read it |
| `protobuf` | Arrow columns as protobuf rows |
| `append` | appending to a stream of the Storage Write API |
| `control` | the table that records which generation and position each table has |
| `tasks` | what runs in tasks: loading a range, and appending a table's part of a batch |
| `destination` | the destination |
"""

from penstock.destinations.bigquery.destination import BigQueryDestination

__all__ = ["BigQueryDestination"]
