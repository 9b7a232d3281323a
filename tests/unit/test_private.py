"""Folders that other users can neither read nor prepare."""

from __future__ import annotations

import ast
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock import private
from penstock.errors import ConfigError
from penstock.spool.folder import SpoolFolder
from penstock.state import open_store

UNPICKLED = {
    # From the pipe of a process that this one started, or that started this one.
    "capture/process.py",
    "operations/supervision.py",
    "operations/verify_process.py",
    # What the same line has pickled.
    "spark/tasks.py",
}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask():
    """The most careless setting."""
    before = os.umask(0)
    yield
    os.umask(before)


def become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process looks as if it ran as another user, who owns nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(private, "_ROOT", -1)


def test_new_folders_and_files_are_for_their_owner_alone(tmp_path):
    SpoolFolder(tmp_path / "below" / "spool").create()
    assert mode_of(tmp_path / "below" / "spool") == 0o700
    (tmp_path / "state").mkdir(mode=0o755)
    open_store(f"sqlite:///{tmp_path}/state/state.db", "shop").close()
    assert {mode_of(path) for path in (tmp_path / "state").iterdir()} == {0o600}


def test_an_existing_file_keeps_the_locks_of_this_process(tmp_path):
    path = private.private_file(tmp_path / "state.db")
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        private.private_file(path)
        # Locks of a process never conflict with its own, so another one has to try.
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=False)
    assert b"BlockingIOError" in tried.stderr


def test_an_existing_folder_may_be_opened_to_a_group(tmp_path):
    (tmp_path / "spool").mkdir(mode=0o750)
    SpoolFolder(tmp_path / "spool").create()
    assert mode_of(tmp_path / "spool") == 0o750


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    for name in ("spool", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    become_another(monkeypatch)
    with pytest.raises(ConfigError, match="belongs to another user"):
        SpoolFolder(tmp_path / "spool").create()
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_store(f"sqlite:///{tmp_path}/state/state.db", "shop")


def test_a_folder_that_everyone_can_write_is_refused(tmp_path):
    (tmp_path / "spool").mkdir(mode=0o777)
    (tmp_path / "spool").chmod(0o1777)
    with pytest.raises(ConfigError, match="every user of this machine can write"):
        SpoolFolder(tmp_path / "spool").create()
    with pytest.raises(ConfigError, match="every user of this machine can write"):
        open_store(f"sqlite:///{tmp_path}/spool/state.db", "shop")


class TestCache:
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        private.cache_folder.cache_clear()
        self.usual = tmp_path / f"penstock-{os.geteuid()}"
        yield
        private.cache_folder.cache_clear()

    def test_is_shared_by_the_processes_of_a_user_and_private(self):
        assert private.cache_folder() == self.usual
        assert mode_of(self.usual) == 0o700
        private.cache_folder.cache_clear()
        assert private.cache_folder() == self.usual

    def test_is_closed_to_readers_where_an_earlier_version_left_it_open(self):
        self.usual.mkdir(mode=0o755)
        assert private.cache_folder() == self.usual
        assert mode_of(self.usual) == 0o700

    def test_is_another_one_where_others_could_write(self):
        self.usual.mkdir(mode=0o777)
        assert private.cache_folder() != self.usual
        assert mode_of(private.cache_folder()) == 0o700

    def test_does_not_follow_a_link(self, tmp_path):
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        self.usual.symlink_to(tmp_path / "elsewhere")
        assert private.cache_folder() != self.usual

    def test_is_not_that_of_another_user(self, tmp_path, monkeypatch):
        become_another(monkeypatch)
        (tmp_path / "penstock-54321").mkdir(mode=0o700)
        assert private.cache_folder() != tmp_path / "penstock-54321"


def test_pickles_come_only_from_pipes_of_our_own_processes():
    """A pickle can run any code, so none may come from a file, a server or a store."""
    root = Path(penstock.__file__).parent
    found = set[str]()
    for path in set(root.rglob("*.py")) - set((root / "testing").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("load", "loads", "Unpickler")
                and isinstance(node.func.value, ast.Name)
                and "pickle" in node.func.value.id
            ):
                found.add(str(path.relative_to(root)))
            if isinstance(node, ast.ImportFrom) and "pickle" in (node.module or ""):
                found.add(str(path.relative_to(root)))
    assert found == UNPICKLED
