"""Documents in OpenSearch and compatible servers."""

from penstock.documents.sinks.opensearch.client import OpenSearchSettings
from penstock.documents.sinks.opensearch.sink import OpenSearchSink

__all__ = ["OpenSearchSettings", "OpenSearchSink"]
