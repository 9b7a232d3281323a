"""Reading the log: all of it, or what was added since the last look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import SpoolCorrupt
from penstock.spool.entries import Entry, from_line
from penstock.spool.folder import SpoolFolder


def read_parts(folder: SpoolFolder, *, repair: bool) -> Iterator[tuple[Path, list[Entry]]]:
    """The entries of each part, oldest first; `repair` cuts off a torn last line (only the writer may)."""
    parts = folder.log_parts()
    for path in parts:
        content = path.read_bytes()
        entries, complete = parse(content)
        if complete < len(content):
            if path != parts[-1]:
                raise SpoolCorrupt(f"{path.name} is damaged at byte {complete}, and is not the last part")
            if repair:
                os.truncate(path, complete)
        yield path, entries


def parse(content: bytes) -> tuple[list[Entry], int]:
    """Entries of the complete lines, and how many bytes these have."""
    entries: list[Entry] = []
    complete = 0
    for line in content.splitlines(keepends=True):
        entry = from_line(line)
        if entry is None:
            if line.endswith(b"\n") and complete + len(line) < len(content):
                raise SpoolCorrupt(f"a damaged line at byte {complete} of the spool's log")
            break
        entries.append(entry)
        complete += len(line)
    return entries, complete


class LogTail:
    """Follows the log of a living spool."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        self._part: Path | None = None
        self._offset = 0

    def read_new(self) -> list[Entry]:
        """Entries that were added since the last call."""
        entries: list[Entry] = []
        while True:
            parts = self._folder.log_parts()
            if self._part is None:
                if not parts:
                    return entries
                self._part, self._offset = parts[0], 0
            try:
                with open(self._part, "rb") as file:
                    file.seek(self._offset)
                    found, complete = parse(file.read())
            except FileNotFoundError:
                # Released before we read it: the caller notices the gap by the positions.
                found, complete = [], 0
            entries += found
            self._offset += complete
            later = [part for part in parts if part.name > self._part.name]
            if not later:
                return entries
            if not found:
                self._part, self._offset = later[0], 0
