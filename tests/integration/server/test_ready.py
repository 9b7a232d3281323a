"""`/readyz` while a real destination hangs: false within ten seconds, and true again when it answers."""

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
from tests.program import start_capture
from tests.support.proxy import Proxy
from tests.support.s3 import S3Server

CONFIG = """
[pipeline]
id = "shop"
spool = {{min_free_bytes = 0}}
batch = {{interval = "100ms"}}
[source]
url = "{dsn}"
tables = ["public.*"]
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


def test_a_destination_that_hangs_makes_the_pipeline_unready_until_it_answers(hanging: Site, proxy: Proxy) -> None:
    for number in (1, 2):
        proxy.stall()
        hanging.database.execute(f"insert into things values ({number}, 'x')")
        [reason] = hanging.wait(lambda: hanging.ask("/readyz").json["reasons"], "the stall")
        stalled = re.fullmatch(r"tables: nothing was applied for ([\d.]+) s, and .* of WAL wait", reason)
        assert stalled is not None, reason
        # As the pipeline measured it: how long this test took to ask does not matter.
        assert 7 <= float(stalled[1]) <= 10
        metrics = hanging.ask("/metrics").body.decode()
        assert "\npenstock_ready 0.0\n" in metrics
        # What the rules PenstockStalled and PenstockLagHigh look at grows while nothing is applied.
        for name in ("penstock_stalled_seconds", "penstock_applied_lag_seconds"):
            value = re.search(rf'^{name}{{output="tables"}} (\S+)$', metrics, re.MULTILINE)
            assert value is not None
            assert float(value[1]) > 5, name
        proxy.flow()
        hanging.wait(lambda: hanging.ask("/readyz").status == 200, "the recovery")
    assert penstock.read_table(hanging.pipeline, "public.things").num_rows == 3
