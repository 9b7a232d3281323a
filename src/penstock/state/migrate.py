"""Numbered migrations of the stores' tables, in `migrations/`; a state from the future is refused.

They run in one transaction, behind a lock, when a store is opened. A state that a pipeline is using right now is not
migrated under its feet: its driver belongs to the older version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

from penstock.errors import LeaseHeld, StateNewer

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, from the version before it to its number."""

    number: int
    name: str
    sql: str

    @property
    def statements(self) -> list[str]:
        """One by one; a statement ends with a semicolon at the end of a line."""
        return [each.strip() for each in self.sql.split(";\n") if each.strip()]


def load_migrations(dialect: str) -> list[Migration]:
    """Those of a folder in `migrations/`, in order."""
    found: list[Migration] = []
    for file in files("penstock.state").joinpath("migrations", dialect).iterdir():
        match = _NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(int(match[1]), match[2], file.read_text()))
    return sorted(found, key=lambda each: each.number)


def pending(migrations: Sequence[Migration], version: int, where: str) -> list[Migration]:
    """What is missing at `version`; `StateNewer` if that is beyond what we know."""
    newest = max((each.number for each in migrations), default=0)
    if version > newest:
        raise StateNewer(
            f"the state in {where} has version {version}; this Penstock knows versions up to {newest}",
            found=version,
            known=newest,
        )
    return [each for each in migrations if each.number > version]


def check_unused(holders: Sequence[tuple[str, str, int, datetime]], where: str) -> None:
    """Refuse to migrate what is in use; `holders` are (pipeline, host, pid, since) of leases that are held."""
    for pipeline_id, host, pid, since in holders:
        raise LeaseHeld(
            f"the state in {where} must be migrated, but pipeline {pipeline_id!r} is driven by process {pid} on {host}",
            hint="Stop it, then start the new version.",
            host=host,
            pid=pid,
            since=since,
        )
