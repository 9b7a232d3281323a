"""The page in a real browser, on a real pipeline: every view, an error with its remedy, actions, a lost connection."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.server.conftest import HOSTILE, TOKEN, Site
from tests.integration.server.test_verify import a_lost_row

playwright = pytest.importorskip("playwright.sync_api")

WAIT = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    """A tab on the page; nothing may be logged as an error, and nothing may leave the server."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(WAIT)
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append(dialog.message))
    tab.on("request", lambda request: wrong.append(request.url) if not _is_own(request.url, site) else None)
    yield tab
    tab.close()
    assert wrong == []


def _is_own(url: str, site: Site) -> bool:
    return url.startswith((f"{site.address}/", "data:"))


def unlock(page: Any, token: str = TOKEN) -> None:
    page.get_by_role("button", name="Unlock actions").first.click()
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Unlock", exact=True).click()


def test_the_overview_draws_the_flow_and_lists_what_needs_attention(page: Any, site: Site) -> None:
    page.goto(site.address)
    flow = page.get_by_role("list", name=re.compile("Flow of changes"))
    playwright.expect(flow).to_contain_text("PostgreSQL 18", timeout=WAIT)
    for text in ("Capture", "Spool", "Apply · lake", "Destination · parquet", "Apply · documents"):
        playwright.expect(flow).to_contain_text(text, ignore_case=True)
    playwright.expect(page.get_by_role("status").first).to_have_text("ready", timeout=WAIT)
    attention = page.locator("section", has_text="Needs attention")
    playwright.expect(attention).to_contain_text("public.errored", timeout=WAIT)
    playwright.expect(attention).to_contain_text("1 document in quarantine")
    playwright.expect(page.get_by_role("img", name=re.compile("Lag over the last hour"))).to_be_visible(timeout=WAIT)


def test_tables_are_searched_filtered_and_opened(page: Any, site: Site) -> None:
    page.goto(f"{site.address}/#/tables")
    rows = page.locator("tbody tr")
    playwright.expect(rows).to_have_count(4, timeout=WAIT)
    playwright.expect(rows.first).to_contain_text("public.errored")
    playwright.expect(rows.first.get_by_role("button", name=re.compile("public.errored"))).to_be_visible()
    page.get_by_label("Search tables").fill("many")
    playwright.expect(rows).to_have_count(1, timeout=WAIT)
    page.get_by_label("Search tables").fill("")
    playwright.expect(rows).to_have_count(4, timeout=WAIT)
    page.get_by_role("button", name="Table", exact=True).click()
    playwright.expect(page.locator("th[aria-sort=ascending]")).to_have_text("Table")
    page.get_by_role("button", name="stopped 1").click()
    playwright.expect(rows).to_have_count(1, timeout=WAIT)
    page.get_by_role("link", name="public.errored").click()
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("public.errored")
    playwright.expect(page.locator("main")).to_contain_text("History of phases", timeout=WAIT)
    playwright.expect(page.locator("main")).to_contain_text("day")
    site.database.execute("update many set note = 'in a batch' where id = 5")
    page.goto(f"{site.address}/#/tables/lake/public.many")
    batches = page.locator("section", has_text="Recent batches")
    playwright.expect(batches).to_contain_text("1 update", timeout=WAIT)
    playwright.expect(batches).to_contain_text(re.compile(r"job \d+ ms · commit \d+ ms · record"))


def test_documents_and_events_are_shown(page: Any, site: Site) -> None:
    page.goto(f"{site.address}/#/documents")
    playwright.expect(page.locator("tbody tr").first).to_contain_text("followed", timeout=WAIT)
    playwright.expect(page.locator("main")).not_to_contain_text("1000")
    unlock(page)
    playwright.expect(page.locator("main")).to_contain_text("1000", timeout=WAIT)
    page.get_by_role("link", name="Events").click()
    playwright.expect(page.locator("main")).to_contain_text("copied public.many", timeout=WAIT)
    playwright.expect(page.locator("main")).to_contain_text("Commands")


def test_tables_are_compared_and_keys_are_shown_with_the_token(page: Any, site: Site) -> None:
    page.goto(f"{site.address}/#/verify")
    with a_lost_row(site, 78):
        page.get_by_role("button", name="Verify all tables").click()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Unlock", exact=True).click()
        page.get_by_role("button", name="Continue").click()
        playwright.expect(page.get_by_role("progressbar")).to_be_visible(timeout=WAIT)
        playwright.expect(page.get_by_role("button", name="Verify all tables")).to_be_disabled()
        # Other tests compare only some tables.
        run = page.locator("details", has_text="1 not compared").filter(has_text="1 different").first
        run.locator("summary").click(timeout=WAIT)
    playwright.expect(run).to_contain_text("1 missing")
    playwright.expect(run).to_contain_text("it has stopped with an error")
    playwright.expect(run).not_to_contain_text("id=78")
    run.get_by_role("button", name="Show keys").click()
    playwright.expect(run).to_contain_text("missing id=78", timeout=WAIT)
    page.get_by_role("link", name="public.many").first.click()
    playwright.expect(page.get_by_role("button", name="Verify public.many")).to_be_visible(timeout=WAIT)
    page.get_by_role("link", name="Events").click()
    commands = page.locator("section", has_text="Commands")
    playwright.expect(commands).to_contain_text("verify", timeout=WAIT)
    playwright.expect(commands).not_to_contain_text("{")


