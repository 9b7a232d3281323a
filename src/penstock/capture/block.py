"""A block: messages that wait to be decoded together, with an index of their rows.

Decoding a table has fixed costs, which weigh less in a larger block. A block is decoded up to its last commit; the rows
of a transaction that is still open move to the next block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.capture.relations import Lane
from penstock.capture.waves import WaveRows, decode_rows
from penstock.changes.steps import Message, Truncation
from penstock.changes.wire import Buffer
from penstock.lsn import Lsn, OrderKey

WAVE_ROWS = 32_768
WAVE_BYTES = 8 << 20
"""Limits of a wave: its arrays should fit into the processor's cache."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction with its commit. (The first message of an ordinary transaction already has it.)"""

    commit_lsn: Lsn
    commit_time: int
    """Unix microseconds."""
    xid: int


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Rows in the order of the stream; offsets are relative to the start of the block."""

    lane: NDArray[np.unsignedinteger[Any]]
    operation: NDArray[np.uint8]
    message: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    transaction: NDArray[np.int32]
    ordinal: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lane)

    def select(self, rows: NDArray[np.int64] | slice) -> RowIndex:
        return RowIndex(
            self.lane[rows], self.operation[rows], self.message[rows], self.start[rows], self.end[rows],
            self.transaction[rows], self.ordinal[rows],
        )  # fmt: skip

    def moved(self, bytes_before: int, transactions_before: int) -> RowIndex:
        return RowIndex(
            self.lane, self.operation, self.message - bytes_before, self.start - bytes_before,
            self.end - bytes_before, self.transaction - np.int32(transactions_before), self.ordinal,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """A step between rows that is not a row: a truncation, or a logical message."""

    row: int
    """The number of rows of the block before it."""
    table_id: int | None
    step: Truncation | Message


@dataclass(frozen=True, slots=True)
class DecodedPart:
    """Consecutive changes of a lane, decoded."""

    row: int
    lane: Lane
    table: pa.Table
    first: OrderKey
    last: OrderKey


class Extent(NamedTuple):
    """The first part of a block: how many rows, marks and transactions it has."""

    rows: int = 0
    marks: int = 0
    transactions: int = 0


@dataclass(slots=True)
class Block:
    """Bytes and rows that are not decoded yet."""

    parts: list[bytes | bytearray] = field(default_factory=list)
    bytes: int = 0
    indexes: list[RowIndex] = field(default_factory=list)
    rows: int = 0
    marks: list[Mark] = field(default_factory=list)
    commit_lsn: list[NDArray[np.int64]] = field(default_factory=list)
    commit_time: list[NDArray[np.int64]] = field(default_factory=list)
    xid: list[NDArray[np.int64]] = field(default_factory=list)
    transactions: int = 0

    @property
    def end(self) -> Extent:
        """The whole block as it is now."""
        return Extent(self.rows, len(self.marks), self.transactions)

    def add_bytes(self, raw: bytes | bytearray) -> int:
        """Append bytes; return their offset."""
        base = self.bytes
        self.parts.append(raw)
        self.bytes += len(raw)
        return base

    def add_transactions(
        self, commit_lsn: NDArray[np.int64], commit_time: NDArray[np.int64], xid: NDArray[np.int64]
    ) -> int:
        """Append transactions; return the number of the first."""
        first = self.transactions
        self.commit_lsn.append(commit_lsn)
        self.commit_time.append(commit_time)
        self.xid.append(xid)
        self.transactions += len(commit_lsn)
        return first

    def add_transaction(self, transaction: Transaction) -> int:
        return self.add_transactions(
            np.array([transaction.commit_lsn], np.int64),
            np.array([transaction.commit_time], np.int64),
            np.array([transaction.xid], np.int64),
        )

    def add_rows(self, rows: RowIndex) -> None:
        if len(rows):
            self.indexes.append(rows)
            self.rows += len(rows)

    def count_lanes(self) -> int:
        """The number of lanes with rows in the block."""
        return len(np.unique(_concatenate(self.indexes).lane)) if self.indexes else 0

    def decode(self, lanes: list[Lane], extent: Extent) -> Iterator[DecodedPart]:
        """Decode the rows of an extent, lane by lane; each part is in the order of the stream.

        A lane is split where its table was truncated or had rows of another shape, so that a part is entirely before or
        after these.
        """
        if not extent.rows:
            return
        self.parts = [b"".join(self.parts)]
        buffer = Buffer(self.parts[0])
        index = _concatenate(self.indexes).select(slice(0, extent.rows))
        commit_lsn = np.concatenate(self.commit_lsn)
        commit_time = np.concatenate(self.commit_time)
        xid = np.concatenate(self.xid)
        by_lane = list(_by_lane(index.lane))
        shapes: dict[int, list[NDArray[np.int64]]] = {}
        for lane, members in by_lane:
            shapes.setdefault(lanes[lane].schema.table_id, []).append(members)
        for lane, members in by_lane:
            table_id = lanes[lane].schema.table_id
            splits: list[Any] = [[mark.row for mark in self.marks[: extent.marks] if mark.table_id == table_id]]
            splits += [others for others in shapes[table_id] if others is not members]
            places = np.unique(np.searchsorted(members, np.concatenate(splits)))
            for piece in np.split(members, places) if len(places) else (members,):
                if not len(piece):
                    continue
                chosen = index.select(piece)
                tables = [
                    decode_rows(
                        buffer,
                        WaveRows(
                            chosen.operation[part], chosen.start[part], chosen.end[part], chosen.message[part],
                            commit_lsn[chosen.transaction[part]], chosen.ordinal[part],
                            commit_time[chosen.transaction[part]], xid[chosen.transaction[part]],
                        ),
                        lanes[lane].layout,
                    )
                    for part in _waves(chosen.end - chosen.message)
                ]  # fmt: skip
                yield DecodedPart(
                    row=int(piece[0]),
                    lane=lanes[lane],
                    table=pa.concat_tables(tables, promote_options="default"),
                    first=OrderKey(Lsn(int(commit_lsn[chosen.transaction[0]])), int(chosen.ordinal[0])),
                    last=OrderKey(Lsn(int(commit_lsn[chosen.transaction[-1]])), int(chosen.ordinal[-1])),
                )

    def rest(self, extent: Extent) -> Block:
        """A new block with what comes after an extent."""
        block = Block()
        kept = self.transactions - extent.transactions
        if kept:
            block.add_transactions(
                np.concatenate(self.commit_lsn)[-kept:],
                np.concatenate(self.commit_time)[-kept:],
                np.concatenate(self.xid)[-kept:],
            )
        if extent.rows < self.rows:
            index = _concatenate(self.indexes).select(slice(extent.rows, None))
            first_byte = int(index.message[0])
            block.add_bytes(b"".join(self.parts)[first_byte:])
            block.add_rows(index.moved(first_byte, extent.transactions))
        block.marks = [replace(mark, row=mark.row - extent.rows) for mark in self.marks[extent.marks :]]
        return block


def _concatenate(indexes: list[RowIndex]) -> RowIndex:
    if len(indexes) == 1:
        return indexes[0]
    return RowIndex(
        *(
            np.concatenate([getattr(index, name) for index in indexes])
            for name in ("lane", "operation", "message", "start", "end", "transaction", "ordinal")
        )
    )


def _by_lane(lane: NDArray[np.unsignedinteger[Any]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Row numbers of each lane, in order."""
    if (lane == lane[0]).all():
        yield int(lane[0]), np.arange(len(lane))
        return
    order = np.argsort(lane, kind="stable")
    grouped = lane[order]
    borders = np.flatnonzero(np.diff(grouped)) + 1
    for members in np.split(order, borders):
        yield int(lane[members[0]]), members


def _waves(length: NDArray[np.int64]) -> Iterator[slice]:
    """Split rows into waves by number and bytes."""
    if len(length) <= WAVE_ROWS and int(length.sum()) <= WAVE_BYTES:
        yield slice(0, len(length))
        return
    total = np.cumsum(length)
    first = 0
    while first < len(length):
        before = int(total[first - 1]) if first else 0
        last = int(np.searchsorted(total, before + WAVE_BYTES, side="right"))
        last = max(first + 1, min(last, first + WAVE_ROWS))
        yield slice(first, last)
        first = last
