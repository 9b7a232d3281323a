"""`penstock run --supervise` with real processes: kills, outages, errors that need a person, and clean stops."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.operations.supervision import START_AGAIN
from penstock.testing.postgres import PostgresServer
from tests.integration.cli.support import PATIENCE, Site, check_discreet
from tests.integration.cli.test_polling import make_site as make_polled_site
from tests.support.disks import SmallDisk
from tests.support.waiting import pause


def look(site: Site) -> dict[str, Any]:
    return json.loads(site.run("status", "--json").stdout)


def wait_for(site: Site, is_so: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    begun = time.monotonic()
    while not is_so(found := look(site)):
        assert time.monotonic() < begun + PATIENCE, found
        pause(begun, shortest=0.2, longest=1.0)
    return found


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_killed_run_is_started_again_and_a_signal_ends_both(site: Site):
    process = site.start("run", "--supervise")
    site.wait_ready(3)
    first = look(site)
    assert first["supervisor"] == {
        "host": first["running"]["host"],
        "pid": process.pid,
        "restarts": 0,
        "last_end": None,
        "next_start": None,
    }
    os.kill(first["running"]["pid"], signal.SIGKILL)
    site.database.execute("insert into nothing select i, 'n' from generate_series(1, 100) i")
    second = wait_for(site, lambda found: found["running"] not in (None, first["running"]) and not found["problems"])
    assert second["supervisor"]["restarts"] == 1
    assert second["supervisor"]["last_end"].endswith(": killed by SIGKILL")
    site.wait_rows("nothing")
    assert f"supervised by process {process.pid}, 1 restart\n" in site.run("status").stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, site.output(process)
    assert "stopped at " in site.output(process)
    assert is_gone(second["running"]["pid"])
    assert look(site)["supervisor"] is None
    check_discreet(site, site.output(process))


def test_a_run_ends_with_its_supervisor(site: Site):
    process = site.start("run", "--supervise")
    site.wait_ready(3)
    running = look(site)["running"]
    process.kill()
    process.wait(PATIENCE)
    found = wait_for(site, lambda found: found["running"] is None)
    assert found["supervisor"] is None
    assert found["last_run"].endswith(": a signal stopped it")
    wait_for(site, lambda found: is_gone(running["pid"]))


def test_an_outage_is_waited_for_and_told_once(make_server: Callable[..., PostgresServer], tmp_path: Path):
    server = make_server()
    with server.connect() as connection:
        connection.execute("create table orders (id int primary key, note text); insert into orders values (1, 'one')")
    site = Site(SimpleNamespace(dsn=server.dsn(), name="away", execute=None), tmp_path)
    site.configure(tables="public.orders")
    server.stop()
    process = site.start("run", "--supervise")
    try:
        found = wait_for(site, lambda found: (found["supervisor"] or {}).get("restarts", 0) >= 3)
        assert "cannot connect" in found["supervisor"]["last_end"]
        server.start()
        wait_for(site, lambda found: found["running"] and found["problems"] == [])
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, site.output(process)
    finally:
        process.kill()
        process.wait(PATIENCE)
    text = site.output(process)
    assert text.count("cannot connect") == 1, text
    assert "error: " not in text
    check_discreet(site, text)


@pytest.mark.remedy("DestinationUnavailable")
def test_a_destination_that_is_away_at_the_first_start_is_waited_for(site: Site, small_disk: SmallDisk):
    site.configure(destination=f'[destination]\ntype = "parquet"\npath = "{small_disk.folder}/lake"')
    small_disk.fill()
    refused = site.run("run")
    assert refused.returncode == START_AGAIN, refused.stderr
    assert "the start is refused: destination: " in refused.stderr
    assert "No space left on device" in refused.stderr
    process = site.start("run", "--supervise")
    found = wait_for(site, lambda found: (found["supervisor"] or {}).get("restarts", 0) >= 2)
    assert "No space left on device" in found["supervisor"]["last_end"]
    assert site.output(process).count("the run ended, starting it again") == 1
    small_disk.free()
    site.wait_ready(3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, site.output(process)
    assert site.rows("orders", f"{small_disk.folder}/lake") == site.source_rows("orders")


def test_an_error_that_needs_a_person_is_told_with_its_remedy_and_ends_it(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute(f"select pg_drop_replication_slot('{site.slot}')")
    refused = site.run("run", "--supervise")
    assert refused.returncode == 1
    assert refused.stderr.count("error: ") == 1, refused.stderr
    assert f"slot '{site.slot}' is gone" in refused.stderr
    assert 'on_lost_slot = "recreate"' in refused.stderr
    # The remedy works under the supervisor, too.
    config = site.folder / "penstock.toml"
    config.write_text(config.read_text().replace("[source]", '[source]\non_lost_slot = "recreate"'))
    assert site.run("run", "--supervise", "--once", "-q").returncode == 0
    assert site.rows("orders") == site.source_rows("orders")


def test_polling_is_supervised_too(make_server: Callable[..., PostgresServer], tmp_path: Path):
    site = make_polled_site(make_server, tmp_path)
    process = site.start("run", "--supervise")
    site.wait_output(process, "polling 2 tables")
    first = wait_for(site, lambda found: found["running"])
    os.kill(first["running"]["pid"], signal.SIGKILL)
    found = wait_for(site, lambda found: found["running"] not in (None, first["running"]))
    assert found["supervisor"]["restarts"] == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, site.output(process)
