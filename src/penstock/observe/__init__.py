"""Seeing what happens: logging and redaction."""

from penstock.observe.logs import LogFormat, configure_logging
from penstock.observe.redact import redact, scrub
from penstock.observe.terminal import one_line, printable

__all__ = ["LogFormat", "configure_logging", "one_line", "printable", "redact", "scrub"]
