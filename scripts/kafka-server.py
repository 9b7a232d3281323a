"""Fetch a Kafka broker and a schema registry into folders, unless they are there. Only tests and benchmarks use them.

Usage: kafka-server.py <folder of the broker> <folder of the registry>
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from ivy import fetch_archive, fetch_jars, why_failed

VERSION = "4.3.1"
BROKER = ("org.apache.kafka", "kafka_2.13", VERSION)
TOOLS = ("org.apache.kafka", "kafka-tools", VERSION)


REGISTRY = ("io.apicurio", "apicurio-registry-app", "3.3.3")


def main() -> int:
    broker, registry = (Path(each) for each in sys.argv[1:])
    for what, target, version, install in (
        ("Kafka", broker, VERSION, install_broker),
        ("Apicurio", registry, REGISTRY[2], install_registry),
    ):
        stamp = target / f".{version}"
        if stamp.exists():
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as name:
            try:
                install(Path(name), target)
            except (OSError, subprocess.SubprocessError) as error:
                print(why_failed(what, error), file=sys.stderr)
                continue
        stamp.touch()
    return 0


def install_broker(folder: Path, target: Path) -> None:
    """Copy all jars into `libs`."""
    for each in (BROKER, TOOLS):
        fetch_jars(each, folder, folder / "libs")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "libs", target / "libs")


def install_registry(folder: Path, target: Path) -> None:
    """Unpack the archive."""
    archive = fetch_archive(REGISTRY, "all", "tar.gz", folder)
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(target, filter="data")
    # As root, servers run as another user.
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    sys.exit(main())
