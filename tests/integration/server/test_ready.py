"""A real destination that hangs: `/readyz` is false within ten seconds, and alerts fire, until it answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.capture import process
from tests.conftest import Database
from tests.integration.server.conftest import PATIENCE, Site
from tests.integration.server.prometheus import Prometheus
from tests.program import start_capture
from tests.support.proxy import Proxy
from tests.support.s3 import S3Server

CONFIG = """
[pipeline]
id = "shop"
spool = {{min_free_bytes = 0, max_bytes = "1MB"}}
batch = {{interval = "100ms"}}
[source]
url = "{dsn}"
tables = ["public.*"]
max_retained_wal = "64MB"
[spark]
master = "none"
[destination]
type = "delta"
path = "s3://lake/{folder}"
storage_options = {{{options}}}
[server]
port = 0
"""


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.port) as made:
        yield made
        made.flow()


@pytest.fixture
def hanging(
    s3: S3Server, proxy: Proxy, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr(process, "start_child", start_capture)
    database.execute("create table things (id int primary key, note text); insert into things values (0, 'copied')")
    options = {**s3.options, "aws_endpoint": f"http://127.0.0.1:{proxy.port}"}
    given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    config = CONFIG.format(dsn=database.dsn, folder=uuid.uuid4().hex, options=given)
    (tmp_path / "penstock.toml").write_text(config)
    with penstock.open(tmp_path / "penstock.toml") as pipeline:
        site = Site(pipeline, database, tmp_path)
        site.wait(lambda: pipeline.address, "the server")
        pipeline.wait_until_ready(PATIENCE)
        site.wait(lambda: site.ask("/readyz").status == 200, "readiness")
        yield site


def test_a_destination_that_hangs_makes_the_pipeline_unready_until_it_answers(
    hanging: Site, proxy: Proxy, tmp_path: Path
) -> None:
    with Prometheus(hanging.port, tmp_path) as prometheus:
        hanging.wait(lambda: prometheus.query("penstock_ready"), "a scrape")
        _hang(hanging, proxy)
        waiting = {"PenstockStalled", "PenstockLagHigh", "PenstockNotReady"}
        hanging.wait(lambda: waiting <= prometheus.firing(), "alerts about the stall")
        # What waits fills the spool, and the server retains WAL for it.
        hanging.wait(lambda: _write(hanging) and "PenstockSpoolFillsUp" in prometheus.firing(), "an alert of the spool")
        hanging.database.execute("select pg_logical_emit_message(false, 'penstock-test', repeat('x', 64 << 20))")
        hanging.wait(lambda: "PenstockWalFillsUp" in prometheus.firing(), "an alert about the slot")
        proxy.flow()
        hanging.wait(lambda: hanging.ask("/readyz").status == 200, "the recovery")
        hanging.wait(lambda: not waiting & prometheus.firing(), "the end of alerts")
    [(written,)] = hanging.database.execute("select count(*) from things")
    hanging.wait(lambda: penstock.read_table(hanging.pipeline, "public.things").num_rows == written, "what was written")


def _hang(site: Site, proxy: Proxy) -> None:
    """Let the destination hang with a change to apply, and wait until the pipeline says so."""
    proxy.stall()
    site.database.execute("insert into things select max(id) + 1, 'x' from things")
    [reason] = site.wait(lambda: site.ask("/readyz").json["reasons"], "the stall")
    stalled = re.fullmatch(r"tables: nothing was applied for ([\d.]+) s, and .* of WAL wait", reason)
    assert stalled is not None, reason
    # As the pipeline measured it: how long this test took to ask does not matter.
    assert 7 <= float(stalled[1]) <= 10
    assert "\npenstock_ready 0.0\n" in site.ask("/metrics").body.decode()


def _write(site: Site) -> bool:
    """Write some hundred kilobytes that do not compress well."""
    site.database.execute(
        """
        insert into things
            select max(id) + 1, (select string_agg(md5(random()::text), '') from generate_series(1, 20000))
            from things
        """
    )
    return True
