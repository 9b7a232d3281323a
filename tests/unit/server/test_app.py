"""The routes, without a server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import quote

import pytest

from penstock.config import make_config
from penstock.server import app
from penstock.server.monitor import Monitor

CONFIG = {
    "pipeline": {"id": "shop"},
    "source": {"url": "postgresql://localhost/shop"},
    "destination": {"type": "memory"},
    "server": {},
}


NAMES = [f"public.{name}" for name in ("a", "a/b", "a\nb", "ab", "a\n", "%", "..", "a?b", "a#b")]


def test_any_name_of_a_table_can_be_asked_for_and_none_gets_the_answer_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "table_page", lambda monitor, table, output: {"table": table})
    running: Any = None
    made = app.make_app(Monitor(make_config(CONFIG), running))

    async def ask_all() -> list[Any]:
        return [await ask(made, f"/api/v1/tables/{name}") for name in NAMES]

    assert asyncio.run(ask_all()) == [{"table": name} for name in NAMES]


def test_answers_take_a_share_of_the_processor_time_however_many_clients_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    working: list[str] = []

    def work(monitor: Any, table: str, output: Any) -> Any:
        """Take 20 ms of processor time."""
        working.append(table)
        at_once.append(len(working))
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass
        working.remove(table)
        return {"table": table}

    monkeypatch.setattr(app, "table_page", work)
    monkeypatch.setattr(app, "MAKING_MILLISECONDS", 100)
    running: Any = None
    made = app.make_app(Monitor(make_config(CONFIG), running))

    async def ask_many() -> float:
        begun = time.monotonic()
        await asyncio.gather(*(ask(made, f"/api/v1/tables/public.{number}") for number in range(30)))
        return time.monotonic() - begun

    # 600 ms of work: 100 ms and what has begun meanwhile at once, the rest at 250 ms per second.
    took = asyncio.run(ask_many())
    assert took > (0.6 - 0.1 - 2 * app.MADE_AT_ONCE * 0.02) / 0.25
    assert max(at_once) <= app.MADE_AT_ONCE

    async def fail_and_ask() -> Any:
        monkeypatch.setattr(app, "table_page", lambda *_: 1 / 0)
        for number in range(2 * app.MADE_AT_ONCE):
            with pytest.raises(ZeroDivisionError):
                await ask(made, f"/api/v1/tables/public.x{number}")
        monkeypatch.setattr(app, "table_page", lambda *_: {"fine": True})
        return await ask(made, "/api/v1/tables/public.y")

    assert asyncio.run(fail_and_ask()) == {"fine": True}


def test_a_scrape_never_waits_behind_the_searches_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAKING_MILLISECONDS", 1)
    monkeypatch.setattr(app, "MAKING_MILLISECONDS_PER_SECOND", 1e-6)
    monkeypatch.setattr(app.Metrics, "render", lambda _: b'"metrics"')
    monkeypatch.setattr(app, "table_page", lambda *_: sum(range(1_000_000)))
    running: Any = None
    made = app.make_app(Monitor(make_config(CONFIG), running))

    async def search_and_scrape() -> Any:
        await ask(made, "/api/v1/tables/public.first")  # uses up the processor time
        searches = [asyncio.ensure_future(ask(made, f"/api/v1/tables/public.{number}")) for number in range(20)]
        try:
            return await asyncio.wait_for(ask(made, "/metrics"), 60), [each.done() for each in searches]
        finally:
            for each in searches:
                each.cancel()

    assert asyncio.run(search_and_scrape()) == ("metrics", [False] * 20)


async def ask(made: Any, path: str) -> Any:
    """Return the answer to a request."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        "scheme": "http",
    }
    await made(scope, receive, send)
    return json.loads(sent[1]["body"])
