"""Sending a request until it is answered: the pauses between attempts, and the meaning of each answer.

| answer | meaning |
|---|---|
| 2xx | done, durably |
| 429, 500–599, time-out, lost connection | retried with back-off for `retry_seconds`; `Retry-After` is respected |
| 401, 403 | the credentials are wrong |
| 409 | refused: the table of another pipeline, or an outdated attempt |
| others | rejected: the table stops |
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

from penstock.destinations.refusals import out_of_reach, rejected, unusable
from penstock.errors import PenstockError
from penstock.retry import Backoff

logger = logging.getLogger(__name__)

_MAX_ANSWER = 16 << 20
_CONFLICT = 409


class Secret:
    """A value for a header; its repr does not show it."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Secret(…)"


class Refused(Exception):
    """The receiver refused the write (409)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and how long they are retried; pickles, because tasks send them."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    credentials: tuple[str, Secret] | None = None
    timeout: float = 30.0
    retry_seconds: float = 60.0
    first_delay: float = 0.2

    def post(self, path: str, body: IO[bytes], headers: Mapping[str, str], *, what: str) -> Any:
        """Send a request, with retries; return the JSON of the answer, or None.

        `what` names the table, or the pipeline, in errors.
        """
        backoff = Backoff(first=self.first_delay, longest=max(self.first_delay, 15.0))
        deadline = time.monotonic() + self.retry_seconds
        while True:
            problem, wait = self._try(path, body, headers, what)
            if problem is None:
                return wait
            delay = max(backoff.next_delay(), wait or 0.0)
            if time.monotonic() + delay > deadline:
                raise out_of_reach(self.host, f"{problem}, for {self.retry_seconds:g} s")
            logger.warning("request failed, retrying what=%s reason=%s delay=%.1f", what, problem, delay)
            time.sleep(delay)

    @property
    def host(self) -> str:
        """Host and port, without the rest of the URL."""
        parts = urllib.parse.urlsplit(self.url)
        return parts.hostname or "" if parts.port is None else f"{parts.hostname}:{parts.port}"

    def _try(self, path: str, body: IO[bytes], headers: Mapping[str, str], what: str) -> tuple[str | None, Any]:
        """Try once; return None and the answer, or a temporary problem and the seconds to wait at least."""
        size = body.seek(0, 2)
        body.seek(0)
        sent = {**dict(self.headers), **headers, "Content-Length": str(size)}
        if self.credentials is not None:
            sent[self.credentials[0]] = self.credentials[1].value
        request = urllib.request.Request(f"{self.url}{path}", data=cast("Any", body), headers=sent, method="POST")
        try:
            with _opener().open(request, timeout=self.timeout) as answer:
                content = answer.read(_MAX_ANSWER)
                return None, _json(content)
        except urllib.error.HTTPError as error:
            retry_after: str | None = error.headers.get("Retry-After")
            error.close()
            return _judge(error.code, retry_after, what)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise unusable(f"the certificate of {self.host} is not trusted") from None
            return f"{type(error.reason).__name__}", None
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, None


def _judge(status: int, retry_after: str | None, what: str) -> tuple[str, float | None]:
    if status == 429 or status >= 500:
        return f"status {status}", _seconds(retry_after)
    if status == _CONFLICT:
        raise Refused(what)
    raise _permanent(status, what)


def _seconds(retry_after: str | None) -> float | None:
    # `isdigit` alone accepts characters, such as "²", that are no numbers.
    is_number = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
    return float(retry_after) if retry_after is not None and is_number else None


def _permanent(status: int, what: str) -> PenstockError:
    if status in (401, 403):
        return unusable(
            f"the receiver rejected the credentials (status {status})",
            hint="Check the environment variable named in auth_env.",
        )
    return rejected(
        what,
        f"the receiver answered with status {status}",
        hint="The receiver's log says why; find the request by its Idempotency-Key. The answer is not shown because it "
        "may contain data.",
    )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the credentials to another place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


def _json(content: bytes) -> Any:
    if not content.strip():
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
