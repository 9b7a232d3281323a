"""Text that is safe to show in a terminal.

Anyone who may create a table chooses its name, and errors quote names. A terminal obeys control characters in them:
they move the cursor, hide lines or change the window, and others turn the direction of text around.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    # Control characters except tab and newline; marks of direction, invisible separators, halves of surrogate pairs.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_BREAK = re.compile("[\t\n]")
_SHORT = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}


def printable(text: str) -> str:
    """Escape characters that a terminal obeys instead of showing them, as in JSON; JSON stays the same value."""
    return _CONTROL.sub(_escape, text)


def one_line(text: str) -> str:
    """Escape line breaks and tabs, too, so that text cannot look like a line of its own."""
    return _BREAK.sub(_escape, printable(text))


def _escape(match: re.Match[str]) -> str:
    return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}"
