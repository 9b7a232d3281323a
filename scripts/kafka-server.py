"""Fetch a Kafka broker into a folder, unless it is there. Only tests, the demo and benchmarks use it.

Usage: kafka-server.py <folder>
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ivy import fetch_jars, why_failed

VERSION = "4.3.1"
BROKER = ("org.apache.kafka", "kafka_2.13", VERSION)
TOOLS = ("org.apache.kafka", "kafka-tools", VERSION)


def main() -> int:
    target = Path(sys.argv[1])
    stamp = target / f".kafka-{VERSION}"
    if stamp.exists():
        return 0
    with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as name:
        folder = Path(name)
        try:
            for each in (BROKER, TOOLS):
                fetch_jars(each, folder, folder / "libs")
        except (OSError, subprocess.SubprocessError) as error:
            print(why_failed("Kafka", error), file=sys.stderr)
            return 0
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "libs", target / "libs")
    stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
