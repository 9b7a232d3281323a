"""Acknowledgements of a capture: its position moves past a piece once that piece and all before it are confirmed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.documents.base import Ack

PositionT = TypeVar("PositionT")


class Acks(Generic[PositionT]):
    """The pieces that were delivered and not confirmed, in order. Thread-safe."""

    def __init__(self, advance: Callable[[PositionT], None]) -> None:
        """`advance` stores a position; it is called by the thread that confirms, by one at a time."""
        self._advance = advance
        self._pieces: deque[_Piece[PositionT]] = deque()
        self._lock = threading.Lock()

    def expect(self, position: PositionT | None = None) -> Ack:
        """Return the acknowledgement of the next piece; `position` is where it ends, None inside of a transaction."""
        piece = _Piece(self, position)
        with self._lock:
            self._pieces.append(piece)
        return piece

    def forget(self) -> None:
        """Forget all pieces that were not confirmed: they are delivered again, and confirming them does nothing."""
        with self._lock:
            self._pieces.clear()

    def confirm(self, piece: _Piece[PositionT]) -> None:
        """Confirm a piece, and move past it if all before it are confirmed."""
        with self._lock:
            piece.confirmed = True
            position: PositionT | None = None
            while self._pieces and self._pieces[0].confirmed:
                reached = self._pieces.popleft().position
                position = position if reached is None else reached
            if position is not None:
                self._advance(position)


@dataclass(eq=False, slots=True)
class _Piece(Generic[PositionT]):
    acks: Acks[PositionT]
    position: PositionT | None
    confirmed: bool = False

    def confirm(self) -> None:
        self.acks.confirm(self)
