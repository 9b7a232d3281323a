"""Positions in the write-ahead log, and the only place where they are compared.

A *position* is a boundary: an LSN `b` such that every transaction whose commit record **starts** below `b` is in,
and every other is not. A commit's end, a slot's consistent point, `confirmed_flush_lsn` and a keepalive outside a
transaction are boundaries. Rows carry the start of their commit record. Back-to-back commits often start exactly
where the one before ended, so equality means *not in*: `<`, never `<=`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class Lsn(int):
    """A byte position in the write-ahead log; prints as Postgres does (`16/B374D848`)."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Lsn:
        if not 0 <= value < 1 << 64:
            raise ValueError(f"not a position in the write-ahead log: {value}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read Postgres' notation."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a position in the write-ahead log: {text!r} (expected like 16/B374D848)")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"


class OrderKey(NamedTuple):
    """Where a change stands: the start of its commit record, then its number among the transaction's changes."""

    commit_lsn: Lsn
    ordinal: int


def is_in(commit_lsn: int, boundary: int) -> bool:
    """Whether the transaction that commits at `commit_lsn` is covered by `boundary`."""
    return int(commit_lsn) < int(boundary)


def are_in(commit_lsn: NDArray[np.int64], boundary: int) -> NDArray[np.bool_]:
    """`is_in` for a column of commit positions."""
    return commit_lsn < int(boundary)


def reaches(position: int, target: int) -> bool:
    """Whether a boundary covers all that another boundary covers."""
    return int(position) >= int(target)
