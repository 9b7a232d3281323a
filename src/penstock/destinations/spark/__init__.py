"""The Spark destination: every format that Spark writes, and functions that get data frames."""

from penstock.destinations.spark.append import Batch
from penstock.destinations.spark.destination import SparkDestination

__all__ = ["Batch", "SparkDestination"]
