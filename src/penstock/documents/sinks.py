"""Sinks without a server, under the name that other programs import; `penstock.sinks` has them all."""

from penstock.sinks.local import CountingSink, MemorySink, StdoutSink, TeeSink

__all__ = ["CountingSink", "MemorySink", "StdoutSink", "TeeSink"]
