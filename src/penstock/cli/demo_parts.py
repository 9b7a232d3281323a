"""What the demos share: a folder of their own, and how one watches outputs until something is so."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.cli.outputs import POLL_SECONDS, LookedAt
from penstock.cli.tail import Ending
from penstock.coordinator import Coordinator
from penstock.errors import ConfigError

MARKER = ".penstock-demo"


@dataclass(frozen=True, slots=True)
class DemoChoice:
    """What a person chose."""

    seconds: float
    rate: float
    orders: int
    folder: Path
    master: str
    keep: bool


class Watch(Protocol):
    """Look until it is done, or the time is over; whether it is done."""

    def __call__(self, seconds: float, done: Callable[[], bool]) -> bool: ...


def fresh_folder(folder: Path) -> Path:
    """The folder, empty; what stands in it is removed only if it is an older demo's."""
    place = folder.absolute()
    if place.exists():
        if not (place / MARKER).is_file() and any(place.iterdir()):
            raise ConfigError(f"{folder} is not empty, and no older demo", hint="Name another one with --folder.")
        shutil.rmtree(place)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}", hint="Name another one with --folder.") from None
    (place / MARKER).touch()
    return place


def watcher(outputs: Coordinator, looked_at: LookedAt, ending: Ending) -> Watch:
    """A way to wait that shows how the outputs are, and ends with them."""

    def watch(seconds: float, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not ending.stop.is_set() and not outputs.wait(0):
            looked_at.look()
            if done():
                return True
            if time.monotonic() >= deadline:
                return False
            ending.stop.wait(POLL_SECONDS)
        return False

    return watch
