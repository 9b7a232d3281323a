"""Sinks: where documents go."""

from penstock.documents.sinks.local import CountingSink, MemorySink, StdoutSink, TeeSink

__all__ = ["CountingSink", "MemorySink", "StdoutSink", "TeeSink"]
