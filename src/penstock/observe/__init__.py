"""Seeing what happens: logging and redaction."""

from penstock.observe.logs import LogFormat, configure_logging
from penstock.observe.redact import redact, scrub

__all__ = ["LogFormat", "configure_logging", "redact", "scrub"]
