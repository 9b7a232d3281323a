"""A real PostgreSQL server for tests, demos and benchmarks, started from installed programs in a temporary folder.

`PostgresServer` creates a cluster with `wal_level = logical` that listens on a free port of 127.0.0.1; it can be
stopped, restarted and killed. `ExistingServer` offers the same helpers for a server that is already running.

    with PostgresServer(settings={"wal_sender_timeout": "2s"}) as server:
        name = server.create_database()
        server.execute("create table t (id bigint primary key)", database=name)

The server ends with the process that started it. It trades safety for speed (`fsync = off`): never keep data in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from penstock.errors import ServerUnavailable, SlotInUse
from penstock.testing.postgres_binaries import ServerBinaries, clean_environment, find_binaries
from penstock.testing.server import STOP_SECONDS, OwnServer, free_port, parents, wait_until_gone

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "fsync": "off",
    "full_page_writes": "off",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%a@%d ",
}
START_SECONDS = 60.0

StopMode = Literal["smart", "fast", "immediate"]

_STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class DatabaseServer:
    """Database helpers for any server; subclasses say how to connect."""

    def dsn(self, database: str = "postgres") -> str:
        """Return a connection string for one of its databases, password included."""
        raise NotImplementedError

    @property
    def major(self) -> int:
        """The major version of the server."""
        return int(self.execute("show server_version_num")[0][0]) // 10000

    def connect(self, database: str = "postgres", **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """Open a connection in autocommit mode, unless `autocommit=False` is given."""
        options.setdefault("autocommit", True)
        return psycopg.connect(self.dsn(database), **options)

    def execute(
        self,
        query: str,
        parameters: Sequence[object] | Mapping[str, object] | None = None,
        *,
        database: str = "postgres",
    ) -> list[tuple[Any, ...]]:
        """Run a statement on a new connection and return its rows, if any."""
        with self.connect(database) as connection:
            return execute_on(connection, query, parameters)

    def create_database(self, name: str | None = None, *, template: str = "template1") -> str:
        """Create an empty database and return its name; without a name, pick an unused one."""
        name = name or f"penstock_{secrets.token_hex(6)}"
        with self.connect() as connection:
            connection.execute(
                sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
            )
        return name

    def drop_database(self, name: str, *, timeout: float = 30.0) -> None:
        """Drop a database with everything that holds it: prepared transactions, sessions, walsenders, slots."""
        with self.connect() as connection:
            if not execute_on(connection, "select from pg_database where datname = %s", [name]):
                return
            self._roll_back_prepared(connection, name)
            # Otherwise a capture process could reconnect and take its slot again.
            connection.execute(sql.SQL("alter database {} allow_connections false").format(sql.Identifier(name)))
            deadline = time.monotonic() + timeout
            while left := _drop_slots(connection, name):
                if time.monotonic() > deadline:
                    raise SlotInUse(f"slots of database {name} are still in use: {', '.join(left)}")
                time.sleep(0.02)
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def _roll_back_prepared(self, connection: psycopg.Connection[Any], name: str) -> None:
        prepared = execute_on(connection, "select gid from pg_prepared_xacts where database = %s", [name])
        if prepared:
            with self.connect(name) as inside:
                for (gid,) in prepared:
                    inside.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))


class ExistingServer(DatabaseServer):
    """A server that is already running, given the connection string of any of its databases."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def dsn(self, database: str = "postgres") -> str:
        """Return a connection string in the form of the given one: a URL for a URL."""
        if "://" in self._dsn:
            return urlsplit(self._dsn)._replace(path="/" + quote(database, safe="")).geturl()
        return make_conninfo(self._dsn, dbname=database)


