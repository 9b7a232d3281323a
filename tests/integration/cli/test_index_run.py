"""`penstock run` with search indexes, in a real search server: alone, and beside tables; and the commands around it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.documents.base import Rejection
from penstock.lsn import Lsn
from penstock.state.quarantine import open_quarantine
from penstock.testing.opensearch import ExistingOpenSearch
from tests.integration.cli.support import ONE, PATIENCE, Site, check_discreet

ORDERS = """
version: 1
table: orders
fields:
  - {text: note}
  - {count: items, table: items, foreign_key: order_id}
"""


class SearchSite(Site):
    """A folder with a config whose documents go to a search server."""

    opensearch: ExistingOpenSearch
    index: str

    def configure_search(self, *, tables: str = "", sink: str = "") -> None:
        (self.folder / "orders.schema.yml").write_text(ORDERS)
        self.configure(
            destination=tables,
            more=f"""
            [[index]]
            specification = "orders.schema.yml"
            name = "{self.index}"
            failure_policy = "skip"
            [sink]
            {sink or 'type = "opensearch"' + chr(10) + f'url = "{self.opensearch.url}"' + chr(10) + "replicas = 0"}
            """,
        )

    def index_facts(self) -> dict[str, Any]:
        result = self.run("index", "list", "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["indexes"][0]

    def document(self, id_: str) -> dict[str, Any]:
        found = self.opensearch.request("GET", f"/{self.index}/_doc/{id_}")
        return found["_source"]


@pytest.fixture
def search_site(database: Any, tmp_path: Path, opensearch: ExistingOpenSearch, index_name: str) -> Iterator[SearchSite]:
    database.execute(
        """
        create table orders (id int primary key, note text);
        create table items (id int primary key, order_id int, note text);
        create index on items (order_id);
        insert into orders select i, 'order ' || i from generate_series(1, 300) i;
        insert into items select i, 1 + i % 300, 'item' from generate_series(1, 900) i;
        """
    )
    site = SearchSite(database, tmp_path)
    site.opensearch, site.index = opensearch, index_name
    yield site
    for process in site.processes:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE)


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_documents_alone_are_filled_followed_rebuilt_and_torn_down(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search()
    plan = json.loads(site.run("run", "--plan", "--json").stdout)
    assert (plan["sink"], plan["destinations"]) == ("opensearch", {})
    assert plan["indexes"] == {site.index: "would be built from public.orders"}

    process = site.start("run")
    site.wait_output(process, f"index {site.index} is complete and in use")
    site.database.execute("update orders set note = 'changed' where id = 7; delete from items where order_id = 8")
    assert site.run("index", "diff", "--full", "--wait", "60").returncode == 0
    assert site.document("7") == {"note": "changed", "items": 3}
    assert site.document("8")["items"] == 0

    status = json.loads(site.run("status", "--json").stdout)
    [output] = status["outputs"]
    assert (output["output"], output["tables"], output["indexes"][0]["status"]) == ("documents", [], "seeded")
    assert site.index in site.run("status").stdout

    before = site.index_facts()["generation"]
    answer = json.loads(site.run("index", "rebuild", site.index, "--json", "--wait", "60").stdout)
    assert (answer["status"], answer["running"]) == ("done", True)
    wait_until(lambda: (facts := site.index_facts())["seeded"] and facts["generation"] != before, "the rebuild")
    assert site.index_facts()["documents"] == 300
    assert json.loads(site.run("pause", "--json").stdout)["status"] == "done"
    assert json.loads(site.run("resume", "--json").stdout)["status"] == "done"

    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0, site.output(process)
    check_discreet(site, site.output(process))
    report = site.run("index", "diff", "--sample", "50", "--json")
    assert json.loads(report.stdout)["result"] == "equal", report.stdout + report.stderr

    for command in (("tables",), ("resync", "public.orders"), ("verify",)):
        refused = site.run(*command)
        assert refused.returncode in (1, 2)
        assert "this command is for tables, and search indexes have none of their own" in refused.stderr
    removed = site.run("teardown", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert site.database.execute(f"select count(*) from pg_replication_slots where slot_name = '{site.slot}'") == [(0,)]
    assert site.index_facts()["status"] == "not built"
    assert site.index_facts()["documents"] == 300, "what is in the sink stays"


def test_differences_end_with_1_and_are_named_without_values(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search()
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("update orders set note = 'very secret' where id = 7; delete from orders where id = 9")
    result = site.run("index", "diff", "--full", "--wait", "0")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 extra, 1 different" in result.stdout
    assert "different  7  note" in result.stdout
    assert "very secret" not in result.stdout + result.stderr
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.run("index", "diff", "--full").returncode == 0


def test_tables_and_documents_share_a_slot(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search(tables=ONE)
    result = site.run("run", "--once")
    assert result.returncode == 0, result.stderr
    check_discreet(site, result.stderr)
    assert "2 tables, into parquet; 1 index, into opensearch" in result.stderr
    site.database.execute("insert into orders values (1000, 'new'); insert into items values (1000, 1000, 'new')")
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.document("1000") == {"note": "new", "items": 1}
    assert site.rows("orders") == site.source_rows("orders")
    assert site.run("index", "diff", "--full").returncode == 0
    assert site.run("verify", "-q").returncode == 0
    status = json.loads(site.run("status", "--json").stdout)
    assert [each["output"] for each in status["outputs"]] == ["tables", "documents"]
    assert site.phases() == {"public.items": "ready", "public.orders": "ready"}


def test_a_sink_that_is_away_is_told_and_an_index_that_does_not_fit_too(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search(sink='type = "opensearch"\nurl = "http://127.0.0.1:1"\nretry_seconds = 1')
    listed = site.run("index", "list")
    assert listed.returncode == 0
    assert "the sink cannot be read: the search server does not answer" in listed.stderr
    compared = site.run("index", "diff")
    assert compared.returncode == 2
    check_discreet(site, listed.stderr + compared.stderr)
    (site.folder / "orders.schema.yml").write_text(ORDERS.replace("text: note", "text: nothing"))
    run = site.run("run", "--once", "-q")
    assert run.returncode == 1
    assert "public.orders has no column 'nothing'" in run.stderr
    check_discreet(site, run.stderr)


def test_documents_on_standard_output_are_lines_of_json(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search(sink='type = "stdout"')
    result = site.run("run", "--once", "-q")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["id"] for line in lines} == {str(n) for n in range(1, 301)}
    assert lines[0]["document"].keys() == {"note", "items"}


def test_what_was_set_aside_is_listed_tried_again_and_dropped(search_site: SearchSite) -> None:
    site = search_site
    site.configure_search()
    assert site.run("index", "quarantine", "list").stdout == "no quarantined documents\n"
    assert site.run("run", "--once", "-q").returncode == 0
    state = f"sqlite:///{site.folder}/work/state.db"
    with closing(open_quarantine(state, "shop:documents")) as quarantine:
        rejections = [Rejection(site.index, str(n), "mapper_parsing_exception", "abc") for n in (1, 2, 3)]
        quarantine.add(rejections, Lsn(77))
    listed = site.run("index", "quarantine", "list")
    assert listed.stdout.count("mapper_parsing_exception") == 3
    facts = json.loads(site.run("index", "quarantine", "list", site.index, "--limit", "2", "--json").stdout)
    assert facts["counts"] == {site.index: 3}
    assert [each["attempts"] for each in facts["documents"]] == [1, 1]
    assert site.index_facts()["quarantined"] == 3

    nothing = site.run("index", "quarantine", "retry", site.index)
    assert nothing.returncode == 2, "ids, or --all"
    unknown = site.run("index", "quarantine", "retry", site.index, "99")
    assert unknown.returncode == 1
    assert f"no quarantined document 99 in index {site.index}" in unknown.stderr
    asked = json.loads(site.run("index", "quarantine", "retry", site.index, "1", "--json").stdout)
    assert asked == {"index": site.index, "ids": ["1"], "running": False}
    assert json.loads(site.run("index", "quarantine", "drop", site.index, "2", "--json").stdout)["dropped"] == 1
    assert "dropped 1 document from" in site.run("index", "quarantine", "drop", site.index, "3").stdout


def test_a_refused_document_is_set_aside_and_returns_when_its_row_fits(search_site: SearchSite) -> None:
    site = search_site
    site.database.execute("alter table orders add day date; update orders set day = 'infinity' where id = 5")
    site.configure_search()
    (site.folder / "orders.schema.yml").write_text(ORDERS + "  - {date: day}\n")

    def set_aside() -> list[tuple[str, int, bool]]:
        found = json.loads(site.run("index", "quarantine", "list", "--json").stdout)["documents"]
        return [(each["id"], each["attempts"], each["wanted"]) for each in found]

    result = site.run("run", "--once")
    assert result.returncode == 0, result.stderr
    assert set_aside() == [("5", 1, False)]
    assert (site.index_facts()["documents"], site.index_facts()["quarantined"]) == (299, 1)
    assert "will be retried" in site.run("index", "quarantine", "retry", site.index, "--all").stdout
    assert set_aside() == [("5", 1, True)]
    assert site.run("run", "--once", "-q").returncode == 0
    assert set_aside() == [("5", 2, False)], "refused again"
    site.database.execute("update orders set day = '2026-11-15' where id = 5")
    assert site.run("run", "--once", "-q").returncode == 0
    assert set_aside() == []
    assert site.document("5")["day"] == "2026-11-15"
    assert site.run("index", "diff", "--full").returncode == 0
