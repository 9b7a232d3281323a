"""The routes, without a server."""

from __future__ import annotations

import asyncio
import json
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