class PostgresServer(OwnServer, DatabaseServer):
    """A server in a temporary folder; the constructor creates the cluster, `start()` or `with` starts it.

    `settings` override `DEFAULT_SETTINGS`; `hba` lines come before the default ones, which require a password for
    every connection. Port and password survive restarts.
    """

    user = "postgres"

    def __init__(
        self,
        *,
        major: int | None = None,
        binaries: ServerBinaries | None = None,
        settings: Mapping[str, object] | None = None,
        hba: Sequence[str] = (),
        primary: PostgresServer | None = None,
    ) -> None:
        """With `primary`, create a physical standby of a running server; see `standby`."""
        self.binaries = binaries or (primary.binaries if primary is not None else find_binaries(major))
        self.password = secrets.token_urlsafe(12) if primary is None else primary.password
        self.primary = primary
        super().__init__("penstock-pg-", pid_file="data/postmaster.pid", end_signal="QUIT")
        self.data_dir = self.folder / "data"
        try:
            self._programs = self._reachable_programs()
            own = {key: str(value) for key, value in (settings or {}).items()}
            if primary is None:
                self._initialise(dict(DEFAULT_SETTINGS) | own, hba)
            else:
                self._back_up(primary, own)
        except BaseException:
            self.close()
            raise

    @property
    def bin_dir(self) -> Path:
        """The folder of the installation's programs (`pg_recvlogical`, `pgbench`, `psql`)."""
        return self.binaries.bin_dir

    @property
    def major(self) -> int:
        return self.binaries.major

    @property
    def version(self) -> str:
        return self.binaries.version

    def dsn(self, database: str = "postgres", *, user: str | None = None, password: str | None = None) -> str:
        """Return a connection URL; for another `user`, pass its password."""
        if user is None:
            user, password = self.user, self.password if password is None else password
        secret = "" if password is None else ":" + quote(password, safe="")
        return f"postgresql://{quote(user, safe='')}{secret}@127.0.0.1:{self.port}/{quote(database, safe='')}"

    def start(self, *, timeout: float = START_SECONDS) -> Self:
        """Start it and wait until it accepts connections."""
        if self.running:
            return self
        first = not (self.data_dir / "postmaster.opts").exists()
        for _ in range(10 if first else 1):
            if self._try_start(timeout):
                return self
            if first and "could not bind" in self.log_tail():
                self.port = free_port()
            else:
                break
        self._process = None
        raise ServerUnavailable(
            f"PostgreSQL {self.version} did not start; its log ends with:\n{self.log_tail()}", hint="", port=self.port
        )

    def stop(self, mode: StopMode = "fast", *, timeout: float = STOP_SECONDS) -> None:
        """Stop it as `pg_ctl stop -m` does; do nothing if it is not running."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(_STOP_SIGNALS[mode])
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerUnavailable(
                f"the server did not stop ({mode}) within {timeout:g} s; its log ends with:\n{self.log_tail()}",
                hint='A client that does not read can delay a "fast" stop; "immediate" does not wait.',
            ) from None
        self._process = None

    def kill(self) -> None:
        """Send SIGKILL to all of its processes at once, as if the machine had failed; `start()` then recovers."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
            children = [child for child, parent in parents() if parent == process.pid]
            for pid in (*children, process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until_gone(children, timeout=STOP_SECONDS)
        process.wait(STOP_SECONDS)
        self._process = None
        # By the next start the file could name an unrelated process.
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start, on the same port."""
        self.stop(mode)
        self.start()

    def standby(self, slot: str = "standby", *, port: int | None = None) -> PostgresServer:
        """Return a physical standby of this running server, not started; on this `port` if one is given.

        It streams through a physical slot of this name and can copy logical slots that have `failover`
        (`sync_slots`; 17 and newer). Run `select pg_promote()` to make it a primary.
        """
        self.execute("select pg_create_physical_replication_slot(%s, true)", [slot])
        made = PostgresServer(primary=self, settings={"primary_slot_name": slot, "hot_standby_feedback": "on"})
        made.port = port or made.port
        return made

    def sync_slots(self, *slots: str, timeout: float = START_SECONDS) -> None:
        """On a standby: copy the primary's failover slots, and wait until these would survive a promotion.

        Their readers must be running: a slot counts only after its reader has acknowledged a position that the standby
        has from the beginning, and the server notices that when it logs its running transactions.
        """
        assert self.primary is not None, "not a standby"
        query = "select count(*) from pg_replication_slots where slot_name = any(%s) and synced and not temporary"
        deadline = time.monotonic() + timeout
        with self.connect() as connection:
            while True:
                self.primary.execute("select pg_log_standby_snapshot()")
                connection.execute("select pg_sync_replication_slots()")
                if execute_on(connection, query, [list(slots)]) == [(len(slots),)]:
                    return
                if time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"slots are not synchronized; the log ends with:\n{self.log_tail()}", hint=""
                    )
                time.sleep(0.05)

    def write_file(self, name: str, content: str) -> Path:
        """Write a file into the data folder with the owner and mode the server requires (certificates, keys)."""
        path = self.data_dir / name
        path.touch(mode=0o600)
        path.write_text(content)
        self._give(path)
        return path

    def _end(self) -> None:
        try:
            self.stop("immediate")
        except ServerUnavailable:
            self.kill()

    def _reachable_programs(self) -> ServerBinaries:
        """Return programs that the server's user can run: a copy if it cannot reach the installed ones."""
        if self._account is None:
            return self.binaries
        if self._run(str(self.binaries.program("postgres")), "--version"):
            return self.binaries
        copy = self.binaries.copy_to(self.folder / "programs")
        os.chmod(self.folder / "programs", 0o755)
        return copy

    def _initialise(self, settings: Mapping[str, str], hba: Sequence[str]) -> None:
        password_path = self.folder / "password"
        password_path.touch(mode=0o600)
        password_path.write_text(self.password)
        self._give(password_path)
        initialised = self._run(
            str(self._programs.program("initdb")),
            *("-D", str(self.data_dir), "-U", self.user, "--pwfile", str(password_path)),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
            *(("--locale-provider", "libc") if self.major >= 15 else ()),
            # A login costs a client 3 ms of CPU time at the default of 4096.
            *(("--set", "scram_iterations=1") if self.major >= 16 else ()),
        )
        if not initialised:
            raise ServerUnavailable(
                f"initdb of PostgreSQL {self.version} ({self.binaries.origin}) failed:\n{self.log_tail()}", hint=""
            )
        password_path.unlink()
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            **settings,
        }
        self._configure(settings)
        if hba:
            path = self.data_dir / "pg_hba.conf"
            path.write_text("".join(f"{line}\n" for line in hba) + path.read_text())

    def _back_up(self, primary: PostgresServer, settings: Mapping[str, str]) -> None:
        """Create the data folder from a base backup; `-R` makes it a standby."""
        copied = self._run(
            str(self._programs.program("pg_basebackup")),
            *("-D", str(self.data_dir), "-d", primary.dsn(), "-R", "--checkpoint=fast", "--no-sync"),
        )
        if not copied:
            raise ServerUnavailable(f"the base backup failed:\n{self.log_tail()}", hint="")
        # A backup has the primary's files, its last start among them.
        (self.data_dir / "postmaster.opts").unlink(missing_ok=True)
        self._configure({"unix_socket_directories": str(self.folder), **settings})

    def _configure(self, settings: Mapping[str, str]) -> None:
        with (self.data_dir / "postgresql.conf").open("a") as file:
            file.writelines(f"{key} = '{_quoted(value)}'\n" for key, value in settings.items())

    def _try_start(self, timeout: float) -> bool:
        command = [str(self._programs.program("postgres")), "-D", str(self.data_dir), "-p", str(self.port)]
        process = self._process = self._spawn(command, clean_environment())
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            if self._is_ready(process.pid):
                return True
            time.sleep(0.02)
        if process.poll() is None:
            self.kill()
        return False

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _run(self, *command: str) -> bool:
        """Run a program to its end; true if it succeeded."""
        try:
            return self._spawn(command, clean_environment(), session=False).wait(START_SECONDS * 2) == 0
        except PermissionError as error:
            with self.log_path.open("a") as log:
                log.write(f"{error}\n")
            return False


def execute_on(
    connection: psycopg.Connection[Any],
    query: str,
    parameters: Sequence[object] | Mapping[str, object] | None = None,
) -> list[tuple[Any, ...]]:
    """Run a statement, or several without parameters; return the rows of the last, if any."""
    with connection.cursor() as cursor:
        cursor.execute(query.encode(), parameters)
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description is not None else []


def _drop_slots(connection: psycopg.Connection[Any], database: str) -> list[str]:
    """End the sessions of a database and drop its idle slots; return the slots still in use."""
    execute_on(
        connection,
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()",
        [database],
    )
    left: list[str] = []
    for name, active in execute_on(
        connection,
        "select slot_name, active from pg_replication_slots where database = %s and not temporary",
        [database],
    ):
        try:
            if not active:
                execute_on(connection, "select pg_drop_replication_slot(%s)", [name])
                continue
        except psycopg.errors.UndefinedObject:
            continue
        except psycopg.errors.ObjectInUse:
            pass
        left.append(name)
    return left


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")
