"""What maintenance must leave alone: versions that somebody reads, and files that no commit names yet.

A version is pinned by a small file in the table's `_penstock/pins` folder, so that another process sees it (`penstock
verify` is one), and until a time, so that a reader that died does not hold files forever. Whoever pins a version while
it is the newest, or was the newest a moment ago, finds all its files: they are kept for the retention anyway.

Files of a copy or a batch under way are known to this process only, which is enough: it is the one that deletes.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.destinations.delta.storage import Storage

PENSTOCK_FOLDER = "_penstock"
PINS_FOLDER = f"{PENSTOCK_FOLDER}/pins"


@dataclass(frozen=True, slots=True)
class Pin:
    """A version that is kept until a time."""

    id: str
    version: int
    until: float
    """Seconds since the epoch."""
    reason: str

    @property
    def path(self) -> str:
        return f"{PINS_FOLDER}/{self.id}.json"


def pin_version(storage: Storage, version: int, *, seconds: float, reason: str) -> Pin:
    """Keep a version readable for a while."""
    pin = Pin(uuid.uuid4().hex, version, time.time() + seconds, reason)
    _put(storage, pin)
    return pin


def release_pin(storage: Storage, pin: Pin) -> None:
    """Nobody needs it any more."""
    storage.delete([pin.path])


def read_pins(storage: Storage) -> list[Pin]:
    """All that are valid now; those that have run out are removed."""
    found: list[Pin] = []
    for file in storage.list(PINS_FOLDER):
        if not file.path.endswith(".json"):
            continue
        content = storage.get(file.path)
        if content is None:
            continue
        record = json.loads(content)
        pin = Pin(record["id"], record["version"], record["until"], record["reason"])
        if pin.until < time.time():
            storage.delete([pin.path])
        else:
            found.append(pin)
    return found


class WritesInFlight:
    """Since when files are being written that no commit names yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around everything from the first file to the commit that names it."""
        key = object()
        with self._lock:
            self._since[key] = time.time()
        try:
            yield
        finally:
            with self._lock:
                del self._since[key]

    def oldest(self) -> float:
        """The time before which all files were committed, or will never be."""
        with self._lock:
            return min(self._since.values(), default=time.time())


def _put(storage: Storage, pin: Pin) -> None:
    record = {"id": pin.id, "version": pin.version, "until": pin.until, "reason": pin.reason}
    storage.put(pin.path, json.dumps(record).encode())
