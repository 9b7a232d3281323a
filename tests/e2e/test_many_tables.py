"""Many tables, each with a change per second: one Spark job per batch, and memory that does not grow.

Sixty tables here, three hundred in `make soak`: `PENSTOCK_SOAK_ROUNDS` seconds of changes, half an hour without it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.lsn import reaches
from penstock.spark.tasks import SparkTasks
from penstock.state import open_store
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for
from tests.e2e.test_spark_pipeline import CountingTasks, job_description, job_ids
from tests.support.processes import Part, descendants_of, part_of, resident_bytes

TABLES = 60
SOAK_TABLES = 300
ROWS = 5
SOAK_ROUNDS = int(os.environ.get("PENSTOCK_SOAK_ROUNDS", "1800"))
START_SECONDS = 600.0
"""A guard, not a measure."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Memory:
    """In MiB."""

    driver: float
    capture: float
    workers: float
    """The largest of the Python processes that run tasks."""
    heap: float
    """Of the JVM, after a collection."""

    @classmethod
    def now(cls, spark: Any) -> Memory:
        gc.collect()
        jvm = spark.sparkContext._jvm
        jvm.java.lang.System.gc()
        runtime = jvm.java.lang.Runtime.getRuntime()
        below = {pid: part_of(pid) for pid in descendants_of(os.getpid())}

        def largest(part: Part) -> float:
            return max(resident_bytes(pid) for pid, found in below.items() if found is part) / MEBIBYTE

        return cls(
            driver=resident_bytes(os.getpid()) / MEBIBYTE,
            capture=largest(Part.CAPTURE),
            workers=largest(Part.WORKER),
            heap=(runtime.totalMemory() - runtime.freeMemory()) / MEBIBYTE,
        )

    def growth(self, since: Memory) -> dict[str, float]:
        return {name: round(getattr(self, name) - getattr(since, name), 1) for name in self.__dataclass_fields__}


class Changes:
    """One change of each table, each a transaction, once per second."""

    def __init__(self, database: Any, tables: int) -> None:
        self._database = database
        self._tables = tables
        self.rounds = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with self._database.connect() as connection:
                    while not stop.is_set():
                        begun = time.monotonic()
                        for table in range(self._tables):
                            connection.execute(
                                f"update t{table} set version = version + 1 where id = %s", [self.rounds % ROWS]
                            )
                        self.rounds += 1
                        # The load is one change per second; nothing is waited for here.
                        stop.wait(max(0.0, 1.0 - (time.monotonic() - begun)))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="changes")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)
        assert not errors, errors[0]


def follow(
    spark: Any, database: Any, folder: Path, tables: int, *, warm_up: int, rounds: int, compared: int
) -> tuple[dict[str, float], int]:
    """Copy, follow for so many rounds after the warm-up; gives the growth of memory meanwhile and the batches.

    Asserts one job per batch, and that the changes of some tables are all there.
    """
    with database.connect() as connection:
        for table in range(tables):
            connection.execute(f"create table t{table} (id int primary key, version int, note text)")
            connection.execute(f"insert into t{table} select i, 0, 'note ' || i from generate_series(0, {ROWS - 1}) i")
    tasks = CountingTasks(SparkTasks(spark), [])
    settings = tables_settings(database, folder, "many", interval=0.5)
    store = open_store(f"sqlite:///{folder / 'state.db'}", "many")
    changes = Changes(database, tables)
    with tables_alone(settings, store, ParquetDestination(folder / "lake"), tasks, spark) as pipeline:

        def ready() -> bool:
            pipeline.wait(0)
            return [phase.name for phase in pipeline.phases.values()] == ["ready"] * tables

        def applied(round_: int) -> None:
            wait_for(lambda: changes.rounds >= round_, "rounds of changes", START_SECONDS + 3 * rounds)
            position = current_position(database)
            wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, position), "apply", START_SECONDS)

        wait_for(ready, "all tables to be ready", START_SECONDS)
        jobs, batches = job_ids(spark), pipeline.status.batches
        tasks.described.clear()
        with changes.running():
            applied(warm_up)
            before = Memory.now(spark)
            applied(warm_up + rounds)
            growth = Memory.now(spark).growth(before)
        applied(changes.rounds)
        count = pipeline.status.batches - batches
        # Spark forgets the oldest jobs of a long run; those that it knows are the last ones.
        known = sorted(job_ids(spark) - jobs)
        assert [job_description(spark, job) for job in known] == tasks.described[-len(known) :]
        assert len(tasks.described) == count, "a batch is one job"
    reader = ParquetReader(folder / "lake")
    assert len(reader.tables()) == tables
    for table in Random(rounds).sample(range(tables), compared):
        found = reader.read_table(f"public.t{table}")
        versions = dict(zip(found["id"].to_pylist(), found["version"].to_pylist(), strict=True))
        assert versions == dict(database.execute(f"select id, version from t{table}")), table
    return growth, count


@pytest.mark.timeout(900)
@pytest.mark.trap(50)
def test_a_change_per_second_in_each_of_many_tables_is_one_job_per_batch(spark, database, tmp_path):
    growth, _ = follow(spark, database, tmp_path, TABLES, warm_up=4, rounds=6, compared=40)
    assert max(growth.values()) < 24, f"MiB in 6 rounds: {growth}"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_300_tables_do_not_grow_in_memory(spark, database, tmp_path, record_property):
    growth, batches = follow(
        spark, database, tmp_path, SOAK_TABLES, warm_up=min(60, SOAK_ROUNDS // 3), rounds=SOAK_ROUNDS, compared=10
    )
    record_property("rounds", SOAK_ROUNDS)
    record_property("batches", batches)
    record_property("growth in MiB", growth)
    assert max(growth.values()) < 64, growth
