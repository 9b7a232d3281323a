"""Positions in the write-ahead log, and the only module that compares them.

A *position* is a boundary: an LSN `b` that divides transactions. A transaction is before `b` if its commit record
**starts** below `b`, and after it otherwise. A commit's end, a slot's consistent point, `confirmed_flush_lsn` and a
keepalive outside a transaction are boundaries. Rows carry the start of their commit record. Commits often start
exactly where the previous one ended, so a transaction that starts *at* a boundary comes after it: `<`, never `<=`.

Because `<` and `<=` are so easy to confuse, `Lsn` has no order of its own: comparing two with an operator, `max`, `min`
or `sorted` raises `TypeError`, and fails type checking. Call the functions of this module instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Never, NoReturn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")
_NO_ORDER = "positions have no order of their own: compare them with the functions of penstock.lsn"


class Lsn(int):
    """A byte position in the write-ahead log; prints as Postgres does (`16/B374D848`).

    Only equality is defined. For order, see `is_in`, `reaches`, `furthest` and `earliest`.
    """

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Lsn:
        if not 0 <= int(value) < 1 << 64:
            raise ValueError(f"not a position in the write-ahead log: {value}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read Postgres' notation."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a position in the write-ahead log: {text!r} (expected like 16/B374D848)")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __lt__(self, other: Never) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(_NO_ORDER)

    def __le__(self, other: Never) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(_NO_ORDER)

    def __gt__(self, other: Never) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(_NO_ORDER)

    def __ge__(self, other: Never) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(_NO_ORDER)

    def __array_ufunc__(self, *arguments: object, **options: object) -> NoReturn:
        raise TypeError(_NO_ORDER)

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"


class OrderKey(NamedTuple):
    """The place of a change: the start of its commit record, then its number among the transaction's changes."""

    commit_lsn: Lsn
    ordinal: int

    @classmethod
    def parse(cls, text: str) -> OrderKey:
        """Parse the output of `str`."""
        commit_lsn, ordinal = text.split("-")
        return cls(Lsn(int(commit_lsn, 16)), int(ordinal, 16))

    def __str__(self) -> str:
        """Text that sorts like the key. The version of a schema is named after the key from which it is valid."""
        return f"{int(self.commit_lsn):016X}-{self.ordinal:08X}"

    def __lt__(self, other: OrderKey) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (int(self.commit_lsn), self.ordinal) < (int(other.commit_lsn), other.ordinal)

    def __le__(self, other: OrderKey) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return not other < self

    def __gt__(self, other: OrderKey) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return other < self

    def __ge__(self, other: OrderKey) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return not self < other


def is_in(commit_lsn: int, boundary: int) -> bool:
    """Return True if `boundary` covers the transaction that commits at `commit_lsn`."""
    return int(commit_lsn) < int(boundary)


def are_in(commit_lsn: NDArray[np.int64], boundary: int) -> NDArray[np.bool_]:
    """`is_in` for a column of commit positions."""
    return commit_lsn < int(boundary)


def reaches(position: int, target: int) -> bool:
    """Return True if a boundary covers everything that another boundary covers."""
    return int(position) >= int(target)


def furthest(first: Lsn, *others: Lsn) -> Lsn:
    """Return the boundary that covers all the others."""
    return max((first, *others), key=int)


def earliest(first: Lsn, *others: Lsn) -> Lsn:
    """Return the boundary that all the others cover."""
    return min((first, *others), key=int)


def distance(behind: Lsn, ahead: Lsn) -> int:
    """Return the bytes of write-ahead log from one position to another; zero if the first is not behind."""
    return max(0, int(ahead) - int(behind))
