"""Proof that the driver and the tasks of a cluster see the same destination.

A folder has the same path on every machine, but not always the same disk behind it. A task whose machine has another
disk there would write rows that no reader finds, and the driver would commit them. So before the first copy, driver and
executors show each other files with random names. Executors that join later are not asked: before a commit, the driver
looks at every file that tasks wrote to a folder (`require_written`).
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.destinations.base import DestinationContext
from penstock.destinations.refusals import unusable
from penstock.errors import DestinationUnavailable

_FOLDER = "_penstock/seen"
_ITEMS = 64
"""More than most clusters have cores. They share one task per core."""
_MOUNT = (
    "All machines of a cluster must see the destination under this path: mount a shared file system there on each of "
    "them, or use an object store, like s3://bucket/lake."
)


class Place(Protocol):
    """A folder or an object store; `penstock.destinations.delta.storage.Storage` is one. Pickles."""

    @property
    def url(self) -> str: ...
    def get(self, path: str, /) -> bytes | None: ...
    def put(self, path: str, content: bytes, /) -> None: ...
    def delete(self, paths: Sequence[str], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder as a place."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def get(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, path: str, content: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    host: str
    path: str
    """The file that the executor left for the driver; empty if it does not see the driver's."""
    reason: str = ""


def require_shared(context: DestinationContext, place: Place) -> None:
    """Raise `ConfigError` if executors and driver do not see each other's files; with a local master, do nothing."""
    if not context.tasks.elsewhere:
        return
    name = uuid.uuid4().hex
    ours = f"{_FOLDER}/{name}"
    place.put(ours, name.encode())
    answers: list[_Answer] = []
    try:
        work = partial(_answer, place, ours)
        what = f"check that executors see {place.url}"
        answers = context.tasks.run([name] * _ITEMS, work, description=what)
        for answer in answers:
            if not answer.path:
                raise _not_shared(place, answer.host, answer.reason)
            if place.get(answer.path) != answer.path.encode():
                raise _not_shared(place, answer.host, "the driver does not find the file that it wrote there")
    finally:
        place.delete([ours, *(answer.path for answer in answers if answer.path)])


def _answer(place: Place, ours: str, name: str) -> _Answer:
    host = socket.gethostname()
    try:
        if place.get(ours) != name.encode():
            return _Answer(host, "", "it does not find the file that the driver wrote there")
        path = f"{_FOLDER}/{name}-{uuid.uuid4().hex}"
        place.put(path, path.encode())
        return _Answer(host, path)
    except Exception as error:
        return _Answer(host, "", getattr(error, "strerror", None) or type(error).__name__)


def _not_shared(place: Place, host: str, reason: str) -> Exception:
    return unusable(f"an executor on {host} does not see {place.url} as the driver does: {reason}", hint=_MOUNT)


def require_written(table: str, files: Iterable[tuple[Path, int | None]]) -> None:
    """Raise if the driver does not see files that tasks wrote, with these sizes; None is any size."""
    for path, size in files:
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            found = None
        if found is None or size not in (None, found):
            raise unseen(table, str(path))


def unseen(table: str, path: str) -> DestinationUnavailable:
    """A task reported a file that is not there for the driver; retried, since another executor may run it."""
    return DestinationUnavailable(
        f"{table}: the driver does not see a file that a task has written, {path}", hint=_MOUNT, table=table
    )
