"""How to reach a search server, and how much to hand it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError

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