def test_a_table_is_copied_again_with_the_token_and_not_without(page: Any, site: Site) -> None:
    def copies() -> int:
        history = site.ask("/api/v1/tables/public.followed").json["history"]
        return [each["phase"] for each in history].count("data_sync")

    before = copies()
    page.goto(f"{site.address}/#/tables/lake/public.followed")
    button = page.get_by_role("button", name="Copy again public.followed")
    button.click()
    page.get_by_role("button", name="Cancel").first.click()
    button.click()
    page.get_by_label("Token").fill("wrong-token-0123456789")
    page.get_by_role("button", name="Unlock", exact=True).click()
    page.get_by_role("button", name="Continue").click()
    playwright.expect(page.locator("#said")).to_contain_text("actions need the token", timeout=WAIT)
    assert copies() == before
    button.click()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Unlock", exact=True).click()
    page.get_by_role("button", name="Continue").click()
    playwright.expect(page.locator("#said")).to_contain_text(re.compile("done|accepted"), timeout=WAIT)
    site.wait(lambda: copies() == before + 1, "the copy")


def test_a_lost_connection_is_shown_and_comes_back(page: Any, site: Site) -> None:
    page.goto(site.address)
    playwright.expect(page.get_by_role("status").first).to_have_text("ready", timeout=WAIT)
    page.context.set_offline(True)
    # An open stream survives in this browser, so the server ends it: it is started again on the same port.
    serving = site.pipeline._server
    serving._choice = replace(serving._choice, port=site.port)
    serving._server.should_exit = True
    playwright.expect(page.get_by_role("alert")).to_be_visible(timeout=WAIT)
    page.context.set_offline(False)
    playwright.expect(page.get_by_role("alert")).to_be_hidden(timeout=WAIT)
    assert site.ask("/healthz").status == 200


def test_the_page_works_with_the_keyboard_and_in_the_dark(browser: Any, site: Site) -> None:
    tab = browser.new_page(color_scheme="dark")
    tab.set_default_timeout(WAIT)
    tab.goto(site.address)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(3):
        tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_role("heading", level=1)).to_have_text("Tables")
    assert tab.evaluate("document.activeElement.id") == "main"
    assert tab.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(14, 20, 20)"
    tab.close()


def test_a_narrow_window_shows_everything_without_scrolling_sideways(page: Any, site: Site) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    outside = """() => [...document.querySelectorAll("main *, header *")].filter((each) => each.getClientRects().length
        && getComputedStyle(each).position !== "absolute" && each.getBoundingClientRect().right > 390)
        .map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 30)}`)"""
    for view, content in (
        ("#/", ".node"),
        ("#/tables", "td.name"),
        ("#/tables/lake/public.errored", ".facts"),
        ("#/documents", "td.name"),
        ("#/events", "td.text"),
    ):
        page.goto(f"{site.address}/{view}")
        page.wait_for_selector(content)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        assert page.evaluate(outside) == [], view
    assert page.evaluate("new Set([...document.querySelectorAll('nav a')].map((each) => each.offsetTop)).size") == 1
    page.goto(f"{site.address}/#/tables")
    playwright.expect(page.get_by_role("button", name="Resume public.errored")).to_be_visible(timeout=WAIT)


def test_a_thousand_tables_stay_usable(page: Any, site: Site) -> None:
    """The list is real up to the server's answer, which is that of a thousand tables here."""
    known = site.ask("/api/v1/tables").json["tables"][0]

    def answer(route: Any) -> None:
        many = [{**known, "table": f"public.t{number:04}"} for number in range(200)]
        route.fulfill(json={"tables": many, "found": 1000, "total": 1000, "phases": {"ready": 1000}})

    page.route(re.compile(r"/api/v1/tables\?"), answer)
    page.goto(f"{site.address}/#/tables")
    playwright.expect(page.locator("tbody tr")).to_have_count(200, timeout=WAIT)
    playwright.expect(page.locator("main")).to_contain_text("1,000 of 1,000")
    playwright.expect(page.get_by_role("button", name="Show more")).to_be_visible()


def test_names_are_text_and_never_markup(page: Any, site: Site) -> None:
    site.database.execute(f'insert into "{HOSTILE.removeprefix("public.")}" values (1)')
    main = page.locator("main")
    for view, text in (
        ("#/", "<i>day</i>"),  # in the reason of an error
        ("#/tables/lake/public.errored", "<i>day</i>"),
        ("#/events", f"copied {HOSTILE}"),
        ("#/tables", HOSTILE),
    ):
        page.goto(f"{site.address}/{view}")
        playwright.expect(main).to_contain_text(text, timeout=WAIT)
        assert main.locator("img, i:not(.bar > i), b b, script").count() == 0, view
    page.get_by_role("link", name=HOSTILE).click()
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    # It is not taken for another table, although its name is a path to one.
    playwright.expect(main).to_contain_text("<b>note</b>", timeout=WAIT)
    playwright.expect(page.locator("section", has_text="Recent batches")).to_contain_text("1 insert", timeout=WAIT)
    assert main.locator("img, b").count() == 0


def test_an_address_that_somebody_typed_shows_a_view(page: Any, site: Site) -> None:
    for typed, title in (("#/tables/%", "Not found"), ("#/tables/lake/%E0%A4%A", "Not found"), ("#/%zz", "Overview")):
        page.goto(f"{site.address}/{typed}")
        playwright.expect(page.get_by_role("heading", level=1)).to_have_text(title, timeout=WAIT)
