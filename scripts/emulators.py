"""Install the emulator of a warehouse into a folder, unless it is there.

Only tests of that destination use it. It gets an environment of its own, because it needs other versions than
Penstock's. DuckDB finds its extensions in a folder below the emulator's home, so that it needs no network.

Usage: emulators.py bigquery-emulator <folder>
       emulators.py fakesnow <folder>
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

DUCKDB = "1.5.5"
PACKAGES = {
    "bigquery-emulator": ("bqemulator==1.4.0", f"duckdb=={DUCKDB}", f"duckdb-extension-spatial=={DUCKDB}", "numpy"),
    "fakesnow": ("fakesnow[server]==0.12.1", "snowflake-connector-python==4.8.1"),
}
REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


def main() -> int:
    name, target = sys.argv[1], Path(sys.argv[2])
    packages = PACKAGES[name]
    stamp = target / f".installed-{'-'.join(packages)}"
    if stamp.exists():
        return 0
    venv.create(target, with_pip=True, clear=True)
    constraints = str(REQUIREMENTS / f"{name}.txt")
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", constraints, *packages]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(f"make: could not install {name}:\n{finished.stderr[-800:]}", file=sys.stderr)
        print("make: continuing without it; tests that need it are skipped and listed.", file=sys.stderr)
        return 0
    if name == "bigquery-emulator":
        install_extension(target)
    stamp.touch()
    return 0


def install_extension(target: Path) -> None:
    name = "spatial.duckdb_extension"
    found = next(target.glob(f"lib/python*/site-packages/duckdb_extension_spatial/extensions/v{DUCKDB}/{name}"))
    folder = target / "home" / ".duckdb" / "extensions" / f"v{DUCKDB}" / "linux_amd64"
    folder.mkdir(parents=True)
    shutil.copy(found, folder / name)


if __name__ == "__main__":
    sys.exit(main())
