"""Readers with their positions, and holds on the changes of tables that are being copied.

A reader registers before it reads, and stays registered while it is down: what it has not finished is neither deleted
nor acknowledged. Only the reader writes its file; the writer of the spool reads it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.durable import sync_folder
from penstock.errors import ConfigError, HoldBroken, PositionGone, SpoolError
from penstock.lsn import Lsn, earliest, reaches
from penstock.spool.folder import SpoolFolder, naming_full_disk, read_file, replace_file

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Readers:
    """The registered readers of a spool."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        folder.create()

    def register(self, name: str, position: Lsn) -> Lsn:
        """Register a reader durably, or find a known one. Returns the position from which it continues.

        Raises `PositionGone` if entries that a new reader needs were already deleted.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"invalid name for a reader: {name!r}", hint="Use letters, digits, dots, dashes and underscores."
            )
        known = self.position(name)
        if known is not None:
            return known
        with self.locked():
            released = self.released
            if released is not None and not reaches(position, released):
                raise PositionGone(
                    f"reader {name!r} would begin at {position}, but entries before {released} are deleted",
                    position=position,
                )
            self._write(name, position)
        return position

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep readers from registering, and the writer from deleting because of positions that it read before."""
        descriptor = os.open(self._folder.readers, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def release(self, position: Lsn) -> None:
        """For the writer, inside `locked`: record that entries before a position are about to be deleted."""
        replace_file(self._folder.released, {"position": str(position)})

    @property
    def released(self) -> Lsn | None:
        """The boundary before which entries may have been deleted; None if none were."""
        record = read_file(self._folder.released)
        return None if record is None else Lsn.parse(record["position"])

    def advance(self, name: str, position: Lsn) -> None:
        """Record durably that the reader needs nothing before `position`; the slot follows. Positions only grow."""
        known = self.position(name)
        if known is None:
            raise SpoolError(f"reader {name!r} is not registered in this spool")
        if not reaches(known, position):
            self._write(name, position)

    def unregister(self, name: str) -> None:
        """Remove a reader: what only it needed will be deleted and acknowledged."""
        (self._folder.readers / f"{name}.json").unlink(missing_ok=True)
        sync_folder(self._folder.readers)

    def position(self, name: str) -> Lsn | None:
        """A reader's position, None if it is not registered."""
        record = read_file(self._folder.readers / f"{name}.json")
        return None if record is None else Lsn.parse(record["position"])

    def positions(self) -> dict[str, Lsn]:
        """All readers."""
        found = {path.stem: self.position(path.stem) for path in self._folder.readers.glob("[!.]*.json")}
        return {name: position for name, position in found.items() if position is not None}

    def earliest(self) -> Lsn | None:
        """The boundary that all readers have passed; None without readers."""
        positions = self.positions().values()
        return earliest(*positions) if positions else None

    def _write(self, name: str, position: Lsn) -> None:
        with naming_full_disk(self._folder.root):
            replace_file(self._folder.readers / f"{name}.json", {"position": str(position)}, durable=True)


@dataclass(frozen=True, slots=True)
class Hold:
    """A table's changes are kept for a reader from `begin` on; `broken` if they exceeded their limit."""

    reader: str
    table_id: int
    begin: Lsn | None
    broken: bool = False


class Holds:
    """The tables that are being copied, by one or several readers."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        folder.create()

    def request(self, reader: str, table_id: int) -> None:
        """Request that a table's changes are kept from now on; the writer confirms with the position."""
        with naming_full_disk(self._folder.root):
            self._write(Hold(reader, table_id, None), durable=True)

    def confirmed(self, reader: str, table_id: int) -> Lsn | None:
        """The position from which the table's changes are kept; None if the writer has not answered yet."""
        hold = self.get(reader, table_id)
        if hold is None:
            raise SpoolError(f"no hold on table {table_id} for {reader!r}")
        if hold.broken:
            raise HoldBroken("the changes kept during the copy exceeded spool.copy_max_bytes", table_id=table_id)
        return hold.begin

    def wait_confirmed(
        self, reader: str, table_id: int, timeout: float, check: Callable[[], None] = lambda: None
    ) -> Lsn:
        """Like `confirmed`, but wait for the writer; `check` raises when the copy is no longer wanted."""
        deadline = time.monotonic() + timeout
        while (begin := self.confirmed(reader, table_id)) is None:
            check()
            if time.monotonic() > deadline:
                raise SpoolError("capture did not confirm a hold in time; is it running?")
            time.sleep(0.02)
        return begin

    def release(self, reader: str, table_id: int) -> None:
        """The copy has ended."""
        self._path(reader, table_id).unlink(missing_ok=True)

    def release_all(self) -> None:
        """Release all holds: no table is being copied, and a killed process may have left some."""
        for hold in self.all():
            self.release(hold.reader, hold.table_id)

    def get(self, reader: str, table_id: int) -> Hold | None:
        record = read_file(self._path(reader, table_id))
        if record is None:
            return None
        return Hold(reader, table_id, Lsn.parse(record["begin"]) if record["begin"] else None, record["broken"])

    def all(self) -> list[Hold]:
        """All holds, confirmed or not."""
        names = (path.stem.rpartition("@") for path in self._folder.holds.glob("[!.]*.json"))
        found = [self.get(reader, int(table_id)) for reader, _, table_id in names]
        return [hold for hold in found if hold is not None]

    def answer(self, hold: Hold) -> None:
        """For the writer: confirm or break a hold, unless it was released meanwhile."""
        if self._path(hold.reader, hold.table_id).exists():
            self._write(hold)

    def _path(self, reader: str, table_id: int) -> Path:
        return self._folder.holds / f"{reader}@{table_id}.json"

    def _write(self, hold: Hold, *, durable: bool = False) -> None:
        record = {"begin": str(hold.begin) if hold.begin is not None else None, "broken": hold.broken}
        replace_file(self._path(hold.reader, hold.table_id), record, durable=durable)
