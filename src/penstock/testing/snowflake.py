"""Snowflake for tests: an emulator over DuckDB, to which the real connector connects over HTTP.

    with EmulatedSnowflake() as server:
        SnowflakeDestination("SHOP", "MIRROR", account="test", user="test", password="test", endpoint=server.endpoint)

The emulator is PyPI `fakesnow`, with what `emulators/fakesnow_server.py` adds to it. It shows that Penstock's
statements do what they should, not that Snowflake keeps its rules. `make fakesnow` installs it.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Self

import snowflake.connector as connector

from penstock.errors import ConfigError, ServerUnavailable
from penstock.testing.server import STOP_SECONDS, OwnServer

HOME_VARIABLE = "PENSTOCK_FAKESNOW"
"""The folder of the emulator; by default `fakesnow` in the interpreter's environment."""
START_SECONDS = 120.0
DATABASE = "SHOP"


def find_emulator() -> Path | None:
    """Return the emulator's folder, if it is installed."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "fakesnow")
    return home if (home / "bin" / "fakesnow").exists() else None


def why_not() -> str | None:
    """Return what is missing to run the emulator here, with the remedy; None if nothing is."""
    return None if find_emulator() is not None else "fakesnow is not installed: make fakesnow"


class EmulatedSnowflake(OwnServer):
    """The emulator, as a process of its own."""

    def __init__(self) -> None:
        home = find_emulator()
        if home is None:
            raise ConfigError(why_not() or "", hint="make fakesnow")
        super().__init__("penstock-snow-", pid_file="pid", end_signal="KILL")
        # It runs as root, too, and another user may not reach the interpreter.
        self._account = None
        self._home = home

    def start(self) -> Self:
        """See `OwnServer`."""
        script = self.folder / "fakesnow_server.py"
        script.write_text((Path(__file__).parent / "emulators" / "fakesnow_server.py").read_text())
        self._give(script)
        command = [str(self._home / "bin" / "python"), str(script), str(self.port)]
        environment = {**os.environ, "HOME": str(self.folder), "TMPDIR": str(self.folder), "PYTHONPATH": ""}
        self._process = self._spawn(command, environment)
        (self.folder / "pid").write_text(str(self._process.pid))
        self._wait()
        self.rows(f"create database if not exists {DATABASE}")
        return self

    def kill(self) -> None:
        """See `OwnServer`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._process = None

    @property
    def endpoint(self) -> str:
        """The URL for the destination."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, schema: str, **more: Any) -> dict[str, Any]:
        """Return the options of a destination that writes here."""
        login = {"account": "test", "user": "test", "password": "secret", "timeout": 20.0}
        return {"database": DATABASE, "schema": schema, "endpoint": self.endpoint, **login, **more}

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query; independent of the code under test."""
        connection = connector.connect(
            account="test", user="test", password="secret", host="127.0.0.1", port=self.port, protocol="http"
        )
        try:
            cursor = connection.cursor(connector.DictCursor)
            return list(cursor.execute(sql).fetchall())  # type: ignore[union-attr]
        finally:
            connection.close()

    def cut(self, match: str, *, when: str = "before", skip: int = 0) -> None:
        """Break requests with statements that match, until `heal`: before they run, or after that."""
        self._control("break", {"match": match, "when": when, "skip": skip})

    def heal(self) -> dict[str, int]:
        """End all faults; return how many requests were broken and how many statements have run."""
        found = self.state()
        self._control("heal")
        return found

    def state(self) -> dict[str, int]:
        """Return how much there is of: broken requests (`hits`), statements (`seen`), transactions (`open`), files."""
        return self._control("state")

    def _control(self, action: str, body: dict[str, Any] | None = None) -> dict[str, int]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", f"/penstock/{action}", json.dumps(body or {}))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self.running:
                break
            try:
                self._control("state")
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
            else:
                return
        raise ServerUnavailable(f"fakesnow did not start:\n{self.log_tail()}", hint="")
