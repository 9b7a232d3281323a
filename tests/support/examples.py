"""How many examples Hypothesis tries of each property: some in each run, many in `make soak`."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("PENSTOCK_SOAK_EXAMPLES", "1"))
"""How many times as many."""


def examples(count: int) -> int:
    """Return a number of examples for `hypothesis.settings`, given the one of a usual run."""
    return count * TIMES
