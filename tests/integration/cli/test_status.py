"""`penstock status` while a pipeline copies, follows, stands still, or has never run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.units import format_moment
from penstock.testing.postgres import PostgresServer
from tests.conftest import Database
from tests.integration.cli.support import BOTH, PATIENCE, Site, check_discreet


def look(site: Site, *arguments: str) -> dict[str, Any]:
    result = site.run("status", "--json", *arguments)
    found = json.loads(result.stdout)
    assert result.returncode == (3 if found["problems"] else 0), result.stderr
    check_discreet(site, result.stdout + result.stderr)
    return found


def tables(found: dict[str, Any], output: int = 0) -> dict[str, dict[str, Any]]:
    return {table["table"]: table for table in found["outputs"][output]["tables"]}


def test_a_pipeline_that_never_ran_is_no_error_and_nothing_is_made(site: Site):
    before = sorted(site.folder.rglob("*"))
    found = look(site)
    assert found["running"] is None
    assert found["source"]["slot"] == {
        "name": site.slot, "exists": False, "active_pid": None, "position": None, "lag_bytes": None,
        "retained_bytes": None, "wal_status": None, "safe_bytes": None, "room": None, "lost": False,
        "waits_for_standby": False,
    }  # fmt: skip
    assert found["outputs"][0]["tables"] == []
    text = site.run("status").stdout
    assert "shop, has not run yet" in text
    assert f"{site.slot}: does not exist" in text
    assert sorted(site.folder.rglob("*")) == before


def test_a_copy_is_seen_from_outside_while_it_runs(site: Site):
    site.database.execute(
        """
        create table big (id int primary key, note text) partition by range (id);
        create table low partition of big for values from (0) to (40000);
        create table high partition of big for values from (40000) to (80000);
        insert into big select i, repeat('y', 500) from generate_series(0, 79999) i;
        """
    )
    # The first partition takes some seconds: time to bar the way to the second.
    site.configure(more='[copy]\nmax_bytes_per_second = "3MB"\nlock_timeout = "10min"')
    process = site.start("run", "--status-every", "0.2")
    site.wait_output(process, "copying public.big: 0 of 2 ranges, ")
    with site.database.connect(autocommit=False) as connection:
        connection.execute("lock table high in access exclusive mode")
        site.wait_output(process, "copying public.big: 1 of 2 ranges, ")
        deadline = time.monotonic() + PATIENCE
        while not ((big := tables(found := look(site))["public.big"])["copy"] or {}).get("ranges_done"):
            assert time.monotonic() < deadline, big
    assert found["running"]["pid"] == process.pid
    assert big["phase"] == "data_sync"
    copy = big["copy"]
    assert (copy["ranges"], copy["ranges_done"], copy["rows_done"]) == (2, 1, 40_000)
    assert 0 < copy["fraction"] < 1
    site.wait_output(process, "copied public.big: 80,000 rows")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, site.output(process)


def test_lag_is_known_whether_it_runs_or_not(site: Site):
    process = site.start("run", "--status-every", "0.5")
    site.wait_output(process, "3 of 3 tables ready; ")
    deadline = time.monotonic() + PATIENCE
    while (output := look(site)["outputs"][0])["lag_bytes"] != 0 or output["changes_per_second"] is None:
        assert time.monotonic() < deadline, output
    text = site.run("status").stdout
    assert f"run by process {process.pid}" in text
    assert "; streaming; " in text
    assert "read by server process" in text

    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert look(site)["last_run"].endswith(": a signal stopped it")
    site.database.execute("insert into nothing select i, 'n' from generate_series(1, 1000) i")
    found = look(site)
    output = found["outputs"][0]
    assert found["running"] is None
    assert output["changes_per_second"] is None
    assert output["lag_bytes"] > 10_000
    assert output["lag_seconds"] > 0
    assert found["source"]["slot"]["lag_bytes"] >= output["lag_bytes"] > 0
    assert {table["phase"] for table in output["tables"]} == {"ready"}
    assert "not being read" in site.run("status").stdout

    away = site.run("status", environment={"SOURCE_URL": "postgresql://postgres:hunter2secret@127.0.0.1:1/shop"})
    assert away.returncode == 3
    assert "; lag unknown" in away.stdout
    assert "cannot connect (127.0.0.1:1/shop)" in away.stdout
    assert "keeps trying" not in away.stdout
    assert "public.orders" in away.stdout
    assert "hunter2" not in away.stdout + away.stderr


def test_a_table_that_stopped_is_explained_and_one_of_several_outputs_can_be_asked_for(site: Site):
    site.database.execute("create table strange (id int primary key, note text, at date)")
    site.database.execute("insert into strange values (1, 'x', 'infinity')")
    site.configure(more='[types]\nout_of_range = "error"', destination=BOTH)
    assert site.run("run", "--once", "-q").returncode == 1
    found = look(site)
    assert found["problems"] == ["the pipeline is not running", *["public.strange has stopped"] * 2]
    assert [output["output"] for output in found["outputs"]] == ["tables", "second"]
    for number in (0, 1):
        assert tables(found, number)["public.strange"]["error"]["command"] == "rollback"
    assert [output["output"] for output in look(site, "--output", "second")["outputs"]] == ["second"]
    text = site.run("status").stdout
    assert text.count("then: penstock rollback public.strange") == 2
    assert "second: at " in text
    site.configure(more='[types]\nout_of_range = "error"')
    assert look(site)["forgotten"].keys() == {"second"}


def test_watching_goes_on_until_it_is_told_to_stop(site: Site):
    process = site.start("status", "--watch", "--json", "--every", "0.2")
    deadline = time.monotonic() + PATIENCE
    while site.output(process).count("\n") < 3:
        assert process.poll() is None, site.output(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    assert all(json.loads(line)["pipeline"] == "shop" for line in site.output(process).splitlines())


def test_a_look_does_not_wait_for_ddl(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    with site.database.connect(autocommit=False) as connection:
        connection.execute("lock table orders in access exclusive mode")
        found = look(site)
    assert tables(found)["public.orders"]["rows"] is None
    assert found["source"]["error"] is None


def test_a_source_that_is_away_and_a_run_that_was_killed_are_said_as_such(
    make_server: Callable[..., PostgresServer], tmp_path: Path
):
    server = make_server()
    site = Site(Database(server, server.create_database()), tmp_path)
    site.database.execute("create table t (id int primary key, note text)")
    site.configure()
    process = site.start("run", "--status-every", "0.5")
    site.wait_output(process, "1 of 1 table ready; ")
    deadline = time.monotonic() + PATIENCE
    while (found := look(site))["problems"] or found["outputs"][0]["lag_bytes"] is None:
        assert time.monotonic() < deadline, found
    assert tables(found)["public.t"]["lag_bytes"] == found["outputs"][0]["lag_bytes"]
    server.stop("immediate")
    site.wait_output(process, "; source unreachable since ")
    while (found := look(site))["source"]["unreachable_since"] is None:
        assert time.monotonic() < deadline, found
    (output,) = found["outputs"]
    assert (output["lag_bytes"], output["lag_seconds"], output["tables"][0]["lag_bytes"]) == (None, None, None)
    assert found["problems"] == ["the source is unreachable"]
    text = site.run("status").stdout
    assert f"source    unreachable since {format_moment(found['source']['unreachable_since'])}, retrying" in text
    assert "; lag unknown" in text
    server.start()
    while look(site)["problems"]:
        assert time.monotonic() < deadline, site.output(process)
    process.kill()
    process.wait(PATIENCE)
    while (found := look(site))["running"] is not None:
        assert time.monotonic() < deadline, found
    assert found["last_run"].endswith(" without giving a reason: it was killed, or the machine stopped")


def test_a_destination_that_is_away_is_said_as_such_until_it_is_back(site: Site):
    process = site.start("run", "--status-every", "0.2")
    site.wait_output(process, "3 of 3 tables ready; ")
    lake = site.folder / "lake"
    away = lake.rename(site.folder / "elsewhere")
    site.database.execute("insert into orders values (9001, 'x')")
    site.wait_output(process, "waiting since ")
    found = look(site)
    (output,) = found["outputs"]
    assert "is the disk mounted?" in output["failing"]
    assert found["problems"] == [f"output tables cannot write: {output['failing']}"]
    text = " ".join(site.run("status").stdout.split())
    assert f"cannot write since {format_moment(output['failing_since'])}, retrying: {output['failing']}" in text
    assert output["hint"] in text
    away.rename(lake)
    deadline = time.monotonic() + PATIENCE
    while look(site)["problems"]:
        assert time.monotonic() < deadline, site.output(process)
