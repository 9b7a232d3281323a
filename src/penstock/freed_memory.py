"""Returns freed memory to the system.

Arrow's allocator and the C library keep what is freed, each for its own later use. Work in steps of bounded size can
so take several times the memory of a step: some megabytes of each step stay where no other step can use them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pyarrow as pa


def release_freed_memory() -> None:
    """Return freed memory to the system, between two steps of work that takes long.

    This takes some milliseconds, and getting the memory back takes as much again: not for steps of milliseconds.
    """
    pa.default_memory_pool().release_unused()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """Return the function of the C library that does it; None if there is none, as on macOS and with musl."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
