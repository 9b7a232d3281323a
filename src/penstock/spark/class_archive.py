"""An archive of Spark's classes, with which its JVM starts in about half the time.

The JVM maps the archive instead of reading and verifying thousands of classes from jars (class data sharing). It
checks that the same Java made the archive from the same jars, and otherwise ignores it, so an archive is only a cache.
Java writes one when a JVM ends. A pipeline should neither wait for that nor depend on how it ends, so a process of its
own starts Spark once more, at a low priority, after the pipeline has run for a minute.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from penstock.durable import aside
from penstock.private import cache_folder
from penstock.spark.java import Java, find_java

DELAY_SECONDS = 60.0
"""A short run needs the processors itself."""
_QUIET = "-Xlog:cds*=off"
"""That an archive does not fit is no news."""

logger = logging.getLogger(__name__)


def archive_path(java: Java) -> Path:
    """Return where this user's archive for a Java and the installed Spark is, or would be."""
    release = java.home / "release"
    updated = release.stat().st_mtime_ns if release.exists() else 0
    what = f"{java.home}\n{updated}\n{pyspark.__file__}\n{pyspark.__version__}"
    return cache_folder() / "classes" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.jsa"


def options_for(archive: Path) -> str:
    """Return the options with which a JVM uses an archive; none if it does not exist."""
    return f"-XX:SharedArchiveFile={archive} {_QUIET}" if archive.exists() else ""


@contextmanager
def creating(archive: Path, delay: float = DELAY_SECONDS) -> Iterator[None]:
    """Create an archive that does not exist while the block runs, if it lasts longer than `delay`."""
    over = threading.Event()
    thread = threading.Thread(target=_create_later, args=(archive, delay, over), name="class-archive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def create(archive: Path) -> None:
    """Start Spark, use it as a pipeline does, and keep the classes that it loaded."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with aside(archive) as new, tempfile.TemporaryDirectory(prefix="penstock-classes-") as folder:
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.extraJavaOptions", f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={new} {_QUIET}")
            .getOrCreate()
        )
        context = spark.sparkContext
        gateway: Any = context._gateway  # pyright: ignore[reportPrivateUsage]
        context.parallelize(range(2), 2).mapPartitions(list).collect()
        spark.range(10).write.parquet(f"{folder}/rows")
        spark.read.parquet(f"{folder}/rows").selectExpr("count(*)").collect()
        spark.stop()
        # The JVM ends when its standard input is closed.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        os.replace(new, archive)


def _create_later(archive: Path, delay: float, over: threading.Event) -> None:
    if archive.exists() or over.wait(delay):
        return
    command = [sys.executable, "-m", "penstock.spark.class_archive", str(archive)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
    except OSError as error:
        logger.debug("no archive of Spark's classes error=%s", error)
        return
    while process.poll() is None and not over.wait(0.5):
        pass
    if process.poll() is None:
        # With its JVM.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    logger.debug("archive of Spark's classes status=%d", process.wait())


def main(arguments: list[str]) -> int:
    """Create the archive that is named."""
    os.nice(10)
    os.environ["JAVA_HOME"] = str(find_java().home)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    create(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
