"""What reads and streams of `format("penstock")` have in common: their options, finding the table, and their errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import (
    ConfigError,
    LineageChanged,
    LostInFailover,
    PenstockError,
    PositionAhead,
    PositionGone,
    PublicationChanged,
    PublicationMissing,
    SlotLost,
    SlotMissing,
    SlotUndecodable,
    SnapshotLost,
    SpoolCorrupt,
    TableRewritten,
    ValueOutOfRange,
    with_hint,
)
from penstock.source.faults import translated
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index"}
_TABLE = """
    select c.oid::int8, c.relkind::text from pg_catalog.pg_class c
    where c.oid = pg_catalog.to_regclass(
        case when pg_catalog.cardinality(pg_catalog.parse_ident(%(name)s)) = 1 then 'public.' || %(name)s
             else %(name)s end
    )::pg_catalog.oid
"""
Hints = Mapping[type[PenstockError], str]
_POLICIES = ("outOfRange", "numeric", "unknownTypes")
_OF_READS: Hints = {
    SnapshotLost: "The snapshot of a data frame ends after five minutes without a reader, that of "
    "penstock.snapshot with its block or its time. Take another one, and call load() again.",
    TableRewritten: "Call load() again.",
    ValueOutOfRange: "Choose what happens to such values with the option 'outOfRange'.",
}
"""Where the hint of a pipeline does not help."""
_NEW_QUERY = (
    "Start a new query, with a new checkpoint and another slot; startingPosition = 'snapshot' copies the table first."
)
_OTHER_SERVER = f"Check the address. If this server lost changes: {_NEW_QUERY[0].lower()}{_NEW_QUERY[1:]}"
OF_STREAMS: Hints = {
    **dict.fromkeys((PublicationChanged, PublicationMissing, SlotMissing, SlotLost, SlotUndecodable), _NEW_QUERY),
    **dict.fromkeys((LineageChanged, LostInFailover, PositionAhead), _OTHER_SERVER),
    PositionGone: _NEW_QUERY,
    SpoolCorrupt: "Stop the query, delete its 'spoolLocation', and start it again: it reads the changes from the slot.",
    SnapshotLost: "Start the query again from its checkpoint: it copies the table again.",
    TableRewritten: "Start the query again from its checkpoint: it copies the table again.",
    ValueOutOfRange: "Choose what happens to such values with the option 'outOfRange', and start the query again.",
}
_Choice = TypeVar("_Choice", OutOfRange, NumericPolicy, UnknownTypes)


def parse_options(options: Mapping[str, str], needed: tuple[str, ...], others: tuple[str, ...]) -> dict[str, str]:
    """Return the options by their names in lower case; raise for missing and unknown ones."""
    given = {name.lower(): value for name, value in options.items()}
    for name in needed:
        if not given.get(name.lower()):
            raise ConfigError(f'format("penstock") needs the option {name!r}')
    names = (*needed, *others, *_POLICIES)
    unknown = given.keys() - {name.lower() for name in names}
    if unknown:
        raise ConfigError(
            f'format("penstock") has no option {min(unknown)!r}', hint=f"Options are: {', '.join(names)}."
        )
    return given


def parse_count(given: Mapping[str, str], name: str) -> int | None:
    """Return an option that is a whole number; None if it is not given."""
    value = given.get(name.lower())
    if value is not None and (not value.isdecimal() or int(value) < 1):
        raise ConfigError(f"the option {name!r} should be a whole number of at least 1")
    return None if value is None else int(value)


def parse_types(given: Mapping[str, str]) -> TypeSettings:
    """Return the options that decide the types of columns."""
    return TypeSettings(
        out_of_range=_choice(OutOfRange, given, "outOfRange", OutOfRange.ERROR),
        numeric=_choice(NumericPolicy, given, "numeric", NumericPolicy.STRING),
        unknown_types=_choice(UnknownTypes, given, "unknownTypes", UnknownTypes.TEXT),
    )


def split_names(text: str) -> Iterator[str]:
    """Split at commas outside of double quotes."""
    part, is_quoted = "", False
    for each in text:
        is_quoted ^= each == '"'
        if each == "," and not is_quoted:
            yield part.strip()
            part = ""
        else:
            part += each
    yield part.strip()


def find_table(connection: psycopg.Connection[Any], name: str) -> int:
    """Return the oid of a table, named as in SQL; raise `ConfigError` if there is none."""
    with translated(connection, f"find the table {name}"), connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(_TABLE, {"name": name}).fetchone()
    if row is None:
        raise ConfigError(
            f"there is no table {name} that this role can see",
            hint="Name it as in SQL, with its schema, and quoted if it has upper-case letters.",
        )
    oid, kind = row
    if kind not in "rp":
        raise ConfigError(
            f"{name} is {_KINDS.get(kind, 'no table')}, and only tables can be read",
            hint='Read it with Spark\'s format("jdbc").',
        )
    return oid


@contextmanager
def explained(hints: Hints = _OF_READS) -> Iterator[None]:
    """Put hints into messages: Spark shows nothing else."""
    try:
        yield
    except PenstockError as error:
        error.hint = hints.get(type(error), error.hint)
        raise PenstockError(with_hint(error), hint="") from None


def _choice(kind: type[_Choice], given: Mapping[str, str], name: str, default: _Choice) -> _Choice:
    value = given.get(name.lower(), default)
    try:
        return kind(value.lower())
    except ValueError:
        choices = ", ".join(f"{each.value!r}" for each in kind)
        raise ConfigError(f"the option {name!r} should be one of {choices}") from None
