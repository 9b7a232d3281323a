"""Many write documents at the same time; whoever begins or ends a generation of an index is alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Generations:
    """May be used from any thread; not again by one that is inside already."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = 0
        self._changing = 0
        self._alone = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the generations stay what they are."""
        with self._changed:
            # Who waits to change them goes first, or there would always be somebody who writes.
            self._changed.wait_for(lambda: not self._changing)
            self._writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, nobody writes."""
        with self._changed:
            self._changing += 1
            self._changed.wait_for(lambda: not self._writing and not self._alone)
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._changing -= 1
                self._alone = False
                self._changed.notify_all()
