"""Translates the name of a source table into a name at a destination, for all destinations.

Postgres allows almost anything in a name: spaces, slashes, dots, mixed case, 63 bytes for each part. Destinations allow
less. Each name is translated on its own, without regard to other names, so it does not change when a table is added,
and no state is needed. Two tables never get the same name: a name that is allowed stays as it is, and any other name
gets a digest of the original as its suffix.

| Source | `FOLDERS` | `IDENTIFIERS` |
|---|---|---|
| `public.orders` | `public/orders` | `public__orders` |
| `public.order_items` | `public/order_items` | `public__order_items` |
| `public.User` | `public/User` | `public__user___6b55d381f2` |
| `app.size 1/2` | `app/size_1_2--4e3e52805c` | `app__size_1_2___fb4253d50f` |
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from penstock.changes.segment import field_names
from penstock.schema import TableSchema

_DIGEST_LENGTH = 10


@dataclass(frozen=True, slots=True)
class Naming:
    """The naming rules of a destination."""

    allowed: str
    """Pattern of parts that stay as they are; must match neither the separator nor the mark of a digest."""
    separator: str
    """Stands between namespace and table."""
    mark: str
    """Precedes a digest."""
    max_bytes: int
    """Maximum length of the name, or of each part if the separator is a slash."""
    case_sensitive: bool = True
    """False if names that differ only by case are the same name there."""

    def table(self, schema: TableSchema) -> str:
        """Return the table's name at the destination."""
        return self.name(schema.namespace, schema.name)

    def name(self, namespace: str, table: str) -> str:
        """Return the name at the destination for a namespace and a table."""
        if self.separator == "/":
            return "/".join(self._part(part, part, self._is_allowed(part)) for part in (namespace, table))
        joined = self.separator.join(self._clean(part) for part in (namespace, table))
        # Names in Postgres contain no zero byte, so this distinguishes a."b.c" from "a.b".c.
        return self._part(joined, f"{namespace}\0{table}", self._is_allowed(namespace) and self._is_allowed(table))

    def columns(self, schema: TableSchema) -> tuple[str, ...]:
        """Return the columns' names: as in segments, unless one collides with another or with one of Penstock's."""
        return field_names(schema)

    def _is_allowed(self, part: str) -> bool:
        return re.fullmatch(self.allowed, part) is not None

    def _clean(self, part: str) -> str:
        if self._is_allowed(part):
            return part
        text = re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") or "table"
        return text if self.case_sensitive else text.lower()

    def _part(self, text: str, original: str, allowed: bool) -> str:
        if allowed and len(text) <= self.max_bytes:
            return text
        digest = hashlib.sha256(original.encode()).hexdigest()[:_DIGEST_LENGTH]
        head = self._clean(text) if self.separator == "/" else text
        return f"{head[: self.max_bytes - len(self.mark) - _DIGEST_LENGTH]}{self.mark}{digest}"


FOLDERS = Naming(allowed=r"[A-Za-z0-9]([A-Za-z0-9_.]|-(?!-))*", separator="/", mark="--", max_bytes=120)
"""A folder for the namespace, with one for the table in it. Spark takes none of these names for hidden or for a
partition, and object store clients encode none of their characters: delta-rs did not find vectors in a folder with a
`~`."""

IDENTIFIERS = Naming(
    allowed=r"[a-z][a-z0-9]*(_[a-z0-9]+)*", separator="__", mark="___", max_bytes=63, case_sensitive=False
)
"""One lowercase word, for systems with a single level of names."""
