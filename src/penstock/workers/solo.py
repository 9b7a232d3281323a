"""Writes one table in a thread of its own, while the apply worker continues with the other tables.

A destination asks for it with `TakesLong`: it has to rewrite the table's files. The coordinator asks for it when
partitions have to be copied (`penstock.workers.partitions`). Meanwhile the table keeps its phase and its position,
where it holds back progress. After a crash the apply worker finds the table where it was, and it is asked again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock import failpoints
from penstock.lsn import Lsn, earliest
from penstock.schema import TableSchema
from penstock.workers.batches import BatchWriter, Work
from penstock.workers.board import Board

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SoloWrite:
    """One table that is written by itself."""

    table_id: int
    position: Lsn
    """Where the table is durable before."""
    work: Work
    thread: threading.Thread
    durable: Lsn | None = None
    """Where it is durable afterwards; None until it is written, or if it failed."""
    error: BaseException | None = None


class SoloWrites:
    """The tables that are written by themselves; used by the apply worker's thread."""

    def __init__(self, board: Board, new_writer: Callable[[], BatchWriter]) -> None:
        """`new_writer` returns a writer for one thread."""
        self._board = board
        self._new_writer = new_writer
        self._writes: dict[int, SoloWrite] = {}

    @property
    def tables(self) -> frozenset[int]:
        return frozenset(self._writes)

    def start(self, table_id: int, position: Lsn, work: Work) -> None:
        """Write a table from its position on; the apply worker leaves it out until `finished` returns it."""
        name = f"write-{self._board.name_of(table_id)}"
        thread = threading.Thread(target=self._run, args=[table_id], name=name, daemon=True)
        self._writes[table_id] = SoloWrite(table_id, position, work, thread)
        self._board.keep_from_copies(self.tables)
        thread.start()

    def finished(self) -> list[SoloWrite]:
        """Return the writes that have ended, once."""
        ended = [each for each in self._writes.values() if not each.thread.is_alive()]
        for each in ended:
            del self._writes[each.table_id]
        if ended:
            self._board.keep_from_copies(self.tables)
        return ended

    def join(self) -> None:
        """Wait until all have ended."""
        for each in list(self._writes.values()):
            each.thread.join()

    def _run(self, table_id: int) -> None:
        write = self._writes[table_id]
        try:
            write.durable = write.work(self._new_writer(), write.position)
        except BaseException as error:
            write.error = error


@dataclass(frozen=True, slots=True)
class LongBatch:
    """One table's part of a batch that takes long."""

    table_id: int
    end: Lsn

    def write(self, writer: BatchWriter, position: Lsn) -> Lsn:
        """Write the table up to the end of one batch, which is not beyond `end`."""
        entries = writer.take(position, self.end, [self.table_id])
        end = earliest(self.end, entries[-1].end) if entries else self.end
        failpoints.reach("before_solo_write")
        written = writer.write(entries, position, end, {self.table_id: position}, alone=True)
        failpoints.reach("after_solo_write")
        if self.table_id in written.failed:
            raise written.failed[self.table_id]
        return written.durable[self.table_id]


@dataclass(frozen=True, slots=True)
class NewColumns:
    """Columns that were renamed or dropped while no row of the table changed."""

    seen: TableSchema
    columns: Mapping[int, str]

    def write(self, writer: BatchWriter, position: Lsn) -> Lsn:
        """Follow them at the table's position."""
        failpoints.reach("before_columns")
        writer.write_columns(self.seen, self.columns, position)
        return position
