"""A real Prometheus that scrapes a pipeline, with the rules that are shipped."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

MONITORING = Path(__file__).parents[3] / "src/penstock/server/monitoring"


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} (Debian: apt-get install prometheus)")
    return found


def impatient_rules() -> dict[str, Any]:
    """Return the shipped rules with shorter times only: they fire at once, and two minutes are two seconds."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for rule in (each for group in rules["groups"] for each in group["rules"]):
        rule.pop("for", None)
        if re.search(r"_(stalled|lag)_seconds > ", rule["expr"]):
            rule["expr"] = re.sub(r"> \d+$", "> 2", rule["expr"])
    return rules


class Prometheus:
    """A context manager; scrapes the port of a pipeline, and evaluates the rules, every second."""

    def __init__(self, port: int, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "rules.yml").write_text(json.dumps(impatient_rules()))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "penstock", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self) -> Prometheus:
        command = [
            program("prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'prometheus'}",
            f"--web.listen-address={self._address}",
        ]
        with open(self._folder / "prometheus.log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def ask(self, path: str) -> Any:
        """Return what it answers; nothing while it starts."""
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return {}

    def query(self, expression: str) -> list[Any]:
        return self.ask(f"/api/v1/query?query={quote(expression)}").get("result", [])

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self.ask("/api/v1/alerts").get("alerts", ())
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}
