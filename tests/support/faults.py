"""Faults: what happens to a pipeline besides kills, each with its end. `tests.support.trial` strikes them.

A fault is a context manager over a `Scene`: it strikes when the block begins and heals when it ends. What it strikes
has no time-out in the trial that is longer than the fault lasts: `SERVER_SETTINGS` and `LEASE_SECONDS` see to that.

    with FAULTS["network cut"].strike(scene):
        …
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from psycopg import sql

from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, SourceSettings, connect_replication
from penstock.testing.postgres import PostgresServer, execute_on
from tests.support.disks import CannotMount, SmallDisk
from tests.support.drive_pipeline import DriveSettings
from tests.support.oracle import current_position
from tests.support.pipeline_process import HANG_SECONDS, PipelineProcess
from tests.support.processes import Part, descendants_of
from tests.support.proxy import Proxy
from tests.support.writers import when_recovered

LEASE_SECONDS = 5.0
"""The lease of a pipeline in a scene; 30 s by default."""
SERVER_SETTINGS: Mapping[str, str] = {
    # Shorter than the faults that make a connection silent.
    "wal_sender_timeout": "2s",
    # Small, so that a slot can be lost after some megabytes.
    "min_wal_size": "32MB",
    "max_wal_size": "64MB",
}
_DISK_MEGABYTES = 96
_POLL_SECONDS = 0.02


@dataclass(slots=True)
class Scene:
    """One pipeline with everything around it that can fail."""

    pipeline: PipelineProcess
    server: PostgresServer
    dsn: str
    """The source, directly; the pipeline connects through the proxy."""
    proxy: Proxy
    random: Random
    disks: Mapping[str, SmallDisk] = field(default_factory=dict[str, SmallDisk])
    """The disks of `spool`, `state` and `lake`; none where they cannot be mounted."""
    state_server: PostgresServer | None = None
    """The server of the state; None if it is in a file."""

    @property
    def slot(self) -> str:
        return self.pipeline.settings.slot

    @property
    def state_file(self) -> Path | None:
        """The file of the state, unless a server has it."""
        return (
            None if self.state_server is not None else Path(self.pipeline.settings.state_url.removeprefix("sqlite:///"))
        )

    def execute(self, query: str, parameters: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement at the source, directly."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return execute_on(connection, query, parameters)

    def position(self) -> Lsn:
        """Return a boundary after every transaction whose commit has returned."""

        def ask() -> Lsn:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                return current_position(connection)

        return when_recovered(ask)

    def walsender(self) -> int | None:
        """Return the process id of the walsender that reads the slot."""
        rows = self.execute("select active_pid from pg_replication_slots where slot_name = %s", [self.slot])
        return rows[0][0] if rows else None

    def terminate_sessions(self) -> int:
        """End all sessions of the pipeline; return their number."""
        query = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name like 'penstock:%%'"
        )
        return self.execute(f"{query} and datname = current_database()", [])[0][0]

    def processes(self, part: Part | None = None) -> list[int]:
        """Return the ids of the pipeline's processes of one kind; without one, of all."""
        if part is None:
            return [self.pipeline.pid, *descendants_of(self.pipeline.pid)] if self.pipeline.running else []
        return self.pipeline.processes().get(part, [])

    def disturb(self, fault: Fault, *, ready: Mapping[str, str] | None = None, longer: float = 1.0) -> Struck:
        """Strike a fault, heal it, and wait until changes flow again; restart the pipeline whenever it has ended.

        `ready` are the phases that its tables have then; `longer` is how many times longer it lasts than it must.
        """
        starts, begun = self.pipeline.starts, time.monotonic()
        with fault.strike(self):
            until = begun + fault.seconds * longer
            self.pipeline.keep_running(lambda: time.monotonic() >= until)
        healed, end = time.monotonic(), self.position()

        def is_recovered() -> bool:
            seen = self.pipeline.seen
            is_ready = ready is None or seen.phases == ready
            return is_ready and seen.durable is not None and reaches(seen.durable, end)

        self.pipeline.keep_running(is_recovered)
        return Struck(fault.name, healed - begun, time.monotonic() - healed, self.pipeline.starts - starts)


