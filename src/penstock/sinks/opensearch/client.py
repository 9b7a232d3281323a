"""Settings of a search server and requests to it.

Transient failures are retried, rejected requests raise an error with the reason, and no secret appears in either.
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, SSLError

from penstock.errors import ConfigError, DestinationError, DestinationRefused, DestinationUnavailable
from penstock.observe.redact import redact, scrub
from penstock.retry import Backoff

SERVING_GC_DELETES = 600
"""Seconds for which a serving generation remembers removals. An older body that arrives later would restore the
document, so a bulk request is given up after half this time."""
FILLING_GC_DELETES = 86_400
"""The same for a generation that is being filled: ranges can write old bodies late."""
DEFAULT_GRACE_SECONDS = 600.0

_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
}
"""The types that a value may have, by the annotation of its field."""
_NAMES: Mapping[type, str] = {
    str: "a string",
    type(None): "omitted",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
OK = (200, 201)
NOT_FOUND = 404
TOO_LARGE = 413
_PASSING = (408, 429, 500, 502, 503, 504)
_FORBIDDEN = (401, 403)
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""Errors of an encrypted connection that ends abruptly: the server is stopping; certificates are not the cause."""
_BLOCKED = "cluster_block_exception"
"""A read-only index because of a full disk, or a cluster without a leader: status 403, but not about permissions."""

_LONG_ATTEMPTS = 5
"""After this many attempts, which take some seconds, retries are logged as warnings."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenSearchSettings:
    """Options of the sink `opensearch`."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    """Certificates to trust, for servers whose certificate no known authority signed."""
    verify_certificates: bool = True
    client_certificate: str | None = None
    client_key: str | None = None
    shards: int = 1
    replicas: int = 1
    refresh_interval: str = "1s"
    """Maximum delay before searches see a document; without waiting changes there is no delay."""
    bulk_documents: int = 5_000
    bulk_bytes: int = 8 << 20
    timeout_seconds: float = 60.0
    """Timeout of one request."""
    retry_seconds: float = 120.0
    """How long a request is retried."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """How long a replaced generation is kept."""

    def __post_init__(self) -> None:
        self._check_types()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("sink: url must be http://host:port or https://host:port")
        if parts.username is not None:
            # Credentials in the URL would appear wherever the URL does.
            host = parts.netloc.rpartition("@")[2]
            self._set("url", parts._replace(netloc=host).geturl())
            self._set("user", self.user or unquote(parts.username))
            self._set("password", self.password or unquote(parts.password or ""))
        if not 0 < self.retry_seconds <= SERVING_GC_DELETES / 2:
            raise ConfigError(
                f"sink: retry_seconds must be between 0 and {SERVING_GC_DELETES // 2}",
                hint="The index forgets removals after a while; an older document that arrives later would then stay.",
            )
        for name in ("bulk_documents", "bulk_bytes", "shards", "timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"sink: {name} must be greater than 0")
        for name in ("replicas", "grace_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"sink: {name} must not be negative")

    def _check_types(self) -> None:
        for each in fields(self):
            kinds = _KINDS[str(each.type)]
            value = getattr(self, each.name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ConfigError(f"sink: {each.name} must be {' or '.join(_NAMES[kind] for kind in kinds)}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server."""

    status: int
    data: bytes

    def json(self) -> Any:
        """Return the parsed answer; None if it is not JSON, such as a proxy's page."""
        try:
            return json.loads(self.data)
        except ValueError:
            return None

    def error_type(self) -> str:
        """Return the type of its error, such as `index_not_found_exception`."""
        said = self.json()
        error = said.get("error") if isinstance(said, dict) else None
        return str(error.get("type", "")) if isinstance(error, dict) else ""

    def reason(self) -> str:
        """Return the most precise reason of its error; for requests about indexes, since others quote documents."""
        said = self.json()
        error = said.get("error") if isinstance(said, dict) else None
        reason = ""
        while isinstance(error, dict):
            reason, error = str(error.get("reason") or reason), error.get("caused_by")
        return reason

    def require_said(self) -> None:
        """Raise `Transient` for a success or a 404 that is not a JSON object: a proxy's page says nothing about an
        index, not even that it does not exist."""
        said = self.json()
        if (self.status in OK and not isinstance(said, dict)) or (self.status == NOT_FOUND and not said):
            raise Transient(f"it answered {self.status} with something other than JSON")
        if self.status in OK and isinstance(said.get("error"), str):
            raise Transient(f"it answered {self.status} with an error")

    def require_acknowledged(self) -> None:
        """Raise `Transient` for a success that does not say that a change of indexes or aliases was made."""
        if self.status in OK and self.json().get("acknowledged") is not True:
            raise Transient(f"it answered {self.status} without acknowledging the request")


