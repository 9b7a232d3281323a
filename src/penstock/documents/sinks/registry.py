"""Which sinks there are, by the name that a config gives them; nothing is imported before it is asked for.

create_sink("opensearch", {"url": "http://localhost:9200"})
create_sink("my_package.my_module:MySink", {"anything": 1})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.documents.base import Sink
from penstock.registry import Registered, Registry

SINKS: Mapping[str, Registered] = {
    "opensearch": Registered("penstock.documents.sinks.opensearch:OpenSearchSink", extra="opensearch"),
    "stdout": Registered("penstock.documents.sinks.local:StdoutSink"),
    "memory": Registered("penstock.documents.sinks.local:MemorySink"),
    "counting": Registered("penstock.documents.sinks.local:CountingSink"),
}

_METHODS = ("write", "flush", "ensure_index", "is_seeded", "mark_seeded", "reindex")
_CONTRACT = "Derive from penstock.documents.Sink, which has a default for all but write and flush."


def create_sink(type_: str, options: Mapping[str, Any] | None = None, other_keys: Iterable[str] = ()) -> Sink:
    """Make a sink from its type and its options; nothing is connected yet."""
    return _registry().create(type_, options, other_keys)


def load_sink(type_: str) -> type[Any]:
    """The class behind a name, or behind `module:Class`."""
    return _registry().load(type_)


def _registry() -> Registry:
    return Registry("sink", SINKS, _METHODS, _CONTRACT)
