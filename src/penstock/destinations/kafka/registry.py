"""The schema registry: schemas are registered by their text, and messages name them by id. Confluent's API."""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.destinations.refusals import out_of_reach, rejected, unusable

_SECONDS = 30.0
_CONTENT = "application/vnd.schemaregistry.v1+json"
_GRANTS = "Check schema_registry and schema_registry_auth_env in [destination]."


@dataclass(frozen=True, slots=True)
class SchemaRegistry:
    """Where schemas are registered; the credentials stay in the environment."""

    url: str
    auth_variable: str | None = None

    def check(self) -> None:
        """Raise if the registry does not answer."""
        self._ask("/subjects", None, "the schema registry")

    def register(self, subject: str, schema: str, table: str) -> int:
        """Return the id of a schema; the registry is asked once for each."""
        return _register(self, subject, schema, table)

    def ask_id(self, subject: str, schema: str, table: str) -> int:
        """Register a schema; return its id."""
        path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
        return int(self._ask(path, {"schema": schema, "schemaType": "AVRO"}, table)["id"])

    def _ask(self, path: str, body: object, table: str) -> Any:
        headers = {"Content-Type": _CONTENT, "Accept": _CONTENT}
        if self.auth_variable is not None:
            held = os.environ.get(self.auth_variable)
            if not held:
                raise unusable(f"the environment variable {self.auth_variable} (schema_registry_auth_env) is not set")
            headers["Authorization"] = f"Basic {base64.b64encode(held.encode()).decode()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 429 or error.code >= 500:
                raise out_of_reach(host, f"the schema registry answered with status {error.code}") from None
            if error.code in (401, 403, 404):
                raise unusable(f"the schema registry answered with status {error.code}", hint=_GRANTS) from None
            raise rejected(
                table,
                f"the schema registry refused the schema (status {error.code})",
                hint="Set the compatibility of the subject to NONE, then run: penstock rollback.",
            ) from None
        except (OSError, ValueError) as error:
            raise out_of_reach(host, f"the schema registry does not answer ({type(error).__name__})") from None


@lru_cache(maxsize=4096)
def _register(registry: SchemaRegistry, subject: str, schema: str, table: str) -> int:
    return registry.ask_id(subject, schema, table)
