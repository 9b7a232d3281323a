"""Where documents go."""

from penstock.documents.sinks.fan_out import FanOutSink
from penstock.documents.sinks.memory import MemorySink
from penstock.documents.sinks.stdout import CountingSink, StdoutSink

__all__ = ["CountingSink", "FanOutSink", "MemorySink", "StdoutSink"]
