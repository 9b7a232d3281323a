"""A standalone Spark cluster on this machine, whose workers do not see the driver's folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pyspark

from penstock.testing.server import wait_until_gone
from tests.e2e.support import wait_for
from tests.support.processes import descendants_of

LOOPBACK = "127.0.0.1"
START_SECONDS = 480.0
"""A guard, not a measure."""


class Cluster:
    """A standalone cluster on this machine: a master, and workers of one core each."""

    options: ClassVar = {
        "spark.executor.memory": "600m",
        # Of executors, it may not have Spark's own settings.
        "spark.executor.extraJavaOptions": " ".join(
            word for word in os.environ.get("SPARK_SUBMIT_OPTS", "").split() if not word.startswith("-Dspark.")
        ),
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
    }
    """For its applications."""

    def __init__(self, folder: Path, java_home: Path) -> None:
        self._folder = folder
        self._java_home = java_home
        self.driver_folder = folder / "driver"
        """For the spool and the state. Workers have an empty disk there, unless `cannot_hide` says why not."""
        self.driver_folder.mkdir()
        self.cannot_hide = _why_not()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"spark://{LOOPBACK}:{free_port()}"

    def start(self, workers: int) -> None:
        port = self.url.rpartition(":")[2]
        self._run("master", "master.Master", "--host", LOOPBACK, "--port", port, "--webui-port", "0")
        wait_for(lambda: is_listening(int(port)), "the master", START_SECONDS)
        for number in range(workers):
            self.start_worker(number)

    def start_worker(self, number: int, hidden: Path | None = None) -> None:
        """Start a worker. It has an empty disk at the driver's folder, and at another one if that is named."""
        self._run(
            f"worker-{number}",
            "worker.Worker",
            *("--host", LOOPBACK, "--webui-port", "0", "--cores", "1", "--memory", "1g"),
            *("--work-dir", str(self._folder / f"work-{number}"), self.url),
            hidden=[self.driver_folder, *([] if hidden is None else [hidden])],
        )

    def kill_worker(self, number: int) -> None:
        """With its executor, as when its machine is lost."""
        process = self._processes.pop(f"worker-{number}")
        pids = [process.pid, *descendants_of(process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)
        assert wait_until_gone(pids, timeout=30)

    def close(self) -> None:
        for name in reversed(list(self._processes)):
            process = self._processes.pop(name)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

    def _run(self, name: str, kind: str, *arguments: str, hidden: Sequence[Path] = ()) -> None:
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": LOOPBACK,
            "JAVA_HOME": str(self._java_home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": os.environ.get("SPARK_SUBMIT_OPTS", ""),
            "PYSPARK_PYTHON": sys.executable,
        }
        with open(self._folder / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [
                    *([] if self.cannot_hide else hide(hidden)),
                    *(home / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", *arguments),
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def hide(folders: Sequence[Path]) -> list[str]:
    """Return the beginning of a command that runs the rest of it with empty disks of its own at these folders."""
    mounts = "".join(f"mount -t tmpfs tmpfs '{folder}' && " for folder in folders)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts}exec "$0" "$@"']


def _why_not() -> str:
    """Return why processes cannot have disks of their own here; empty if they can."""
    try:
        done = subprocess.run([*hide([Path("/mnt")]), "true"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return server.getsockname()[1]


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((LOOPBACK, port)) == 0
