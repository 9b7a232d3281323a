"""How the name of a source table becomes a name at a destination: decided here, for all of them.

Postgres allows nearly anything in a name: spaces, slashes, dots, capitals that differ from small letters, 63 bytes of
each part. Destinations allow less. A name is translated by itself, never by looking at other names: it does not change
when a table is added, and needs no memory. Two tables never get the same name: one that is allowed stays as it is, and
any other one gets a digest of the original behind what is left of it.

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
    """The rules of a destination."""

    allowed: str
    """A pattern of the parts that stay as they are; must not match the separator, nor the mark of a digest."""
    separator: str
    """Between namespace and table."""
    mark: str
    """Before a digest."""
    max_bytes: int
    """Of the whole; where the separator is a slash, of each part."""
    case_sensitive: bool = True
    """False: names that differ only by case are the same name there."""

    def table(self, schema: TableSchema) -> str:
        """The table's name at the destination."""
        return self.name(schema.namespace, schema.name)

    def name(self, namespace: str, table: str) -> str:
        """The same, from the two parts of a name."""
        if self.separator == "/":
            return "/".join(self._part(part, part, self._is_allowed(part)) for part in (namespace, table))
        joined = self.separator.join(self._clean(part) for part in (namespace, table))
        # No name in Postgres has a zero byte, so this tells a."b.c" from "a.b".c.
        return self._part(joined, f"{namespace}\0{table}", self._is_allowed(namespace) and self._is_allowed(table))

    def columns(self, schema: TableSchema) -> tuple[str, ...]:
        """The columns' names: as in segments, where none collides with another one or with ours."""
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
"""A folder for the namespace and one for the table in it; none that Spark takes for hidden or for a partition, and with
no letter that an object store's client writes in another way: delta-rs did not find vectors in a folder with a `~`."""

IDENTIFIERS = Naming(
    allowed=r"[a-z][a-z0-9]*(_[a-z0-9]+)*", separator="__", mark="___", max_bytes=63, case_sensitive=False
)
"""One word of small letters, for systems with a single level of names."""
