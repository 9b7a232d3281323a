"""Looking for an event again and again, less often the longer it takes: looking costs processor time, too."""

from __future__ import annotations

import time


def pause(begun: float, *, shortest: float = 0.01, longest: float = 0.05) -> None:
    """Wait before the next look; `begun` is when the first look was (`time.monotonic`). Adds a tenth, or `shortest`."""
    time.sleep(min(longest, max(shortest, (time.monotonic() - begun) / 10)))
