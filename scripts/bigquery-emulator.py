"""Install the BigQuery emulator into a folder, unless it is there.

Only tests of the bigquery destination use it. It gets an environment of its own, because it needs other versions of
DuckDB and protobuf than Penstock's. It loads an extension of DuckDB from a folder below its home, so that it needs no
network.

Usage: bigquery-emulator.py <folder>
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

DUCKDB = "1.5.5"
PACKAGES = ("bqemulator==1.4.0", f"duckdb=={DUCKDB}", f"duckdb-extension-spatial=={DUCKDB}", "numpy")
CONSTRAINTS = Path(__file__).resolve().parent.parent / "requirements" / "bigquery-emulator.txt"


def main() -> int:
    target = Path(sys.argv[1])
    stamp = target / f".installed-{'-'.join(PACKAGES)}"
    if stamp.exists():
        return 0
    venv.create(target, with_pip=True, clear=True)
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), *PACKAGES]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(f"make: could not install the BigQuery emulator:\n{finished.stderr[-800:]}", file=sys.stderr)
        print("make: continuing without it; tests that need it are skipped and listed.", file=sys.stderr)
        return 0
    name = "spatial.duckdb_extension"
    found = next(target.glob(f"lib/python*/site-packages/duckdb_extension_spatial/extensions/v{DUCKDB}/{name}"))
    folder = target / "home" / ".duckdb" / "extensions" / f"v{DUCKDB}" / "linux_amd64"
    folder.mkdir(parents=True)
    shutil.copy(found, folder / name)
    stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
