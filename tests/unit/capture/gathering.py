"""A sink that remembers what an assembler gives it."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from penstock.capture.assembler import Assembler, AssemblerSettings
from penstock.capture.streams import OpenStreams
from penstock.changes.segment import COMMIT_LSN, ORDINAL, UNREPRESENTABLE, UNREPRESENTABLE_TYPE
from penstock.changes.steps import Message, Truncation
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.spool.folder import DiskGuard
from tests.unit.capture.corpus import Corpus, RecordedResolver, parcel


@dataclass
class MemorySink:
    """Published entries as lists of rows and steps."""

    entries: list[list[object]] = field(default_factory=list)
    ends: list[Lsn] = field(default_factory=list)
    transactions: int = 0
    pending: list[object] = field(default_factory=list)
    leaves: list[tuple[int, int, Lsn]] = field(default_factory=list)

    def write_rows(self, schema: TableSchema, rows: pa.Table, first: OrderKey, last: OrderKey) -> None:
        keys = list(zip(rows[COMMIT_LSN].to_pylist(), rows[ORDINAL].to_pylist(), strict=True))
        assert keys == sorted(keys)
        assert (keys[0], keys[-1]) == (tuple(map(int, first)), tuple(map(int, last)))
        # Durable segments survive Parquet: what Arrow itself finds wrong must not get there.
        rows.validate(full=True)
        self.pending.append((schema, rows))

    def note_leaf(self, table_id: int, leaf: int, at: Lsn) -> None:
        self.leaves.append((table_id, leaf, at))

    def write_step(self, step: Truncation | Message) -> None:
        self.pending.append(step)

    def publish(self, end: Lsn, *, transactions: int, commit_times: tuple[int, int]) -> None:
        self.entries.append(self.pending)
        self.pending = []
        self.ends.append(end)
        self.transactions += transactions

    def changes(self) -> list[tuple[object, ...]]:
        """All changes by order key, as (commit_lsn, ordinal, table, row or truncate)."""
        found: list[tuple[object, ...]] = []
        for entry in self.entries:
            for part in entry:
                if isinstance(part, tuple):
                    schema, rows = part
                    if UNREPRESENTABLE not in rows.column_names:
                        rows = rows.append_column(UNREPRESENTABLE, pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE))
                    found += [
                        (row.pop(COMMIT_LSN), row.pop(ORDINAL), str(schema), repr(row)) for row in rows.to_pylist()
                    ]
                elif isinstance(part, Truncation):
                    found.append((int(part.key.commit_lsn), part.key.ordinal, part.table, "truncate"))
        return sorted(found, key=repr)


def make_assembler(
    corpus: Corpus, sink: MemorySink, folder: Path, settings: AssemblerSettings | None = None
) -> Assembler:
    streams = OpenStreams(folder / "open", DiskGuard(folder, min_free_bytes=0, stop=threading.Event()))
    return Assembler(sink, RecordedResolver(corpus.schemas), streams, settings or AssemblerSettings())


def assemble(
    corpus: Corpus,
    messages: list[bytes],
    folder: Path,
    *,
    cuts: list[int] | None = None,
    settings: AssemblerSettings | None = None,
    cut_each: bool = False,
) -> MemorySink:
    """Feed messages, in parcels that end at `cuts`, and publish what is whole."""
    sink = MemorySink()
    assembler = make_assembler(corpus, sink, folder, settings)
    borders = [0, *(cuts or []), len(messages)]
    for first, last in itertools.pairwise(borders):
        if first < last:
            assembler.feed(parcel(messages[first:last]))
            if cut_each:
                assembler.publish()
    assembler.publish()
    return sink