@dataclass(frozen=True, slots=True)
class Struck:
    """What a fault cost."""

    fault: str
    seconds: float
    recovery: float
    """The seconds from its end until every change before that was applied, and all tables were ready."""
    restarts: int

    def __str__(self) -> str:
        return (
            f"{self.fault} for {self.seconds:.1f} s, changes flow {self.recovery:.1f} s later, {self.restarts} restarts"
        )


@contextmanager
def open_scene(
    settings: DriveSettings, server: PostgresServer, random: Random, *, with_state_server: bool = False
) -> Iterator[Scene]:
    """Yield the scene of a pipeline that is not started yet; its settings name the source directly."""
    with ExitStack() as stack:
        folder, dsn = Path(settings.folder), settings.dsn
        proxy = stack.enter_context(Proxy(server.port))
        disks: dict[str, SmallDisk] = {}
        with suppress(CannotMount):
            for name in ("spool", "state", "lake"):
                disks[name] = stack.enter_context(SmallDisk(folder / name, _DISK_MEGABYTES))
        (folder / "state").mkdir(exist_ok=True)
        state = f"sqlite:///{folder / 'state' / 'state.db'}"
        state_server = stack.enter_context(PostgresServer()) if with_state_server else None
        if state_server is not None:
            state = state_server.dsn()
        settings = replace(
            settings, dsn=proxy.dsn(dsn), state=state, on_lost_slot="recreate", lease_seconds=LEASE_SECONDS
        )
        pipeline = PipelineProcess(settings)
        stack.callback(pipeline.close)
        yield Scene(pipeline, server, dsn, proxy, random, disks, state_server)


