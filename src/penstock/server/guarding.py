"""What every request passes: checks of its host, origin, token and size, limits, and headers of the answer.

Reading needs no token: all who reach the server may read. An action needs `Authorization: Bearer …`, which no other
site can make a browser send, and is refused if it comes from another origin. A name in `Host` must be known, so that
no other site can rename itself to this address.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

from penstock.config import ServerChoice
from penstock.observe import one_line

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
BODY_SECONDS = 10.0
"""How long a client may take to send a body."""
ANSWER_SECONDS = 60.0
"""How long an answer may take, until the client has it; streams have limits of their own."""
SEND_SECONDS = 20.0
"""How long a client may take to receive a part of an answer, or an event of a stream."""
ACTIONS, ACTIONS_PER_SECOND = 20, 1.0
"""Number of actions allowed at once, and the rate after that."""
WRONG_TOKENS, WRONG_TOKENS_PER_SECOND = 5, 0.1
"""The same for wrong tokens, for each address."""
_ADDRESSES = 1000

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Refused(Exception):
    """A request that is refused; the message goes to the client."""

    def __init__(self, status: int, message: str, hint: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.hint = hint
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, str]:
        """What the client is told, as JSON."""
        return {"error": str(self), **({"hint": self.hint} if self.hint else {})}


class ClientLost(Exception):
    """An answer that cannot be sent, such as to a client that broke the protocol meanwhile."""


class Bucket:
    """Allows some calls at once, and then a rate."""

    def __init__(self, size: int, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._per_second, self._clock = size, per_second, clock
        self._left, self._at = float(size), clock()

    def wait(self) -> float:
        """Return the seconds until a call is allowed; 0 if one is."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        return 0.0 if self._left >= 1 else (1 - self._left) / self._per_second

    def take(self, calls: float = 1.0) -> None:
        """Count a call, or several."""
        self._left -= calls


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App, choice: ServerChoice) -> None:
        self._app = app
        self._choice = choice
        self._actions = Bucket(ACTIONS, ACTIONS_PER_SECOND)
        self._wrong: OrderedDict[str, Bucket] = OrderedDict()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request. Nothing that an application raises reaches the server."""
        if scope["type"] != "http":
            return
        answer = _Answer(send)
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            check_host(headers.get("host", ""), self._choice)
            if scope["method"] not in ("GET", "HEAD", "POST"):
                raise Refused(405, "this method is not supported", headers={"allow": "GET, HEAD, POST"})
            if scope["method"] == "POST":
                self._check_action(headers, _address(scope))
            # Only actions have a body. It is read whole, so that a slow client keeps nothing else waiting.
            body = await _read_body(receive, headers) if scope["method"] == "POST" else b""
            async with asyncio.timeout(None if scope["path"].endswith("/stream") else ANSWER_SECONDS):
                check_token = partial(self.check_token, headers, _address(scope))
                await self._app({**scope, "check_token": check_token}, _Body(body, receive), answer)
        except Refused as refused:
            text = "request refused status=%d method=%s path=%s client=%s reason=%s"
            path = one_line(scope["path"])[:200]
            logger.info(text, refused.status, scope["method"], path, _address(scope), refused)
            await answer.refuse(refused)
        except ClientLost as lost:
            logger.info("a client could not be answered client=%s reason=%s", _address(scope), lost)
        except asyncio.CancelledError:
            # The server ends, and does not wait for this client.
            logger.debug("request given up path=%s", one_line(scope["path"])[:200])
        except TimeoutError:
            logger.info("a client took too long client=%s", _address(scope))
            await answer.refuse(Refused(503, "this took too long"))
        except Exception as error:
            # Only the class: the message may quote a value.
            where = one_line(scope["path"])[:200]
            logger.error("request failed path=%s error=%s", where, type(error).__name__)
            logger.debug("request failed", exc_info=True)
            await answer.refuse(Refused(500, "this failed; the log has the reason"))

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request carries the token."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = self._choice.token
        if token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), token.encode())

    def check_token(self, headers: Mapping[str, str], address: str, refusal: str) -> None:
        """Raise `Refused` unless a request carries the token, or if its address has sent too many wrong ones.

        Every path that needs the token calls this, or it would tell right tokens from wrong ones without a limit.
        """
        if self._choice.token is None:
            raise Refused(403, f"{refusal}, and there is none", 'Set server.token = "${NAME}", a secret.')
        wrong = self._wrong.get(address)
        if wrong is not None and (seconds := wrong.wait()):
            raise _too_many(seconds)
        if not self.is_authorized(headers):
            # Who sends none does not guess. Warnings are limited, too: nobody can fill the log with them.
            if "authorization" in headers:
                self._count_wrong(address)
                logger.warning("a wrong token was refused client=%s", address)
            raise Refused(401, refusal, "Send: Authorization: Bearer …", {"www-authenticate": "Bearer"})

    def _check_action(self, headers: Mapping[str, str], address: str) -> None:
        host = headers.get("host", "")
        origin = headers.get("origin", f"http://{host}").lower().partition("://")[2]
        # A proxy may pass on another host than the browser has asked for.
        if origin != host.lower() and origin.partition(":")[0] not in self._choice.hosts:
            raise Refused(403, "this request comes from another site")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "this request comes from another site")
        self.check_token(headers, address, "actions need the token")
        if seconds := self._actions.wait():
            raise _too_many(seconds)
        self._actions.take()
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body of an action is JSON", "Send: Content-Type: application/json")

    def _count_wrong(self, address: str) -> None:
        bucket = self._wrong.setdefault(address, Bucket(WRONG_TOKENS, WRONG_TOKENS_PER_SECOND))
        bucket.take()
        self._wrong.move_to_end(address)
        while len(self._wrong) > _ADDRESSES:
            self._wrong.popitem(last=False)


def check_host(host: str, choice: ServerChoice) -> None:
    """Raise `Refused` unless the host is an address, `localhost`, or a name of the config."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name == choice.host.lower() or name in choice.hosts:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        hint = "Add the name to server.hosts, or use the address."
        raise Refused(421, "this server is not known under that name", hint) from None


async def _read_body(receive: Receive, headers: Mapping[str, str]) -> bytes:
    too_large = Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes", headers={"connection": "close"})
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the client is gone")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(408, "the body did not arrive in time", headers={"connection": "close"}) from None


class _Body:
    """Gives an application the body that was read, and then what else the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """Adds headers to an answer, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            given = {name.lower() for name, _ in message["headers"]}
            more = {"cache-control": "no-store", **_HEADERS}
            message["headers"] = [
                *message["headers"],
                *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in given),
            ]
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise
        except Exception as error:
            raise ClientLost(type(error).__name__) from None

    async def refuse(self, refused: Refused) -> None:
        if self._has_begun:
            return
        body = json.dumps(refused.body).encode()
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        headers = [(name.encode(), value.encode()) for name, value in {**fixed, **refused.headers}.items()]
        await self({"type": "http.response.start", "status": refused.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def _too_many(seconds: float) -> Refused:
    return Refused(429, "too many requests", headers={"retry-after": str(int(seconds) + 1)})


def _address(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"
