"""Deletes entries that every reader has passed, except changes of tables that are being copied.

There are two limits. Entries that some reader has not passed count against the size of the spool; when it is full,
capture stops reading. Changes that are kept only for a copy have their own limit; beyond it, those of the largest
copy are deleted and that copy restarts. The others continue.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.changes.steps import Entry, Segment
from penstock.lsn import Lsn, earliest, is_in, reaches
from penstock.spool.folder import SpoolFolder, is_disk_full
from penstock.spool.log import parse
from penstock.spool.registry import Hold, Holds

logger = logging.getLogger(__name__)


class Retention:
    """Counts bytes and deletes files. `add` and `apply` may run in different threads."""

    def __init__(self, folder: SpoolFolder, entries: Iterable[Entry], *, copy_max_bytes: int) -> None:
        self._folder = folder
        self._copy_max_bytes = copy_max_bytes
        self._holds = Holds(folder)
        self._lock = threading.Lock()
        self._waiting: deque[Entry] = deque(entries)
        """Entries that some reader has not passed."""
        self._held: deque[tuple[Entry, dict[int, list[Segment]]]] = deque()
        """Entries that all readers have passed, with the segments that are kept, by table."""
        self.unreleased_bytes = sum(entry.bytes for entry in self._waiting)

    def add(self, entry: Entry) -> None:
        """Add a published entry."""
        with self._lock:
            self._waiting.append(entry)
            self.unreleased_bytes += entry.bytes

    def would_release(self, floor: Lsn) -> bool:
        """True if `apply` would delete something that all readers have passed."""
        with self._lock:
            return bool(self._waiting) and reaches(floor, self._waiting[0].end)

    def apply(self, floor: Lsn | None, end: Lsn | None) -> None:
        """Delete what is not needed, given the boundary that all readers have passed."""
        holds = self._answer(end)
        if floor is not None:
            self._release(floor, holds)
        self._let_go(holds)
        self._stay_within_budget(holds)
        self._drop_log_parts(floor, holds)

    def _answer(self, end: Lsn | None) -> dict[int, Lsn]:
        """Confirm new holds: all changes that are not deleted yet will be kept from now on.

        Returns for each table the boundary from which its changes are kept, for the reader that needs the most.
        """
        begins: dict[int, Lsn] = {}
        for hold in self._holds.all():
            if hold.broken or end is None:
                continue
            begin = hold.begin
            if begin is None:
                with self._lock:
                    begin = self._waiting[0].begin if self._waiting else end
                if not self._say(replace(hold, begin=begin)):
                    continue
            begins[hold.table_id] = earliest(begin, begins.get(hold.table_id, begin))
        return begins

    def _release(self, floor: Lsn, holds: dict[int, Lsn]) -> None:
        while True:
            with self._lock:
                if not self._waiting or not reaches(floor, self._waiting[0].end):
                    return
                entry = self._waiting.popleft()
                self.unreleased_bytes -= entry.bytes
            kept: dict[int, list[Segment]] = {}
            for step in entry.steps:
                if isinstance(step, Segment):
                    if step.table_id in holds and not is_in(step.last.commit_lsn, holds[step.table_id]):
                        kept.setdefault(step.table_id, []).append(step)
                    else:
                        Path(step.path).unlink(missing_ok=True)
            if kept:
                self._held.append((entry, kept))
            else:
                shutil.rmtree(self._folder.entry(entry.number), ignore_errors=True)

    def _let_go(self, holds: dict[int, Lsn]) -> None:
        """Delete what was kept for copies that have ended."""
        for _ in range(len(self._held)):
            entry, kept = self._held.popleft()
            for table_id in [table_id for table_id in kept if table_id not in holds]:
                for segment in kept.pop(table_id):
                    Path(segment.path).unlink(missing_ok=True)
            if kept:
                self._held.append((entry, kept))
            else:
                shutil.rmtree(self._folder.entry(entry.number), ignore_errors=True)

    def _stay_within_budget(self, holds: dict[int, Lsn]) -> None:
        used: dict[int, int] = {}
        for _, kept in self._held:
            for table_id, segments in kept.items():
                used[table_id] = used.get(table_id, 0) + sum(segment.bytes for segment in segments)
        while sum(used.values()) > self._copy_max_bytes:
            largest = max(used, key=lambda table_id: used[table_id])
            broken = [hold for hold in self._holds.all() if hold.table_id == largest]
            if not all(self._say(replace(hold, broken=True)) for hold in broken):
                return
            logger.error("changes kept for a copy exceeded copy_max_bytes, the copy restarts table_id=%d", largest)
            holds.pop(largest, None)
            del used[largest]
            self._let_go(holds)

    def _say(self, hold: Hold) -> bool:
        """Answer a hold. Returns False if the disk is full: deleting continues, and the answer is retried."""
        try:
            self._holds.answer(hold)
        except OSError as error:
            if not is_disk_full(error):
                raise
            return False
        return True

    def _drop_log_parts(self, floor: Lsn | None, holds: dict[int, Lsn]) -> None:
        """Delete parts of the log that all readers and copies have passed; the last part stays."""
        if floor is None:
            return
        passed = earliest(floor, *holds.values())
        for part, following in itertools.pairwise(self._folder.log_parts()):
            if not reaches(passed, _begin_of(following, self._folder.root)):
                return
            part.unlink(missing_ok=True)


def _begin_of(part: Path, root: Path) -> Lsn:
    with open(part, "rb") as file:
        entries, _ = parse(file.readline(), root)
    return entries[0].begin if entries else Lsn((1 << 64) - 1)
