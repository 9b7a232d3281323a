"""Splits a table into ranges: by blocks of the heap, of about equal size, each partition separately.

A range is a condition on `ctid`, for which the server reads only those blocks. The first range of a heap has no lower
end and the last no upper one: the measured size may be outdated, and must not decide which rows are copied. Ranges are
short, so that a failed one costs little and other work gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

RANGE_BYTES = 32 << 20
CHUNK_BYTES = 4 << 20
TID_RANGES_SINCE = 140000
"""Older servers read the whole table for any condition on `ctid`."""


@dataclass(frozen=True, slots=True)
class CopySettings:
    """How tables are copied."""

    range_bytes: int = RANGE_BYTES
    """Size of a range, including TOAST: a second or two of work."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes from the server in one record batch; a single row may exceed it."""
    lock_timeout: float = 60.0
    """Seconds to wait for DDL on the table to end."""
    max_bytes_per_second: int | None = None
    """Limit for each range that is being read."""
    resume_max_bytes: int = 4 << 30
    """WAL that the server may keep so that an interrupted copy can be resumed; 0 to start again always."""

    @property
    def session_parameters(self) -> dict[str, str]:
        """Settings of the sessions that read: no limit for statements, a limit for locks."""
        return {"lock_timeout": str(max(1, round(self.lock_timeout * 1000))), "statement_timeout": "0"}


@runtime_checkable
class SizedItem(Protocol):
    """An item of a copy that states how many bytes it reads from the source's disk."""

    @property
    def estimated_bytes(self) -> int: ...


def bytes_of(items: Iterable[object]) -> int:
    """Return how many bytes a copy reads from the source's disk. An item without a size counts as a whole range."""
    return sum(item.estimated_bytes if isinstance(item, SizedItem) else RANGE_BYTES for item in items)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A heap in the snapshot: an ordinary table, or a leaf of a partitioned one."""

    oid: int
    filenode: int
    """The file with the snapshot's rows; a different one later means that the table was rewritten."""
    blocks: int
    bytes: int
    """Includes TOAST."""
    attnums: tuple[int, ...]
    """The table's columns here, in the order of the table's schema."""
    rows: float = -1.0
    """The server's estimate; negative if it has none."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """A part of a table that one task reads. `index` identifies it within its attempt."""

    table_id: int
    index: int
    leaf: Leaf
    first_block: int
    """0 means no lower end."""
    end_block: int | None
    """The first block after the range; None means no upper end."""
    estimated_bytes: int = 0

    @property
    def blocks(self) -> tuple[int, int, int | None, int]:
        """As in `penstock.copy.resume.Blocks`."""
        return self.leaf.oid, self.first_block, self.end_block, self.estimated_bytes

    @property
    def condition(self) -> str:
        """Return the range as a condition; empty for a whole heap."""
        lower = f"ctid >= '({self.first_block},0)'::pg_catalog.tid" if self.first_block else ""
        upper = "" if self.end_block is None else f"ctid < '({self.end_block},0)'::pg_catalog.tid"
        return " and ".join(filter(None, (lower, upper)))


def plan_ranges(
    table_id: int,
    leaves: Iterable[Leaf],
    *,
    range_bytes: int = RANGE_BYTES,
    can_seek: bool = True,
    finished: Mapping[int, Iterable[tuple[int, int | None]]] | None = None,
) -> tuple[CopyRange, ...]:
    """Split heaps into ranges. Every heap has at least one, even if it is empty, unless it is finished.

    `can_seek` says that the server reads a range of `ctid` alone (14 and newer); otherwise a heap is one range.
    `finished` are the first and end blocks of the parts of heaps that need no range, by oid.
    """
    pieces = (
        (leaf, first, end)
        for leaf in leaves
        for gap in _gaps((finished or {}).get(leaf.oid, ()))
        for first, end in _cut(leaf, range_bytes if can_seek else leaf.bytes + 1, gap)
    )
    return tuple(
        CopyRange(table_id, index, leaf, first, end, _estimate(leaf, first, end))
        for index, (leaf, first, end) in enumerate(pieces)
    )


def _gaps(parts: Iterable[tuple[int, int | None]]) -> Iterator[tuple[int, int | None]]:
    """Yield what lies between some parts of a heap."""
    begin = 0
    for first, end in sorted(parts, key=lambda part: part[0]):
        if begin < first:
            yield begin, first
        if end is None:
            return
        begin = max(begin, end)
    yield begin, None


def _cut(leaf: Leaf, range_bytes: int, gap: tuple[int, int | None]) -> Iterator[tuple[int, int | None]]:
    first, end = gap
    blocks = max(0, (leaf.blocks if end is None else end) - first)
    count = max(1, min(blocks, -(-_estimate(leaf, first, end) // max(1, range_bytes))))
    borders = [first + blocks * number // count for number in range(count)]
    yield from zip(borders, [*borders[1:], end], strict=True)


def _estimate(leaf: Leaf, first: int, end: int | None) -> int:
    blocks = max(0, (leaf.blocks if end is None else end) - first)
    return leaf.bytes * blocks // leaf.blocks if leaf.blocks else 0
