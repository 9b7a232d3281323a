"""Run `penstock run` as a process on a benchmark's server: start it, watch it, ask for its progress, and stop it.

The figures come from data that the pipeline leaves behind: the state store has the time of every phase, and the lake
that of every commit. So measuring costs the pipeline nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from harness import BenchmarkFailed
from processes import TreeWatch
from workloads import PUBLICATION

from penstock.config import load_config
from penstock.lsn import Lsn, reaches
from penstock.state import Errored, Ready
from penstock.testing.postgres import PostgresServer

SLOT = "bench"
PATIENCE_SECONDS = 900.0
_SOURCE_URL = "BENCH_SOURCE_URL"
_Seen = TypeVar("_Seen")


@dataclass(frozen=True, slots=True)
class Site:
    """A folder with a config for a database; the publication is the benchmark's own."""

    server: PostgresServer
    database: str
    folder: Path
    master: str
    """Of Spark; `none` for none."""
    destination: str = "parquet"
    options: Mapping[str, str] | None = None
    """Of the destination, as in TOML."""
    slot: str = SLOT
    port: int | None = None
    """Of the pipeline's HTTP server; None for no server."""

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def configure(self) -> None:
        """Write the config: everything at its default, but for places."""
        self.folder.mkdir(parents=True)
        more = "".join(f"{name} = {value}\n" for name, value in (self.options or {}).items())
        self._config.write_text(
            f"""
[pipeline]
id = "bench"
[source]
url = "${{{_SOURCE_URL}}}"
publication = "{PUBLICATION}"
manage_publication = false
slot = "{self.slot}"
[spark]
master = "{self.master}"
[destination]
type = "{self.destination}"
path = "lake"
{more}{"" if self.port is None else f"[server]{chr(10)}port = {self.port}{chr(10)}"}"""
        )

    def start(self) -> Run:
        """Start the pipeline; it may not stream yet."""
        return Run(self)

    @property
    def _config(self) -> Path:
        return self.folder / "penstock.toml"

    @property
    def environment(self) -> dict[str, str]:
        """For processes that read the config."""
        return os.environ | {_SOURCE_URL: self.server.dsn(self.database)}

    def tables(self) -> dict[str, int]:
        """Ids of the tables in the publication, by name."""
        query = """
            select c.relname, c.oid::int8
            from pg_catalog.pg_publication_rel r join pg_catalog.pg_class c on c.oid = r.prrelid"""
        with self.server.connect(self.database) as connection:
            return dict(connection.execute(query.encode()).fetchall())

    def phases(self) -> dict[int, Any]:
        """The stored phase of every table."""
        config = load_config(self._config, self.environment)
        if config.state_file is None or not config.state_file.exists():
            return {}
        with config.open_store() as store:
            return dict(store.get_table_replication_states())

    def phase_times(self, table_id: int) -> dict[str, float]:
        """When a table reached each of its phases; Unix time."""
        with load_config(self._config, self.environment).open_store() as store:
            return {each.phase.name: each.at.timestamp() for each in store.get_table_replication_history(table_id)}

    def all_ready(self) -> bool:
        """Whether every published table is Ready."""
        phases = self.phases()
        for phase in phases.values():
            if isinstance(phase, Errored):
                raise BenchmarkFailed(f"a table stopped: {phase.reason}")
        return all(isinstance(phases.get(table_id), Ready) for table_id in self.tables().values())

    def has_confirmed(self, position: Lsn) -> bool:
        """Whether the pipeline has acknowledged a position: all before it is durable."""
        with self.server.connect(self.database) as connection:
            query = "select confirmed_flush_lsn::text from pg_catalog.pg_replication_slots where slot_name = %s"
            row = connection.execute(query, [self.slot]).fetchone()
        return row is not None and reaches(Lsn.parse(row[0]), position)

    def current_position(self) -> Lsn:
        """The end of the WAL so far."""
        with self.server.connect(self.database) as connection:
            row = connection.execute("select pg_catalog.pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])


class Run:
    """One process of a pipeline with all of its children; killed at the end of the block if it still runs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.launched = time.time()
        number = len(list(site.folder.glob("run-*.log")))
        self._log = site.folder / f"run-{number}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "run", "-c", "penstock.toml", "--status-every", "0"],
                cwd=site.folder,
                env=site.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.watch = TreeWatch(self._process.pid)

    def __enter__(self) -> Run:
        self.watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.watch.__exit__()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, look: Callable[[], _Seen], what: str, *, seconds: float = 0.1) -> _Seen:
        """Look every so often until there is something true to see, while the process lives."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (seen := look()):
            if self._process.poll() is not None:
                raise BenchmarkFailed(f"the pipeline ended while waiting for {what}:\n{self.output}")
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"waited {PATIENCE_SECONDS:.0f} s for {what}:\n{self.output}")
            time.sleep(seconds)
        return seen

    def wait_confirmed(self) -> None:
        """Wait until everything that is committed now is durable, and the server knows."""
        position = self.site.current_position()
        self.wait_for(lambda: self.site.has_confirmed(position), f"position {position}")

    def terminate(self) -> float:
        """SIGTERM; how many seconds it took to end, which it must with exit code 0."""
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchmarkFailed(f"the pipeline did not end after SIGTERM:\n{self.output}") from None
        if code != 0:
            raise BenchmarkFailed(f"the pipeline ended with exit code {code}:\n{self.output}")
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to the driver; its children notice by themselves."""
        self._process.kill()
        self._process.wait()

    @property
    def output(self) -> str:
        """The end of what it has said."""
        return "\n".join(self._log.read_text().splitlines()[-20:])


class Writer:
    """Transactions at a steady rate, in a thread; one that is late is followed by the next at once."""

    def __init__(self, site: Site, rate: float, transaction: Callable[[psycopg.Connection[Any], int], int]) -> None:
        """`transaction` gets its number, and gives back how many rows it changed."""
        self._site = site
        self._rate = rate
        self._transaction = transaction
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._error: BaseException | None = None
        self.transactions = 0
        self.changes = 0
        self.late_seconds = 0.0
        """How far the writer fell behind its rate, at most."""

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End after the transaction at hand; raises what went wrong."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._site.server.connect(self._site.database) as connection:
                began = time.monotonic()
                while not self._stop.is_set():
                    wait = began + self.transactions / self._rate - time.monotonic()
                    if wait > 0 and self._stop.wait(wait):
                        return
                    self.late_seconds = max(self.late_seconds, -wait)
                    self.changes += self._transaction(connection, self.transactions)
                    self.transactions += 1
        except BaseException as error:
            self._error = error
