"""Registering tables in a catalog of Spark, so that `select * from shop.orders` finds them.

Spark SQL does it, so any catalog works that the session is configured for: the Hive metastore, Glue, Unity. A table
that cannot be registered is replicated all the same: the log says why.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.destinations.refusals import unusable
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """The option `register`: where tables appear."""

    catalog: str | None = None
    """None for the session's current one."""
    schema: str | None = None
    """None for one with the name of the source's schema."""
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @classmethod
    def parse(cls, option: object) -> Registration | None:
        """Return what the config says; None if tables are not registered."""
        if option is None or option is False:
            return None
        if option is True:
            return cls()
        known = ("catalog", "schema")
        if not isinstance(option, Mapping) or not all(
            name in known and isinstance(value, str) and value for name, value in option.items()
        ):
            raise unusable(
                "register is not understood", hint='Write register = {catalog = "…", schema = "…"}, or true.'
            )
        return cls(**option)

    def name_of(self, source: TableSchema) -> tuple[str, ...]:
        """Return the parts of a table's name in the catalog, where names have only letters, digits and underscores."""
        parts = (self.catalog, self.schema or _plain(source.namespace), _plain(source.name))
        return tuple(part for part in parts if part is not None)

    def register(self, session: Any, source: TableSchema, url: str) -> None:
        """Register a table with its location, unless a table of this name exists."""
        parts = self.name_of(source)
        name, namespace = _quoted(parts), _quoted(parts[:-1])
        location = url.replace("\\", "\\\\").replace("'", "\\'")
        try:
            with self._lock:
                session.sql(f"create schema if not exists {namespace}")
                session.sql(f"create table if not exists {name} using delta location '{location}'")
                found: str = session.sql(f"describe detail {name}").first()["location"]
        except Exception as error:
            # Errors of the catalog differ from one to the next; none of them concerns the rows.
            reason = (str(error).strip().splitlines() or [""])[0]
            text = "table could not be registered table=%s name=%s error=%s reason=%s"
            logger.warning(text, source, ".".join(parts), type(error).__name__, reason)
            return
        if found.removeprefix("file:").rstrip("/") == url.rstrip("/"):
            logger.info("table is registered table=%s name=%s", source, ".".join(parts))
        else:
            text = "another table is registered under this name table=%s name=%s location=%s"
            logger.warning(text, source, ".".join(parts), found)


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _quoted(parts: tuple[str, ...]) -> str:
    return ".".join("`{}`".format(part.replace("`", "``")) for part in parts)
