"""Which processes live, read from /proc: for tests that kill a server or a capture process and must know it is gone."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    return [child for child, parent in _parents() if parent == pid]


def descendants_of(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    found: list[int] = []
    parents = list(_parents())
    wanted = [pid]
    while wanted:
        above = wanted.pop()
        below = [child for child, parent in parents if parent == above]
        found += below
        wanted += below
    return found


def command_of(pid: int) -> list[str]:
    """How a process was called; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * resource.getpagesize()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected by its parent (a zombie) does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def wait_until_gone(pids: Iterable[int], *, timeout: float) -> bool:
    """Wait until none of the processes runs; false if some still do after the time-out."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        while is_alive(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            yield int(entry.name), int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows; the name before them stands in parentheses and may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
