"""Records in SQL, in the part of the language that SQLite and Postgres share, and the migrations of their tables.

Migrations are numbered files in `migrations/`. They run in one transaction, behind a lock, when a store is opened. A
state from a newer version is refused, and so is migrating a state that a running pipeline uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Protocol

from penstock.errors import LeaseHeld, StateNewer
from penstock.state.records import ColumnKind, Record, RecordT, layout_of

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
_ROWS_AT_ONCE = 50


class Dialect(Protocol):
    """The differences between SQLite and Postgres."""

    prefix: str
    """Before each table's name: the schema, quoted, or nothing."""
    placeholder: str

    def encode(self, kind: ColumnKind, value: Any) -> Any:
        """Return a value other than None as the driver takes it."""
        ...

    def decode(self, kind: ColumnKind, value: Any) -> Any:
        """Return a value as the driver gave it, in Python."""
        ...


class Cursor(Protocol):
    """The part of a driver's cursor that is used."""

    @property
    def rowcount(self) -> int: ...
    def fetchall(self) -> list[Any]: ...


class SqlTransaction:
    """A transaction that its database has opened and will commit."""

    def __init__(
        self,
        pipeline_id: str,
        dialect: Dialect,
        execute: Callable[[str, Sequence[Any]], Cursor],
        now: Callable[[], datetime],
    ) -> None:
        self._pipeline_id = pipeline_id
        self._dialect = dialect
        self._execute = execute
        self._now = now

    def now(self) -> datetime:
        """See `records.Transaction`."""
        return self._now()

    def rows(self, kind: type[RecordT], **values: Any) -> list[RecordT]:
        """See `records.Transaction`."""
        statement = _select(kind, self._dialect.prefix, self._dialect.placeholder, tuple(values))
        kinds = layout_of(kind).kinds
        found = self._execute(statement, self._parameters(kind, values)).fetchall()
        return [kind(*map(self._decode, kinds, row)) for row in found]

    def put(self, records: Iterable[Record]) -> None:
        """See `records.Transaction`."""
        for kind, group in groupby(records, key=type):
            layout = layout_of(kind)
            # One statement does not take the same key twice: the last record wins.
            unique = list({tuple(_values(record, layout.key)): record for record in group}.values())
            for start in range(0, len(unique), _ROWS_AT_ONCE):
                part = unique[start : start + _ROWS_AT_ONCE]
                values = [
                    value
                    for record in part
                    for value in (self._pipeline_id, *map(self._encode, layout.kinds, _values(record, layout.names)))
                ]
                statement = _upsert(kind, self._dialect.prefix, self._dialect.placeholder, len(part))
                self._execute(statement, values)

    def delete(self, kind: type[Record], **values: Any) -> int:
        """See `records.Transaction`."""
        statement = _delete(kind, self._dialect.prefix, self._dialect.placeholder, tuple(values))
        return self._execute(statement, self._parameters(kind, values)).rowcount

    def _parameters(self, kind: type[Record], values: dict[str, Any]) -> list[Any]:
        layout = layout_of(kind)
        kinds = dict(zip(layout.names, layout.kinds, strict=True))
        return [self._pipeline_id, *(self._encode(kinds[name], value) for name, value in values.items())]

    def _encode(self, kind: ColumnKind, value: Any) -> Any:
        return None if value is None else self._dialect.encode(kind, value)

    def _decode(self, kind: ColumnKind, value: Any) -> Any:
        return None if value is None else self._dialect.decode(kind, value)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, from the version before its number to its number."""

    number: int
    name: str
    sql: str

    @property
    def statements(self) -> list[str]:
        """Its statements; each ends with a semicolon at the end of a line."""
        return [each.strip() for each in self.sql.split(";\n") if each.strip()]


def load_migrations(dialect: str) -> list[Migration]:
    """Return the migrations in a folder of `migrations/`, in order."""
    found: list[Migration] = []
    for file in files("penstock.state").joinpath("migrations", dialect).iterdir():
        match = _NAME.fullmatch(file.name)
        if match is not None:
            found.append(Migration(int(match[1]), match[2], file.read_text()))
    return sorted(found, key=lambda each: each.number)


def pending(migrations: Sequence[Migration], version: int, where: str) -> list[Migration]:
    """Return the migrations after `version`; raise `StateNewer` if the version is unknown."""
    newest = max((each.number for each in migrations), default=0)
    if version > newest:
        raise StateNewer(
            f"the state in {where} has version {version}, but this Penstock knows versions up to {newest}",
            found=version,
            known=newest,
        )
    return [each for each in migrations if each.number > version]


def check_unused(holders: Sequence[tuple[str, str, int, datetime]], where: str) -> None:
    """Raise `LeaseHeld` if the state is in use; `holders` are (pipeline, host, pid, since) of held leases."""
    for pipeline_id, host, pid, since in holders:
        raise LeaseHeld(
            f"the state in {where} must be migrated, but process {pid} on {host} runs pipeline {pipeline_id!r}",
            hint="Stop that process, then start the new version.",
            host=host,
            pid=pid,
            since=since,
        )


# All names below are names of records and their fields; none comes from outside.


@cache
def _select(kind: type[Record], prefix: str, placeholder: str, names: tuple[str, ...]) -> str:
    columns = ", ".join(layout_of(kind).names)
    order = ", ".join(("pipeline_id", *layout_of(kind).key))
    where = _where(names, placeholder)
    return f"select {columns} from {prefix}{kind.table} where {where} order by {order}"  # noqa: S608


@cache
def _upsert(kind: type[Record], prefix: str, placeholder: str, count: int) -> str:
    layout = layout_of(kind)
    names = ("pipeline_id", *layout.names)
    key = ", ".join(("pipeline_id", *layout.key))
    changes = ", ".join(f"{name} = excluded.{name}" for name in layout.names if name not in layout.key)
    row = f"({', '.join([placeholder] * len(names))})"
    into = f"insert into {prefix}{kind.table} ({', '.join(names)}) values {', '.join([row] * count)}"  # noqa: S608
    return f"{into} on conflict ({key}) do update set {changes}"


@cache
def _delete(kind: type[Record], prefix: str, placeholder: str, names: tuple[str, ...]) -> str:
    return f"delete from {prefix}{kind.table} where {_where(names, placeholder)}"  # noqa: S608


def _values(record: Record, names: Sequence[str]) -> Iterator[Any]:
    return (getattr(record, name) for name in names)


def _where(names: tuple[str, ...], placeholder: str) -> str:
    return " and ".join(f"{name} = {placeholder}" for name in ("pipeline_id", *names))
