"""The config file: read, checked, and turned into the settings of the packages that it is about."""

from penstock.config.loading import Config, SparkChoice, load_config

__all__ = ["Config", "SparkChoice", "load_config"]
