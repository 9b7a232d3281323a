"""Random specifications, random transactions, SIGKILLs: in the end every document equals the one of the database."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from penstock import failpoints
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import parse_specification
from penstock.state import CommandKind, open_store
from tests.conftest import Database
from tests.e2e.documents import documents_of
from tests.e2e.support import current_position
from tests.integration.documents import world
from tests.support.document_sink import FileSink
from tests.support.drive_pipeline import DriveSettings
from tests.support.faults import FAULTS, SERVER_SETTINGS, Struck, open_scene
from tests.support.pipeline_process import PipelineProcess
from tests.support.processes import Part

KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "100"))
SEED = int(os.environ.get("PENSTOCK_SEED", "1"))
POINTS = tuple(failpoints.DOCUMENT_POINTS)
OF_TABLES = frozenset(
    {
        *("lake disk full", "destination failing", "destination slow", "destination loses answers"),
        *("destination accepts and the driver dies", "destination rejects a table"),
        # The load would lose its connection; and the file of the sink is on one machine.
        *("server killed", "server away", "taken over"),
    }
)
"""Faults that concern a destination of tables, or that this load does not survive."""

pytestmark = pytest.mark.timeout(900)


class Load:
    """Transactions without an end, until told to stop; `wait` for so many more of them."""

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._random = Random(seed)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.count = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, more: int) -> None:
        with self._changed:
            target = self.count + more
            assert self._changed.wait_for(lambda: self.count >= target or self._error is not None, 120)

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self._stop.is_set():
                    # Now and then one that is larger than a batch.
                    statements = 300 if self._random.random() < 0.02 else self._random.randint(1, 6)
                    world.random_transaction(self._random, connection, statements, truncates=0.0005)
                    if self._random.random() < 0.05:
                        world.random_ddl(self._random, connection)
                    with self._changed:
                        self.count += 1
                        self._changed.notify_all()
                    self._stop.wait(0.02)
        except BaseException as error:
            self._error = error
            with self._changed:
                self._changed.notify_all()


@dataclass
class Driven:
    """A process with random indexes over the world's tables."""

    database: Any
    process: PipelineProcess
    indexes: dict[str, str]

    def check(self) -> None:
        """Quiet now: all arrives, and all is equal."""
        if not self.process.running:
            self.process.start()
        self.process.wait_phases("seeded", len(self.indexes))
        self.process.wait_applied(current_position(self.database))
        self.process.wait_phases("seeded", len(self.indexes))
        specifications = [parse_specification(text, name) for name, text in self.indexes.items()]
        sink = FileSink(self.process.settings.sink_file)
        for name, wanted in documents_of(self.database.dsn, specifications).items():
            found = sink.documents(name)
            assert found.keys() == wanted.keys(), (name, self.indexes[name])
            assert found == wanted, (name, self.indexes[name])

    def rebuild(self) -> None:
        settings = self.process.settings
        with open_store(settings.state_url, f"{settings.id}:documents") as store:
            store.add_command(CommandKind.REBUILD_INDEX)


def random_indexes(random: Random, count: int) -> dict[str, str]:
    return {f"index{number}": world.random_text(random) for number in range(count)}


@contextmanager
def driven(database: Any, folder: Path, random: Random, **settings: Any) -> Iterator[Driven]:
    described = describe(database, folder, random, **settings)
    process = PipelineProcess(described)
    try:
        yield Driven(database, process, dict(described.indexes))
    finally:
        process.close()


def describe(database: Any, folder: Path, random: Random, **settings: Any) -> DriveSettings:
    """Create the world's tables; return the settings of a process with random indexes over them."""
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection, recorded=False)
        for name in world.COLUMNS:
            if random.random() < 0.25:
                connection.execute(f"alter table w.{name} replica identity full")
        world.fill(random, connection)
    return DriveSettings(
        dsn=database.dsn,
        folder=str(folder),
        slot=f"kills_{database.name[-12:]}",
        tables=("w.*",),
        indexes=random_indexes(random, 3),
        **settings,
    )


def kill_at_random(found: Driven, load: Load, random: Random) -> None:
    """SIGKILL: at one of the points between two steps, or at any moment."""
    if random.random() < 0.4:
        point = random.choice(POINTS)
        found.process.start(armed=f"{point}=kill:{random.randint(1, 3)}")
        load.wait(random.randint(20, 120))
        if random.random() < 0.5:
            found.rebuild()
            load.wait(40)
    else:
        found.process.start()
        load.wait(random.randint(5, 150))
    if random.random() < 0.2:
        found.process.kill(Part.CAPTURE)
    found.process.kill()


