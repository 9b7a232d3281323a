"""Pipelines as people run them on a Spark cluster, whose machines share the lake with the driver and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
import pytest

from penstock.errors import ConfigError
from penstock.spark.java import find_java
from tests.e2e.support import current_position, wait_for
from tests.support.processes import descendants_of
from tests.support.spark_cluster import Cluster

TABLES = 10
ROWS = 300
SECONDS = 900.0
"""A guard, not a measure."""
SPARK_SUBMIT = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")


@dataclass
class Site:
    """A config that names no master, in the driver's folder, which workers do not see, and the lake, which they do."""

    database: Any
    cluster: Cluster
    lake: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.cluster.driver_folder

    @property
    def slot(self) -> str:
        return f"cluster_{self.database.name[-12:]}"

    def create(self) -> None:
        for number in range(TABLES):
            self.database.execute(
                f"create table t{number} (id int primary key, note text); "
                f"insert into t{number} select i, 'n' || i from generate_series(1, {ROWS}) i"
            )
        (self.folder / "pipeline.py").write_text("from penstock.__main__ import main\n\nmain()\n")
        (self.folder / "penstock.toml").write_text(
            textwrap.dedent(f"""
                [pipeline]
                id = "shop"
                spool = {{path = "spool", min_free_bytes = 0}}
                batch = {{interval = "100ms"}}
                [source]
                url = "${{SOURCE_URL}}"
                tables = ["public.*"]
                publication = "shop"
                slot = "{self.slot}"
                [destination]
                type = "delta"
                path = "{self.lake}"
            """)
        )

    def submit(self, *arguments: str, **options: str) -> subprocess.Popen[str]:
        """Start the pipeline with `spark-submit`."""
        settings = {**self.cluster.options, **{name.replace("_", "."): value for name, value in options.items()}}
        named = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        return self.start(SPARK_SUBMIT, "--master", self.cluster.url, *named, "pipeline.py", *arguments)

    def penstock(self, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
        """Start a command on the same cluster, without `spark-submit`; `python` is that of executors."""
        return self.start(sys.executable, "-m", "penstock", *arguments, python=python)

    def start(self, *command: str, python: str = sys.executable) -> subprocess.Popen[str]:
        settings = [f"--conf {name}='{value}'" for name, value in self.cluster.options.items()]
        environment = {
            **os.environ,
            "SOURCE_URL": self.database.dsn,
            "COLUMNS": "160",
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "PYSPARK_PYTHON": python,
            "PYSPARK_SUBMIT_ARGS": f"--master {self.cluster.url} {' '.join(settings)} pyspark-shell",
        }
        with open(self.folder / f"output-{len(self.processes)}", "w") as log:
            self.processes.append(
                subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log, text=True)
            )
        return self.processes[-1]

    def said(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"output-{self.processes.index(process)}").read_text()

    def wait_said(self, process: subprocess.Popen[str], text: str) -> None:
        wait_for(lambda: text in self.said(process) or process.poll() is not None, text, SECONDS)
        assert text in self.said(process), self.said(process)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        status = process.wait(SECONDS)
        return status, self.said(process)

    def stop(self, process: subprocess.Popen[str]) -> int:
        """Stop the Python process of `spark-submit`, or the command itself."""
        pythons = [pid for pid in descendants_of(process.pid) if "pipeline.py" in _command(pid)]
        os.kill(pythons[-1] if pythons else process.pid, signal.SIGTERM)
        return process.wait(SECONDS)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                for pid in [process.pid, *descendants_of(process.pid)]:
                    os.kill(pid, signal.SIGKILL)
                process.wait(SECONDS)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def make_site(database: Any, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make a site with some workers, of which the lake may be hidden."""
    made: list[Site] = []

    def make(workers: int, *, hide_lake: bool = False) -> Site:
        try:
            java = find_java()
        except ConfigError as error:
            pytest.skip(f"needs Java ({error.hint})")
        cluster = Cluster(tmp_path, java.home)
        if cluster.cannot_hide:
            pytest.skip(f"cannot hide folders from workers: {cluster.cannot_hide}")
        site = Site(database, cluster, tmp_path / "lake")
        made.append(site)
        site.lake.mkdir()
        cluster.start(workers=0)
        for number in range(workers):
            cluster.start_worker(number, hidden=site.lake if hide_lake else None)
        site.create()
        return site

    yield make
    for site in made:
        site.close()
        site.cluster.close()


@pytest.mark.timeout(1800)
def test_spark_submit_runs_a_pipeline_on_a_cluster_that_grows_and_verify_finds_it_equal(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(2)
    run = site.submit(
        "--log-level=info",
        "run",
        **{
            "spark.dynamicAllocation.enabled": "true",
            "spark.dynamicAllocation.shuffleTracking.enabled": "true",
            "spark.dynamicAllocation.initialExecutors": "1",
            "spark.dynamicAllocation.executorIdleTimeout": "600s",
        },
    )
    site.wait_said(run, f"spark started master={site.cluster.url}")
    site.wait_said(run, "segments are served to tasks")
    site.wait_said(run, f"table copied table=public.t{TABLES - 1}")
    for number in range(TABLES):
        site.database.execute(
            f"update t{number} set note = note || '!' where id % 3 = 0; delete from t{number} where id < 9"
        )
    # It holds both cores now.
    verify = site.penstock("verify")
    site.wait_said(verify, "waiting for executors")
    assert site.stop(verify) != 0
    position = current_position(site.database)
    wait_for(lambda: _confirmed(site, position), "the changes", SECONDS)
    assert site.stop(run) == 0
    status, said = site.end(site.penstock("verify"))
    assert status == 0, said
    assert f"{TABLES} tables" in said, said


def _confirmed(site: Site, position: Any) -> bool:
    query = "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    return site.database.execute(query, [str(position), site.slot]) == [(True,)]


@pytest.mark.timeout(1800)
def test_a_cluster_that_cannot_work_is_refused_with_the_cause(make_site: Callable[..., Site]) -> None:
    site = make_site(1, hide_lake=True)
    run = site.penstock("run", "--once")
    status, said = site.end(run)
    assert status == 1, said
    assert f"does not see {site.lake}" in said
    assert "mount a shared file system" in said
    assert not list(site.lake.rglob("*.parquet"))
    status, said = site.end(site.penstock("run", "--once", python="/no/such/python"))
    assert status == 1, said
    assert "executors lack the program /no/such/python" in said
