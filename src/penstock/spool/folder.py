"""Where things lie in a spool, and how small files are replaced without ever being half there.

spool/
  lineage.json          which server, timeline and slot the positions belong to
  lock                  held by the one writer
  log/00000001.jsonl    entries in order, in parts
  segments/00000042/    the files of entry 42
  schemas/16384/…json   versions of a table's schema
  readers/<name>.json   up to where each reader needs nothing more
  released.json         up to where entries may be gone
  holds/16384.json      tables that are being copied: their changes are kept longer
  open/                 streamed transactions that have not ended
  status.json           how the process that runs saw itself last, for `penstock status`
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.durable import sync_folder


@dataclass(frozen=True, slots=True)
class SpoolFolder:
    """Paths inside a spool."""

    root: Path

    @property
    def lineage(self) -> Path:
        return self.root / "lineage.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def schemas(self) -> Path:
        return self.root / "schemas"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def released(self) -> Path:
        return self.root / "released.json"

    @property
    def holds(self) -> Path:
        return self.root / "holds"

    @property
    def open(self) -> Path:
        return self.root / "open"

    @property
    def comparisons(self) -> Path:
        """What tasks of `penstock verify` write down."""
        return self.root / "verify"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    def entry(self, number: int) -> Path:
        return self.segments / f"{number:012d}"

    def log_parts(self) -> list[Path]:
        """The log's files, oldest first."""
        return sorted(self.log.glob("*.jsonl"))

    def create(self) -> None:
        for folder in (self.log, self.segments, self.schemas, self.readers, self.holds):
            folder.mkdir(parents=True, exist_ok=True)

    def discard(self) -> None:
        """Forget everything: what is here belongs to a slot that is gone. Nobody reads or writes it now."""
        # The log first: without it nothing else counts.
        for folder in (self.log, self.readers, self.holds, self.open, self.schemas, self.segments):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.lineage, self.released):
            file.unlink(missing_ok=True)


def replace_file(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write JSON so that readers see the old content or the new one; `durable` outlives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(value, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def read_file(path: Path) -> Any | None:
    """JSON, or None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def remove_damaged(paths: Iterable[Path]) -> None:
    """Remove files of JSON that a power cut has left empty or half written."""
    for path in paths:
        try:
            read_file(path)
        except ValueError:
            path.unlink(missing_ok=True)
