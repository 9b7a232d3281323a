"""Find the Java that runs Spark, and fail with a clear message if there is none."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.registry import requires_extra

OLDEST, NEWEST = 17, 21
"""The Java versions that all supported Spark versions run on."""
_INSTALLED = Path("/usr/lib/jvm")
_HINT = (
    f"Install Java {OLDEST} to {NEWEST} (Debian and Ubuntu: apt-get install default-jre-headless; "
    "macOS: brew install openjdk@21), or set JAVA_HOME to its folder."
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime."""

    program: Path
    version: int

    @property
    def fits(self) -> bool:
        return OLDEST <= self.version <= NEWEST

    @property
    def home(self) -> Path:
        return self.program.resolve().parent.parent


def require_spark() -> None:
    """Raise `ConfigError` unless pyspark and a suitable Java are installed."""
    with requires_extra("spark", "Spark"):
        importlib.import_module("pyspark")
    find_java()


def find_java(installed: Path = _INSTALLED) -> Java:
    """Return the first suitable Java of `JAVA_HOME`, the `java` on the path, and the installed ones.

    Raises `ConfigError` if there is none.
    """
    unfit: list[str] = []
    for program in _candidates(installed):
        version = read_version(program)
        if version is None:
            continue
        java = Java(program, version)
        if java.fits:
            return java
        unfit.append(f"{program} is Java {version}")
    if unfit:
        raise ConfigError(f"Spark needs Java {OLDEST} to {NEWEST}, but {', '.join(unfit)}", hint=_HINT)
    raise ConfigError("Spark needs Java, and this machine has none", hint=_HINT)


def read_version(program: Path) -> int | None:
    """Return the major version that a `java` reports, or None if it does not run."""
    try:
        output = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(output)


def parse_version(output: str) -> int | None:
    """Return the major version: `openjdk version "17.0.15"` is 17, `java version "1.8.0_402"` is 8."""
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(match[1]) if match else None


def _candidates(installed: Path) -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)
    yield from sorted(installed.glob("*/bin/java"))
