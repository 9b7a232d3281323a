"""The routes: health, metrics, the API as JSON, actions, a stream of events, and the page.

Every answer is made from `penstock.server.monitor`, so that page, API, metrics and `penstock status` agree. Answers
are kept for a second: many clients cost about as much as one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.comparison.compare import CompareSettings
from penstock.comparison.verification import VerifySettings
from penstock.config.problems import explain
from penstock.errors import ConfigError, PenstockError, StateError
from penstock.observe import redact, scrub
from penstock.operations.commands import send_command
from penstock.operations.status_model import status_facts
from penstock.operations.verify import VerifyRequest, verifications
from penstock.server.guarding import Bucket, Refused
from penstock.server.metrics import CONTENT_TYPE, Metrics
from penstock.server.monitor import Monitor, describe
from penstock.server.openapi import TABLE_QUERY, CommandRequest, RetryRequest, VerifyBody, make_document
from penstock.server.views import (
    batch_list,
    command_log,
    error_list,
    output_list,
    pipeline_summary,
    quarantined,
    table_page,
    table_rows,
    verification_list,
)
from penstock.state import CommandKind, CommandStatus
from penstock.state.quarantine import Quarantine

logger = logging.getLogger(__name__)

KEPT_SECONDS = 1.0
"""How long an answer is kept."""
KEPT_ANSWERS = 64
MAKING_MILLISECONDS, MAKING_MILLISECONDS_PER_SECOND = 2000, 250
"""Processor time that making answers may take at once, and after that: a quarter of a core. Then clients wait."""
MADE_AT_ONCE = 8
"""Answers that are made at the same time."""
STREAMS = 50
"""Pages that may follow the pipeline at the same time."""
ACTION_SECONDS = 3.0
"""How long an action waits for the pipeline's answer."""
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/elements.js": ("elements.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

Read = Callable[[Request], Any]
Make = Callable[[Request], Response]
Key = tuple[str | None, ...]
"""The path of a kept answer, and the values of its parameters."""


class NameConvertor(PathConvertor):
    """The rest of a path: names of tables have slashes and line breaks, which Starlette's own `path` does not match."""

    regex = "(?s:.*)"


register_url_convertor("name", NameConvertor())


def make_app(monitor: Monitor) -> Starlette:
    """Return the application; `penstock.server.guarding.Guard` goes around it."""
    app = Starlette(routes=Routes(monitor).all(), exception_handlers={HTTPException: _not_found, Refused: _refuse})
    # Its redirects repeat the Host of the request, without the scheme of a proxy.
    app.router.redirect_slashes = False
    return app


