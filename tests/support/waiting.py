"""Looking and writing again and again, less often the longer it takes: both cost processor time, and many tests run."""

from __future__ import annotations

import time

_SLOWEST = 0.05
"""A writer that is slowed down still writes 20 times a second."""


def pause(begun: float, *, shortest: float = 0.01, longest: float = 0.2) -> None:
    """Wait before the next look; `begun` is when the first look was (`time.monotonic`). Adds a tenth, or `shortest`."""
    time.sleep(min(longest, max(shortest, (time.monotonic() - begun) / 10)))


def slowed(pause: float, begun: float) -> float:
    """Return the pause before the next transaction of a writer that began then: it grows, but not above `_SLOWEST`.

    On a busy machine a test takes longer, and a writer that kept its pace would make it longer still.
    """
    return max(pause, min(_SLOWEST, pause * (1.0 + time.monotonic() - begun)))
