"""Files that replace others: what is left of them after errors and kills."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.parquet import folder as parquet
from penstock.durable import aside, sweep_aside
from penstock.spool import SpoolSettings, SpoolWriter
from penstock.spool.folder import SpoolFolder, replace_file

HOUR = 3600.0


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Files cannot grow beyond a size, as on a disk that is full."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(target: Path, *, hours: float) -> Path:
    """What is left of a process that was killed while it wrote a file."""
    with aside(target) as temporary:
        pass
    temporary.write_text("part")
    old = time.time() - hours * HOUR
    os.utime(temporary, (old, old))
    return temporary


def test_a_write_to_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with limited_files(1000):
        for write in (
            lambda: LocalStorage(tmp_path).put("a", bytes(5000)),
            lambda: LocalStorage(tmp_path).put_if_absent("b", bytes(5000)),
            lambda: parquet.put_if_absent(tmp_path / "c", "c" * 5000),
            lambda: replace_file(tmp_path / "d", "d" * 5000),
            lambda: replace_file(tmp_path / "e", "e" * 5000, durable=True),
        ):
            with pytest.raises(OSError, match="File too large"):
                write()
    assert names(tmp_path) == []


def test_only_what_nothing_writes_any_more_is_swept(tmp_path: Path) -> None:
    killed(tmp_path / "a.json", hours=2)
    recent = killed(tmp_path / "a.json", hours=0.1)
    for name in (".hidden", ".profile.d", "a.json"):
        (tmp_path / name).write_text("kept")
        os.utime(tmp_path / name, (0, 0))
    sweep_aside(tmp_path)
    assert names(tmp_path) == sorted([".hidden", ".profile.d", "a.json", recent.name])
    sweep_aside(tmp_path / "missing")


def test_a_spool_that_is_opened_again_is_swept(tmp_path: Path) -> None:
    folder = SpoolFolder(tmp_path)
    folder.create()
    (folder.schemas / "7").mkdir()
    left = [
        killed(target, hours=2)
        for target in (folder.status, folder.readers / "a.json", folder.holds / "a@7.json", folder.schemas / "7/1.json")
    ]
    for name, days in (("penstock-verify-old", 2), ("penstock-verify-new", 0)):
        (folder.comparisons / name).mkdir(parents=True)
        moment = time.time() - days * 24 * HOUR
        os.utime(folder.comparisons / name, (moment, moment))
    SpoolWriter(SpoolSettings(tmp_path, min_free_bytes=0)).close()
    assert [path for path in left if path.exists()] == []
    assert names(folder.comparisons) == ["penstock-verify-new"]
