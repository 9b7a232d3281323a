"""`penstock run` with a server and with JSON log lines, and what is printed for monitoring."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.integration.cli.support import Site
from tests.program import PATIENCE, penstock


def test_run_says_where_it_serves_and_stops_although_a_page_follows(database: Any, tmp_path: Path) -> None:
    database.execute("create table things (id int primary key, note text); insert into things values (1, 'x')")
    site = Site(database, tmp_path)
    site.configure(more='[server]\nport = 0\n[log]\nformat = "json"\n')
    process = site.start("run")
    try:
        site.wait_output(process, "serving on http://127.0.0.1:")
        address = re.search(r"serving on (http://127\.0\.0\.1:\d+)", site.output(process))
        assert address is not None
        with urllib.request.urlopen(f"{address[1]}/healthz", timeout=PATIENCE) as answer:
            assert json.load(answer) == {"status": "ok"}
        site.wait_output(process, '"copied"')
        port = int(address[1].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as page:
            page.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert page.recv(100).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0, site.output(process)
        assert "Traceback" not in site.output(process)
        # The config asks for JSON, and an option goes before it.
        lines = [json.loads(line) for line in site.output(process).splitlines()]
        assert "copied" in {line.get("event") for line in lines}
        plain = site.run("--log-format", "text", "run", "--once")
        assert plain.returncode == 0
        assert "caught up, stopping" in plain.stderr.splitlines()
    finally:
        if process.poll() is None:
            process.kill()


def test_rules_and_the_board_are_printed() -> None:
    rules = yaml.safe_load(penstock("monitoring", "alerts", environment={}).stdout)
    assert rules["groups"][0]["rules"][0]["alert"] == "PenstockDown"
    assert json.loads(penstock("monitoring", "grafana", environment={}).stdout)["title"] == "Penstock"
