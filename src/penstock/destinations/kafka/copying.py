"""Copies: one task writes a table in one transaction, with its position. Readers see all of it or nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.destinations.base import CopyRows
from penstock.destinations.kafka.client import Cluster, Fenced, Writer
from penstock.destinations.kafka.control import Control, Known, Layout, Recorded
from penstock.destinations.kafka.messages import Encoder
from penstock.destinations.refusals import fenced_copy, other_writer, unexpected
from penstock.destinations.row_groups import group_batches
from penstock.schema import TableSchema

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where and how a copy is written; pickles."""

    cluster: Cluster
    control: Control
    transactional_id: str
    schema: TableSchema
    encoder: Encoder
    partition: int
    lineage: str
    epoch: int
    mode: Layout
    topic_id: str
    empties: bool
    """Something was in the topic before, which the copy replaces."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy, as a task gets it."""

    target: CopyTarget
    rows: CopyRows


def copy_table(copy: Copy) -> int:
    """Write a copy, in a task; return how many rows it has.

    If the task runs twice, the second producer fences the first. If the first had finished, the second does nothing.
    """
    target, rows = copy.target, copy.rows
    writer = Writer(target.cluster, target.transactional_id)
    table, count = str(target.schema), 0
    try:
        writer.initialize()
        known = require_begun(target.control.load(), target, rows.attempt)
        if known.is_copied:
            return 0
        moment = time.time_ns() // 1000
        topic, encoder = known.next_topic, target.encoder
        with writer.transaction():
            if target.empties:
                writer.send(topic, encoder.emptied(target.schema, rows.position, moment), max(target.partition, 0))
            for batches in group_batches(rows.arrow(), _PIECE_BYTES):
                piece = pa.Table.from_batches(batches, schema=rows.arrow_schema)
                writer.send(topic, encoder.copied(piece, target.schema, rows.position, moment), target.partition)
                count += piece.num_rows
            writer.send(target.control.topic, target.control.schema(target.schema, f"copy {rows.attempt}"), 0)
            writer.send(target.control.topic, target.control.records([finished(known, target, rows)]), 0)
    except Fenced:
        raise fenced_copy(table, rows.attempt) from None
    except Exception as error:
        raise unexpected(table, error) from None
    finally:
        writer.discard()
    return count


def require_begun(recorded: Recorded, target: CopyTarget, attempt: str) -> Known:
    """Return the record of a table whose newest attempt this is; raise for any other."""
    known = recorded.tables.get(target.schema.table_id)
    if recorded.epoch > target.epoch:
        raise other_writer(str(target.schema))
    if known is None or known.attempt != attempt or not known.next_topic:
        raise fenced_copy(str(target.schema), attempt)
    return known


def finished(known: Known, target: CopyTarget, rows: CopyRows) -> Known:
    """Return the record of a complete copy."""
    return replace(
        known,
        source=str(target.schema),
        place=known.next_place,
        topic=known.next_topic,
        topic_id=target.topic_id,
        copied=rows.attempt,
        lineage=target.lineage,
        position=rows.position,
        epoch=target.epoch,
        mode=target.mode,
    )
