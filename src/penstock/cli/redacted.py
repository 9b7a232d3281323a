"""A config file without its secrets, for reports.

Goes by what is known to be harmless, not by what looks like a secret: of the options of destinations and of Spark only
those are shown that are known. What comes from the environment stays a reference; its value is never looked up.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from penstock.observe import redact
from penstock.observe.redact import MASK

_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_HARMLESS_OPTIONS = frozenset({"type", "name", "path", "mode", "compression", "format", "commit_interval"})
_HARMLESS_SPARK = frozenset({"master", "memory"})
_SHORTEST_SECRET = 8
_OPEN_SECTIONS = frozenset({"destination", "spark"})
"""Sections that take any key."""


def redact_config(file: dict[str, Any]) -> dict[str, Any]:
    """The parsed file, before anything was put in from the environment."""
    return {name: _section(name, value) for name, value in file.items()}


def hidden_texts(file: dict[str, Any]) -> set[str]:
    """What `redact_config` hides altogether: not to be shown elsewhere either. Short texts are words, not secrets."""
    shown = _texts(redact_config(file))
    return {text for text in _texts(file) - shown if len(text) >= _SHORTEST_SECRET}


def _texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {text for each in value.values() for text in _texts(each)}
    if isinstance(value, list):
        return {text for each in value for text in _texts(each)}
    return {value} if isinstance(value, str) else set()


def _section(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_section(name, each) for each in value]
    if not isinstance(value, dict):
        return _known(value)
    if name in _OPEN_SECTIONS:
        harmless = _HARMLESS_SPARK if name == "spark" else _HARMLESS_OPTIONS
        return {key: _known(each) if key in harmless else _masked(each) for key, each in value.items()}
    return _known(value)


def _known(value: Any) -> Any:
    """A value of a key that we know: a URL may have a password, nothing else."""
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return redact(value) if isinstance(value, str) else value


def _masked(value: Any) -> Any:
    """A value of which nothing is known; of an address the host is shown."""
    if isinstance(value, dict):
        return {key: _masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    if not isinstance(value, str) or _REFERENCE.fullmatch(value):
        return value
    try:
        address = urlsplit(value)
        host = address.hostname
    except ValueError:
        return MASK
    return f"{address.scheme}://{host}/{MASK}" if address.scheme and host and "$" not in host else MASK
