"""After a rename, all commands know a table by its current name, and show where it is."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.cli.support import PATIENCE, Site
from tests.support.waiting import pause

DELTA = '[destination]\ntype = "delta"\npath = "lake"'
PARQUET = '[destination]\ntype = "parquet"\npath = "lake"'
KEEP = '[schema_changes]\nrename_table = "keep"'


def tables(site: Site) -> dict[str, dict[str, Any]]:
    result = site.run("tables", "--json")
    assert result.returncode == 0, result.stderr
    return {each["table"]: each for each in json.loads(result.stdout)["tables"]}


def wait(look: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not look():
        assert time.monotonic() < begun + PATIENCE
        pause(begun, shortest=0.2, longest=1.0)


@pytest.mark.parametrize(
    ("destination", "more", "folder"),
    [(DELTA, "", "public/sales"), (DELTA, KEEP, "public/orders"), (PARQUET, "", "public/orders")],
    ids=["delta follows", "delta keeps", "parquet keeps"],
)
def test_all_commands_know_a_renamed_table_by_its_current_name(
    site: Site, destination: str, more: str, folder: str
) -> None:
    site.configure(destination=destination, more=more)
    process = site.start("run")
    site.wait_ready(3)
    place = tables(site)["public.orders"]["location"]
    assert place == str(site.folder / "lake/public/orders")
    assert place in site.run("tables").stdout.replace("\n", "")
    site.database.execute("alter table orders rename to sales")
    wait(lambda: (tables(site).get("public.sales") or {}).get("location") == str(site.folder / "lake" / folder))
    site.wait_ready(3)
    assert "public.orders" not in tables(site)
    status = json.loads(site.run("status", "--json").stdout)
    assert {each["table"] for each in status["outputs"][0]["tables"]} == tables(site).keys()

    verified = site.run("verify", "sales", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    [output] = json.loads(verified.stdout)["outputs"]
    assert [each["table"] for each in output["tables"]] == ["public.sales"]
    assert site.run("resync", "public.sales").returncode == 0
    site.wait_ready(3)
    old = site.run("resync", "public.orders")
    assert old.returncode != 0
    assert "has no table 'public.orders'" in old.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, site.output(process)
    assert "public.orders was renamed to public.sales\n" in site.output(process)
    assert "is no longer in the publication" not in site.output(process)

    # While it is stopped, the source knows the current name.
    site.database.execute("alter table sales rename to deals")
    asked = site.run("resync", "deals", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["tables"] == ["public.deals"]
    process = site.start("run")
    wait(lambda: tables(site).get("public.deals", {}).get("phase") == "ready")
    wait(lambda: {each["status"] for each in commands(site) if each["kind"] == "resync"} == {"done"})
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0, site.output(process)


def commands(site: Site) -> list[dict[str, Any]]:
    from penstock.config import load_config

    config = load_config(site.folder / "penstock.toml", site.environment)
    with config.open_store() as store:
        return [{"kind": each.kind.value, "status": each.status.value} for each in store.get_commands()]


def test_tables_are_listed_while_the_destination_is_away(site: Site) -> None:
    site.configure(destination=DELTA)
    assert site.run("run", "--once", "-q").returncode == 0
    moved = (site.folder / "lake").rename(site.folder / "elsewhere")
    found = tables(site)
    assert {each["location"] for each in found.values()} == {None}
    moved.rename(site.folder / "lake")
    assert tables(site)["public.orders"]["location"] == str(site.folder / "lake/public/orders")
