"""The container file without an engine: its steps are followed in folders, and what it starts runs as it is written.

Not tried here: the base image and its packages, pip's downloads, and the engine itself. Dependencies come from the
environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.confined import Machine
from tests.support.processes import descendants_of
from tests.support.waiting import pause

ROOT = Path(__file__).resolve().parents[3]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "deploy/Containerfile").read_text()).splitlines()
PATIENCE = 120.0
CONFIG = """
[pipeline]
id = "shop"
spool = {{path = "/var/lib/penstock/spool", min_free_bytes = 0}}
[source]
url = "${{SOURCE_URL}}"
tables = ["public.*"]
slot = "{slot}"
[spark]
master = "none"
[destination]
type = "delta"
path = "/var/lib/penstock/lake"
[server]
host = "0.0.0.0"
token = "${{PENSTOCK_TOKEN}}"
"""


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(f"{name} ")]


def command_of(text: str) -> list[str]:
    """A command in the form of a JSON list."""
    return json.loads(text[text.index("[") :])


@dataclass(frozen=True)
class Image:
    """The last stage of the container file, in folders."""

    machine: Machine
    environment: dict[str, str]
    folder: str
    user: int
    entry: list[str]
    health: list[str]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """Follow the steps. pip installs the wheel only; its dependencies are those of this environment."""
    machine = Machine(tmp_path / "machine")
    source = machine.root / "var/source"
    source.mkdir()
    for line in instructions("COPY"):
        *what, target = line.split()
        if what[0].startswith("--from"):
            # What the second stage takes from the first.
            assert line == "--from=build /opt/penstock /opt/penstock"
            continue
        for each in what:
            copied = ROOT / each
            into = source / target / (copied.name if target.endswith("/") else "")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(copied, into, ignore=ignored) if copied.is_dir() else shutil.copy(copied, into)
    (build,) = [line for line in instructions("RUN") if "pip install" in line]
    create, _, install = (shlex.split(each) for each in build.split("&&"))
    assert create == ["python", "-m", "venv", "/opt/penstock"]
    assert install[:2] == ["/opt/penstock/bin/pip", "install"]
    assert "--no-build-isolation" in install
    python = _python_of_everyone()
    done = machine.run([python, "-m", "venv", "--without-pip", "/opt/penstock"], mode="writable")
    assert done.returncode == 0, done.stderr
    (packages,) = machine.root.glob("opt/penstock/lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    tool = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    into = ["--python", "/opt/penstock/bin/python", "install", "--no-index", "--no-deps"]
    built = machine.run(
        [*tool, *into, "--no-build-isolation", "."],
        folder="/var/source",
        mode="writable",
        environment={"HOME": "/tmp", "PYTHONPATH": sysconfig.get_path("purelib")},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.rmtree(source)
    (environment,) = ([each.split("=", 1) for each in line.split()] for line in instructions("ENV"))
    values = {name: value.replace("$PATH", os.defpath) for name, value in environment}
    (user,), (folder,) = instructions("USER"), instructions("WORKDIR")[-1:]
    home = machine.root / folder.removeprefix("/")
    home.mkdir(parents=True)
    if machine.can_be_another_user:
        os.chown(home, int(user), int(user))
    (machine.root / "etc/penstock").mkdir()
    entry = [*command_of(*instructions("ENTRYPOINT")), *command_of(*instructions("CMD"))]
    return Image(machine, values, folder, int(user), entry, command_of(*instructions("HEALTHCHECK")))


def _python_of_everyone() -> str:
    """A Python that any user may run and that can use the packages of this one."""
    tag = f"python3.{sys.version_info.minor}"
    for found in (f"/usr/local/bin/{tag}", f"/usr/bin/{tag}"):
        if Path(found).exists():
            return found
    if os.geteuid() == 0:
        pytest.skip(f"needs {tag} in /usr")
    return sys.executable


@pytest.fixture
def port() -> int:
    with socket.socket() as wanted:
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wanted.bind(("0.0.0.0", 8321))
        except OSError:
            pytest.skip("port 8321, which the container file names, is taken")
    return 8321


def test_the_container_runs_as_its_file_says(image: Image, port: int, database: Any, tmp_path: Path) -> None:
    assert instructions("EXPOSE") == [str(port)]
    database.execute("create table things (id int primary key); insert into things select generate_series(1, 10)")
    machine = image.machine
    slot = f"container_{database.name[-12:]}"
    Path(machine.root / "etc/penstock/penstock.toml").write_text(CONFIG.format(slot=slot))
    environment = image.environment | {"SOURCE_URL": database.dsn, "PENSTOCK_TOKEN": "a-token-of-some-length"}
    command = image.entry if shutil.which("tini") else image.entry[2:]
    assert image.entry[:2] == ["tini", "--"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        """As the engine runs health checks, and people run commands: in the same container."""
        return machine.run(arguments, environment=environment, folder=image.folder, user=image.user)

    log = tmp_path / "log"
    assert run(*image.health).returncode != 0
    with open(log, "wb") as output:
        process = machine.start(command, environment=environment, folder=image.folder, user=image.user, output=output)
    try:
        begun = time.monotonic()
        while run(*image.health).returncode != 0:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < begun + PATIENCE, log.read_text()
            pause(begun, longest=0.5)
        status = Path(f"/proc/{process.pid}/status").read_text()
        if machine.can_be_another_user:
            assert f"Uid:\t{image.user}" in status
        assert "NoNewPrivs:\t1" in status
        assert "CapEff:\t0000000000000000" in status
        while '"copied"' not in log.read_text():
            assert time.monotonic() < begun + PATIENCE, log.read_text()
            pause(begun, longest=0.5)
        asked = run("penstock", "status", "--json")
        assert json.loads(asked.stdout)["running"]["pid"] == process.pid, asked.stderr
        below = descendants_of(process.pid)
        (number,) = instructions("STOPSIGNAL")
        process.send_signal(signal.Signals[number])
        assert process.wait(PATIENCE) == 0, log.read_text()
        assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    finally:
        process.kill()
        process.wait(PATIENCE)
    # The root is read-only, and the volume has everything.
    assert {each.name for each in (machine.root / "var/lib/penstock").iterdir()} == {
        *("lake", "spool", "state.db"),
    }
    # Logs are JSON, as the file says.
    assert all(json.loads(line) for line in log.read_text().splitlines())
