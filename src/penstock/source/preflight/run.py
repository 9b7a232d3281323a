"""Running all checks. One that fails to run says so and does not keep the others from running."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import psycopg

from penstock.errors import PenstockError
from penstock.source.connections import SourceSettings
from penstock.source.faults import from_exception
from penstock.source.preflight import privileges, server, settings, tables
from penstock.source.preflight.context import Context, Request
from penstock.source.preflight.report import Check, Report, Severity, failed, passed, unknown

__all__ = ["Request", "run_preflight"]

ALL_CHECKS: Mapping[str, Callable[[Context], Iterator[Check]]] = {
    **server.CHECKS,
    **privileges.CHECKS,
    **tables.CHECKS,
    **settings.CHECKS,
    **server.SLOT_CHECKS,
}

logger = logging.getLogger(__name__)


def run_preflight(source: SourceSettings, request: Request = Request()) -> Report:  # noqa: B008 (frozen)
    """Look at a server, and at a publication, a slot and tables if the request names them. Changes nothing."""
    context = Context(source, request)
    try:
        try:
            user = context.connection.info.user
        except PenstockError as error:
            found = [failed("connection", Severity.CRITICAL, str(error), error.hint, error=error)]
        else:
            found = [passed("connection", f"connected to {source.location} as {user!r}")]
            for id_, check in ALL_CHECKS.items():
                found += _run(id_, check, context)
    finally:
        context.close()
    return Report(source.location, tuple(found))


def _run(id_: str, check: Callable[[Context], Iterator[Check]], context: Context) -> list[Check]:
    found: list[Check] = []
    try:
        found.extend(check(context))
    except PenstockError as error:
        found.append(unknown(id_, str(error)))
    except psycopg.Error as error:
        found.append(unknown(id_, str(from_exception(error, context.settings.place, "check the server"))))
    except Exception as error:  # a mistake in one check must not hide what the others found
        logger.exception("check failed to run check=%s", id_)
        found.append(unknown(id_, f"{type(error).__name__} in the check itself; please report it"))
    return found
