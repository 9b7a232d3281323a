"""One snapshot for all tables that are about to be copied: each costs connections, a slot, and a wait for writers.

Whoever needs a snapshot boards the next one that is taken, and never one whose taking has begun: a table's changes must
be held before its snapshot exists. While one is taken, others gather for the one after it. So a table alone gets its
snapshot at once, and of hundreds many share theirs. It is let go when the last of them has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.source.slots import Blocker
from penstock.source.snapshots import Snapshot
from penstock.spool import Stopping

OnWait = Callable[[Sequence[Blocker]], None]
Take = Callable[[OnWait], Snapshot]

_CHECK_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Departure:
    """A snapshot to be, and who waits for it."""

    aboard: list[OnWait] = field(default_factory=list[OnWait])
    snapshot: Snapshot | None = None
    error: BaseException | None = None
    """What kept it from being taken; `Stopping` if only the one who took it was not wanted any more."""

    def tell(self, blockers: Sequence[Blocker]) -> None:
        for on_wait in list(self.aboard):
            on_wait(blockers)


class SharedSnapshots:
    """May be used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gathering: _Departure | None = None
        self._taking = False

    @contextmanager
    def enter(self, take: Take, *, on_wait: OnWait, check: Callable[[], None]) -> Iterator[Snapshot]:
        """A snapshot that is taken from now on, by `take` or by that of another who waits for it too.

        `on_wait` hears whom it waits for. `check` is called now and then, and raises when it is not wanted any more.
        """
        departure = self._board(take, on_wait, check)
        assert departure.snapshot is not None
        try:
            yield departure.snapshot
        finally:
            self._leave(departure, on_wait)

    def _board(self, take: Take, on_wait: OnWait, check: Callable[[], None]) -> _Departure:
        while True:
            with self._changed:
                departure = self._gathering = self._gathering or _Departure()
                departure.aboard.append(on_wait)
            try:
                if self._wait(departure, check):
                    self._take(departure, take)
                if departure.snapshot is not None:
                    return departure
                if departure.error is not None and not isinstance(departure.error, Stopping):
                    raise departure.error
                # Another one was to take it, and has gone.
                check()
            except BaseException:
                self._leave(departure, on_wait)
                raise

    def _wait(self, departure: _Departure, check: Callable[[], None]) -> bool:
        """Wait for it to be taken; True for the one who has to do it."""
        with self._changed:
            while departure.snapshot is None and departure.error is None:
                if not self._taking and self._gathering is departure:
                    self._taking = True
                    self._gathering = None
                    return True
                self._changed.wait(_CHECK_SECONDS)
                check()
        return False

    def _take(self, departure: _Departure, take: Take) -> None:
        try:
            departure.snapshot = take(departure.tell)
        except BaseException as error:
            departure.error = error
            raise
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()

    def _leave(self, departure: _Departure, on_wait: OnWait) -> None:
        with self._changed:
            departure.aboard.remove(on_wait)
            if departure.aboard:
                return
            if self._gathering is departure:
                self._gathering = None
        if departure.snapshot is not None:
            departure.snapshot.close()
