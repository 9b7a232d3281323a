"""Seeing what happens: logging and redaction."""

from penstock.observe.redact import redact, scrub

__all__ = ["redact", "scrub"]