class Routes:
    """The routes of one pipeline."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._config = monitor.config
        self._metrics = Metrics(monitor)
        self._document = make_document()
        self._kept: dict[Key, tuple[float, Response]] = {}
        self._making: dict[Key, asyncio.Future[Response]] = {}
        """Answers that are being made."""
        # Each search is another answer: a client that asks for thousands must not take the pipeline's processor time.
        self._processor = Bucket(MAKING_MILLISECONDS, MAKING_MILLISECONDS_PER_SECOND)
        self._making_now = 0
        self._streams = 0

    def all(self) -> list[Route]:
        """Every route; those below `/api/v1` are in the OpenAPI document."""
        api = "/api/v1"
        return [
            Route("/healthz", self._health),
            Route("/readyz", self._readiness),
            Route("/metrics", self._kept_answer(self._scrape, waits=False)),
            *(Route(path, _file(*page)) for path, page in _PAGE.items()),
            Route(f"{api}/openapi.json", self._json(lambda _: self._document)),
            Route(f"{api}/now", self._json(lambda _: describe(self._monitor))),
            Route(f"{api}/status", self._json(lambda _: status_facts(self._monitor.status()))),
            Route(f"{api}/pipeline", self._json(lambda _: pipeline_summary(self._monitor))),
            Route(f"{api}/outputs", self._json(lambda _: output_list(self._monitor))),
            Route(f"{api}/tables", self._json(self._tables, *TABLE_QUERY)),
            Route(f"{api}/tables/{{table:name}}", self._json(self._table, "output")),
            Route(f"{api}/indexes", self._json(self._indexes)),
            Route(f"{api}/indexes/{{index}}/quarantine", self._quarantine),
            Route(f"{api}/indexes/{{index}}/quarantine/retry", self._retry, methods=["POST"]),
            Route(f"{api}/errors", self._json(lambda _: {"errors": error_list(self._monitor)})),
            Route(f"{api}/history", self._json(lambda _: {"history": self._monitor.history})),
            Route(f"{api}/batches", self._json(self._batches, "output", "limit")),
            Route(f"{api}/events", self._json(lambda _: {"events": self._monitor.events})),
            Route(f"{api}/verifications", self._json(lambda _: verification_list(self._runs())), methods=["GET"]),
            Route(f"{api}/verifications", self._verify, methods=["POST"]),
            Route(f"{api}/verifications/{{id}}", self._verification),
            Route(f"{api}/commands", self._json(lambda _: {"commands": command_log(self._monitor)}), methods=["GET"]),
            Route(f"{api}/commands", self._command, methods=["POST"]),
            Route(f"{api}/stream", self._stream),
        ]

    # Health

    async def _health(self, request: Request) -> Response:
        """Answer as long as the process does."""
        return JSONResponse({"status": "ok"})

    async def _readiness(self, request: Request) -> Response:
        unready = self._monitor.unready
        return JSONResponse({"ready": not unready, "reasons": list(unready)}, 503 if unready else 200)

    # Reading

    def _kept_answer(
        self, make: Make, *parameters: str, waits: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer requests by `make`, once a second for each combination of values of these parameters.

        A path without parameters has one answer. Nothing else that a client chooses makes another one. An answer that
        does not wait is made even if others have used up the processor time.
        """

        async def answer(request: Request) -> Response:
            query = request.query_params
            if parameters and (unknown := sorted(query.keys() - set(parameters))):
                raise Refused(400, f"unknown parameter: {unknown[0][:50]}")
            # Not the path of the URL, which ends at a "?" in a name.
            key = (request.scope["path"], *(query.get(name) for name in parameters))
            kept, making = self._kept, self._making
            known = kept.get(key)
            if known is not None and time.monotonic() - known[0] < KEPT_SECONDS:
                return known[1]
            made = making.get(key)
            if made is None:
                made = making[key] = asyncio.ensure_future(self._make(key, make, request, kept, waits=waits))
                made.add_done_callback(lambda _: making.pop(key))
            # Others wait for it, too: a client that leaves must not end it.
            return await asyncio.shield(made)

        return answer

    async def _make(
        self, key: Key, make: Make, request: Request, kept: dict[Key, tuple[float, Response]], *, waits: bool
    ) -> Response:
        spent = 0.0

        def timed() -> Response:
            nonlocal spent
            begun = time.thread_time()
            try:
                return make(request)
            finally:
                spent = time.thread_time() - begun

        while waits and ((seconds := self._processor.wait()) or self._making_now >= MADE_AT_ONCE):
            await asyncio.sleep(max(seconds, 0.02))
        self._making_now += 1
        try:
            with _errors_for_clients(self._monitor):
                made = await run_in_threadpool(timed)
        finally:
            self._making_now -= 1
            self._processor.take(spent * 1000)
        while len(kept) >= KEPT_ANSWERS:
            kept.pop(next(iter(kept)))
        kept[key] = (time.monotonic(), made)
        return made

    def _forget_answers(self) -> None:
        """Discard kept answers after an action, and those that are being made: they may be from before it."""
        self._kept, self._making = {}, {}

    def _json(self, read: Read, *parameters: str) -> Callable[[Request], Awaitable[Response]]:
        return self._kept_answer(lambda request: JSONResponse(self._monitor.discreet(read(request))), *parameters)

    def _scrape(self, request: Request) -> Response:
        # Never behind the searches of others: Prometheus would call the pipeline down.
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    def _batches(self, request: Request) -> dict[str, Any]:
        return batch_list(self._monitor, request.query_params)

    def _tables(self, request: Request) -> dict[str, Any]:
        return table_rows(self._monitor, dict(request.query_params))

    def _table(self, request: Request) -> dict[str, Any]:
        return table_page(self._monitor, request.path_params["table"], request.query_params.get("output"))

    def _indexes(self, request: Request) -> dict[str, Any]:
        outputs = self._monitor.status().outputs
        return {"indexes": [asdict(index) for output in outputs for index in output.indexes]}

    def _runs(self) -> list[dict[str, Any]]:
        return verifications(self._config.pipeline.spool.path)[::-1]

    async def _verification(self, request: Request) -> Response:
        """One comparison with the keys of rows, which need the token."""
        request.scope["check_token"]("the keys of rows need the token")
        runs = await run_in_threadpool(self._runs)
        found = next((each for each in runs if each.get("id") == request.path_params["id"]), None)
        if found is None:
            raise Refused(404, "there is no such comparison; the last 20 are kept")
        return JSONResponse(self._monitor.discreet(found))

    async def _quarantine(self, request: Request) -> Response:
        """List quarantined documents; their ids are values of keys, so this needs the token."""
        request.scope["check_token"]("the ids of documents need the token")
        with _errors_for_clients(self._monitor):
            entries = await run_in_threadpool(self._quarantine_of(request).entries, request.path_params["index"])
        return JSONResponse(self._monitor.discreet(quarantined(entries)))

    # Actions

    async def _command(self, request: Request) -> Response:
        asked = _parse(CommandRequest, await request.body())
        who = _client(request)
        logger.warning(
            # What the client chooses comes last: it cannot pretend to be another client.
            "action requested by=%s kind=%s output=%s tables=%s indexes=%s",
            *(who, asked.kind, asked.output, ", ".join(asked.tables), ", ".join(asked.indexes)),
        )
        with _errors_for_clients(self._monitor):
            sent = await run_in_threadpool(self._send, asked, who)
        self._forget_answers()
        refused = any(each["status"] == CommandStatus.REFUSED.value for each in sent)
        done = all(each["status"] == CommandStatus.DONE.value for each in sent)
        return JSONResponse(self._monitor.discreet({"commands": sent}), 409 if refused else 200 if done else 202)

    def _send(self, asked: CommandRequest, who: str) -> list[dict[str, Any]]:
        kind, output, options = CommandKind(asked.kind), asked.output, {}
        if kind is CommandKind.REBUILD_INDEX:
            options = {"indexes": [self._config.indexes.index(name).name for name in asked.indexes]}
            output = self._config.indexes.name
        sent = send_command(
            self._config,
            kind,
            output=output,
            tables=asked.tables,
            options=options,
            wait=ACTION_SECONDS,
            stores=self._monitor.running.stores,
            requested_by=who,
        )
        return [
            {
                "output": each.output,
                "command": each.command.number,
                "kind": each.command.kind.value,
                "tables": list(each.command.tables),
                "status": each.command.status.value,
                "reason": each.command.reason,
            }
            for each in sent
        ]

    async def _retry(self, request: Request) -> Response:
        asked = _parse(RetryRequest, await request.body())
        index = request.path_params["index"]
        count = "all" if asked.ids is None else len(asked.ids)
        logger.warning(
            "action requested by=%s kind=quarantine_retry documents=%s index=%s", _client(request), count, index
        )
        with _errors_for_clients(self._monitor):
            retried = await run_in_threadpool(self._quarantine_of(request).retry, index, asked.ids)
        self._forget_answers()
        return JSONResponse({"index": index, "documents": len(retried)}, 202)

    async def _verify(self, request: Request) -> Response:
        asked = _parse(VerifyBody, await request.body())
        who, tables = _client(request), ", ".join(asked.tables)
        logger.warning("action requested by=%s kind=verify output=%s tables=%s", who, asked.output, tables)
        options = VerifySettings(CompareSettings(sample=asked.sample))
        wanted = VerifyRequest(self._config, asked.tables, asked.output, options, who)
        with _errors_for_clients(self._monitor):
            begun = await run_in_threadpool(self._monitor.verifying.start, wanted, self._monitor.running.stores)
        self._forget_answers()
        return JSONResponse({"verifying": asdict(begun)}, 202)

    def _quarantine_of(self, request: Request) -> Quarantine:
        with _errors_for_clients(self._monitor):
            documents = self._config.indexes
            documents.index(request.path_params["index"])
        return Quarantine(self._monitor.running.stores[documents.name].database)

    # The stream of events

    async def _stream(self, request: Request) -> Response:
        if self._streams >= STREAMS:
            raise Refused(503, "too many pages follow this pipeline", headers={"retry-after": "10"})
        # Counted here and not by the iterator, which starts later: many that come at once must not pass together.
        self._streams += 1
        return _Stream(self._moments(), self._end_stream)

    def _end_stream(self) -> None:
        self._streams -= 1

    async def _moments(self) -> AsyncIterator[str]:
        """Send the last moment every second; a slow page misses some, and nothing piles up."""
        yield "retry: 2000\n\n"
        while not self._monitor.ending.is_set():
            now = json.dumps(self._monitor.discreet(describe(self._monitor)))
            yield f"event: now\ndata: {now}\n\n"
            for _ in range(5):
                await asyncio.sleep(0.0 if self._monitor.ending.is_set() else 0.2)


class _Stream(StreamingResponse):
    """Server-sent events; says when they have ended, also if they have never begun."""

    def __init__(self, content: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


@contextmanager
def _errors_for_clients(monitor: Monitor) -> Generator[None]:
    """Turn errors of Penstock into answers, without secrets."""
    try:
        yield
    except PenstockError as error:
        message, hint = (redact(scrub(each, monitor.config.secrets)) for each in (error.message, error.hint))
        status = 422 if isinstance(error, ConfigError) else 503 if isinstance(error, StateError) else 409
        raise Refused(status, message, hint) from None


def _client(request: Request) -> str:
    return f"HTTP client {request.client.host if request.client else 'unknown'}"


def _parse(model: type[Any], body: bytes) -> Any:
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        if any(not each["loc"] and each["type"] != "value_error" for each in error.errors(include_input=False)):
            raise Refused(422, "the body is not a JSON object") from None
        raise Refused(422, "; ".join(explain(error, model))) from None


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("penstock.server").joinpath("page", name).read_bytes()
    response = Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    async def answer(request: Request) -> Response:
        return response

    return answer


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status, error.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": "there is no such path or method"}, status)
