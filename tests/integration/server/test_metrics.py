"""Metrics: a real Prometheus scrapes a real pipeline, the page of metrics is complete, and the rules fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.integration.server.conftest import Site
from tests.integration.server.prometheus import MONITORING, Prometheus, program

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/metrics.md"
NAMES = set(re.findall(r"^\| `(penstock_\w+)`", PAGE.read_text(), re.MULTILINE))


def scraped(site: Site) -> dict[str, str]:
    """The type of each metric, by name."""
    text = site.ask("/metrics").body.decode()
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def test_every_documented_metric_exists_and_every_metric_is_documented(site: Site) -> None:
    found = {name for name in scraped(site) if name.startswith("penstock_")}
    assert found == NAMES


def test_names_and_units_follow_the_conventions(site: Site) -> None:
    for name, kind in scraped(site).items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|millis|kb|mb|percent)(_|$)", name), name


def test_changes_are_counted_by_table_and_operation(site: Site) -> None:
    def counted(operation: str) -> float:
        text = site.ask("/metrics").body.decode()
        wanted = rf'^penstock_changes_total{{operation="{operation}",output="lake",table="public.many"}} (\S+)$'
        found = re.search(wanted, text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    # Other tests write to this table, too, but delete nothing: what they wrote is counted before this delete.
    deleted = counted("delete")
    site.database.execute("delete from many where id = 400")
    site.wait(lambda: counted("delete") > deleted, "what other tests wrote")
    before = {operation: counted(operation) for operation in ("insert", "update", "delete")}
    site.database.execute("insert into many select n, 'x' from generate_series(10001, 10007) n")
    site.database.execute("update many set note = 'y' where id between 10001 and 10005")
    site.database.execute("delete from many where id between 10001 and 10007")
    for operation, count in (("insert", 7), ("update", 5), ("delete", 7)):
        site.wait(lambda o=operation, c=count: counted(o) == before[o] + c, f"{count} of {operation}")


def test_what_happened_is_counted(site: Site) -> None:
    text = site.ask("/metrics").body.decode()
    assert 'penstock_errors_total{class="ValueOutOfRange",output="lake"} 1.0' in text
    assert re.search(r'penstock_documents_total{index="followed",outcome="sent",output="documents"} [1-9]', text)
    assert re.search(r'penstock_documents_total{index="followed",outcome="rejected",output="documents"} [1-9]', text)
    assert re.search(r'penstock_batch_seconds_count{output="lake",stage="write"} [1-9]', text)
    assert 'penstock_tables{output="lake",phase="errored"} 1.0' in text
    assert re.search(r"^penstock_children_resident_memory_bytes [1-9]", text, re.MULTILINE)
    assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)


def test_a_real_prometheus_scrapes_every_metric_and_fires_the_rules(site: Site, tmp_path: Path) -> None:
    with Prometheus(site.port, tmp_path) as prometheus:
        site.wait(lambda: prometheus.query("penstock_ready"), "a scrape")
        known = set(prometheus.ask("/api/v1/label/__name__/values"))
        # A gauge or a counter without labels is there from the start; what has not happened yet has no series.
        typed = set(prometheus.ask("/api/v1/metadata"))
        assert {name.removesuffix("_total") for name in NAMES} <= {name.removesuffix("_total") for name in typed}
        assert {"penstock_ready", "penstock_applied_lag_seconds", "penstock_batches_total"} <= known
        (up,) = prometheus.query("up")
        assert up["value"][1] == "1"
        # The pipeline has a table that stopped, and a document in quarantine.
        caused = {"PenstockTableStopped", "PenstockDocumentsQuarantined"}
        site.wait(lambda: caused <= prometheus.firing(), "the alerts")
        rules = [rule for group in prometheus.ask("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
        assert "PenstockSlotLost" not in prometheus.firing()


def test_every_rule_fires_when_its_condition_is_caused(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).parent / "alerts.test.yml", tmp_path)
    result = subprocess.run(
        [program("promtool"), "test", "rules", "alerts.test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def rules() -> list[dict]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_rule_is_tested_and_has_its_section_in_the_guide() -> None:
    guide = (ROOT / "docs/guides/alerts.md").read_text()
    tested = (Path(__file__).parent / "alerts.test.yml").read_text()
    for rule in rules():
        name = rule["alert"]
        assert f"\n## {name}\n" in guide
        assert rule["annotations"]["runbook"] == f"docs/guides/alerts.md#{name.lower()}"
        assert f"        alertname: {name}\n        exp_alerts:" in tested


def test_rules_and_the_board_use_metrics_that_exist() -> None:
    text = (MONITORING / "alerts.yml").read_text() + (MONITORING / "grafana.json").read_text()
    used = set(re.findall(r"\bpenstock_[a-z_]+", text))
    families = NAMES | {f"{name}_bucket" for name in NAMES}
    assert used - families == set()
    assert len(json.loads((MONITORING / "grafana.json").read_text())["panels"]) > 10
