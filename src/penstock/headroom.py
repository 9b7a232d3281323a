"""Room that runs out, on the spool's disk and for WAL on the server: how much is left, and how long it lasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 300.0
"""The period over which the rate is averaged."""
LEAST_SECONDS = 60.0
"""A shorter period has no rate: batches and checkpoints free room in steps."""
SHORT_SECONDS = 1800.0
"""Room that is used up sooner is short, and so is the last tenth of it."""
GRACE_SECONDS = 60.0
"""How long more than the limit may be used, and for as long again whenever it has become less."""
_SHORT_SHARE, _AMPLE_SHARE = 0.1, 0.2


@dataclass(frozen=True, slots=True)
class Room:
    """Room at one moment, in bytes."""

    used: int
    left: int
    limit: str
    """The setting that limits it: the one of which the least is left."""
    seconds_left: float | None = None
    """How long it lasts at the rate of the last minutes; None if it does not shrink, or that is not known yet."""
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Headroom:
    """What a stream has left."""

    spool: Room | None = None
    wal: Room | None = None
    """WAL that the server retains for the slot."""

    @property
    def wal_limit(self) -> int | None:
        """How much WAL the server may retain for the slot; None if that is not known."""
        return None if self.wal is None else self.wal.used + self.wal.left


class Trend:
    """Samples of the room that is left."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, at: float, left: int) -> None:
        """Add a sample; `at` is in seconds."""
        self._samples.append((at, left))
        while at - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def seconds_left(self) -> float | None:
        """The time after the last sample at which nothing is left."""
        (since, before), (at, left) = self._samples[0], self._samples[-1]
        if left <= 0:
            return 0.0
        if at - since < LEAST_SECONDS or left >= before:
            return None
        return left * (at - since) / (before - left)


class RoomWatch:
    """Watches one kind of room, and warns once when it becomes short; again after there was enough meanwhile."""

    def __init__(self, warn: Callable[[Room], None]) -> None:
        self._warn = warn
        self._trends: dict[str, Trend] = {}
        self._is_short = False

    def look(self, at: float, used: int, left: Mapping[str, int]) -> Room:
        """Return the room now; `left` has what each limit leaves of it, by the name of its setting."""
        for limit, bytes_left in left.items():
            self._trends.setdefault(limit, Trend()).add(at, bytes_left)
        tightest = min(left, key=lambda limit: (self._seconds(limit), left[limit]))
        room = Room(used, max(0, left[tightest]), tightest, self._trends[tightest].seconds_left)
        was_short, self._is_short = self._is_short, self._judge(room)
        room = Room(room.used, room.left, room.limit, room.seconds_left, self._is_short)
        if room.is_short and not was_short:
            self._warn(room)
        return room

    def _seconds(self, limit: str) -> float:
        seconds = self._trends[limit].seconds_left
        return float("inf") if seconds is None else seconds

    def _judge(self, room: Room) -> bool:
        # Once short, it has to become ample, so that a rate that varies does not warn each time.
        seconds, share = (2 * SHORT_SECONDS, _AMPLE_SHARE) if self._is_short else (SHORT_SECONDS, _SHORT_SHARE)
        lasts = float("inf") if room.seconds_left is None else room.seconds_left
        return lasts < seconds or room.left <= share * (room.used + room.left)


class Overrun:
    """Decides when a limit is exceeded for good: not while it is about to be met again.

    A pipeline that was stopped for a day finds much WAL when it starts, and needs some time to read it.
    """

    def __init__(self) -> None:
        self._least: int | None = None
        self._since = 0.0

    def lasts(self, at: float, used: int, limit: int) -> bool:
        """Return whether the limit has been exceeded for `GRACE_SECONDS` in which `used` has not shrunk."""
        if used <= limit:
            self._least = None
        elif self._least is None or used < self._least:
            self._least, self._since = used, at
        return self._least is not None and at - self._since >= GRACE_SECONDS
