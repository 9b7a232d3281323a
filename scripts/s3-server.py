"""Build an S3 server (versitygw) with Go into a folder, unless it is there. Takes about six minutes on two cores.

Only `make soak` uses it; the other tests use an emulator.

Usage: s3-server.py <folder>
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "versitygw"
VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
SECONDS = 3600


def main() -> int:
    target = Path(sys.argv[1]).resolve()
    stamp = target / f".{PROGRAM}-{VERSION}"
    if stamp.exists() and (target / PROGRAM).exists():
        return 0
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        return _without("Go is not installed; install golang 1.25 or newer")
    print(f"make: building {PROGRAM} {VERSION}, once; this takes several minutes", file=sys.stderr)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-go-", dir=target) as folder:
        environment = {**os.environ, "GOBIN": folder}
        try:
            subprocess.run([go, "install", MODULE], check=True, env=environment, capture_output=True, timeout=SECONDS)
        except subprocess.SubprocessError as error:
            output = (getattr(error, "stderr", None) or b"").decode(errors="replace")
            return _without(f"could not build {PROGRAM}; the end of Go's output:\n{output[-800:]}")
        os.replace(Path(folder) / PROGRAM, target / PROGRAM)
    stamp.touch()
    return 0


def _without(reason: str) -> int:
    print(f"make: {reason}", file=sys.stderr)
    print("make: continuing without it; tests that need it are skipped and listed.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
