"""The config file: read, checked, and turned into the settings of the packages that it is about."""

from penstock.config.documents import DocumentsChoice, IndexChoice, PollingChoice
from penstock.config.loading import Config, OutputChoice, SparkChoice, load_config, make_config

__all__ = [
    "Config",
    "DocumentsChoice",
    "IndexChoice",
    "OutputChoice",
    "PollingChoice",
    "SparkChoice",
    "load_config",
    "make_config",
]
