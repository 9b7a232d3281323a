"""What scripts read: the plan, and the answers of a pipeline."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.cli.support import Site, check_discreet


def ask(site: Site, *arguments: str, status: int = 0) -> dict[str, Any]:
    result = site.run(*arguments, "--json")
    assert result.returncode == status, result.stdout + result.stderr
    check_discreet(site, result.stdout + result.stderr)
    return json.loads(result.stdout)


def test_the_plan(site: Site):
    plan = ask(site, "run", "--plan")
    assert plan["pipeline"] == "shop"
    assert plan["slot"] == site.slot
    assert plan["slot_plan"] == plan["state_plan"] == "would be created"
    assert plan["destinations"] == {"tables": "parquet"}
    assert plan["tables"]["public.orders"] == {"tables": "would be copied"}
    wrong = site.run("run", "--json")
    assert wrong.returncode == 2
    assert "--log-format json" in wrong.stderr.replace("\n", " ")


def test_commands(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    noted = ask(site, "pause")
    assert {"kind": "pause", "running": False, "status": "pending", "tables": []}.items() <= noted.items()
    assert ask(site, "resume")["command"] == noted["command"] + 1
    process = site.start("run")
    site.wait_output(process, "following publication shop")
    site.wait_ready(3)
    done = ask(site, "resync", "orders", "--wait", "60")
    assert {"kind": "resync", "running": True, "status": "done", "tables": ["public.orders"]}.items() <= done.items()
    assert (done["pipeline"], done["output"], done["reason"]) == ("shop", "tables", None)
    refused = ask(site, "rollback", "items", "--wait", "60", status=1)
    assert refused["status"] == "refused"
    assert "only an errored table can be rolled back" in refused["reason"]
