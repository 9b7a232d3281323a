"""The unit of `penstock systemd`: its command line runs as it is written, confined as the unit says.

There is no systemd in most places where tests run. This does what it does: its folders, its user's lack of privileges,
the environment of the file, the read-only system, signals and restarts. `systemd-analyze` reads the unit elsewhere.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from configparser import ConfigParser
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.reader import DeltaReader
from penstock.errors import PenstockError
from penstock.state.sql import load_migrations
from penstock.state.sqlite import SqliteDatabase
from tests.support.confined import Machine
from tests.support.processes import descendants_of
from tests.support.waiting import pause

PATIENCE = 120.0
CONFIG = """
[pipeline]
id = "shop"
spool = {{path = "/var/lib/penstock/shop/spool", min_free_bytes = 0}}
batch = {{interval = "100ms"}}
[source]
url = "${{SHOP_URL}}"
tables = ["public.*"]
slot = "{slot}"
[spark]
master = "none"
[destination]
type = "delta"
path = "/var/lib/penstock/shop/lake"
[server]
port = {port}
"""


class Service:
    """What systemd does with the unit, for `penstock@shop`."""

    def __init__(self, folder: Path, database: Any) -> None:
        self.machine = Machine(folder / "machine")
        self.log = folder / "log"
        printed = subprocess.run([sys.executable, "-m", "penstock", "systemd"], capture_output=True, check=True)
        parser = ConfigParser(interpolation=None, strict=True)
        parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
        parser.read_string(printed.stdout.decode().replace("%i", "shop"))
        self.unit = parser["Service"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        root = self.machine.root
        (root / "etc/penstock").mkdir()
        config = CONFIG.format(slot=f"service_{database.name[-12:]}", port=self.port)
        (root / "etc/penstock/shop.toml").write_text(config)
        (root / "etc/penstock/shop.env").write_text(f"SHOP_URL={database.dsn}\n")
        self.state = root / "var/lib" / self.unit["StateDirectory"]
        self.state.mkdir(mode=int(self.unit["StateDirectoryMode"], 8), parents=True)

    def start(self) -> subprocess.Popen[bytes]:
        variables = self.machine.root / self.unit["EnvironmentFile"].removeprefix("-/")
        environment = dict(line.split("=", 1) for line in variables.read_text().splitlines())
        # Only so that the package is found; nothing else of this environment.
        ours = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        with open(self.log, "ab") as log:
            return self.machine.start(
                shlex.split(self.unit["ExecStart"]),
                environment=ours | environment,
                folder=self.unit["WorkingDirectory"],
                output=log,
                umask=int(self.unit["UMask"], 8),
            )

    def is_restarted(self, status: int) -> bool:
        assert self.unit["Restart"] == "on-failure"
        prevented = [int(each) for each in self.unit["RestartPreventExitStatus"].split()]
        return status not in (0, *prevented)

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM to the main process; nothing may be left over for SIGKILL (`KillMode=mixed`)."""
        assert self.unit["KillMode"] == "mixed"
        below = descendants_of(process.pid)
        process.send_signal(signal.SIGTERM)
        status = process.wait(float(self.unit["TimeoutStopSec"]))
        assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
        return status

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as answer:
                return json.load(answer)["ready"]
        except OSError:
            return False

    def rows(self) -> int:
        try:
            return DeltaReader(self.state / "lake").read_table("public.things").num_rows
        except (PenstockError, KeyError):
            return 0  # not copied yet

    def wait(self, look: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        begun = time.monotonic()
        while not look():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < begun + PATIENCE, self.log.read_text()
            pause(begun, longest=0.2)


@pytest.fixture
def service(database: Any, tmp_path: Path) -> Service:
    database.execute("create table things (id int primary key); insert into things select generate_series(1, 10)")
    return Service(tmp_path, database)


def test_the_service_runs_is_restarted_and_stops(service: Service, database: Any) -> None:
    process = service.start()
    try:
        service.wait(service.is_ready, process)
        service.wait(lambda: service.rows() == 10, process)
        # A crash: systemd starts it again, and it continues at once.
        process.kill()
        assert service.is_restarted(process.wait(PATIENCE))
        database.execute("insert into things values (11)")
        process = service.start()
        service.wait(service.is_ready, process)
        service.wait(lambda: service.rows() == 11, process)
        assert not service.is_restarted(service.stop(process))
    finally:
        process.kill()
        process.wait(PATIENCE)
    # Only the service can read what it wrote.
    assert [each for each in service.state.rglob("*") if each.stat().st_mode & 0o077] == []
    # `systemctl start` after `stop`.
    process = service.start()
    try:
        service.wait(service.is_ready, process)
        assert service.stop(process) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
    assert "Traceback" not in service.log.read_text()


def test_a_new_version_upgrades_the_state_and_an_old_one_leaves_a_newer_state_alone(service: Service) -> None:
    migrations = load_migrations("sqlite")
    (service.state / "state.db").touch(mode=0o600)
    early = SqliteDatabase(service.state / "state.db", "shop")
    early.migrate(migrations[:1])
    early.close()
    process = service.start()
    try:
        service.wait(service.is_ready, process)
        assert service.stop(process) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
    with closing(sqlite3.connect(service.state / "state.db")) as state:
        (version,) = state.execute("pragma user_version").fetchone()
        assert version == migrations[-1].number
        state.execute(f"pragma user_version = {version + 1}")
    status = service.start().wait(PATIENCE)
    # It needs a person, so systemd does not try again and again.
    assert not service.is_restarted(status)
    assert f"has version {version + 1}" in service.log.read_text()