@pytest.mark.trap(42, 43, 44, 47, 48, 49)
def test_documents_survive_kills_at_random_moments(database: Any, tmp_path: Path) -> None:
    random = Random(f"kills-{SEED}")
    with driven(database, tmp_path, random, documents={"fan_out_documents": 3, "chunk_documents": 2}) as found:
        with Load(database.dsn, SEED) as load:
            for _ in range(3):
                kill_at_random(found, load, random)
            found.process.start()
            found.process.wait_phases("seeded", len(found.indexes))
            load.wait(100)
        found.check()
        with Load(database.dsn, SEED + 1) as load:
            found.rebuild()
            load.wait(60)
        found.check()
        assert found.process.stop() == 0


@pytest.mark.soak
@pytest.mark.trap(42, 43, 44, 47, 48, 49)
@pytest.mark.parametrize("number", range(-(-KILLS // 10)))
def test_documents_survive_many_kills(database: Any, tmp_path: Path, number: int) -> None:
    random = Random(f"kills-{SEED}-{number}")
    limits = {"fan_out_documents": random.choice([3, 1000]), "chunk_documents": random.choice([2, 1000])}
    with driven(database, tmp_path, random, documents=limits) as found:
        for round_ in range(2):
            with Load(database.dsn, SEED + number + round_) as load:
                for _ in range(5):
                    kill_at_random(found, load, random)
            found.check()
            found.process.kill()


@pytest.mark.soak
@pytest.mark.trap(42, 45, 47)
def test_documents_survive_a_kill_at_every_point(database: Any, tmp_path: Path) -> None:
    random = Random(f"points-{SEED}")
    with driven(database, tmp_path, random, documents={"fan_out_documents": 3, "chunk_documents": 2}) as found:
        with Load(database.dsn, SEED) as load:
            # What a first start comes by, then what happens under load, then what a rebuild comes by.
            first = ("after_maps", "after_build_wanted", "after_reindex", "after_build_planned", "after_range")
            for point in (*first, *(each for each in POINTS if each not in first)):
                found.process.start(armed=f"{point}=kill")
                if point not in first:
                    found.rebuild()
                assert found.process.wait_ended() == -9, point
                load.wait(20)
        found.check()
        assert found.process.stop() == 0


@pytest.mark.soak
@pytest.mark.trap(42, 44)
@pytest.mark.parametrize("with_state_server", [False, True], ids=["state in a file", "state in a server"])
def test_documents_survive_faults(
    make_server: Any, tmp_path: Path, record_property: Any, with_state_server: bool
) -> None:
    server = make_server(settings=SERVER_SETTINGS)
    database = Database(server, server.create_database())
    random = Random(f"faults-{SEED}-{with_state_server}")
    described = describe(database, tmp_path, random, documents={"fan_out_documents": 3, "chunk_documents": 2})
    with open_scene(described, server, random, with_state_server=with_state_server) as scene:
        found = Driven(database, scene.pipeline, dict(described.indexes))
        faults = [each for each in FAULTS.values() if each.can_strike(scene) and each.name not in OF_TABLES]
        random.shuffle(faults)
        struck: list[Struck] = []
        with Load(database.dsn, SEED) as load:
            for fault in faults:
                scene.pipeline.keep_running(lambda: scene.pipeline.seen.applied is not None)
                load.wait(random.randint(1, 50))
                struck.append(scene.disturb(fault))
                print(struck[-1], flush=True)
        found.check()
        assert found.process.stop() == 0
    slowest = max(struck, key=lambda each: each.recovery)
    record_property("faults", len(struck))
    record_property("slowest", str(slowest))


@pytest.mark.soak
@pytest.mark.trap(44, 45, 50)
def test_documents_survive_kills_of_spark(database: Any, tmp_path: Path) -> None:
    random = Random(f"spark-{SEED}")
    limits = {"local_documents": 0, "fan_out_documents": 3, "chunk_documents": 2}
    with driven(database, tmp_path, random, master="local[2]", documents=limits) as found:
        with Load(database.dsn, SEED) as load:
            for victim in (Part.WORKER, Part.JVM, Part.DRIVER, Part.WORKER, Part.CAPTURE):
                if not found.process.running:
                    found.process.start()
                found.process.wait_for("its first word", lambda seen: seen.applied is not None)
                found.rebuild()
                load.wait(random.randint(20, 100))
                assert found.process.kill(victim)
                if victim is Part.JVM:
                    found.process.wait_ended()
        found.check()
        assert found.process.stop() == 0
