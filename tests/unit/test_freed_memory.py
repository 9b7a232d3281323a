"""What was freed is no longer in the process's memory."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from penstock.freed_memory import release_freed_memory
from tests.support.processes import resident_bytes


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps no freed memory, or all")
def test_freed_memory_is_returned_to_the_system() -> None:
    """Also if blocks that are in use lie between those that are free."""
    blocks = [np.ones(32 << 10, np.uint8) for _ in range(4096)]
    kept = blocks[::16]
    del blocks
    before = resident_bytes(os.getpid())
    release_freed_memory()
    assert resident_bytes(os.getpid()) < before - (64 << 20)
    assert len(kept) == 256
