"""Protects files from maintenance: versions that are being read, and files that no commit names yet.

A version is pinned by a small file in the table's `_penstock/pins` folder, so that other processes see it (`penstock
verify` is one). A pin expires, so that a reader that died does not keep files forever. A reader that pins the newest
version, or one that was newest a moment ago, finds all its files, because the retention keeps them anyway.

Files of an unfinished copy or batch are known only to this process, which is enough: only this process deletes files.
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
    """A version that is kept until a given time."""

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
    """Delete a pin."""
    storage.delete([pin.path])


def read_pins(storage: Storage) -> list[Pin]:
    """Return all valid pins; delete those that have expired."""
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
    """Tracks since when files are being written that no commit names yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Enclose everything from the first file to the commit that names it."""
        key = object()
        with self._lock:
            self._since[key] = time.time()
        try:
            yield
        finally:
            with self._lock:
                del self._since[key]

    def oldest(self) -> float:
        """Return the time before which every file is either committed or will never be."""
        with self._lock:
            return min(self._since.values(), default=time.time())


def _put(storage: Storage, pin: Pin) -> None:
    record = {"id": pin.id, "version": pin.version, "until": pin.until, "reason": pin.reason}
    storage.put(pin.path, json.dumps(record).encode())
