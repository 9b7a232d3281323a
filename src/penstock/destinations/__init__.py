"""Where changes are written: the contract, the destinations that come with Penstock, and base classes for your own."""

from penstock.destinations.base import (
    Capabilities,
    CopyRows,
    Destination,
    DestinationContext,
    TableResult,
    Tasks,
    WriteHandle,
    WriteResult,
    completed,
)
from penstock.destinations.registry import create_destination, load_destination
from penstock.destinations.rows import RowDestination

__all__ = [
    "Capabilities",
    "CopyRows",
    "Destination",
    "DestinationContext",
    "RowDestination",
    "TableResult",
    "Tasks",
    "WriteHandle",
    "WriteResult",
    "completed",
    "create_destination",
    "load_destination",
]
