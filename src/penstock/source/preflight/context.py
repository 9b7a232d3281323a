"""The facts that checks need, loaded on first use and shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.changes.transform import Transforms
from penstock.errors import NotIdentified
from penstock.schema import PostgresType
from penstock.source.catalog import load_tables, load_types
from penstock.source.columns import CatalogTable
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.ddl_trigger import DdlTrigger
from penstock.source.faults import translated
from penstock.source.patterns import TableName, TablePattern
from penstock.source.preflight.report import Severity
from penstock.source.publications import (
    Publication,
    PublishedTable,
    find_left_out,
    find_tables,
    inspect_publication,
    published_attnums,
    published_tables,
    tables_with_column_list,
)
from penstock.source.slots import Slot, inspect_slot
from penstock.source.unidentified import find_unidentified
from penstock.values import TypeSettings

_SETTINGS = "select name, setting, unit from pg_catalog.pg_settings"

_OIDS = """
    select c.oid::int8, n.nspname, c.relname, c.relkind::text
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    join unnest(%s::text[], %s::text[]) wanted (namespace, name)
      on wanted.namespace = n.nspname and wanted.name = c.relname
    order by n.nspname, c.relname
"""

_LEAVES = """
    select root::int8, t.relid::pg_catalog.oid::int8
    from unnest(%s::pg_catalog.oid[]) root
    cross join lateral pg_catalog.pg_partition_tree(root) t
    where t.isleaf
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What to check besides the server. A malformed pattern raises `ConfigError`."""

    publication: str | None = None
    slot: str | None = None
    patterns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    manage_publication: bool = False
    failover_slot: bool | None = None
    """As configured."""
    unidentified: frozenset[str] = frozenset()
    """Tables that a managed publication has although the server then rejects their updates and deletes."""
    generated_columns: bool | None = None
    """Whether the next start publishes stored generated columns; None leaves the publication as it is."""
    ddl_trigger: DdlTrigger | None = None
    """The trigger that a start creates."""
    needs_slot: bool = False
    """True if tables were copied, whose changes only the slot has."""
    recreates_slot: bool = False
    """True if a start creates a lost slot again."""
    types: TypeSettings = field(default_factory=TypeSettings)
    transforms: Transforms = field(default_factory=Transforms)
    schema_changes: Mapping[str, str] = field(default_factory=dict[str, str])
    """How tables follow changes of their schemas, for people: by name, and under `""` all others."""

    def __post_init__(self) -> None:
        for pattern in (*self.patterns, *self.exclude):
            TablePattern(pattern)


@dataclass(frozen=True, slots=True)
class Subject:
    """A table that is or would be published. `stored` are the tables with its rows: a partitioned root's leaves."""

    published: PublishedTable
    catalog: CatalogTable
    attnums: tuple[int, ...]
    stored: tuple[CatalogTable, ...]

    def __str__(self) -> str:
        return str(self.published)


