"""Java is looked at before Spark is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.spark.java import find_java, parse_version


def pretend(folder: Path, said: str) -> Path:
    """A `java` that says which version it is."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("no java", None),
    ],
)
def test_versions_are_read(said: str, version: int | None) -> None:
    assert parse_version(said) == version


def test_the_first_java_that_fits_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = pretend(tmp_path / "old", 'java version "1.8.0_402"')
    pretend(tmp_path / "installed" / "a25", 'openjdk version "25.0.1"')
    good = pretend(tmp_path / "installed" / "b21", 'openjdk version "21.0.2"')
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    monkeypatch.setenv("PATH", "/nowhere:/bin:/usr/sbin")
    monkeypatch.setattr("shutil.which", lambda name: None)
    java = find_java(tmp_path / "installed")
    assert (java.program, java.version, java.home) == (good, 21, good.parent.parent)


def test_no_java_or_an_old_one_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="this machine has none") as caught:
        find_java(tmp_path)
    assert "default-jre-headless" in caught.value.hint
    pretend(tmp_path / "x", 'openjdk version "11.0.2"')
    with pytest.raises(ConfigError, match="is Java 11"):
        find_java(tmp_path)
