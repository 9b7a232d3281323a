"""Settings of a search server and requests to it.

Transient failures are retried, a refusal is raised with its reason, and no secret appears in either.
"""

from __future__ import annotations

import json
import logging
import ssl
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
"""Seconds for which a generation that serves remembers what was removed. A body that is older than its removal must
arrive within them, or it would come back: a bulk is given up after half of it."""
FILLING_GC_DELETES = 86_400
"""While a generation is filled, old bodies come late: ranges take their time."""
DEFAULT_GRACE_SECONDS = 600.0

_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
}
"""What a value may be, by what its field is annotated with."""
_NAMES: Mapping[type, str] = {
    str: "a text",
    type(None): "left out",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
OK = (200, 201)
NOT_FOUND = 404
TOO_LARGE = 413
_PASSING = (408, 429, 500, 502, 503, 504)
_FORBIDDEN = (401, 403)
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""An end in the middle of an encrypted connection: the server stops, and says nothing about who asks."""
_BLOCKED = "cluster_block_exception"
"""An index that is read-only because a disk is full, or a cluster without a leader: 403, but not about who asks."""

_LONG_ATTEMPTS = 5
"""After some seconds, people should know what is waited for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenSearchSettings:
    """Options of the sink `opensearch`."""

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    """Certificates to trust, for servers whose own is not signed by a known authority."""
    verify_certificates: bool = True
    client_certificate: str | None = None
    client_key: str | None = None
    shards: int = 1
    replicas: int = 1
    refresh_interval: str = "1s"
    """How late searches see a document at most; they see it at once when nothing waits behind it."""
    bulk_documents: int = 5_000
    bulk_bytes: int = 8 << 20
    timeout_seconds: float = 60.0
    """For one request."""
    retry_seconds: float = 120.0
    """For how long a request is tried again."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """How long a generation that serves no more is kept."""

    def __post_init__(self) -> None:
        self._check_types()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("sink: url must be http://host:port or https://host:port")
        if parts.username is not None:
            # Credentials in the URL would turn up wherever it is named.
            host = parts.netloc.rpartition("@")[2]
            self._set("url", parts._replace(netloc=host).geturl())
            self._set("user", self.user or unquote(parts.username))
            self._set("password", self.password or unquote(parts.password or ""))
        if not 0 < self.retry_seconds <= SERVING_GC_DELETES / 2:
            raise ConfigError(
                f"sink: retry_seconds must lie between 0 and {SERVING_GC_DELETES // 2}",
                hint="The index forgets removals after a while; an older body that comes later would stay.",
            )
        for name in ("bulk_documents", "bulk_bytes", "shards", "timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"sink: {name} must be more than 0")
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
    """What the server said."""

    status: int
    data: bytes

    def json(self) -> Any:
        """The answer as values; nothing if it is not JSON, as what proxies say."""
        try:
            return json.loads(self.data)
        except ValueError:
            return None

    def error_type(self) -> str:
        """The type of the error that it tells of, such as `index_not_found_exception`."""
        said = self.json()
        error = said.get("error") if isinstance(said, dict) else None
        return str(error.get("type", "")) if isinstance(error, dict) else ""


class Passing(Exception):
    """A request failed for a reason that passes: a full queue, a server that starts, a connection that was cut."""


@dataclass(slots=True)
class Patience:
    """How long something is tried again; pauses start over after progress, the limit does not."""

    seconds: float
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.1, longest=10.0))
    started: float = field(default_factory=time.monotonic)

    def wait(self, reason: object) -> None:
        """Pause before the next try; gives up when there was time enough."""
        delay = self.backoff.next_delay()
        left = self.started + self.seconds - time.monotonic()
        if left <= 0:
            raise DestinationUnavailable(f"the search server did not take documents for {self.seconds:g} s: {reason}")
        attempt = self.backoff.attempt
        level = logging.INFO if attempt < _LONG_ATTEMPTS else logging.WARNING
        logger.log(level, "search server busy or away, trying again attempt=%d reason=%s", attempt, reason)
        time.sleep(min(delay, left))


class OpenSearchClient:
    """One server, or several behind one address. Connections are made when they are needed, and kept."""

    def __init__(self, settings: OpenSearchSettings) -> None:
        self._settings = settings
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
        """Close its connections."""
        self._pool.clear()

    def try_once(self, method: str, path: str, body: Any = None, *, lines: bool = False) -> Answer:
        """One request; raises `Passing` for what another one may get through."""
        if body is not None and not lines:
            body = json.dumps(body).encode()
        headers = dict(self._pool.headers)
        headers["content-type"] = "application/x-ndjson" if lines else "application/json"
        try:
            response = self._pool.request(method, self._url + path, body=body, headers=headers)
        except (HTTPError, OSError) as error:
            if isinstance(error, SSLError) and not isinstance(error.args[0], _CUT_OFF):
                said = self._clean(error)
                raise DestinationRefused(f"no encrypted connection to the search server: {said}") from None
            raise Passing(self._clean(error)) from None
        answer = Answer(response.status, response.data)
        if answer.status in _PASSING:
            raise Passing(f"it answered {answer.status} {answer.error_type()}".rstrip())
        if answer.status in _FORBIDDEN:
            kind = answer.error_type()
            if kind == _BLOCKED:
                raise Passing(f"it answered {answer.status} {kind}")
            raise DestinationRefused(f"the search server answered {answer.status} to {method} {_place(path)}")
        return answer

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """A request that may be repeated; tried again while there is patience."""
        patience = Patience(self._settings.retry_seconds)
        while True:
            try:
                return self.try_once(method, path, body)
            except Passing as error:
                patience.wait(error)

    def expect(self, method: str, path: str, body: Any = None, *, allowed: tuple[int, ...] = ()) -> Any:
        """The same, for requests that must succeed; an answer that is only allowed is None."""
        answer = self.ask(method, path, body)
        if answer.status in OK:
            return answer.json()
        if answer.status in allowed:
            return None
        said = answer.json()
        error = said.get("error") if isinstance(said, dict) else None
        # About indexes, aliases and mappings; what is said of documents is never told.
        reason = error.get("reason", "") if isinstance(error, dict) else ""
        raise DestinationError(
            f"the search server answered {answer.status} {answer.error_type()} to {method} {_place(path)}:"
            f" {self._clean(reason)}",
            hint="Is it OpenSearch, or a server that speaks its language, and the address of its API?",
        )

    def _clean(self, said: object) -> str:
        return scrub(redact(str(said)), [self._settings.password or ""])


def _place(path: str) -> str:
    return path.partition("?")[0]