class Context:
    """The server, the request, and what the catalog says about both."""

    def __init__(self, settings: SourceSettings, request: Request) -> None:
        self.settings = settings
        self.request = request
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    @property
    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        """The connection. It is reopened if a check lost it, so that the next check can run."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self.settings, Role.CHECK, parameters={"statement_timeout": "30s"})
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement of a check."""
        with translated(self.connection, "check the server"), self.connection.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(statement.encode(), parameters or None).fetchall()

    def value(self, statement: str, *parameters: Any) -> Any:
        return self.rows(statement, *parameters)[0][0]

    @cached_property
    def version(self) -> int:
        """As in `server_version_num`."""
        return self.connection.info.server_version

    @cached_property
    def in_recovery(self) -> bool:
        return bool(self.value("select pg_catalog.pg_is_in_recovery()"))

    @cached_property
    def _server_settings(self) -> dict[str, tuple[str, str | None]]:
        return {name: (setting, unit) for name, setting, unit in self.rows(_SETTINGS)}

    def setting(self, name: str) -> str | None:
        """A server setting; None if this version of the server does not have it."""
        found = self._server_settings.get(name)
        return None if found is None else found[0]

    def number(self, name: str) -> int | None:
        """A numeric setting in its own unit."""
        setting = self.setting(name)
        return None if setting is None else int(setting)

    @cached_property
    def publication(self) -> Publication | None:
        name = self.request.publication
        return None if name is None else inspect_publication(self.connection, name)

    @cached_property
    def slot(self) -> Slot | None:
        name = self.request.slot
        return None if name is None else inspect_slot(self.connection, name)

    @cached_property
    def members(self) -> frozenset[int]:
        """The tables that are published now."""
        if self.publication is None:
            return frozenset()
        return frozenset(table.oid for table in published_tables(self.connection, self.publication.name))

    @cached_property
    def left_out(self) -> Mapping[str, NotIdentified]:
        """The tables that a start would not publish, so that their updates and deletes are not rejected."""
        request = self.request
        if not request.manage_publication:
            return {}
        return find_left_out(
            self.connection,
            self.publication,
            self._patterns,
            request.exclude,
            generated_columns=request.generated_columns,
            unidentified=request.unidentified,
        )

    @cached_property
    def rejecting(self) -> Mapping[str, NotIdentified]:
        """The tables that are or would be published although the server then rejects their updates and deletes."""
        generated = self.request.generated_columns
        if generated is None:
            generated = self.publication is not None and self.publication.generated_columns
        found = find_unidentified(
            self.connection,
            [subject.published.oid for subject in self.subjects],
            generated_columns=generated,
            listed=tables_with_column_list(self.connection, self.publication),
        )
        return {error.table: error for error in found.values()}

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The tables that are published, or would be after a start."""
        return tuple(subject for subject in self.matching if str(subject) not in self.left_out)

    @cached_property
    def matching(self) -> tuple[Subject, ...]:
        """The published tables, and those that match the patterns (or all tables, without patterns) if Penstock
        chooses what is published; also those that are left out."""
        published: list[PublishedTable] = []
        if self.publication is not None:
            published = published_tables(self.connection, self.publication.name)
        if self.publication is None or self.request.manage_publication:
            known = {table.oid for table in published}
            published += [table for table in self._published_candidates() if table.oid not in known]
            published.sort(key=lambda table: (table.namespace, table.name))
        tables = load_tables(self.connection, [table.oid for table in published])
        roots = [table.oid for table in published if table.kind == "p"]
        leaves: dict[int, list[int]] = {}
        for root, leaf in self.rows(_LEAVES, roots) if roots else []:
            leaves.setdefault(root, []).append(leaf)
        stored = load_tables(self.connection, [leaf for group in leaves.values() for leaf in group])
        subjects: list[Subject] = []
        for table in published:
            catalog = tables.get(table.oid)
            if catalog is None:
                continue
            parts = tuple(stored[leaf] for leaf in leaves.get(table.oid, []) if leaf in stored)
            subjects.append(
                Subject(table, catalog, self._attnums(catalog, table), parts if table.kind == "p" else (catalog,))
            )
        return tuple(subjects)

    @property
    def names(self) -> frozenset[str]:
        """The tables that are published, or match."""
        return frozenset(str(subject) for subject in self.matching)

    @property
    def _patterns(self) -> tuple[str, ...]:
        return self.request.patterns or ("*",)

    @cached_property
    def types(self) -> Mapping[int, PostgresType]:
        """The types of all columns that are or would be published."""
        wanted = {
            attribute.type_oid
            for subject in self.subjects
            for attribute in subject.catalog.live_attributes
            if attribute.attnum in subject.attnums
        }
        return load_types(self.connection, wanted)

    @property
    def severity(self) -> Severity:
        """How serious a table's fault is: only a warning if neither publication nor patterns ask for the table."""
        asked_for = self.publication is not None or self.request.patterns
        return Severity.CRITICAL if asked_for else Severity.WARNING

    def _attnums(self, catalog: CatalogTable, table: PublishedTable) -> tuple[int, ...]:
        if self.publication is not None:
            return published_attnums(catalog, table, self.publication)
        return tuple(attribute.attnum for attribute in catalog.live_attributes if not attribute.generated)

    @cached_property
    def candidates(self) -> Sequence[TableName]:
        """The tables that match the patterns and can be published."""
        return find_tables(self.connection, self._patterns, self.request.exclude)

    def _published_candidates(self) -> list[PublishedTable]:
        names = self.candidates
        rows = self.rows(_OIDS, [table.namespace for table in names], [table.name for table in names])
        return [PublishedTable(oid, namespace, name, kind, None, None) for oid, namespace, name, kind in rows]
