"""The facts that checks need, loaded on first use and shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.changes.transform import Transforms
from penstock.schema import PostgresType
from penstock.source.catalog import load_tables, load_types
from penstock.source.columns import CatalogTable
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.patterns import TablePattern
from penstock.source.preflight.report import Severity
from penstock.source.publications import (
    Publication,
    PublishedTable,
    find_tables,
    inspect_publication,
    published_attnums,
    published_tables,
)
from penstock.source.slots import Slot, inspect_slot
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
    needs_slot: bool = False
    """Tables or indexes exist that need every change from the slot on."""
    types: TypeSettings = field(default_factory=TypeSettings)
    transforms: Transforms = field(default_factory=Transforms)
    generated_columns: bool = False
    """The next start publishes stored generated columns."""
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
    def subjects(self) -> tuple[Subject, ...]:
        """The published tables; without a publication, those that match the patterns, or all."""
        if self.publication is not None:
            published = published_tables(self.connection, self.publication.name)
        else:
            published = self._candidates()
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

    @cached_property
    def names(self) -> frozenset[str]:
        """The tables that are published, or would be after a start."""
        known = {str(subject) for subject in self.subjects}
        if self.request.manage_publication or self.publication is None:
            found = find_tables(self.connection, self.request.patterns or ("*",), self.request.exclude)
            known |= {str(table) for table in found}
        return frozenset(known)

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

    def _candidates(self) -> list[PublishedTable]:
        names = find_tables(self.connection, self.request.patterns or ("*",), self.request.exclude)
        rows = self.rows(_OIDS, [table.namespace for table in names], [table.name for table in names])
        return [PublishedTable(oid, namespace, name, kind, None, None) for oid, namespace, name, kind in rows]
