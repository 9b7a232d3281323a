"""A pipeline as people run it: processes, on a real server, into Parquet files."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.destinations.parquet.reader import ParquetReader
from tests.program import PATIENCE, Command, penstock
from tests.support.waiting import pause

ONE = '[destination]\ntype = "parquet"\npath = "lake"'
SECOND = '[[destination]]\nname = "second"\ntype = "parquet"\npath = "second"'
BOTH = f'[{ONE.replace("]", "]]", 1)}\nname = "tables"\n{SECOND}'


@dataclass
class Site:
    """A folder with a config for a database."""

    database: Any
    folder: Path
    processes: list[Command] = field(default_factory=list[Command])

    @property
    def slot(self) -> str:
        return f"run_{self.database.name[-12:]}"

    def configure(
        self, *, master: str = "none", tables: str = "public.*", more: str = "", destination: str = ONE
    ) -> None:
        (self.folder / "penstock.toml").write_text(
            f"""
            [pipeline]
            id = "shop"
            spool = {{path = "work/spool", min_free_bytes = 0}}
            batch = {{interval = "100ms"}}
            [source]
            url = "${{SOURCE_URL}}"
            tables = ["{tables}"]
            publication = "shop"
            slot = "{self.slot}"
            [spark]
            master = "{master}"
            {destination}
            {more}
            """
        )

    def start(self, *arguments: str) -> Command:
        with open(self.folder / f"stderr-{len(self.processes)}", "wb") as log:
            process = Command(*arguments, environment=self.environment, folder=self.folder, output=log, errors=log)
        self.processes.append(process)
        return process

    def run(
        self, *arguments: str, answer: str = "", environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        everything = {**self.environment, **(environment or {})}
        return penstock(*arguments, environment=everything, folder=self.folder, answer=answer)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SOURCE_URL": self.database.dsn, "COLUMNS": "160"}

    def output(self, process: Command) -> str:
        return (self.folder / f"stderr-{self.processes.index(process)}").read_text()

    def wait_output(self, process: Command, text: str, *, after: int = 0) -> None:
        """Wait until a process has written a text, `after` some characters."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.output(process)[after:]:
            assert process.poll() is None, self.output(process)
            assert time.monotonic() < deadline, self.output(process)
            time.sleep(0.05)

    def phases(self) -> dict[str, str]:
        result = self.run("tables", "--json")
        assert result.returncode == 0, result.stderr
        return {each["table"]: each["phase"] for each in json.loads(result.stdout)["tables"]}

    def wait_ready(self, count: int) -> None:
        begun = time.monotonic()
        while list((phases := self.phases()).values()) != ["ready"] * count:
            assert time.monotonic() < begun + PATIENCE, phases
            pause(begun, shortest=0.2, longest=1.0)

    def rows(self, table: str, lake: str = "lake") -> list[tuple[Any, ...]]:
        found = ParquetReader(self.folder / lake).read_table(f"public.{table}").select(["id", "note"])
        return sorted(tuple(row.values()) for row in found.to_pylist())

    def wait_rows(self, table: str) -> None:
        begun = time.monotonic()
        while self.rows(table) != (wanted := self.source_rows(table)):
            assert time.monotonic() < begun + PATIENCE, (len(self.rows(table)), len(wanted))
            pause(begun, shortest=0.1, longest=1.0)

    def source_rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.database.execute(f"select id, note from {table}"))


def check_discreet(site: Site, text: str) -> None:
    assert "Traceback" not in text, text
    assert site.database.dsn not in text


class Terminal:
    """A process in a terminal of its own, and what it has written there."""

    def __init__(self, *arguments: str, cwd: Path, environment: dict[str, str], columns: int = 120) -> None:
        self._descriptor, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        hidden = ("COLUMNS", "LINES", "NO_COLOR")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=cwd,
            env={name: value for name, value in environment.items() if name not in hidden} | {"TERM": "xterm"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.text = ""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the window: what the process writes from now on fails."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def wait_for(self, part: str) -> None:
        """Until this was written, after what was waited for before."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.text.find(part, self._seen)) < 0:
            assert time.monotonic() < deadline, self.text
            assert self._read() or part in self.text[self._seen :], self.text
        self._seen = found + len(part)

    def type(self, line: str) -> None:
        os.write(self._descriptor, f"{line}\n".encode())

    def wait(self) -> int:
        """All that it writes, until its end; its exit status."""
        deadline = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < deadline, self.text
        return self.process.wait(PATIENCE)

    def interrupt(self) -> int:
        """Press Ctrl-C until it ends; its exit status. A prompt sleeps through a signal that comes just before it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
            while time.monotonic() < pressed + 30:
                if not self._read():
                    return self.process.wait(PATIENCE)
        raise AssertionError(self.text)

    def _read(self) -> bool:
        """Some more; False at the end."""
        if select.select([self._descriptor], [], [], 0.2)[0]:
            try:
                content = os.read(self._descriptor, 65536)
            except OSError:
                return False
            self.text += content.decode("utf-8", "replace")
            return bool(content)
        return True
