"""Keeping secrets out of everything that people and machines can read: logs, errors, reports.

Two means. `redact` knows what a secret looks like (a password in a URL, `password=…` in a conninfo) and is applied
to free text. `scrub` knows the secrets themselves and removes them wherever they turn up; it is the second net, for
text that comes from elsewhere (libpq quotes pieces of a conninfo that it cannot read).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

_URL_PASSWORD = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.\-]*://[^\s:/@?#'\"]*:)[^\s'\"]*@")
_ASSIGNMENT = re.compile(
    r"(?i)\b((?:ssl)?password|passwd|pwd|secret|token)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&'\"]+)",
)
_SHORT = 6


def redact(text: str) -> str:
    """The text without anything that looks like a password; may hide more than needed, never less."""
    text = _URL_PASSWORD.sub(rf"\g<1>{MASK}@", text)
    return _ASSIGNMENT.sub(rf"\g<1>\g<2>{MASK}", text)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """The text without these values; a short one only where it stands alone, or it would tear words apart."""
    for secret in sorted({secret for secret in secrets if secret}, key=len, reverse=True):
        pattern = re.escape(secret)
        if len(secret) < _SHORT:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        text = re.sub(pattern, lambda _match: MASK, text)
    return text
