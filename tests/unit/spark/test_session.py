"""What the session is told, before there is one."""

from __future__ import annotations

import zipfile
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.spark.session import (
    APPLY_POOL,
    COPY_POOL,
    PYTHON_DAEMON,
    SparkSettings,
    build_session,
    cause_of,
    reason_of,
    settings_around,
)


def test_a_persons_settings_win() -> None:
    settings = SparkSettings(
        memory="3g",
        options={"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Dx=1", "spark.local.dir": "/x"},
    )
    found = settings.configuration()
    assert (found["spark.master"], found["spark.ui.enabled"], found["spark.local.dir"]) == ("local[*]", "true", "/x")
    assert found["spark.driver.memory"] == "3g"
    assert found["spark.driver.extraJavaOptions"].endswith(" -Dx=1")
    # The last of several counts.
    given = SparkSettings(options={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4"}).configuration()
    assert given["spark.driver.extraJavaOptions"].endswith("-XX:TieredStopAtLevel=1 -XX:TieredStopAtLevel=4")
    assert found["spark.driver.host"] == "127.0.0.1"


def test_the_jvm_has_room_for_compiled_code_and_leaves_stdout_alone() -> None:
    """With one compiler, Java's default is 48 MB: queries fill it, and then nothing is compiled any more."""
    options = SparkSettings().configuration()["spark.driver.extraJavaOptions"].split()
    assert "-XX:ReservedCodeCacheSize=240m" in options
    assert "-XX:+DisplayVMOutputToStderr" in options


def test_clusters_find_the_driver_by_themselves() -> None:
    found = SparkSettings(master="spark://somewhere:7077").configuration()
    assert "spark.driver.host" not in found


@pytest.mark.parametrize(
    ("memory", "heap", "rest"),
    [("4g", "1024m", "3072m"), ("8192m", "2048m", "6144m"), ("1g", "512m", "512m"), ("600M", "512m", "384m")],
)
def test_most_memory_of_an_executor_is_for_its_python_workers(memory: str, heap: str, rest: str) -> None:
    found = SparkSettings(master="yarn", memory=memory).configuration()
    assert (found["spark.executor.memory"], found["spark.executor.memoryOverhead"]) == (heap, rest)
    own = SparkSettings(master="yarn", memory=memory, options={"spark.executor.memory": "9g"}).configuration()
    assert own["spark.executor.memory"] == "9g"
    assert SparkSettings(memory=memory).configuration()["spark.driver.memory"] == memory


def test_memory_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="much"):
        SparkSettings(master="yarn", memory="much").configuration()


def test_what_spark_submit_says_goes_before_our_defaults_and_after_the_config() -> None:
    around = {
        "spark.master": "spark://somewhere:7077",
        "spark.scheduler.mode": "FIFO",
        "spark.app.name": "theirs",
        "spark.executor.memory": "2g",
    }
    found = SparkSettings(app_name="ours").configuration(around)
    assert found["spark.master"] == "spark://somewhere:7077"
    assert (found["spark.scheduler.mode"], found["spark.app.name"]) == ("FIFO", "theirs")
    # Spark itself takes what Penstock says nothing about.
    assert "spark.executor.memory" not in found
    assert "spark.driver.host" not in found
    own = SparkSettings(master="local[3]", options={"spark.scheduler.mode": "FAIR"}).configuration(around)
    assert (own["spark.master"], own["spark.scheduler.mode"]) == ("local[3]", "FAIR")
    assert own["spark.driver.host"] == "127.0.0.1"
    with pytest.raises(ConfigError, match="speculation"):
        SparkSettings().configuration({"spark.speculation": "true"})


def test_settings_around_are_found_without_spark_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    assert settings_around() == {}
    (tmp_path / "spark-defaults.conf").write_text(
        "# spark.master no\n\nspark.master   spark://defaults:7077\nspark.executor.memory=2g\n"
        "spark.eventLog.dir: hdfs://namenode:8021/directory\nspark.empty\nnot.spark 1\n"
    )
    assert settings_around() == {
        "spark.master": "spark://defaults:7077",
        "spark.executor.memory": "2g",
        "spark.eventLog.dir": "hdfs://namenode:8021/directory",
    }
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master yarn --conf 'spark.x=a b=c' --py-files a.zip pyspark-shell")
    found = settings_around()
    assert (found["spark.master"], found["spark.x"], found["spark.submit.pyFiles"]) == ("yarn", "a b=c", "a.zip")


def test_sparks_own_daemon_starts_where_penstock_comes_with_the_job(tmp_path: Path) -> None:
    daemon = "spark.python.daemon.module"
    archives = {}
    for name, content in (("ours.zip", "penstock/__init__.py"), ("other.zip", "other/__init__.py")):
        archives[name] = str(tmp_path / name)
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(content, "")

    def chosen(files: str) -> str | None:
        return SparkSettings().configuration({"spark.submit.pyFiles": files}).get(daemon)

    assert chosen(archives["other.zip"]) == PYTHON_DAEMON
    assert chosen(f"{archives['other.zip']},{archives['ours.zip']}") is None
    assert chosen(f"file://{archives['ours.zip']}") is None
    assert chosen("hdfs://nodes/penstock-0.1.zip") is None
    assert SparkSettings(options={"spark.submit.pyFiles": archives["ours.zip"]}).configuration().get(daemon) is None


@pytest.mark.parametrize("way", ["master", "option", "environment"])
def test_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    settings = {
        "master": SparkSettings(master="sc://host:15002"),
        "option": SparkSettings(options={"spark.remote": "local[*]"}),
        "environment": SparkSettings(),
    }[way]
    if way == "environment":
        monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with pytest.raises(ConfigError, match="Spark Connect") as caught:
        build_session(settings)
    assert "spark://host:7077" in caught.value.hint


LOST = (
    "Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 in "
    "stage 1.0 (TID 3) (127.0.0.1 executor 0): "
)
NO_DAEMON = f"""{LOST}org.apache.spark.SparkException:
Error from python worker:
  /usr/bin/python3: Error while finding module specification for 'penstock.spark.daemon' (ModuleNotFoundError: No module named 'penstock')
PYTHONPATH was:
  /opt/spark/python
org.apache.spark.SparkException: No port number in penstock.spark.daemon's stdout
\tat org.apache.spark.api.python.PythonWorkerFactory.startDaemon(PythonWorkerFactory.scala:1)"""  # noqa: E501
NO_MODULE = f"""{LOST}org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/python/pyspark/worker.py", line 1, in main
ModuleNotFoundError: No module named 'pyarrow'

\tat org.apache.spark.api.python.BasePythonRunner"""
VERSION = f"""{LOST}org.apache.spark.api.python.PythonException: Traceback (most recent call last):
pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark cannot run with different minor versions."""  # noqa: E501
NO_PYTHON = f'{LOST}java.io.IOException: Cannot run program "./environment/bin/python": error=2, No such file'
CRASHED = f"""{LOST}org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "x.py", line 1
ValueError: cell 42"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (NO_DAEMON, "executors lack a Python module: No module named penstock"),
        (NO_MODULE, "executors lack a Python module: No module named pyarrow"),
        (VERSION, "executors run Python 3.10, the driver runs 3.11"),
        (NO_PYTHON, "executors lack the program ./environment/bin/python"),
        (CRASHED, None),
        (f"{LOST}ExecutorLostFailure (executor 0 exited)", None),
    ],
)
def test_what_executors_lack_is_found_in_the_error_of_a_job(text: str, cause: str | None) -> None:
    assert cause_of(RuntimeError(text)) == cause
    assert "cell 42" not in reason_of(RuntimeError(text))
    assert reason_of(RuntimeError(CRASHED)) == "ValueError in a Python worker"


@pytest.mark.trap(50)
def test_speculation_stays_off() -> None:
    assert SparkSettings().configuration()["spark.speculation"] == "false"
    with pytest.raises(ConfigError, match="speculation"):
        SparkSettings(options={"spark.speculation": "true"})


def test_other_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="master"):
        SparkSettings(options={"master": "local"})


def test_the_files_that_are_named_exist() -> None:
    found = SparkSettings().configuration()
    pools = ElementTree.parse(Path(urlparse(found["spark.scheduler.allocation.file"]).path))
    assert {pool.get("name") for pool in pools.iter("pool")} == {APPLY_POOL, COPY_POOL}
    logs = found["spark.driver.extraJavaOptions"].split()[0].partition("=")[2]
    assert Path(urlparse(logs).path).is_file()
