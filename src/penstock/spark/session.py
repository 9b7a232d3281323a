"""The Spark session, built from settings: quiet, fair between copies and changes, and with the types we need.

The driver is this process. Static settings (memory, master, the scheduler) count only for the first session of a
process, as always with Spark: a session that is there already is taken as it is.
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
"""Also in the command line of every Python worker, which is forked from it."""
_LOOPBACK = "127.0.0.1"
_ONE_COMPILER = "-XX:TieredStopAtLevel=1"
"""For the driver's JVM, which only hands tasks and bytes on: the second compiler took half of its processor time in the
first minute, and made no batch quicker."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """Where tasks run, and how."""

    master: str = "local[*]"
    app_name: str = "penstock"
    memory: str | None = None
    """Like `4g`: of the JVM that runs tasks (the driver's with a local master, else each executor's)."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Any `spark.*`; they win over what is set here."""
    log_level: str = "ERROR"

    def __post_init__(self) -> None:
        foreign = sorted(name for name in self.options if not name.startswith("spark."))
        if foreign:
            raise ConfigError(f"not a setting of Spark: {', '.join(foreign)}", hint="Their names begin with spark.")
        if self.options.get("spark.speculation", "false").lower() != "false":
            raise ConfigError(
                "spark.speculation must stay off",
                hint="A task that runs twice at the same time writes everything twice, and both read from the source.",
            )

    @property
    def is_local(self) -> bool:
        """Tasks run in threads of this machine's JVM."""
        return self.master == "local" or self.master.startswith("local[")

    def configuration(self) -> dict[str, str]:
        """All settings that the session gets."""
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
            # Without it Spark 4.1 refuses columns of type time, also when it only reads a file that has one.
            "spark.sql.timeType.enabled": "true",
        }
        if self.is_local:
            ours |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
        if self.memory is not None:
            ours["spark.driver.memory" if self.is_local else "spark.executor.memory"] = self.memory
        given = self.options.get("spark.driver.extraJavaOptions", "")
        return {**ours, **self.options, "spark.driver.extraJavaOptions": f"{logs} {_ONE_COMPILER} {given}".strip()}


def build_session(settings: SparkSettings | None = None) -> SparkSession:
    """Start Spark, or take the session that this process has. Raises `ConfigError` if there is no Java for it."""
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
            hint="See what it has written before this; master, memory and spark.* in the config must fit this machine.",
        ) from None
    session.sparkContext.setLogLevel(settings.log_level.upper())
    logger.info("spark is there master=%s cores=%d", settings.master, session.sparkContext.defaultParallelism)
    return session


def stop_session(session: SparkSession) -> None:
    """End Spark; a JVM that is gone already needs no ending, and must not hide why."""
    try:
        session.stop()
    except (Py4JError, OSError) as error:
        logger.warning("spark had ended before it was asked to error=%s", type(error).__name__)


def reason_of(error: Exception) -> str:
    """The reason in a message of the JVM, without its stack."""
    exception = getattr(error, "java_exception", None)
    text = str(exception.getMessage() or exception) if exception is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _prepare_environment(settings: SparkSettings) -> None:
    """What Spark takes from the environment only; what a person has set there stays."""
    java = find_java()
    if os.environ.get("JAVA_HOME") != str(java.home):
        os.environ["JAVA_HOME"] = str(java.home)
    python = settings.options.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if settings.is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
