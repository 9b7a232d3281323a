"""Which Java runs Spark: found, and looked at, before Spark fails with something less clear."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

OLDEST, NEWEST = 17, 21
"""The versions that Spark 4.1 runs on."""
_INSTALLED = Path("/usr/lib/jvm")
_HINT = (
    f"Install Java {OLDEST} to {NEWEST} (Debian and Ubuntu: apt-get install default-jre-headless; "
    "macOS: brew install openjdk@21), or set JAVA_HOME to where it is."
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


def find_java(installed: Path = _INSTALLED) -> Java:
    """`JAVA_HOME`, the `java` on the path, or one that is installed: the first that Spark runs on."""
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
    raise ConfigError("Spark needs Java, and there is none on this machine", hint=_HINT)


def read_version(program: Path) -> int | None:
    """The major version that a `java` says it has; None if it does not run."""
    try:
        said = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(said)


def parse_version(said: str) -> int | None:
    """`openjdk version "17.0.15"` is 17, `java version "1.8.0_402"` is 8."""
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(match[1]) if match else None


def _candidates(installed: Path) -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield Path(found)
    yield from sorted(installed.glob("*/bin/java"))
