"""What people do wrong is one clear message with what to do: no traceback, no secret, exit status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cli.support import PATIENCE, Site, check_discreet

SECRET = "hunter2secret"
WITHOUT_JAVA = """
import sys
from pathlib import Path
import penstock.spark.java as java
java.find_java.__defaults__ = (Path("/nowhere"),)
from penstock.cli.main import main
sys.argv[0] = "penstock"
main()
"""

# Root may write anywhere, unless it gives up that right.
_ROOT = os.geteuid() == 0
OBEDIENT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if _ROOT else []


def run(site: Site, *command: str, **environment: str) -> str:
    result = subprocess.run(
        list(command),
        cwd=site.folder,
        env={**site.environment, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    check_discreet(site, result.stdout + result.stderr)
    assert SECRET not in result.stdout + result.stderr
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.count("error: ") == 1
    assert result.stderr.count("hint: ") == 1
    return result.stderr


def penstock(*arguments: str) -> list[str]:
    return [*OBEDIENT, sys.executable, "-m", "penstock", *arguments]


def other_url(site: Site, *, user: str = "postgres", password: str = SECRET, database: str | None = None) -> str:
    server, _, name = site.database.dsn.rpartition("@")[2].partition("/")
    return f"postgresql://{user}:{password}@{server}/{database or name}"


@pytest.mark.parametrize("command", [("run",), ("run", "--plan"), ("init", "-c", "new.toml", "--yes"), ("tail",)])
def test_a_wrong_password(site: Site, command: tuple[str, ...]):
    url = other_url(site)
    said = run(site, *penstock(*command), SOURCE_URL=url, **({"PENSTOCK_URL": url} if command[0] == "init" else {}))
    assert "password authentication failed" in said
    assert "Check the user and password" in said
    assert not (site.folder / "new.toml").exists()


def test_a_database_that_does_not_exist(site: Site):
    said = run(site, *penstock("run"), SOURCE_URL=site.database.dsn.rpartition("/")[0] + "/nowhere")
    assert 'database "nowhere" does not exist' in said
    assert "Check the database name" in said


def test_a_config_that_is_not_there_or_cannot_be_read(site: Site):
    said = run(site, *penstock("run", "-c", "none.toml"))
    assert "there is no config file 'none.toml'" in said
    assert "penstock init" in said
    (site.folder / "folder.toml").mkdir()
    assert "Is a directory" in run(site, *penstock("tables", "-c", "folder.toml"))
    (site.folder / "penstock.toml").chmod(0)
    said = run(site, *penstock("status"))
    assert "Permission denied" in said
    assert "permission to read it" in said


def test_a_variable_that_is_not_set(site: Site):
    site.configure(more='mode = "${SHOP_MODE}"')
    said = run(site, *penstock("check"))
    assert "destination.mode: the environment variable SHOP_MODE is not set" in said
    assert "export it" in said


def _lake(site: Site, forbidden: Path) -> None:
    site.configure(destination='[destination]\ntype = "parquet"\npath = "forbidden/lake"')


def _delta(site: Site, forbidden: Path) -> None:
    site.configure(destination='[destination]\ntype = "delta"\npath = "forbidden/lake"')


def _state(site: Site, forbidden: Path) -> None:
    site.configure(more='[state]\nurl = "sqlite:///forbidden/deep/state.db"')


@pytest.mark.parametrize("arrange", [_lake, _delta, _state], ids=["parquet", "delta", "state"])
def test_a_folder_that_may_not_be_written(site: Site, arrange: Callable[[Site, Path], None]):
    forbidden = site.folder / "forbidden"
    forbidden.mkdir(mode=0o555)
    arrange(site, forbidden)
    said = run(site, *penstock("run", "--once"))
    assert "forbidden" in said
    assert "Permission denied" in said
    assert list(forbidden.iterdir()) == []


def test_no_java(site: Site, tmp_path: Path):
    site.configure(master="local[1]")
    command = [sys.executable, "-c", WITHOUT_JAVA, "run", "--once"]
    said = run(site, *command, PATH=str(tmp_path / "empty"), JAVA_HOME="")
    assert "Spark needs Java, and this machine has none" in said
    assert "apt-get install default-jre-headless" in said


def test_a_spark_that_does_not_start_leaves_nothing_behind(site: Site):
    site.configure(master="local[many]")
    said = run(site, *penstock("run", "--once"))
    assert "Spark did not start on local[many]: " in said
    assert "`master`, `memory` and `spark.*" in said
    assert (
        site.database.execute(
            "select slot_name from pg_catalog.pg_replication_slots where database = current_database()"
        )
        == []
    )
    assert site.database.execute("select pubname from pg_catalog.pg_publication") == []


def test_whatever_the_system_refuses_is_told_without_a_traceback(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    spool = site.folder / "work/spool"
    spool.chmod(0)
    try:
        said = run(site, *penstock("teardown", "--yes"))
    finally:
        spool.chmod(0o755)
    assert "Permission denied" in said