class Transient(Exception):
    """A request failed for a transient reason: a full queue, a starting server, a broken connection."""


@dataclass(slots=True)
class RetryLimit:
    """Limits retries: progress resets the pauses, but not the time limit."""

    seconds: float
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.1, longest=10.0))
    started: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)
    """When it is set, the time is up."""

    def wait(self, reason: object) -> None:
        """Pause before the next attempt; raises `DestinationUnavailable` when the time is up."""
        delay = self.backoff.next_delay()
        left = self.started + self.seconds - time.monotonic()
        if left <= 0 or self.stop.is_set():
            spent = self.seconds - max(left, 0)
            raise DestinationUnavailable(f"the search server has not accepted documents for {spent:.3g} s: {reason}")
        attempt = self.backoff.attempt
        level = logging.INFO if attempt < _LONG_ATTEMPTS else logging.WARNING
        logger.log(level, "search server busy or unavailable, retrying attempt=%d reason=%s", attempt, reason)
        self.stop.wait(min(delay, left))


class OpenSearchClient:
    """One server, or several behind one address. Connections are opened on demand and reused."""

    def __init__(self, settings: OpenSearchSettings, stop: threading.Event | None = None) -> None:
        self._settings = settings
        self._stop = stop or threading.Event()
        self._url = settings.url.rstrip("/")
        headers = {"accept": "application/json"}
        if settings.user is not None:
            headers |= urllib3.make_headers(basic_auth=f"{settings.user}:{settings.password or ''}")
        self._pool = urllib3.PoolManager(
            headers=headers,
            retries=False,
            timeout=urllib3.Timeout(connect=min(10.0, settings.timeout_seconds), read=settings.timeout_seconds),
            cert_reqs="CERT_REQUIRED" if settings.verify_certificates else "CERT_NONE",
            ca_certs=settings.ca_file,
            cert_file=settings.client_certificate,
            key_file=settings.client_key,
        )
        if not settings.verify_certificates:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()

    def try_once(self, method: str, path: str, body: Any = None, *, lines: bool = False) -> Answer:
        """Send one request; raises `Transient` if a retry may succeed."""
        if body is not None and not lines:
            body = json.dumps(body).encode()
        headers = dict(self._pool.headers)
        headers["content-type"] = "application/x-ndjson" if lines else "application/json"
        try:
            response = self._pool.request(method, self._url + path, body=body, headers=headers)
        except (HTTPError, OSError) as error:
            if isinstance(error, SSLError) and not isinstance(error.args[0], _CUT_OFF):
                said = self._clean(error)
                raise DestinationRefused(f"cannot open an encrypted connection to the search server: {said}") from None
            raise Transient(self._clean(error)) from None
        answer = Answer(response.status, response.data)
        if answer.status in _PASSING:
            raise Transient(f"it answered {answer.status} {answer.error_type()}".rstrip())
        if answer.status in _FORBIDDEN:
            kind = answer.error_type()
            if kind == _BLOCKED:
                raise Transient(f"it answered {answer.status} {kind}")
            said = f"the search server answered {answer.status} to {method} {_place(path)}"
            raise DestinationRefused(said, status=answer.status)
        return answer

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request that may be repeated; retries transient failures."""
        retries = RetryLimit(self._settings.retry_seconds, stop=self._stop)
        changes = path == "/_aliases" or (method in ("PUT", "DELETE") and not path.startswith(("/_search", "/_pit")))
        while True:
            try:
                answer = self.try_once(method, path, body)
                answer.require_said()
                if changes:
                    answer.require_acknowledged()
                return answer
            except Transient as error:
                retries.wait(error)

    def expect(self, method: str, path: str, body: Any = None, *, allowed: tuple[int | str, ...] = ()) -> Any:
        """Send a request that must succeed; return the parsed answer, None for an `allowed` status or type of error."""
        answer = self.ask(method, path, body)
        if answer.status in OK:
            return answer.json()
        if answer.status in allowed or answer.error_type() in allowed:
            return None
        raise DestinationError(
            f"the search server answered {answer.status} {answer.error_type()} to {method} {_place(path)}:"
            f" {self._clean(answer.reason())}",
            hint="Check that sink.url is the address of OpenSearch's API, or of a compatible server.",
        )

    def _clean(self, said: object) -> str:
        return scrub(redact(str(said)), [self._settings.password or ""])


def _place(path: str) -> str:
    return path.partition("?")[0]
