"""`[[index]]` and `[sink]`: the search indexes of a config, which together are one output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config.models import DOCUMENTS_OUTPUT, ConfigFile, IndexSection, PollingSection, SinkSection
from penstock.documents.base import BatchPolicy, FailurePolicies, FailurePolicy
from penstock.documents.polling import PollSettings
from penstock.errors import ConfigError, SpecificationInvalid
from penstock.schema import quote_identifier
from penstock.sinks.base import Sink
from penstock.sinks.registry import SINKS, create_sink
from penstock.source.patterns import TableName, select_tables
from penstock.specification import IndexSpecification, load_specification
from penstock.tables import TablesSettings

_PATHS = ("path", "_file", "client_certificate", "client_key")
"""Endings of sink options that name files."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class IndexChoice:
    """One index: its specification, and what happens to documents that it rejects."""

    specification: IndexSpecification
    file: Path
    failure_policy: FailurePolicy = FailurePolicy.STOP

    @property
    def name(self) -> str:
        return self.specification.name


@dataclass(frozen=True, slots=True)
class PollingChoice:
    """How to poll for changes if the server does not send them."""

    settings: PollSettings
    cursor: str
    """The default for tables that name none."""
    cursors: Mapping[TableName, str] = field(default_factory=dict[TableName, str])


@dataclass(frozen=True, slots=True)
class DocumentsChoice:
    """All indexes, and the sink of their documents."""

    settings: TablesSettings
    indexes: tuple[IndexChoice, ...]
    sink_type: str
    sink_options: Mapping[str, Any] = field(repr=False, default_factory=dict[str, Any])
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    skip_backfill: bool = False
    polling: PollingChoice | None = None
    """None if the server sends changes."""

    @property
    def name(self) -> str:
        """The name of the output."""
        return self.settings.output

    @property
    def specifications(self) -> tuple[IndexSpecification, ...]:
        return tuple(each.specification for each in self.indexes)

    @property
    def failure_policies(self) -> FailurePolicies:
        return FailurePolicies(indexes={each.name: each.failure_policy for each in self.indexes})

    def index(self, name: str) -> IndexChoice:
        """An index by its name."""
        found = [each for each in self.indexes if each.name == name]
        if not found:
            known = ", ".join(each.name for each in self.indexes)
            raise ConfigError(f"the config has no index {name!r}", hint=f"It has: {known}.")
        return found[0]

    def create_sink(self) -> Sink:
        """Create the sink; it does not connect yet."""
        try:
            return create_sink(self.sink_type, self.sink_options, SinkSection.model_fields)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"sink: {self.sink_type!r} does not accept these options: {error}") from None


def documents_choice(file: ConfigFile, settings: TablesSettings, folder: Path) -> DocumentsChoice | None:
    """The documents output of a config; None if it has no index."""
    if not file.index or file.sink is None:
        return None
    indexes = _indexes(file.index, folder, file.sink)
    _refuse_left_out(indexes, settings)
    options = dict(file.sink.model_extra or {})
    for name, value in options.items():
        if name.endswith(_PATHS) and isinstance(value, str) and "://" not in value:
            options[name] = str(folder / value)
    return DocumentsChoice(
        settings=replace(settings, output=DOCUMENTS_OUTPUT),
        indexes=indexes,
        sink_type=file.sink.type,
        sink_options=options,
        batch=BatchPolicy(file.sink.max_changes, file.sink.max_delay.total_seconds()),
        skip_backfill=file.sink.skip_backfill,
        polling=_polling(file.polling, indexes),
    )


def tables_of(indexes: Sequence[IndexSection], folder: Path) -> tuple[str, ...]:
    """Patterns for exactly the tables that the documents are built from."""
    tables = {table for each in _indexes(indexes, folder) for table in each.specification.tables()}
    return tuple(f"{quote_identifier(table.namespace)}.{quote_identifier(table.name)}" for table in sorted(tables))


def _indexes(
    sections: Sequence[IndexSection], folder: Path, sink: SinkSection | None = None
) -> tuple[IndexChoice, ...]:
    indexes: list[IndexChoice] = []
    problems: list[str] = []
    for number, section in enumerate(sections):
        path = folder / section.specification
        try:
            specification = load_specification(path, section.name)
        except SpecificationInvalid as error:
            problems.append(error.message)
            continue
        prefix = "" if sink is None else sink.index_prefix
        name, aliases = prefix + specification.name, tuple(prefix + each for each in section.aliases)
        specification = replace(specification, name=name, aliases=aliases, id_prefix=section.id_prefix)
        indexes.append(IndexChoice(specification, path, section.failure_policy))
        problems += _search_only(number, section, sink)
        if _NAME.fullmatch(name) is None:
            problems.append(
                f"index.{number}.name: {name!r} may have lowercase letters, digits, '_', '-' and '.', and must start"
                " with a letter or digit"
            )
        elif name in [each.name for each in indexes[:-1]]:
            problems.append(f"index.{number}.name: duplicate index {name!r}; give one of them another name")
    names = {each.name for each in indexes}
    for each in indexes:
        for alias in names.intersection(each.specification.aliases):
            problems.append(f"index {each.name!r}: its alias {alias!r} is the name of an index; use another one")
    if problems:
        raise SpecificationInvalid("\n  ".join(problems), problems=problems)
    return tuple(indexes)


def _search_only(number: int, section: IndexSection, sink: SinkSection | None) -> Iterator[str]:
    """Yield what only a search server can do, for other sinks."""
    if sink is not None and sink.type in SINKS and sink.type != "opensearch":
        for key in ("aliases", "id_prefix"):
            if getattr(section, key):
                yield f"index.{number}.{key}: the sink {sink.type!r} does not support it"
    for alias in section.aliases:
        if _NAME.fullmatch(alias) is None:
            yield f"index.{number}.aliases: {alias!r} is not a name that an index can have"


def _refuse_left_out(indexes: Sequence[IndexChoice], settings: TablesSettings) -> None:
    if not settings.manage_publication:
        return
    for each in indexes:
        needed = each.specification.tables()
        left_out = needed.difference(select_tables(needed, settings.tables, settings.exclude))
        if left_out:
            raise ConfigError(
                f"index {each.name!r} needs {_listed(left_out)}, which source.tables or exclude leaves out",
                hint="Add these tables: without their changes, documents would become stale.",
            )


def _polling(section: PollingSection | None, indexes: Sequence[IndexChoice]) -> PollingChoice | None:
    if section is None:
        return None
    known = {table for each in indexes for table in each.specification.tables()}
    cursors: dict[TableName, str] = {}
    for pattern, cursor in section.tables.items():
        found = select_tables(known, [pattern])
        if not found:
            raise ConfigError(
                f'polling.tables."{pattern}": no index uses a table that matches',
                hint=f"Indexes use: {_listed(known)}.",
            )
        cursors |= dict.fromkeys(found, cursor)
    settings = PollSettings(section.interval.total_seconds(), section.overlap.total_seconds())
    return PollingChoice(settings, section.cursor, cursors)


def _listed(tables: set[TableName]) -> str:
    return ", ".join(str(table) for table in sorted(tables))
