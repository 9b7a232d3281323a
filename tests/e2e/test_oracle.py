"""Random tables and transactions, captured three times in different ways, against what the server says."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql

from penstock.capture import AssemblerSettings, CaptureSettings
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from tests.support.oracle import capture_until, check_same, check_spool, current_position
from tests.support.planned_tables import PlannedColumn, PlannedTable, Size, plan_tables
from tests.support.replay import Replayable
from tests.support.samples import Sample, available_samples
from tests.support.workload import MESSAGE_PREFIX, Truth, Workload

SEED = os.environ.get("PENSTOCK_SEED")
SOAK_SEEDS = int(os.environ.get("PENSTOCK_SOAK_SEEDS", "100"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))
TRAPS = pytest.mark.trap(1, 3, 12, 13, 25, 26, 27, 31, 32)
PUBLICATION = "oracle_pub"


@dataclass(frozen=True)
class Way:
    """How the same WAL is captured."""

    work_mem: str
    streaming: bool = True
    block_bytes: int = 24 << 20
    messages: bool = False


WAYS = {
    "small": Way("64kB"),
    "large": Way("64MB", block_bytes=20_000),
    "plain": Way("64kB", streaming=False, messages=True),
    "pieces": Way("64kB", block_bytes=1_500, messages=True),
}


def run(server, seed: int, size: Size, folder: Path) -> Truth:
    """One example: workload, captures, checks. The database is dropped with its slots."""
    name = server.create_database()
    try:
        with server.connect(name) as connection:
            samples = available_samples(connection)
            random = Random(seed)
            return run_tables(server, name, plan_tables(random, samples, size), random, size, folder)
    except BaseException as error:
        error.add_note(f"to see it again: PENSTOCK_SEED={seed} (with {size}, PostgreSQL {server.major})")
        raise
    finally:
        server.drop_database(name)


def run_tables(
    server, database: str, tables: list[PlannedTable], random: Random, size: Size, folder: Path, *, sweep: bool = False
) -> Truth:
    dsn = server.dsn(database)
    with server.connect(database) as connection, Workload(dsn, random, tables, size) as workload:
        truth = workload.create()
        publish(connection, tables)
        for name in WAYS:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [f"{name}_{database}"])
        workload.sweep(truth) if sweep else workload.run(truth)
        end = current_position(connection)
        # An unpublished commit: the server writes out, and sends, all that was before it.
        connection.execute("create table public.unpublished ()")
    spools: dict[str, Replayable] = {}
    for name, way in WAYS.items():
        path = folder / f"{database}-{name}"
        capture_until(settings_for(dsn, f"{name}_{database}", path, way), end)
        spools[name] = check_spool(path, truth)
        if way.messages:
            # Streamed, a message does not say which sub-transaction it belongs to: those of rolled-back ones are there.
            assert len(spools[name].messages) >= truth.messages
            assert way.streaming or len(spools[name].messages) == truth.messages
    for name in WAYS:
        check_same(spools["small"], spools[name], f"{WAYS['small']} and {WAYS[name]}")
    return truth


def publish(connection: psycopg.Connection, tables: list[PlannedTable]) -> None:
    names = sql.SQL(", ").join(table.identifier for table in tables)
    connection.execute(sql.SQL("create publication {} for table {}").format(sql.Identifier(PUBLICATION), names))


def settings_for(dsn: str, slot: str, path: Path, way: Way) -> CaptureSettings:
    return CaptureSettings(
        source=SourceSettings(f"{dsn}?options=-c%20logical_decoding_work_mem%3D{way.work_mem}"),
        slot=slot,
        publication=PUBLICATION,
        spool=SpoolSettings(path, min_free_bytes=0),
        streaming=way.streaming,
        assembler=AssemblerSettings(
            block_bytes=way.block_bytes,
            lane_bytes=min(way.block_bytes, 256 << 10),
            message_prefixes=frozenset({MESSAGE_PREFIX} if way.messages else ()),
        ),
    )


@pytest.fixture(params=[15, 18], ids=["pg15", "pg18"])
def one_server(request, server_pool):
    return server_pool.get(request.param)


@TRAPS
@pytest.mark.skipif(SEED is not None, reason="PENSTOCK_SEED asks for one example")
@settings(
    max_examples=5,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 10**9))
def test_replaying_the_spool_gives_the_tables(seed, one_server, tmp_path_factory):
    run(one_server, seed, size_of(seed), tmp_path_factory.mktemp("oracle"))


@pytest.mark.skipif(SEED is None, reason="PENSTOCK_SEED names an example")
def test_replaying_the_spool_gives_the_tables_for_a_seed(one_server, tmp_path):
    seed = int(SEED or 0)
    run(one_server, seed, size_of(seed), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_replaying_the_spool_gives_the_tables_for_many_seeds(one_server, tmp_path, record_property):
    failures: list[str] = []
    seeds = range(SOAK_SEED, SOAK_SEED + SOAK_SEEDS)
    record_property("seeds", f"{seeds[0]}–{seeds[-1]}")
    for seed in seeds:
        try:
            run(one_server, seed, size_of(seed), tmp_path / str(seed))
        except AssertionError as error:
            failures.append(f"PENSTOCK_SEED={seed}: {error}")
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
    assert not failures, "\n".join(failures)


@TRAPS
@pytest.mark.parametrize("identity", ["default", "full", "index"])
def test_every_value_of_every_type_survives(identity, one_server, tmp_path):
    """Each type's awkward values, inserted, updated and deleted; with FULL they are in the old rows too."""
    database = one_server.create_database()
    try:
        with one_server.connect(database) as connection:
            samples = available_samples(connection)
        tables = [
            PlannedTable(
                f"t{first}",
                (
                    PlannedColumn("id", Sample("int8", ("0",), unique=str)),
                    *(
                        PlannedColumn(f"c{at}", sample, external=sample.large is not None)
                        for at, sample in enumerate(samples[first : first + 15])
                    ),
                ),
                ("id",),
                identity,
            )
            for first in range(0, len(samples), 15)
        ]
        size = Size(sessions=1, initial_rows=2)
        truth = run_tables(one_server, database, tables, Random(1), size, tmp_path, sweep=True)
        assert len(truth.transactions) == len(tables)
    finally:
        one_server.drop_database(database)


@TRAPS
def test_every_kind_of_key_survives_its_changes(one_server, tmp_path):
    """A table per type that can be a key; the awkward values of dates, times and arrays are keys too."""
    database = one_server.create_database()
    try:
        with one_server.connect(database) as connection:
            keys = [sample for sample in available_samples(connection) if sample.unique is not None]
        note = PlannedColumn("note", Sample("text", ("a", "b"), large=lambda random: random.randbytes(2000).hex()))
        tables = [
            PlannedTable(f"k{at}", (note, PlannedColumn("key", sample)), ("key",), ["default", "index", "full"][at % 3])
            for at, sample in enumerate(keys)
        ]
        size = Size(actions=700, sessions=2, initial_rows=5)
        run_tables(one_server, database, tables, Random(2), size, tmp_path)
    finally:
        one_server.drop_database(database)


def size_of(seed: int) -> Size:
    """What `PENSTOCK_SEED` alone stands for."""
    random = Random(seed)
    return Size(
        tables=random.randint(2, 6),
        columns=random.randint(3, 12),
        actions=random.randint(60, 260),
        sessions=random.randint(1, 3),
        initial_rows=random.randint(0, 8),
    )
