"""Spark's JVM starts from an archive of its classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.spark.class_archive import creating, options_for
from tests.conftest import SPARK_CLASSES
from tests.e2e.support import wait_for

START = """
import sys
from penstock.spark.session import SparkSettings, build_session
options = {"spark.driver.extraJavaOptions": sys.argv[1]}
spark = build_session(SparkSettings(master="local[1]", options=options))
assert spark.sparkContext.parallelize([1, 2]).sum() == 3
spark.stop()
"""


@pytest.mark.skipif(not SPARK_CLASSES.exists(), reason="`make` could not write an archive of Spark's classes")
def test_classes_of_spark_come_from_the_archive(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    options = f"{options_for(SPARK_CLASSES)} -Xlog:class+load:file={loaded}"
    subprocess.run([sys.executable, "-c", START, options], check=True, capture_output=True)
    lines = [line for line in loaded.read_text().splitlines() if " org.apache.spark." in line]
    shared = [line for line in lines if "shared objects file" in line]
    assert len(shared) > 0.5 * len(lines) > 100


def test_an_archive_that_does_not_fit_is_ignored(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jsa"
    damaged.write_bytes(b"no archive" * 1000)
    done = subprocess.run([sys.executable, "-c", START, options_for(damaged)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cds" not in done.stdout + done.stderr


def test_short_runs_write_no_archive(tmp_path: Path) -> None:
    archive = tmp_path / "classes.jsa"
    with creating(archive, delay=3600.0):
        pass
    assert not list(tmp_path.iterdir())


def test_a_stop_ends_the_process_that_writes_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "classes" / "spark.jsa"
    with creating(archive, delay=0.0):
        wait_for(lambda: archive.parent.exists(), "the process", 300)
    assert not list(archive.parent.iterdir())


@pytest.mark.soak
def test_long_runs_write_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "classes.jsa"
    with creating(archive, delay=0.0):
        wait_for(archive.exists, "the archive", 900)
    assert archive.stat().st_size > 10 << 20
