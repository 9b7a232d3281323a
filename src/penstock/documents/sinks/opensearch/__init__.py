"""Documents in OpenSearch, and in servers that speak its language."""

from penstock.documents.sinks.opensearch.client import OpenSearchSettings
from penstock.documents.sinks.opensearch.sink import OpenSearchSink

__all__ = ["OpenSearchSettings", "OpenSearchSink"]
