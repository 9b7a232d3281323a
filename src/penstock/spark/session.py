"""Build the Spark session from settings.

This process is the driver. As always with Spark, static settings (memory, master, scheduler) apply only to the first
session of a process; a session that exists already is used as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.spark.java import find_java

_FOLDER = Path(__file__).parent
APPLY_POOL, COPY_POOL = "apply", "copy"
PYTHON_DAEMON = "penstock.spark.daemon"
"""Also appears in the command line of every Python worker, because workers are forked from it."""
_LOOPBACK = "127.0.0.1"
_ONE_COMPILER = "-XX:TieredStopAtLevel=1"
"""For the driver's JVM, which only passes tasks and bytes on: the second compiler took half of its processor time in
the first minute and made no batch faster."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """Where and how tasks run."""

    master: str = "local[*]"
    app_name: str = "penstock"
    memory: str | None = None
    """Memory of the JVM that runs tasks, like `4g`: the driver with a local master, otherwise each executor."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Any `spark.*` options; they take precedence over Penstock's own."""
    log_level: str = "ERROR"

    def __post_init__(self) -> None:
        foreign = sorted(name for name in self.options if not name.startswith("spark."))
        if foreign:
            raise ConfigError(
                f"not a Spark option: {', '.join(foreign)}", hint="Names of Spark options start with spark."
            )
        if self.options.get("spark.speculation", "false").lower() != "false":
            raise ConfigError(
                "spark.speculation must stay off",
                hint="Spark could otherwise run two copies of a task at once, which read and write everything twice.",
            )

    @property
    def is_local(self) -> bool:
        """True if tasks run on this machine, in the driver's JVM."""
        return self.master == "local" or self.master.startswith("local[")

    def configuration(self) -> dict[str, str]:
        """Return all options of the session."""
        level = self.log_level.lower()
        logs = f"-Dlog4j2.configurationFile={(_FOLDER / 'log4j2.properties').as_uri()} -Dpenstock.log.level={level}"
        ours = {
            "spark.app.name": self.app_name,
            "spark.master": self.master,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.speculation": "false",
            "spark.scheduler.mode": "FAIR",
            "spark.scheduler.allocation.file": (_FOLDER / "pools.xml").as_uri(),
            "spark.sql.session.timeZone": "UTC",
            "spark.python.daemon.module": PYTHON_DAEMON,
            # Without it Spark 4.1 refuses `time` columns, even when it only reads a file that has one.
            "spark.sql.timeType.enabled": "true",
        }
        if self.is_local:
            ours |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
        if self.memory is not None:
            ours["spark.driver.memory" if self.is_local else "spark.executor.memory"] = self.memory
        given = self.options.get("spark.driver.extraJavaOptions", "")
        return {**ours, **self.options, "spark.driver.extraJavaOptions": f"{logs} {_ONE_COMPILER} {given}".strip()}


def build_session(settings: SparkSettings | None = None) -> SparkSession:
    """Start Spark, or use the session that this process has. Raises `ConfigError` if Spark or Java does not start."""
    settings = settings or SparkSettings()
    existing = SparkSession.getActiveSession()
    if existing is None:
        _prepare_environment(settings)
    builder = SparkSession.builder
    for name, value in settings.configuration().items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise ConfigError(
            f"Spark did not start on {settings.master}: {reason_of(error)}",
            hint="See Spark's output above, and check `master`, `memory` and `spark.*` in the config.",
        ) from None
    session.sparkContext.setLogLevel(settings.log_level.upper())
    logger.info("spark started master=%s cores=%d", settings.master, session.sparkContext.defaultParallelism)
    return session


def stop_session(session: SparkSession) -> None:
    """Stop Spark. A JVM that has already ended is only logged, so that it does not hide the error that ended it."""
    try:
        session.stop()
    except (Py4JError, OSError) as error:
        logger.warning("spark ended before it was stopped error=%s", type(error).__name__)


def reason_of(error: Exception) -> str:
    """Return the reason from an error of the JVM, without the stack trace."""
    exception = getattr(error, "java_exception", None)
    text = str(exception.getMessage() or exception) if exception is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _prepare_environment(settings: SparkSettings) -> None:
    """Set what Spark reads from environment variables only; existing values of the user stay."""
    java = find_java()
    if os.environ.get("JAVA_HOME") != str(java.home):
        os.environ["JAVA_HOME"] = str(java.home)
    python = settings.options.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if settings.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
