"""Build the Spark session from settings.

This process is the driver. What `spark-submit` and `spark-defaults.conf` set goes before Penstock's defaults, and what
the config says goes before both. As always with Spark, static settings (memory, master, scheduler) apply only to the
first session of a process; a session that exists already is used as it is.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]
from pyspark.sql import SparkSession

from penstock.changes.frames import is_local
from penstock.changes.segment_files import SegmentServer
from penstock.errors import ConfigError
from penstock.spark.class_archive import archive_path, creating, options_for
from penstock.spark.java import Java, find_java

_FOLDER = Path(__file__).parent
APPLY_POOL, COPY_POOL = "apply", "copy"
PYTHON_DAEMON = "penstock.spark.daemon"
"""Also appears in the command line of every Python worker, because workers are forked from it."""
_LOOPBACK = "127.0.0.1"
_ONE_COMPILER = "-XX:+DisplayVMOutputToStderr -XX:ReservedCodeCacheSize=240m -XX:TieredStopAtLevel=1"
"""For the driver's JVM, which mostly passes tasks and bytes on: the second compiler took half of its processor time in
the first minute and made no batch faster. With one compiler, Java reserves a fifth of the room for compiled code. The
SQL of `type = "spark"` fills that within a minute; after that, the JVM compiles nothing. Messages of the JVM itself do
not belong in the output of a command."""

_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""Is set by `spark-submit` for the Python process that it starts."""
_SETTING = re.compile(r"\s*(spark\.[^\s=:]+)(?:\s*[=:]\s*|\s+)(\S.*?)\s*")
"""A line of `spark-defaults.conf`."""
_MEMORY = re.compile(r"(\d+)([kmgt]?)b?")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LEAST_HEAP = 512
_LEAST_OVERHEAD = 384
"""In megabytes. Spark refuses a smaller heap, and its own default of the overhead is this one."""
_PYTHON_ERROR = re.compile(r"(?:[a-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::.*)?")
_NOT_HEALED = (
    (
        re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'|No module named ([\w.]+)$", re.MULTILINE),
        "executors lack a Python module: No module named {0}{1}",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\]?\D*(\d+[.\d]*)\D*(\d+[.\d]*)"),
        "executors run Python {0}, the driver runs {1}",
    ),
    (re.compile(r'Cannot run program "([^"]+)"'), "executors lack the program {0}"),
)
"""Errors that every further attempt repeats."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSettings:
    """Where and how tasks run."""

    master: str | None = None
    """None takes the master of `spark-submit` or `spark-defaults.conf`, or else `local[*]`."""
    app_name: str = "penstock"
    memory: str | None = None
    """Memory for tasks, like `4g`: of the driver's JVM with a local master, otherwise of each executor, most of it for
    its Python workers."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Any `spark.*` options; they take precedence over all others."""
    log_level: str = "ERROR"

    def __post_init__(self) -> None:
        foreign = sorted(name for name in self.options if not name.startswith("spark."))
        if foreign:
            raise ConfigError(
                f"not a Spark option: {', '.join(foreign)}", hint="Names of Spark options start with spark."
            )
        _require_no_speculation(self.options)

    def configuration(self, around: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the options of the session. `around` are those of `spark-submit` and `spark-defaults.conf`: Penstock
        leaves them as they are, unless its own config says otherwise."""
        around = around or {}
        level = self.log_level.lower()
        logs = f"-Dlog4j2.configurationFile={(_FOLDER / 'log4j2.properties').as_uri()} -Dpenstock.log.level={level}"
        named = self.options.get("spark.master") or self.master
        master = named or around.get("spark.master", "local[*]")
        ours = {
            "spark.app.name": self.app_name,
            "spark.master": master,
            "spark.ui.showConsoleProgress": "false",
            "spark.speculation": "false",
            "spark.scheduler.mode": "FAIR",
            "spark.scheduler.allocation.file": (_FOLDER / "pools.xml").as_uri(),
            "spark.sql.session.timeZone": "UTC",
            # Without it Spark 4.1 refuses `time` columns, even when it only reads a file that has one.
            "spark.sql.timeType.enabled": "true",
        }
        if not _ships_code({**around, **self.options}):
            ours["spark.python.daemon.module"] = PYTHON_DAEMON
        if is_local(master):
            ours |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
        kept = {name: value for name, value in around.items() if name in ours}
        found = {**ours, **kept, "spark.master": master, **self._memory(master), **self.options}
        _require_no_speculation(found)
        given = self.options.get("spark.driver.extraJavaOptions", around.get("spark.driver.extraJavaOptions", ""))
        return {**found, "spark.driver.extraJavaOptions": f"{logs} {_ONE_COMPILER} {given}".strip()}

    def _memory(self, master: str) -> dict[str, str]:
        if self.memory is None:
            return {}
        if is_local(master):
            return {"spark.driver.memory": self.memory}
        size = _MEMORY.fullmatch(self.memory.strip().lower())
        if size is None:
            raise ConfigError(f"spark.memory is {self.memory!r}", hint='Write a number and a unit, like "4g".')
        megabytes = max(1, int(size[1]) * _UNITS[size[2] or ""] >> 20)
        # Tasks work in Python, outside of the JVM's heap, which only passes bytes on.
        heap = max(min(megabytes, _LEAST_HEAP), megabytes // 4)
        rest = max(megabytes - heap, _LEAST_OVERHEAD)
        return {"spark.executor.memory": f"{heap}m", "spark.executor.memoryOverhead": f"{rest}m"}


class StartingSpark:
    """Spark, started by a thread, so that capture can start meanwhile.

    Tasks need only `sparkContext`. `session` opens the SQL part when it is first needed, which takes two more
    seconds.
    """

    def __init__(self, settings: SparkSettings) -> None:
        """Raise `ConfigError` if there is no suitable Java."""
        self._configuration = _configure(settings)
        self._log_level = settings.log_level
        self._context: Future[SparkContext] = Future()
        self._archiving = ExitStack()
        java = _prepare_environment(self._configuration)
        if java is not None:
            archive = archive_path(java)
            _use_archive(self._configuration, archive)
            self._archiving.enter_context(creating(archive))
        self._thread = threading.Thread(target=self._start, name="start-spark", daemon=True)
        self._thread.start()

    @property
    def sparkContext(self) -> SparkContext:  # noqa: N802, named as in a session
        """Wait until Spark has started; raise `ConfigError` if it cannot start."""
        return self._context.result()

    @cached_property
    def session(self) -> SparkSession:
        """The session of the application."""
        self._context.result()
        return _open_session(self._configuration)

    def stop(self) -> None:
        """Wait until Spark has started, and stop it."""
        self._archiving.close()
        if self._context.exception() is None:
            # A session also forgets itself, so that this process can start another one.
            stop_spark(self.__dict__.get("session") or self._context.result())
        self._thread.join()

    def _start(self) -> None:
        try:
            context = _start_context(self._configuration, self._log_level)
        except BaseException as error:
            self._context.set_exception(error)
            return
        self._context.set_result(context)
        if is_local(context.master):
            _start_workers(context)


def build_session(settings: SparkSettings | None = None) -> SparkSession:
    """Start Spark, or use the session that this process has. Raises `ConfigError` if Spark or Java does not start."""
    settings = settings or SparkSettings()
    if SparkSession.getActiveSession() is not None:
        return _open_session(settings.configuration())
    configuration = _configure(settings)
    java = _prepare_environment(configuration)
    if java is not None:
        _use_archive(configuration, archive_path(java))
    _start_context(configuration, settings.log_level)
    return _open_session(configuration)


def _configure(settings: SparkSettings) -> dict[str, str]:
    """Return the options of a Spark that is about to start; raise `ConfigError` for Spark Connect."""
    _refuse_connect(settings)
    return settings.configuration(settings_around())


def _open_session(configuration: Mapping[str, str]) -> SparkSession:
    builder = SparkSession.builder
    for name, value in configuration.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _start_context(configuration: Mapping[str, str], log_level: str) -> SparkContext:
    try:
        context = SparkContext.getOrCreate(SparkConf().setAll(list(configuration.items())))
    except (PySparkException, Py4JError) as error:
        raise ConfigError(
            f"Spark did not start on {configuration['spark.master']}: {reason_of(error)}",
            hint="See Spark's output above, and check `master`, `memory` and `spark.*` in the config.",
        ) from None
    context.setLogLevel(log_level.upper())
    logger.info(
        "spark started master=%s cores=%d ui=%s", context.master, context.defaultParallelism, context.uiWebUrl or "off"
    )
    return context


def _start_workers(context: SparkContext) -> None:
    """Start Python workers with a job that does nothing, so that the first batch need not wait for their imports."""
    try:
        context.setJobDescription("start Python workers")
        cores = max(1, context.defaultParallelism)
        context.parallelize(range(cores), cores).mapPartitions(_nothing).collect()
    except Exception:
        # If Spark is stopped meanwhile, PySpark raises errors of all kinds.
        logger.debug("python workers could not be started ahead", exc_info=True)


def _nothing(items: Iterable[int]) -> Iterable[int]:
    return ()


def settings_around() -> dict[str, str]:
    """Return the settings that Spark has without Penstock: of `spark-submit`, `PYSPARK_SUBMIT_ARGS` and
    `spark-defaults.conf`."""
    if _GATEWAY in os.environ:
        # `spark-submit` runs this process: its JVM already runs, and knows them all.
        SparkContext._ensure_initialized()  # pyright: ignore[reportPrivateUsage]
        return dict(SparkConf().getAll())
    found: dict[str, str] = {}
    folder = os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home()) / "conf"
    with suppress(OSError):
        for line in (Path(folder) / "spark-defaults.conf").read_text().splitlines():
            setting = _SETTING.fullmatch(line)
            if setting is not None:
                found[setting[1]] = setting[2]
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for option, value in pairwise(words):
        if option == "--master":
            found["spark.master"] = value
        elif option in ("--conf", "-c") and "=" in value:
            name, _, value = value.partition("=")
            found[name] = value
        elif option == "--py-files":
            found["spark.submit.pyFiles"] = value
    return found


def _ships_code(options: Mapping[str, str]) -> bool:
    """True if executors get Penstock with a job: they do not have it yet when they start the process that forks Python
    workers, so Spark's own must do that."""
    return any(map(_has_penstock, options.get("spark.submit.pyFiles", "").split(",")))


def _has_penstock(archive: str) -> bool:
    try:
        with zipfile.ZipFile(archive.removeprefix("file://")) as content:
            return any(name.startswith("penstock/") for name in content.namelist())
    except (OSError, zipfile.BadZipFile):
        return "penstock" in archive.rpartition("/")[2]


def _require_no_speculation(options: Mapping[str, str]) -> None:
    if options.get("spark.speculation", "false").lower() != "false":
        raise ConfigError(
            "spark.speculation must stay off",
            hint="Spark could otherwise run two copies of a task at once, which read and write everything twice.",
        )


def _refuse_connect(settings: SparkSettings) -> None:
    remote = settings.options.get("spark.remote") or os.environ.get("SPARK_REMOTE") or settings.master or ""
    if remote.startswith("sc://") or "spark.remote" in settings.options or "SPARK_REMOTE" in os.environ:
        raise ConfigError(
            "Penstock cannot run its tasks through Spark Connect (sc://)",
            hint="Set master in [spark] to the cluster itself, like spark://host:7077, yarn or k8s://…, or to "
            "local[*], and remove SPARK_REMOTE and spark.remote.",
        )


@contextmanager
def serving_segments(context: SparkContext, spool: Path, port: int = 0) -> Iterator[SegmentServer | None]:
    """Let tasks on other machines read the segments of a spool inside the block; with a local master, do nothing.

    The server listens where Spark's driver does; port 0 takes any free one. Raises `ConfigError` if it cannot.
    """
    if is_local(context.master):
        yield None
        return
    configuration = context.getConf()
    host = configuration.get("spark.driver.host", _LOOPBACK)
    bind = configuration.get("spark.driver.bindAddress", host)
    try:
        server = SegmentServer(spool, host=host, bind=bind, port=port)
    except OSError as error:
        raise ConfigError(
            f"the driver cannot serve changes to executors on {bind}:{port}: {error.strerror}",
            hint="Check segment_port in [spark], spark.driver.host and spark.driver.bindAddress.",
        ) from None
    with server:
        yield server


def stop_spark(spark: SparkSession | SparkContext) -> None:
    """Stop Spark. A JVM that has already ended is only logged, so that it does not hide the error that ended it."""
    try:
        spark.stop()
    except (Py4JError, OSError) as error:
        logger.warning("spark ended before it was stopped error=%s", type(error).__name__)


def reason_of(error: Exception) -> str:
    """Return the reason from an error of the JVM, without the stack trace: that of the Python worker if there is one.

    The text of a worker's exception is shown only if it cannot contain data: of failed imports.
    """
    text = _text_of(error)
    cause = cause_of(error)
    if cause is not None:
        return cause
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [match for line in lines if (match := _PYTHON_ERROR.fullmatch(line))]
    reason = lines[0] if lines else type(error).__name__
    if raised and reason.rstrip().endswith(("SparkException:", "PythonException: Traceback (most recent call last):")):
        return f"{raised[-1][1]} in a Python worker"
    return reason


def cause_of(error: Exception) -> str | None:
    """Return what executors lack so that no task of this pipeline can run there; None if time may heal the error."""
    text = _text_of(error)
    for pattern, said in _NOT_HEALED:
        found = pattern.search(text)
        if found is not None:
            return said.format(*found.groups(""))
    return None


def _text_of(error: Exception) -> str:
    exception = getattr(error, "java_exception", None)
    return str(exception.getMessage() or exception) if exception is not None else str(error)


def _use_archive(configuration: dict[str, str], archive: Path) -> None:
    """Let the driver's JVM load Spark's classes from an archive, if it exists; options of the user come later."""
    name = "spark.driver.extraJavaOptions"
    configuration[name] = f"{options_for(archive)} {configuration[name]}".strip()


def _prepare_environment(configuration: Mapping[str, str]) -> Java | None:
    """Set what Spark reads from environment variables only; existing values of the user stay.

    Returns the Java that runs the driver, or None if it runs already.
    """
    if _GATEWAY in os.environ:
        return None
    java = find_java()
    if os.environ.get("JAVA_HOME") != str(java.home):
        os.environ["JAVA_HOME"] = str(java.home)
    python = configuration.get("spark.pyspark.python", sys.executable)
    os.environ.setdefault("PYSPARK_PYTHON", python)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local(configuration["spark.master"]):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    return java