Strike = Callable[[Scene], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong for a while."""

    name: str
    strike: Strike
    seconds: float
    """How long it lasts at least to have an effect."""
    can_strike: Callable[[Scene], object]


FAULTS: dict[str, Fault] = {}
"""All faults, by name."""


def _fault(
    seconds: float = 0.0, *, needs: Callable[[Scene], object] = lambda _: True
) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    """Add a fault; its name is that of the function, which strikes, yields and heals."""

    def add(function: Callable[[Scene], Iterator[None]]) -> None:
        name = function.__name__.replace("_", " ").strip()
        FAULTS[name] = Fault(name, contextmanager(function), seconds, needs)

    return add


IN_STATE_FILE = frozenset({"state read only", "state locked", "state disk full"})
"""Faults of a state that is in a file."""
IN_STATE_SERVER = frozenset({"state server away", "state server killed"})
"""Faults of a state that is in a server."""


# Processes that stop and continue


@contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@_fault(LEASE_SECONDS + 1)
def _driver_stopped(scene: Scene) -> Iterator[None]:
    with _stopped(scene.processes(Part.DRIVER)):
        yield


@_fault(LEASE_SECONDS + 1)
def _machine_stopped(scene: Scene) -> Iterator[None]:
    """All processes of the pipeline, as when a virtual machine is suspended."""
    with _stopped(scene.processes()):
        yield


@_fault(3)
def _capture_stopped(scene: Scene) -> Iterator[None]:
    with _stopped(scene.processes(Part.CAPTURE)):
        yield


@_fault(5, needs=lambda scene: scene.pipeline.settings.master)
def _jvm_stopped(scene: Scene) -> Iterator[None]:
    with _stopped(scene.processes(Part.JVM)):
        yield


@_fault(12)
def _walsender_stopped(scene: Scene) -> Iterator[None]:
    """For longer than capture waits for a word of the server."""
    walsender = scene.walsender()
    with _stopped([walsender] if walsender else []):
        yield


# Connections


@_fault(1)
def _sessions_terminated(scene: Scene) -> Iterator[None]:
    until = time.monotonic() + 1
    while time.monotonic() < until:
        scene.terminate_sessions()
        time.sleep(_POLL_SECONDS)
    yield


@_fault(2)
def _network_cut(scene: Scene) -> Iterator[None]:
    scene.proxy.refuse = True
    scene.proxy.cut()
    yield
    scene.proxy.refuse = False


@_fault(3)
def _network_delayed(scene: Scene) -> Iterator[None]:
    scene.proxy.delay = 0.2
    yield
    scene.proxy.delay = 0.0


@_fault(3)
def _network_throttled(scene: Scene) -> Iterator[None]:
    scene.proxy.bytes_per_second = 20_000
    yield
    scene.proxy.bytes_per_second = None


@_fault(3)
def _network_stalled(scene: Scene) -> Iterator[None]:
    """Nothing arrives for longer than the server waits, and then everything does."""
    scene.proxy.stall()
    yield
    scene.proxy.flow()


@_fault(12)
def _network_half_open(scene: Scene) -> Iterator[None]:
    """Both sides are connected, and no byte arrives, for longer than capture waits."""
    scene.proxy.fall_silent()
    yield
    scene.proxy.speak()


# Disks and the state


def _disk_full(name: str) -> Callable[[Scene], Iterator[None]]:
    def fill(scene: Scene) -> Iterator[None]:
        scene.disks[name].fill()
        yield
        scene.disks[name].free()

    fill.__name__ = f"{name}_disk_full"
    return fill


for _name in ("spool", "state", "lake"):
    _fault(3, needs=lambda scene, name=_name: name in scene.disks)(_disk_full(_name))


@_fault(3, needs=lambda scene: scene.state_file is not None and "state" in scene.disks)
def _state_read_only(scene: Scene) -> Iterator[None]:
    # SQLite keeps its files open, which prevents a new mount: another mount covers this one.
    path = str(scene.disks["state"].folder)
    subprocess.run(["mount", "--bind", path, path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        # Files that are open stay writable.
        scene.pipeline.kill()
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@_fault(12, needs=lambda scene: scene.state_file is not None)
def _state_locked(scene: Scene) -> Iterator[None]:
    """By another program, for longer than a writer waits for the lock."""
    assert scene.state_file is not None
    connection = sqlite3.connect(scene.state_file, isolation_level=None, timeout=HANG_SECONDS)
    try:
        connection.execute("begin immediate")
        yield
        connection.execute("rollback")
    finally:
        connection.close()


@_fault(12, needs=lambda scene: scene.state_server is not None)
def _state_server_away(scene: Scene) -> Iterator[None]:
    """For longer than a call tries to reach it."""
    assert scene.state_server is not None
    scene.state_server.stop("immediate")
    yield
    scene.state_server.start()


@_fault(needs=lambda scene: scene.state_server is not None)
def _state_server_killed(scene: Scene) -> Iterator[None]:
    assert scene.state_server is not None
    scene.state_server.kill()
    scene.state_server.start()
    yield


# The destination


def _destination(name: str, strike: Sequence[Any], heal: Sequence[Any], seconds: float = 1.0) -> None:
    def obey(scene: Scene) -> Iterator[None]:
        scene.pipeline.order(*strike)
        yield
        scene.pipeline.order(*heal)

    obey.__name__ = name
    _fault(seconds)(obey)


_destination("destination_failing", ["fail_before", None], ["fail_before", 0])
_destination("destination_slow", ["slow", 1.0], ["slow", 0.0], 2.0)
_destination("destination_loses_answers", ["fail_after", None], ["fail_after", 0])
_destination("destination_accepts_and_the_driver_dies", ["arm", "after_write=kill"], ["arm", ""])
_destination("destination_rejects_a_table", ["reject", 2], ["reject", 0])


# The source


@_fault(2)
def _server_away(scene: Scene) -> Iterator[None]:
    scene.server.stop("immediate")
    try:
        yield
    finally:
        scene.server.start()


@_fault()
def _server_killed(scene: Scene) -> Iterator[None]:
    scene.server.kill()
    scene.server.start()
    yield


@_fault()
def _slot_dropped(scene: Scene) -> Iterator[None]:
    query = "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s"
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        try:
            scene.execute(query, [scene.slot])
            break
        except psycopg.errors.ObjectInUse:
            # Capture holds it, until its walsender is gone and before it comes back.
            scene.execute("select pg_terminate_backend(%s)", [scene.walsender() or 0])
    yield


@_fault()
def _slot_lost(scene: Scene) -> Iterator[None]:
    """The server removes WAL that the slot needs, because of `max_slot_wal_keep_size`."""
    server = scene.server
    status = "select wal_status from pg_replication_slots where slot_name = %s"
    with _stopped(scene.processes()):
        server.execute("alter system set max_slot_wal_keep_size = '1MB'")
        server.execute("select pg_reload_conf()")
        deadline = time.monotonic() + HANG_SECONDS
        while scene.execute(status, [scene.slot]) not in ([("lost",)], []) and time.monotonic() < deadline:
            for _ in range(3):
                scene.execute("select pg_logical_emit_message(false, 'fault', 'wal'), pg_switch_wal()")
            scene.execute("checkpoint")
        server.execute("alter system reset max_slot_wal_keep_size")
        server.execute("select pg_reload_conf()")
    yield


@_fault(3)
def _slot_held(scene: Scene) -> Iterator[None]:
    """Another client reads the slot, and acknowledges nothing."""
    connection = connect_replication(SourceSettings(scene.dsn, application_name="thief"), Role.CAPTURE)
    publication = scene.pipeline.settings.id
    command = f"START_REPLICATION SLOT {scene.slot} LOGICAL 0/0 (proto_version '1', publication_names '{publication}')"
    deadline = time.monotonic() + HANG_SECONDS
    try:
        while connection.exec_(command.encode()).status != psycopg.pq.ExecStatus.COPY_BOTH:
            assert time.monotonic() < deadline, "the slot cannot be taken"
            scene.execute("select pg_terminate_backend(%s)", [scene.walsender() or 0])
        yield
    finally:
        connection.finish()


@_fault(3)
def _table_locked(scene: Scene) -> Iterator[None]:
    """In ACCESS EXCLUSIVE mode, for longer than a look at the catalog waits for a lock."""
    published = "select schemaname, tablename from pg_publication_tables where pubname = %s order by 1, 2"
    with psycopg.connect(scene.dsn) as connection:
        is_locked = False
        while not is_locked:
            names = connection.execute(published, [scene.pipeline.settings.id]).fetchall()
            table = sql.Identifier(*scene.random.choice(names))
            try:
                connection.execute(sql.SQL("lock table {} in access exclusive mode").format(table))
                is_locked = True
            except psycopg.errors.UndefinedTable:  # another session has just dropped it
                connection.rollback()
        yield


# Two processes


@_fault()
def _second_driver(scene: Scene) -> Iterator[None]:
    """Another process with the same id is refused, and the first does not notice."""
    first = scene.pipeline
    # It does not get as far as Spark's work.
    second = PipelineProcess(replace(_elsewhere(first.settings, "second"), master=None))
    try:
        second.start()
        assert second.wait_ended() != 0, "two drivers run one pipeline"
    finally:
        second.close()
    assert first.running, "the first driver ended because of the second"
    yield


@_fault()
def _taken_over(scene: Scene) -> Iterator[None]:
    """The machine stops, possibly before a commit; another takes over; the first continues and must change nothing."""
    first = scene.pipeline
    stopped = _stopped(scene.processes())
    second = PipelineProcess(_elsewhere(first.settings, "second"))
    try:
        with stopped:
            end = scene.position()
            deadline = time.monotonic() + HANG_SECONDS
            while second.seen.applied is None and time.monotonic() < deadline:
                if not second.running:
                    # The lease of the first, and its place at the slot, have to expire.
                    second.start()
                time.sleep(_POLL_SECONDS)
            second.wait_applied(end)
        assert first.wait_ended() != 0, "a driver without its lease did not fail"
        second.wait_applied(scene.position())
        assert second.stop() == 0
    finally:
        second.close()
    yield


def _elsewhere(settings: DriveSettings, name: str) -> DriveSettings:
    """Return the settings of the same pipeline on another machine: only the spool is elsewhere."""
    folder = Path(settings.folder).with_name(f"{Path(settings.folder).name}-{name}")
    folder.mkdir(exist_ok=True)
    options = {"path": str(settings.lake), **settings.options}
    return replace(settings, folder=str(folder), options=options)
