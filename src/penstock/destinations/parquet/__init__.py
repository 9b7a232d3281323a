"""Every change in Parquet files, exactly once; the reference for people who write destinations.

Read `manifests` (what makes a batch atomic), then `folder` (where things lie, and fences), `tasks` (what runs in
Spark), `destination` (how these are put together) and `reader`.
"""

from penstock.destinations.parquet.destination import ParquetDestination
from penstock.destinations.parquet.reader import ParquetReader

__all__ = ["ParquetDestination", "ParquetReader"]
