"""Watch all processes of a pipeline together, including those that come and go.

A pipeline on Spark is a driver, its JVM, the Python workers that the JVM forks, and capture. Names come from command
lines; processes of the same kind are distinguished by their pid.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import SAMPLE_SECONDS, format_table, read_usage

from tests.support.processes import Part, command_of, part_of

DRIVER, JVM, PYTHON_WORKER, CAPTURE = "driver", "Spark JVM", "Spark Python worker", "capture"
_PYTHON_DAEMON = "Spark Python daemon"
_SERVER = "postgres"
"""A benchmark's own server is a child of it too; it is the source, and not what is measured."""

_SEARCH_EVERY = 20
"""Samples; looking through all processes of the machine costs a hundred times as much as looking at a few."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process, over the time it was watched."""

    pid: int
    kind: str
    cpu_before: float
    cpu_seconds: float
    """While it was watched."""
    peak_rss_mib: float
    """Since it started."""


class TreeWatch:
    """Samples a process and all of its descendants from a thread. What the watching process itself used is in it when
    `root` is its own id."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[int, ProcessUsage] = {}
        self._tree: list[tuple[int, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-tree", daemon=True)
        self._sample(is_first=True)

    def __enter__(self) -> TreeWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    @property
    def processes(self) -> list[ProcessUsage]:
        """Those that did something, driver first."""
        order = (DRIVER, JVM, PYTHON_WORKER, CAPTURE)
        busy = (each for each in self._seen.values() if each.kind in order or each.cpu_seconds > 0)
        return sorted(busy, key=lambda each: (order.index(each.kind) if each.kind in order else len(order), each.pid))

    @property
    def cpu_seconds(self) -> float:
        """Of all together."""
        return sum(each.cpu_seconds for each in self._seen.values())

    def peak_rss_mib(self, kind: str | None = None) -> float:
        """The most that a single process has had; one of that kind must have been there."""
        return max(each.peak_rss_mib for each in self._seen.values() if kind in (None, each.kind))

    def _run(self) -> None:
        rounds = itertools.count(1)
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample(search=next(rounds) % _SEARCH_EVERY == 0)

    def _sample(self, *, is_first: bool = False, search: bool = True) -> None:
        if search:
            self._tree = _find_tree(self._root)
        for pid, kind in self._tree:
            usage = read_usage(pid)
            if usage is None:
                continue
            known = self._seen.get(pid)
            if known is None:
                known = ProcessUsage(pid, kind, usage.cpu_seconds if is_first else 0.0, 0.0, 0.0)
            self._seen[pid] = replace(
                known,
                # A shell may have become what it was to start.
                kind=kind,
                cpu_seconds=usage.cpu_seconds - known.cpu_before,
                peak_rss_mib=usage.peak_rss_mib,
            )


def merge_peaks(watches: Sequence[TreeWatch]) -> str:
    """A table of all processes of several watches: processor seconds together, memory at its peak."""
    together: dict[int, ProcessUsage] = {}
    for watch in watches:
        for each in watch.processes:
            known = together.get(each.pid)
            together[each.pid] = (
                each
                if known is None
                else replace(
                    known,
                    cpu_seconds=known.cpu_seconds + each.cpu_seconds,
                    peak_rss_mib=max(known.peak_rss_mib, each.peak_rss_mib),
                )
            )
    rows = [[each.kind, f"{each.cpu_seconds:.1f}", f"{each.peak_rss_mib:.0f}"] for each in together.values()]
    return format_table(["process", "CPU s", "peak RSS MiB"], rows)


def _find_tree(root: int) -> list[tuple[int, str]]:
    """The process and its descendants, with what they are."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found = [(root, DRIVER)]
    for pid, kind in found:
        named = ((child, _kind(child, kind)) for child in children.get(pid, ()))
        found += [(child, name) for child, name in named if not name.startswith(_SERVER)]
    return found


def _kind(pid: int, parent: str) -> str:
    match part_of(pid):
        case Part.WORKER:
            return PYTHON_WORKER if parent == _PYTHON_DAEMON else _PYTHON_DAEMON
        case Part.CAPTURE:
            return CAPTURE
        case Part.JVM:
            return JVM
        case _:
            return Path(next(iter(command_of(pid)), "ended")).name
