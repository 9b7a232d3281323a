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
environment/bin/penstock demo --seconds 3 --orders 1000 --master none 2>&1 | tail -n 12
environment/bin/python - <<'PYTHON'
import os
import subprocess

from penstock.testing.postgres import PostgresServer

with PostgresServer() as server:
    server.execute("create table t (id int primary key, note text)")
    server.execute("create publication p for table t")
    server.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    server.execute("insert into t values (1, 'from the wheel')")
    environment = os.environ | {"PENSTOCK_URL": server.dsn()}
    for command in ("check --publication p --slot s", "tail --publication p --slot s --limit 1 --json"):
        subprocess.run(["environment/bin/penstock", *command.split()], env=environment, check=True, timeout=120)
PYTHON
