"""A coordinator that counts how often it has checked the publication, for tests that wait for the next check."""

from __future__ import annotations

from typing import Any

from penstock.coordinator import Coordinator


class CountingCoordinator(Coordinator):
    """A coordinator with a count of its checks that succeeded and that all outputs have followed."""

    looks = 0

    def _refresh(self, stream: Any, tended: Any, backoff: Any) -> float:
        delay = super()._refresh(stream, tended, backoff)
        self.looks += not backoff.attempt
        return delay
