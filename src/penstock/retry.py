"""Waiting between attempts: exponential back-off with jitter that starts over after progress."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Delays that double from `first` to `longest`, each spread over its upper half."""

    first: float = 0.2
    longest: float = 30.0
    attempt: int = 0
    random: random.Random = field(default_factory=random.Random)

    @property
    def log_level(self) -> int:
        """The level for a failure before its delay: of several in a row, only the first is a warning."""
        return logging.WARNING if self.attempt == 0 else logging.INFO

    def next_delay(self) -> float:
        """Return the next delay in seconds; jitter keeps many clients from coming back at the same moment."""
        ceiling = min(self.longest, self.first * 2 ** min(self.attempt, 32))
        self.attempt += 1
        return ceiling * self.random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start over; called after progress, so that errors weeks apart do not add up."""
        self.attempt = 0
