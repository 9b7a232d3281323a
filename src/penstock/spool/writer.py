"""The writer of a spool: it writes segments first, then the line of the log that makes them visible.

Two threads use it. The decoding thread writes segments, publishes entries and waits while the spool is full. The
housekeeping thread calls `tick`, which deletes what no reader needs. Opening the spool removes files that no line
names, so a crash leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.segment import count_operations, count_unrepresentable
from penstock.changes.steps import Entry, Message, Segment, Step, Truncation
from penstock.errors import SpoolCorrupt, SpoolInUse
from penstock.lsn import Lsn, OrderKey, furthest, reaches
from penstock.schema import TableSchema
from penstock.source.lineage import Ancestry
from penstock.spool.folder import (
    DiskGuard,
    SpoolFolder,
    Stopping,
    append,
    is_disk_full,
    read_file,
    remove_damaged,
    replace_file,
)
from penstock.spool.lineage import load_ancestry, to_record
from penstock.spool.log import read_parts, to_line
from penstock.spool.partitions import MentionedLeaves
from penstock.spool.registry import Readers
from penstock.spool.retention import Retention
from penstock.spool.schemas import SchemaVersions

logger = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """The limits of a spool."""

    path: Path
    max_bytes: int = 4 << 30
    """Limit of bytes that some reader still needs; beyond it capture stops reading. One transaction may exceed it."""
    copy_max_bytes: int = 4 << 30
    """Limit of bytes kept only for tables that are being copied; beyond it the copy with the most bytes restarts."""
    min_free_bytes: int = 256 << 20
    """Free space to leave on the disk; below it capture waits."""
    position_interval: float = 0.5
    """Seconds between records of a position without changes."""
    log_part_bytes: int = 4 << 20
    compression: str = "lz4"


class SpoolWriter:
    """Holds the spool's lock from opening to closing."""

    def __init__(self, settings: SpoolSettings, stop: threading.Event | None = None) -> None:
        """`stop` ends every wait for room."""
        self._settings = settings
        self._folder = SpoolFolder(settings.path)
        self._folder.create()
        self._stop = stop or threading.Event()
        self._lock_file = self._lock()
        try:
            self.disk = DiskGuard(settings.path, min_free_bytes=settings.min_free_bytes, stop=self._stop)
            self.readers = Readers(self._folder)
            self.schemas = SchemaVersions(self._folder)
            self._leaves = MentionedLeaves(self._folder)
            self._folder.sweep()
            self._boot = self._clear_after_restart()
            entries = self._recover()
        except BaseException:
            self._lock_file.close()
            raise
        self._retention = Retention(self._folder, entries, copy_max_bytes=settings.copy_max_bytes)
        self._room = threading.Condition()
        self._ask: Callable[[], Ancestry] | None = None
        self._steps: list[Step] = []
        self._segment_count = 0
        last = entries[-1] if entries else None
        self._number = last.number + 1 if last else 1
        self._end = last.end if last else None
        self._seen = self._end
        self._seen_at = 0.0

    @property
    def open_folder(self) -> Path:
        """The folder of streamed transactions that have not ended."""
        return self._folder.open

    @property
    def end(self) -> Lsn | None:
        """The boundary up to which everything is published; None in a new spool."""
        return self._end

    @property
    def unreleased_bytes(self) -> int:
        return self._retention.unreleased_bytes

    @property
    def is_full(self) -> bool:
        return self._retention.unreleased_bytes >= self._settings.max_bytes

    def needed_from(self) -> Lsn | None:
        """Where capture has to continue: the end of the spool, or the earliest reader's position in a new spool."""
        if self._end is not None:
            return self._end
        return self.readers.earliest()

    @property
    def ancestry(self) -> Ancestry | None:
        """The lineage of the positions in this spool; None in a new one."""
        return load_ancestry(self._folder)

    def begin_at(self, position: Lsn, ancestry: Ancestry, ask: Callable[[], Ancestry] | None = None) -> None:
        """Begin capturing at a position of a server. A spool with entries can only continue at its end.

        Readers learn of the server before they see an entry of it. `ask` returns the ancestry of a server that may be
        promoted meanwhile; it is called before each entry is published.
        """
        if self._end is not None and position != self._end:
            raise SpoolCorrupt(f"capture would start at {position}, but the spool ends at {self._end}")
        self._ask = ask
        self._name_server(ancestry)
        if self._end is None:
            self._append(Entry(self._number, position, position))

    # The decoding thread

    def write_rows(self, schema: TableSchema, rows: pa.Table, first: OrderKey, last: OrderKey) -> None:
        """Write consecutive changes of a table as a segment of the next entry."""
        folder = self._folder.entry(self._number)
        path = folder / f"{schema.table_id}-{self._segment_count}.parquet"
        self._segment_count += 1

        def write() -> tuple[str, int]:
            folder.mkdir(exist_ok=True)
            version = self.schemas.version_for(schema, first)
            pq.write_table(
                rows,
                path,
                compression=self._settings.compression,
                use_dictionary=False,
                write_statistics=False,
                store_schema=True,
                row_group_size=1 << 30,
            )
            return version, path.stat().st_size

        version, size = self.disk.run(write, lambda: path.unlink(missing_ok=True))
        self._steps.append(
            Segment(
                table_id=schema.table_id,
                table=str(schema),
                version=version,
                path=str(path),
                rows=rows.num_rows,
                bytes=size,
                first=first,
                last=last,
                unrepresentable=count_unrepresentable(rows),
                memory=rows.nbytes,
                operations=count_operations(rows),
            )
        )

    def note_leaf(self, table_id: int, leaf: int, at: Lsn) -> None:
        """Note that rows of a leaf follow, in a transaction that commits at this position."""
        self.disk.run(lambda: self._leaves.add(table_id, leaf, at), lambda: None)

    def write_step(self, step: Truncation | Message) -> None:
        """Add a truncation or a message to the next entry."""
        self._steps.append(step)

    def publish(self, end: Lsn, *, transactions: int, commit_times: tuple[int, int]) -> None:
        """Make the next entry visible. A position without transactions is recorded only every `position_interval`."""
        if not transactions:
            self._seen = furthest(self._seen or end, end)
            if time.monotonic() - self._seen_at < self._settings.position_interval:
                return
        self._flush(end, transactions, commit_times)

    def flush_position(self) -> None:
        """Record a position that `publish` has deferred; called while there are no changes."""
        due = time.monotonic() - self._seen_at >= self._settings.position_interval
        if due and not self._steps and self._seen is not None and self._end is not None:
            self._flush(self._seen, 0, (0, 0))

    def wait_for_room(self, ended: threading.Event | None = None) -> None:
        """Wait while the spool is full. Capture's queue fills meanwhile, and reading stops.

        `ended` ends the wait as `stop` does: the connection is gone, and what waits to be written comes again.
        """
        with self._room:
            while self.is_full:
                if self._stop.is_set() or (ended is not None and ended.is_set()):
                    raise Stopping
                self._room.wait(0.1)

    def discard_unpublished(self) -> None:
        """Discard what was written for the next entry, after its connection was lost.

        This includes a deferred position: the next server may be a standby that never reached it.
        """
        self._steps = []
        self._segment_count = 0
        self._seen = self._end
        shutil.rmtree(self._folder.entry(self._number), ignore_errors=True)

    # The housekeeping thread

    def tick(self) -> Lsn | None:
        """Delete what no reader needs. Returns the boundary that all readers have passed; None without readers."""
        with self.readers.locked():
            floor = self.readers.earliest()
            if floor is not None and self._retention.would_release(floor):
                self._note_released(floor)
            self._retention.apply(floor, self._end)
        with self._room:
            self._room.notify_all()
        return floor

    def _note_released(self, floor: Lsn) -> None:
        """Record what is about to be deleted. On a full disk it is deleted anyway, and no reader can be registered."""
        try:
            self.readers.release(floor)
        except OSError as error:
            if not is_disk_full(error):
                raise

    def close(self) -> None:
        """Release the lock."""
        self._lock_file.close()

    def _flush(self, end: Lsn, transactions: int, commit_times: tuple[int, int]) -> None:
        if self._end is None:
            raise SpoolCorrupt("an entry was published before capture began")
        if not transactions and not self._steps and reaches(self._end, end):
            return
        if self._ask is not None:
            self._name_server(self._ask())
        self._append(Entry(self._number, self._end, end, transactions, *commit_times, tuple(self._steps)))
        self._steps = []
        self._segment_count = 0

    def _name_server(self, ancestry: Ancestry) -> None:
        record = to_record(ancestry) | {"boot": self._boot}
        if read_file(self._folder.lineage) != record:
            self.disk.run(lambda: replace_file(self._folder.lineage, record, durable=True), lambda: None)

    def _append(self, entry: Entry) -> None:
        line = to_line(entry, self._folder.root)
        path = self._part()
        size = path.stat().st_size if path.exists() else 0
        self.disk.run(lambda: append(path, line), lambda: path.exists() and os.truncate(path, size))
        self._number = entry.number + 1
        self._end = entry.end
        self._seen_at = time.monotonic()
        self._retention.add(entry)

    def _part(self) -> Path:
        parts = self._folder.log_parts()
        if parts and parts[-1].stat().st_size < self._settings.log_part_bytes:
            return parts[-1]
        return self._folder.log / f"{(int(parts[-1].stem) if parts else 0) + 1:08d}.jsonl"

    def _lock(self) -> IO[str]:
        file = open(self._folder.lock, "a+")  # noqa: SIM115 — held until close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise SpoolInUse(f"the spool {self._settings.path} is in use by process {owner}", owner=owner) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def _clear_after_restart(self) -> str:
        """Empty a spool that was written before the machine was restarted; return the id of this boot.

        Segments are not synced, so after a power failure a line can exist without its file. The slot has everything.
        Versions of schemas and answers to holds are not synced either; intact ones are kept.
        """
        boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        stored = read_file(self._folder.lineage)
        if stored is not None and stored["boot"] != boot:
            logger.info("the machine was restarted: capture fills the spool again from the slot")
            for folder in (self._folder.log, self._folder.segments):
                shutil.rmtree(folder, ignore_errors=True)
            self._folder.released.unlink(missing_ok=True)
            self._folder.create()
            remove_damaged(itertools.chain(self._folder.schemas.glob("*/*.json"), self._folder.holds.glob("*.json")))
        return boot

    def _recover(self) -> deque[Entry]:
        """Read the log, truncate a torn last line, and remove files that no line names."""
        shutil.rmtree(self._folder.open, ignore_errors=True)
        entries: deque[Entry] = deque()
        for _, content in read_parts(self._folder, repair=True):
            entries.extend(content)
        for before, after in itertools.pairwise(entries):
            if before.end != after.begin or before.number >= after.number:
                raise SpoolCorrupt(f"entry {after.number} does not follow entry {before.number}")
        named = {Path(step.path).parent.name for entry in entries for step in entry.steps if isinstance(step, Segment)}
        for folder in self._folder.segments.iterdir():
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)
        return entries
