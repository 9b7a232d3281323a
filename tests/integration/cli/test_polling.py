"""`penstock run` with `[polling]`, on a server that does not decode its log."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.testing.postgres import PostgresServer
from tests.integration.cli.support import PATIENCE, Site, check_discreet

CONFIG = """
[pipeline]
id = "shop"
[source]
url = "${SOURCE_URL}"
[polling]
interval = "100ms"
tables = {orders = "updated_at"}
[[index]]
specification = "orders.schema.yml"
[sink]
type = "stdout"
skip_backfill = true
"""
ORDERS = """
version: 1
table: orders
fields:
  - {text: note}
  - {has_many: items, table: items, foreign_key: order_id, primary_key: id, fields: [{text: note}]}
"""


def make_site(make_server: Callable[..., PostgresServer], folder: Path) -> Site:
    server = make_server(settings={"wal_level": "replica"})
    with server.connect() as connection:
        connection.execute(
            """
            create table orders (id int primary key, note text, updated_at timestamptz not null default now());
            create table items (id int primary key, order_id int, note text);
            insert into orders values (1, 'one'), (2, 'two');
            insert into items values (1, 1, 'first');
            """
        )

    def execute(statement: str) -> Any:
        with server.connect() as connection:
            return connection.execute(statement)

    (folder / "penstock.toml").write_text(CONFIG)
    (folder / "orders.schema.yml").write_text(ORDERS)
    return Site(SimpleNamespace(dsn=server.dsn(), execute=execute, name="polled"), folder)


def test_documents_follow_without_logical_decoding(make_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    site = make_site(make_server, tmp_path)
    checked = json.loads(site.run("index", "check", "--json").stdout)
    said = " ".join(each["what"] for each in checked["indexes"][0]["checks"])
    assert checked["ready"] is True
    assert "polling does not see deleted rows" in said
    assert "polling does not see changes that leave updated_at as it is" in said
    assert "public.items is polled by xmin: each poll reads the whole table" in said
    assert "public.orders has no index on (updated_at)" in said
    assert "relation map" not in said, "no replica identity avoids it"

    assert "not needed: changes are polled" in site.run("run", "--plan").stdout
    filled = site.run("run", "--once", "-q", environment={})
    assert filled.returncode == 0, filled.stderr
    process = site.start("run")
    site.wait_output(process, "polling 2 tables")
    site.database.execute("update items set order_id = 2 where id = 1")
    for id_ in ("1", "2"):
        site.wait_output(process, f'"id": "{id_}"')
    documents = [json.loads(line) for line in site.output(process).splitlines() if line.startswith("{")]
    last = {each["id"]: each["document"] for each in documents}
    assert last["1"]["items"] == [], "the order that the item hung on, too"
    assert last["2"]["items"] == [{"note": "first"}]
    second = site.run("run", "--once", "-q")
    assert second.returncode == 75
    assert "is already running" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, site.output(process)
    check_discreet(site, site.output(process))
    shown = site.run("status").stdout
    assert "not running" in shown
    assert "seeded" in shown
    assert site.run("teardown", "--yes").returncode == 0


@pytest.mark.trap(44)
def test_a_standby_is_refused(make_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    server = make_server()
    site = make_site(lambda **_: server, tmp_path)
    server.stop()
    server.write_file("standby.signal", "")
    server.start()
    checked = json.loads(site.run("index", "check", "--json").stdout)
    assert checked["ready"] is False
    assert "the server is a standby" in " ".join(each["what"] for each in checked["indexes"][0]["checks"])
    refused = site.run("run", "--once", environment={})
    assert refused.returncode != 0
    assert "documents cannot be built from a standby" in refused.stderr
