"""The log of a spool: one line of JSON per entry, with a checksum, in parts.

A line exists only after all files that it names are complete, and counts only if its checksum is right: a line that was
torn by a crash was never there.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.changes.steps import Entry, Message, Segment, Step, Truncation
from penstock.errors import SpoolCorrupt
from penstock.lsn import Lsn, OrderKey
from penstock.spool.folder import SpoolFolder

_KINDS: dict[str, type[Step]] = {"rows": Segment, "truncate": Truncation, "message": Message}
_IN_BATCHES = ("after", "until", "refuses", "settled", "transform", "origin")
"""Fields of a segment that say which part of it a batch has, and who serves it; in the log it is whole."""


def read_parts(folder: SpoolFolder, *, repair: bool) -> Iterator[tuple[Path, list[Entry]]]:
    """The entries of each part, oldest first. `repair` truncates a torn last line; only the writer may do that."""
    parts = folder.log_parts()
    for path in parts:
        content = path.read_bytes()
        entries, complete = parse(content, folder.root)
        if complete < len(content):
            if path != parts[-1]:
                raise SpoolCorrupt(f"{path.name}, an earlier part of the spool's log, is damaged at byte {complete}")
            if repair:
                os.truncate(path, complete)
        yield path, entries


def parse(content: bytes, root: Path) -> tuple[list[Entry], int]:
    """The entries of all complete lines, and the length of these lines in bytes."""
    entries: list[Entry] = []
    complete = 0
    for line in content.splitlines(keepends=True):
        entry = from_line(line, root)
        if entry is None:
            if line.endswith(b"\n") and complete + len(line) < len(content):
                raise SpoolCorrupt(f"the spool's log is damaged at byte {complete}")
            break
        entries.append(entry)
        complete += len(line)
    return entries, complete


class LogTail:
    """Follows the log of a spool that is being written."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        self._part: Path | None = None
        self._offset = 0

    def read_new(self) -> list[Entry]:
        """The entries that were added since the last call."""
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
                    found, complete = parse(file.read(), self._folder.root)
            except FileNotFoundError:
                # Deleted before we read it: the caller notices the gap by the positions.
                found, complete = [], 0
            entries += found
            self._offset += complete
            later = [part for part in parts if part.name > self._part.name]
            if not later:
                return entries
            if not found:
                self._part, self._offset = later[0], 0


def to_line(entry: Entry, root: Path) -> bytes:
    """A line of the log; files are named relative to the spool's folder."""
    record = {
        "number": entry.number,
        "begin": str(entry.begin),
        "end": str(entry.end),
        "transactions": entry.transactions,
        "commit_times": [entry.first_commit_time, entry.last_commit_time],
        "steps": [_step_to_json(step, root) for step in entry.steps],
    }
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def from_line(line: bytes, root: Path) -> Entry | None:
    """Parse a line; None if it is torn."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
        return Entry(
            number=record["number"],
            begin=Lsn.parse(record["begin"]),
            end=Lsn.parse(record["end"]),
            transactions=record["transactions"],
            first_commit_time=record["commit_times"][0],
            last_commit_time=record["commit_times"][1],
            steps=tuple(_step_from_json(step, root) for step in record["steps"]),
        )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise SpoolCorrupt(f"the spool's log has a malformed line: {error}") from error


def _step_to_json(step: Step, root: Path) -> dict[str, Any]:
    kind = next(name for name, type_ in _KINDS.items() if isinstance(step, type_))
    record = {field.name: _to_json(getattr(step, field.name)) for field in fields(step)}
    if isinstance(step, Segment):
        record["file"] = str(Path(record.pop("path")).relative_to(root))
        record = {name: value for name, value in record.items() if name not in _IN_BATCHES}
    return {"kind": kind} | record


def _step_from_json(record: dict[str, Any], root: Path) -> Step:
    type_ = _KINDS[record.pop("kind")]
    if type_ is Segment:
        record["path"] = str(root / record.pop("file"))
    return type_(**{name: _from_json(name, value) for name, value in record.items()})


def _to_json(value: Any) -> Any:
    if isinstance(value, OrderKey):
        return [str(value.commit_lsn), value.ordinal]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def _from_json(name: str, value: Any) -> Any:
    if name in ("first", "last", "key"):
        return OrderKey(Lsn.parse(value[0]), value[1])
    if name == "content":
        return base64.b64decode(value)
    if name == "operations":
        return tuple(value)
    return value
