"""Splits a table into ranges: by blocks of the heap, of about equal size, each partition separately.

A range is a condition on `ctid`, for which the server reads only those blocks. The first range of a heap has no lower
end and the last no upper one: the measured size may be outdated, and must not decide which rows are copied. Ranges are
short, so that a failed one costs little and other work gets its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    def condition(self) -> str:
        """Return the range as a condition; empty for a whole heap."""
        lower = f"ctid >= '({self.first_block},0)'::pg_catalog.tid" if self.first_block else ""
        upper = "" if self.end_block is None else f"ctid < '({self.end_block},0)'::pg_catalog.tid"
        return " and ".join(filter(None, (lower, upper)))


def plan_ranges(
    table_id: int, leaves: Iterable[Leaf], *, range_bytes: int = RANGE_BYTES, can_seek: bool = True
) -> tuple[CopyRange, ...]:
    """Split heaps into ranges. Every heap has at least one, even if it is empty.

    `can_seek` says that the server reads a range of `ctid` alone (14 and newer); otherwise a heap is one range.
    """
    pieces = (
        (leaf, first, end) for leaf in leaves for first, end in _cut(leaf, range_bytes if can_seek else leaf.bytes + 1)
    )
    return tuple(
        CopyRange(table_id, index, leaf, first, end, _estimate(leaf, first, end))
        for index, (leaf, first, end) in enumerate(pieces)
    )


def _cut(leaf: Leaf, range_bytes: int) -> Iterator[tuple[int, int | None]]:
    count = max(1, min(leaf.blocks, -(-leaf.bytes // max(1, range_bytes))))
    borders = [leaf.blocks * number // count for number in range(count)]
    yield from zip(borders, [*borders[1:], None], strict=True)


def _estimate(leaf: Leaf, first: int, end: int | None) -> int:
    blocks = (leaf.blocks if end is None else end) - first
    return leaf.bytes * blocks // leaf.blocks if leaf.blocks else 0
