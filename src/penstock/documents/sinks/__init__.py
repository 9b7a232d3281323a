"""Where documents go."""

from penstock.documents.sinks.local import CountingSink, FanOutSink, MemorySink, StdoutSink

__all__ = ["CountingSink", "FanOutSink", "MemorySink", "StdoutSink"]
