"""Every change in Parquet files, exactly once; the reference implementation for authors of destinations.

Read `folder` (where files are, manifests and fences), then `tasks` (the work in Spark), `destination` (how these fit
together) and `reader`.
"""

from penstock.destinations.parquet.destination import ParquetDestination
from penstock.destinations.parquet.reader import ParquetReader

__all__ = ["ParquetDestination", "ParquetReader"]
