"""Sinks by their names in config files; a sink is imported when it is first used.

create_sink("opensearch", {"url": "http://localhost:9200"})
create_sink("my_package.my_module:MySink", {"anything": 1})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.registry import Registered, Registry
from penstock.sinks.base import Sink

SINKS: Mapping[str, Registered] = {
    "opensearch": Registered("penstock.sinks.opensearch:OpenSearchSink", extra="opensearch"),
    "ndjson": Registered("penstock.sinks.files:NdjsonSink"),
    "parquet": Registered("penstock.sinks.files:ParquetSink"),
    "delta": Registered("penstock.sinks.delta:DeltaSink", extra="delta"),
    "stdout": Registered("penstock.sinks.local:StdoutSink"),
    "memory": Registered("penstock.sinks.local:MemorySink"),
    "counting": Registered("penstock.sinks.local:CountingSink"),
}

_METHODS = ("write", "flush", "ensure_index", "is_seeded", "mark_seeded", "reindex")
_CONTRACT = "Derive from penstock.documents.Sink, which has defaults for all methods except write and flush."


def create_sink(type_: str, options: Mapping[str, Any] | None = None, other_keys: Iterable[str] = ()) -> Sink:
    """Create a sink from its type and options; opens no connection yet."""
    return _registry().create(type_, options, other_keys)


def load_sink(type_: str) -> type[Any]:
    """Return the class of a name, or of `module:Class`."""
    return _registry().load(type_)


def _registry() -> Registry:
    return Registry("sink", SINKS, _METHODS, _CONTRACT)
