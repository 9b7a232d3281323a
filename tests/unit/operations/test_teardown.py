"""What teardown removes on this machine."""

from __future__ import annotations

from pathlib import Path

from penstock.operations.teardown import _remove_spool
from penstock.spool.folder import SpoolFolder


def fill(spool: Path) -> None:
    """Create every file and folder that a spool may have."""
    folder = SpoolFolder(spool)
    folder.create()
    for name in (name for name, value in vars(SpoolFolder).items() if isinstance(value, property)):
        path: Path = getattr(folder, name)
        if path.suffix or name == "lock":
            path.write_text("{}")
        else:
            path.mkdir(exist_ok=True)
            (path / "file").write_text("")


def test_nothing_of_a_spool_is_left(tmp_path: Path) -> None:
    fill(tmp_path / "spool")
    _remove_spool(tmp_path / "spool")
    assert not list(tmp_path.iterdir())


def test_files_of_others_stay(tmp_path: Path) -> None:
    fill(tmp_path / "spool")
    (tmp_path / "spool" / "mine.txt").write_text("")
    _remove_spool(tmp_path / "spool")
    assert [file.name for file in (tmp_path / "spool").iterdir()] == ["mine.txt"]
