"""The config file: read, validated, and turned into settings."""

from penstock.config.documents import DocumentsChoice, IndexChoice, PollingChoice
from penstock.config.loading import Config, LogChoice, OutputChoice, ServerChoice, SparkChoice, load_config, make_config

__all__ = [
    "Config",
    "DocumentsChoice",
    "IndexChoice",
    "LogChoice",
    "OutputChoice",
    "PollingChoice",
    "ServerChoice",
    "SparkChoice",
    "load_config",
    "make_config",
]
