"""Provide what a benchmark runs on: a private server, a folder and, if needed, a Spark session; removed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BenchmarkFailed, cleaned_up, describe_machine

from penstock.testing.postgres import PostgresServer

CORES = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """What a benchmark has for itself."""

    server: PostgresServer
    folder: Path


@contextmanager
def open_stage(major: int | None, settings: Mapping[str, str]) -> Iterator[Stage]:
    """A server with these settings, and an empty folder. A run that fails ends the program with one line: why."""
    try:
        with (
            cleaned_up(),
            PostgresServer(major=major, settings=settings) as server,
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        ):
            print(f"PostgreSQL {server.version}; {describe_machine()}")
            yield Stage(server, Path(folder))
    except BenchmarkFailed as error:
        raise SystemExit(f"benchmark failed: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextmanager
def spark_session(name: str, cores: int = CORES, **settings: Any) -> Iterator[Any]:
    """A session of this process, by default on all cores that benchmarks use; `settings` say where else."""
    # Not every benchmark needs it, nor the time that it takes.
    from penstock.spark.session import SparkSettings, build_session

    session = build_session(SparkSettings(**{"master": f"local[{cores}]", "app_name": name, **settings}))
    try:
        yield session
    finally:
        session.stop()
