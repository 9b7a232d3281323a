"""Assembles messages to entries of the spool: whole transactions, in commit order, without what was rolled back.

The assembler takes parcels of messages in the order of the connection. Rows wait in a block until there are enough of
them, or until `publish` is called.

A transaction that the server streams while it is still open arrives in runs between `S` and `E`, interleaved with
others. Its messages are kept as they are (`streams.py`) and read again at its commit, without those of rolled-back
sub-transactions: by the same code, and with the same ordinals as if it had not been streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.capture import parcels
from penstock.capture.block import Block, DecodedPart, Extent, Mark, RowIndex, Transaction
from penstock.capture.messages import (
    Relation,
    StreamCommit,
    parse_logical_message,
    parse_relation,
    parse_stream_abort,
    parse_stream_commit,
    parse_stream_start,
    parse_truncate,
)
from penstock.capture.parcels import HEADER, Parcel, Scan
from penstock.capture.relations import CatalogResolver, RelationMap
from penstock.capture.streams import OpenStreams
from penstock.changes.steps import Message, Truncation
from penstock.errors import DecodeError
from penstock.lsn import Lsn, OrderKey, furthest
from penstock.source.ddl_trigger import DdlTrigger
from penstock.spool import SpoolWriter
from penstock.values import TypeSettings


@dataclass(frozen=True, slots=True)
class AssemblerSettings:
    """How rows are gathered, and which logical messages are kept."""

    block_bytes: int = 24 << 20
    """A block of this size is decoded …"""
    lane_bytes: int = 256 << 10
    """… unless its tables have less than this on average …"""
    largest_block_bytes: int = 64 << 20
    """… and the block is smaller than this. Each table in a block has a fixed cost."""
    message_prefixes: frozenset[str] = frozenset()
    """Logical messages with these prefixes are kept."""
    ddl_trigger: DdlTrigger | None = None
    """Its messages record DDL; those about rewritten tables are kept, too."""
    types: TypeSettings = field(default_factory=TypeSettings)


class Assembler:
    """Assembles the messages of one connection; a new connection needs a new assembler."""

    def __init__(
        self, sink: SpoolWriter, resolver: CatalogResolver, streams: OpenStreams, settings: AssemblerSettings
    ) -> None:
        self._sink = sink
        self._settings = settings
        self._relations = RelationMap(resolver, settings.types)
        self._streams = streams
        self._streaming: int | None = None
        self._block = Block()
        self._open: Transaction | None = None
        self._ordinal = 0
        self._described: tuple[int, OrderKey | None] = 0, None
        """The table that was described last, and where."""
        self._committed = Extent()
        self._end: Lsn | None = None
        """The end of the last commit that is not published yet."""
        self._transactions = 0
        self._commit_times: tuple[int, int] | None = None

    @property
    def has_committed(self) -> bool:
        """True if `publish` would publish a transaction."""
        return self._transactions > 0

    @property
    def in_transaction(self) -> bool:
        """True while a transaction is open; it is published only as a whole."""
        return self._open is not None

    def feed(self, parcel: Parcel) -> None:
        """Take messages. Decodes and publishes when a block is full."""
        scan = Scan(parcel)
        base = self._block.add_bytes(parcel.raw)
        done = 0
        # Few: relations, truncates, borders of streamed runs. Rows, begins and commits are between them.
        for index in np.flatnonzero(parcels.IS_SINGLE[scan.kind]).tolist():
            kind = int(scan.kind[index])
            if self._streaming is not None:
                if kind == parcels.STREAM_STOP:
                    self._keep_streamed(scan, parcel, done, index)
                    self._streaming = None
                    done = index + 1
                elif kind == parcels.RELATION:
                    relation = parse_relation(scan.message(index), streamed=True)
                    self._relations.announce(relation.table_id, self._streaming)
                elif kind in (parcels.STREAM_START, parcels.STREAM_COMMIT, parcels.STREAM_ABORT):
                    raise DecodeError(f"a message of kind {chr(kind)!r} is inside a streamed run", offset=0)
                continue
            self._take_run(scan, base, done, index)
            self._take_single(kind, scan.message(index))
            done = index + 1
            if kind == parcels.STREAM_COMMIT:
                # The transaction's bytes were added after this parcel's, or emptied the block. Rows must be in the
                # order of their bytes, so add the rest of the parcel again.
                behind = int(scan.end[index])
                base = self._block.add_bytes(parcel.raw[behind:]) - behind
        if self._streaming is not None:
            self._keep_streamed(scan, parcel, done, scan.count)
        else:
            self._take_run(scan, base, done, scan.count)
        self._limit_block()

    def keepalive(self, position: Lsn) -> None:
        """Take a keepalive: the server has sent all commits that start before `position`.

        The position is a boundary, unless a transaction is open.
        """
        if self._open is not None or self._streaming is not None:
            return
        if self._transactions:
            self._end = furthest(self._end or position, position)
        else:
            self._sink.publish(position, transactions=0, commit_times=(0, 0))

    def publish(self) -> None:
        """Publish all whole transactions that have arrived."""
        if not self._transactions:
            return
        assert self._end is not None
        assert self._commit_times is not None
        self._decode(self._committed)
        self._sink.publish(self._end, transactions=self._transactions, commit_times=self._commit_times)
        self._end = None
        self._transactions = 0
        self._commit_times = None

    def _limit_block(self) -> None:
        """Keep the block within its bounds."""
        if self._block.bytes >= self._settings.block_bytes and self._is_worthwhile():
            if self._transactions:
                self.publish()
            else:
                self._decode(self._block.end)
        elif not self._block.rows and not self._block.marks and not self._transactions:
            # It holds only messages of streamed transactions.
            self._drop(self._block.end)

    def _is_worthwhile(self) -> bool:
        """True if the tables in the block have enough bytes each, or the block has reached its largest size."""
        settings = self._settings
        wanted = min(settings.largest_block_bytes, self._block.count_lanes() * settings.lane_bytes)
        return self._block.bytes >= wanted

    def _decode(self, extent: Extent) -> None:
        """Hand the rows and marks of an extent to the sink, in the order of each table."""
        parts: list[DecodedPart | Mark] = list(self._block.marks[: extent.marks])
        parts += self._block.decode(self._relations.lanes, extent)
        # A mark comes before the row with its number.
        for part in sorted(parts, key=lambda part: (part.row, isinstance(part, DecodedPart))):
            if isinstance(part, Mark):
                self._sink.write_step(part.step)
            else:
                self._sink.write_rows(part.lane.schema, part.table, part.first, part.last)
        self._drop(extent)

    def _drop(self, extent: Extent) -> None:
        """Continue with a block that has only what comes after an extent, and the open transaction if there is one."""
        closed = self._block.transactions - (self._open is not None)
        self._block = self._block.rest(extent._replace(transactions=min(extent.transactions, closed)))
        self._committed = Extent()

    # Ordinary transactions

    def _take_run(self, scan: Scan, base: int, first: int, last: int) -> None:
        """Take consecutive begins, commits and rows outside of streamed runs."""
        if first >= last:
            return
        kind = scan.kind[first:last]
        begins = first + np.flatnonzero(kind == parcels.BEGIN)
        commits = first + np.flatnonzero(kind == parcels.COMMIT)
        self._require_nesting(begins, commits)
        is_row = parcels.IS_ROW[kind]
        rows_before = np.concatenate(([0], np.cumsum(is_row)))
        opened = self._open
        before = self._block.transactions - 1
        begun = scan.positions(begins, 1), scan.commit_times(begins, 9), scan.uint32(begins, 17)
        self._block.add_transactions(*begun)
        rows = first + np.flatnonzero(is_row)
        if len(rows):
            number = np.searchsorted(begins, rows)
            if (number + (opened is not None) - np.searchsorted(commits, rows) != 1).any():
                raise DecodeError("a change is outside of a transaction", offset=0)
            counted_from = np.concatenate(([-self._ordinal], rows_before[begins - first]))
            ordinal = rows_before[rows - first] - counted_from[number]
            self._add_rows(scan, base, rows, (before + number).astype(np.int32), ordinal, prefix=0, stream=None)
        if len(begins):
            self._open = Transaction(Lsn(int(begun[0][-1])), int(begun[1][-1]), int(begun[2][-1]))
            self._ordinal = int(rows_before[-1] - rows_before[begins[-1] - first])
        else:
            self._ordinal += int(rows_before[-1])
        if len(commits):
            number = np.searchsorted(begins, commits)
            announced = np.concatenate(([opened.commit_lsn if opened else 0], begun[0]))[number]
            if (scan.positions(commits, 2) != announced).any():
                raise DecodeError("the commit LSN differs from the one that BEGIN announced", offset=2)
            rows_after = int(rows_before[-1] - rows_before[commits[-1] - first])
            extent = Extent(self._block.rows - rows_after, len(self._block.marks), before + int(number[-1]) + 1)
            self._note_commits(extent, Lsn(int(scan.positions(commits[-1:], 10)[0])), scan.commit_times(commits, 18))
            if not len(begins) or begins[-1] < commits[-1]:
                self._open = None
                self._ordinal = 0

    def _require_nesting(self, begins: NDArray[np.int64], commits: NDArray[np.int64]) -> None:
        """Raise unless begins and commits alternate."""
        paired = begins if self._open is None else np.concatenate(([-1], begins))
        if (
            len(paired) - len(commits) not in (0, 1)
            or not (paired[: len(commits)] < commits).all()
            or not (commits[: len(paired) - 1] < paired[1:]).all()
        ):
            raise DecodeError("begins and commits do not alternate", offset=0)

    def _note_commits(self, extent: Extent, end: Lsn, times: NDArray[np.int64]) -> None:
        self._committed = extent
        self._end = end
        self._transactions += len(times)
        earliest, latest = int(times.min()), int(times.max())
        known = self._commit_times or (earliest, latest)
        self._commit_times = (min(known[0], earliest), max(known[1], latest))

    def _add_rows(
        self,
        scan: Scan,
        base: int,
        rows: NDArray[np.int64],
        transaction: NDArray[np.int32],
        ordinal: NDArray[np.int64],
        *,
        prefix: int,
        stream: int | None,
    ) -> None:
        """Index row messages; in streamed runs, `prefix` bytes (the sub-transaction) come before the table."""
        message = scan.start[rows] + base
        tuple_start = message + (HEADER + 5 + prefix)
        end = scan.end[rows] + base
        if prefix and (tuple_start + 3 > end).any():
            raise DecodeError("a streamed change ends inside its header", offset=5)
        self._block.add_rows(
            RowIndex(
                lane=self._lanes(scan.uint32(rows, 1 + prefix), stream),
                operation=scan.kind[rows],
                message=message + HEADER,
                start=tuple_start,
                end=end,
                transaction=transaction,
                ordinal=ordinal,
            )
        )

    def _lanes(self, tables: NDArray[np.int64], stream: int | None) -> NDArray[np.unsignedinteger[Any]]:
        number_type = np.uint16 if len(self._relations.lanes) <= 1 << 16 else np.uint32
        if (tables == tables[0]).all():
            lane = self._relations.lane(int(tables[0]), transaction=stream)
            return np.full(len(tables), lane.number, number_type)
        known, inverse = np.unique(tables, return_inverse=True)
        # One lookup per table, not per row.
        numbers = [self._relations.lane(table, transaction=stream).number for table in known.tolist()]
        return np.array(numbers, number_type)[inverse]

    # Messages that are few

    def _take_single(self, kind: int, message: bytes) -> None:
        if kind == parcels.RELATION:
            at = None if self._open is None else OrderKey(self._open.commit_lsn, self._ordinal)
            self._describe(parse_relation(message), at)
        elif kind == parcels.TRUNCATE:
            if self._open is None:
                raise DecodeError("a truncate is outside of a transaction", offset=0)
            self._take_truncate(message, self._open)
        elif kind == parcels.MESSAGE:
            self._take_message(message, self._open)
        elif kind == parcels.STREAM_START:
            if self._open is not None:
                raise DecodeError("a streamed run starts inside a transaction", offset=0)
            self._streaming = parse_stream_start(message).xid
            self._streams.start(self._streaming)
        elif kind == parcels.STREAM_COMMIT:
            self._take_stream_commit(parse_stream_commit(message))
        elif kind == parcels.STREAM_ABORT:
            abort = parse_stream_abort(message)
            self._streams.abort(abort.xid, abort.subtransaction_xid)
            if abort.xid == abort.subtransaction_xid:
                self._relations.abort(abort.xid)
        else:
            raise DecodeError("a streamed run ends that never started", offset=0)

    def _describe(self, relation: Relation, at: OrderKey | None, stream: int | None = None) -> None:
        """Take the description of a table. The one of a leaf directly follows that of the table it belongs to."""
        self._relations.describe(relation, transaction=stream, at=at)
        if at is not None:
            table_id, place = self._described
            if place == at and table_id != relation.table_id:
                self._sink.note_leaf(table_id, relation.table_id, at.commit_lsn)
            self._described = relation.table_id, at

    def _take_truncate(self, message: bytes, transaction: Transaction, stream: int | None = None) -> None:
        truncate = parse_truncate(message, streamed=stream is not None)
        key = OrderKey(transaction.commit_lsn, self._ordinal)
        self._ordinal += 1
        for table_id in truncate.table_ids:
            schema = self._relations.lane(table_id, transaction=stream).schema
            step = Truncation(
                table_id=table_id,
                table=str(schema),
                key=key,
                commit_time=transaction.commit_time,
                xid=transaction.xid,
                cascade=truncate.cascade,
                restart_identity=truncate.restart_identity,
            )
            self._block.marks.append(Mark(self._block.rows, table_id, step))

    def _take_message(self, raw: bytes, transaction: Transaction | None, stream: int | None = None) -> None:
        message = parse_logical_message(raw, streamed=stream is not None)
        if transaction is None or not message.transactional:
            return
        trigger = self._settings.ddl_trigger
        key = OrderKey(transaction.commit_lsn, self._ordinal)
        if trigger is not None and message.prefix in (trigger.prefix, trigger.rewrite_prefix):
            # Any user of the database can send such a message.
            if not self._relations.is_genuine(message, transaction.xid):
                return
            if message.prefix == trigger.prefix:
                self._relations.learn(message.content, key)
                return
        elif message.prefix not in self._settings.message_prefixes:
            return
        step = Message(key, transaction.commit_time, transaction.xid, message.prefix, message.content)
        self._block.marks.append(Mark(self._block.rows, None, step))

    # Streamed transactions

    def _keep_streamed(self, scan: Scan, parcel: Parcel, first: int, last: int) -> None:
        assert self._streaming is not None
        if first < last:
            raw = memoryview(parcel.raw)[int(scan.start[first]) : int(scan.end[last - 1])]
            self._streams.append(self._streaming, raw, parcel.lengths[first:last])

    def _take_stream_commit(self, commit: StreamCommit) -> None:
        """Read a streamed transaction again, now that it has committed."""
        transaction = Transaction(commit.commit_lsn, commit.commit_time, commit.xid)
        self._open = transaction
        self._ordinal = 0
        self._block.add_transaction(transaction)
        stream = self._streams.take(commit.xid)
        for parcel in stream.parcels(self._settings.block_bytes // 4):
            self._replay(parcel, transaction, stream.aborted)
            self._limit_block()
        self._relations.commit(commit.xid)
        self._open = None
        self._ordinal = 0
        self._note_commits(self._block.end, commit.end_lsn, np.array([commit.commit_time]))

    def _replay(self, parcel: Parcel, transaction: Transaction, aborted: NDArray[np.int64]) -> None:
        scan = Scan(parcel)
        base = self._block.add_bytes(parcel.raw)
        done = 0
        for index in np.flatnonzero(parcels.IS_SINGLE[scan.kind]).tolist():
            self._replay_rows(scan, base, done, index, transaction.xid, aborted)
            done = index + 1
            kind, message = int(scan.kind[index]), scan.message(index)
            if kind == parcels.RELATION:
                # Kept even if its sub-transaction was rolled back, because the server does not send it again.
                relation = parse_relation(message, streamed=True)
                at = OrderKey(transaction.commit_lsn, self._ordinal)
                self._describe(relation, at, transaction.xid)
            elif int.from_bytes(message[1:5], "big") in aborted:
                continue
            elif kind == parcels.TRUNCATE:
                self._take_truncate(message, transaction, transaction.xid)
            elif kind == parcels.MESSAGE:
                self._take_message(message, transaction, transaction.xid)
            else:
                raise DecodeError(f"a message of kind {chr(kind)!r} is inside a streamed run", offset=0)
        self._replay_rows(scan, base, done, scan.count, transaction.xid, aborted)

    def _replay_rows(
        self, scan: Scan, base: int, first: int, last: int, stream: int, aborted: NDArray[np.int64]
    ) -> None:
        rows = first + np.flatnonzero(parcels.IS_ROW[scan.kind[first:last]])
        if len(aborted) and len(rows):
            rows = rows[~np.isin(scan.uint32(rows, 1), aborted)]
        if not len(rows):
            return
        number = np.full(len(rows), self._block.transactions - 1, np.int32)
        ordinal = self._ordinal + np.arange(len(rows))
        self._ordinal += len(rows)
        self._add_rows(scan, base, rows, number, ordinal, prefix=4, stream=stream)
