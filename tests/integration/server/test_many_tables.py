"""A thousand real tables: copied, followed, and usable on the page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.capture import process
from tests.conftest import Database
from tests.integration.server.conftest import Site
from tests.integration.server.test_page import WAIT, browser, page, playwright  # noqa: F401 (fixtures)
from tests.program import start_capture

TABLES = 1000
CREATE = f"""
    do $$ begin
        for n in 0..{TABLES - 1} loop
            execute format('create table t%s (id int primary key)', lpad(n::text, 4, '0'));
        end loop;
    end $$
"""


@pytest.fixture
def site(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(process, "start_child", start_capture)
    database.execute(CREATE)
    pipeline = penstock.Pipeline(
        database.dsn, {"type": "memory"}, folder=tmp_path, spark={"master": "none"}, server={"port": 0}
    )
    with pipeline:
        made = Site(pipeline, database, tmp_path)
        made.wait(lambda: pipeline.address, "the server")
        yield made


@pytest.mark.soak  # copying a thousand tables takes about two minutes of processor time
@pytest.mark.timeout(1800)
def test_a_thousand_tables_are_copied_listed_searched_and_opened(page: Any, site: Site) -> None:  # noqa: F811
    page.goto(f"{site.address}/#/tables")
    main, rows = page.locator("main"), page.locator("tbody tr")
    # While they are copied, the page lists them, with their phases.
    playwright.expect(main).to_contain_text("1,000 of 1,000", timeout=WAIT)
    playwright.expect(rows).to_have_count(200, timeout=WAIT)
    site.pipeline.wait_until_ready(600)
    ready = {"ready": TABLES}
    site.wait(lambda: site.ask("/api/v1/tables?limit=1").json["phases"] == ready, "a status with them")
    playwright.expect(page.get_by_role("button", name=f"ready {TABLES:,}")).to_be_visible(timeout=WAIT)
    page.get_by_label("Search tables").fill("t0999")
    playwright.expect(rows).to_have_count(1, timeout=WAIT)
    playwright.expect(main).to_contain_text("1 of 1,000")
    page.get_by_label("Search tables").fill("t00")
    playwright.expect(rows).to_have_count(100, timeout=WAIT)
    page.get_by_label("Search tables").fill("")
    for shown in range(400, TABLES + 1, 200):
        page.get_by_role("button", name="Show more").click()
        playwright.expect(rows).to_have_count(shown, timeout=WAIT)
    site.database.execute("insert into t0999 values (1)")
    page.get_by_role("link", name="public.t0999").click()
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("public.t0999")
    playwright.expect(page.locator("section", has_text="Recent batches")).to_contain_text("1 insert", timeout=WAIT)
    page.get_by_role("link", name="Overview", exact=True).click()
    flow = page.get_by_role("list", name=re.compile("Flow of changes"))
    playwright.expect(flow).to_contain_text("1,000 of 1,000 tables ready", timeout=WAIT)
