"""Spark destinations on the session of the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.destinations.base import DestinationContext
from penstock.destinations.spark import SparkDestination
from penstock.schema import TableSchema
from penstock.testing.destinations import ScriptedSource, make_context


class _OnSession(SparkDestination):
    session: Any = None

    def startup(self, context: DestinationContext) -> None:
        super().startup(replace(context, open_session=lambda: self.session))


def on(session: Any, **options: Any) -> SparkDestination:
    """Return a destination that is not started."""
    destination = _OnSession(**options)
    destination.session = session
    return destination


def started(session: Any, transform: str | None = None, **options: Any) -> SparkDestination:
    """Return a destination that is started; `transform` is that of every table."""
    destination = on(session, **options)
    destination.startup(replace(make_context(), transform_of=lambda _: transform))
    return destination


def copy(destination: SparkDestination, source: ScriptedSource, schema: TableSchema, rows: list[Any]) -> None:
    """Copy a table."""
    destination.drop_table_for_copy(schema, "attempt-1")
    destination.write_table_rows(schema, source.copy(schema, rows))
