"""Documents in OpenSearch and compatible servers."""

from penstock.sinks.opensearch.client import OpenSearchSettings
from penstock.sinks.opensearch.sink import OpenSearchSink

__all__ = ["OpenSearchSettings", "OpenSearchSink"]
