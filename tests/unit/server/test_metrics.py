"""Metrics that are measured when they are asked for."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.server.metrics import children_memory


def test_a_thread_that_ends_meanwhile_does_not_hide_the_children_of_others(tmp_path: Path) -> None:
    """Its folder is listed, and then it is gone."""
    own = tmp_path / str(os.getpid()) / "task"
    (own / "1").mkdir(parents=True)
    (own / "2").mkdir()
    (own / "2" / "children").write_text("77 ")
    (tmp_path / "77" / "task").mkdir(parents=True)
    (tmp_path / "77" / "statm").write_text("9 5 0 0 0 0 0")
    assert children_memory(tmp_path) == 5 * os.sysconf("SC_PAGE_SIZE")
