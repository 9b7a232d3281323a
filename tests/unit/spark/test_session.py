"""What the session is told, before there is one."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.spark.session import APPLY_POOL, COPY_POOL, SparkSettings


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


def test_clusters_find_the_driver_by_themselves() -> None:
    found = SparkSettings(master="spark://somewhere:7077", memory="3g").configuration()
    assert "spark.driver.host" not in found
    assert found["spark.executor.memory"] == "3g"


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
