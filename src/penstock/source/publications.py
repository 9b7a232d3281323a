"""Publications: which tables the server sends, with which columns and rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.errors import (
    ConfigError,
    IdentitiesDiffer,
    NotIdentified,
    PublicationMissing,
    ServerUnavailable,
    SourceError,
)
from penstock.source.columns import CatalogTable
from penstock.source.faults import Place, translated
from penstock.source.identity import judge_identity, load_partitions
from penstock.source.patterns import TableName, select_tables
from penstock.source.unidentified import find_unidentified

SCHEMAS_SINCE = 150000
GENERATED_SINCE = 180000
_ALTER_SECONDS = 10.0
"""How long tables are tried one by one, at most, each time that a publication is brought up to date."""

DDL_SCHEMA = "penstock_ddl"
"""The schema of the DDL trigger (`penstock.source.ddl_trigger`). The statements below leave its tables out."""

_TABLES_13 = """
    select c.oid::int8, n.nspname, c.relname, c.relkind::text, null::int2[], null::text
    from pg_catalog.pg_publication_tables t
    join pg_catalog.pg_namespace n on n.nspname = t.schemaname
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
    where t.pubname = %s and n.nspname <> 'penstock_ddl' and (%s::oid is null or c.oid = %s::oid)
    order by n.nspname, c.relname
"""

PUBLISHED_13 = """
    published as (
        select p.oid as publication, c.oid as relation, c.relnamespace as namespace, n.nspname, c.relname
        from pg_catalog.pg_publication p
        join pg_catalog.pg_publication_tables t on t.pubname = p.pubname
        join pg_catalog.pg_namespace n on n.nspname = t.schemaname
        join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = t.tablename
        where p.pubname = %s and n.nspname <> 'penstock_ddl'
    )
"""

# From 15 on `pg_publication_tables` opens every table, and waits for DDL on any of them. The same from the catalog
# alone: members, tables of published schemas, or all tables; partitions as their leaves, or left to the root.
PUBLISHED_15 = """
    publication as (
        select oid, puballtables, pubviaroot from pg_catalog.pg_publication where pubname = %s
    ),
    named as (
        select r.prrelid as oid
        from pg_catalog.pg_publication_rel r join publication p on p.oid = r.prpubid
        where not p.puballtables
        union
        select c.oid
        from pg_catalog.pg_publication_namespace s
        join publication p on p.oid = s.pnpubid and not p.puballtables
        join pg_catalog.pg_class c on c.relnamespace = s.pnnspid
        where c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
        union
        select c.oid
        from publication p
        join pg_catalog.pg_class c on c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
        where p.puballtables
    ),
    tree as (
        select oid from named
        union
        select i.inhrelid
        from tree t
        join pg_catalog.pg_class parent on parent.oid = t.oid and parent.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = t.oid
    ),
    published as (
        select p.oid as publication, c.oid as relation, c.relnamespace as namespace, n.nspname, c.relname
        from publication p
        join tree t on true
        join pg_catalog.pg_class c on c.oid = t.oid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where n.nspname <> 'penstock_ddl' and case when p.pubviaroot
            then t.oid in (select oid from named) and not exists (
                select from pg_catalog.pg_partition_ancestors(t.oid) a
                where c.relispartition and a.relid <> t.oid and a.relid in (select oid from named)
            )
            else c.relkind = 'r'
        end
    )
"""

# The row filter and the column list are those of the table's own entry; they do not count when the whole schema
# or the whole database is published.
_TABLES_15 = f"""
    with recursive {PUBLISHED_15}
    select c.oid::int8, d.nspname, d.relname, c.relkind::text,
           case when own.oid is not null then own.prattrs::int2[] end,
           case when own.oid is not null then pg_catalog.pg_get_expr(own.prqual, own.prrelid) end
    from published d
    join publication p on p.oid = d.publication
    join pg_catalog.pg_class c on c.oid = d.relation
    left join pg_catalog.pg_publication_rel own
           on own.prpubid = p.oid and own.prrelid = c.oid and not p.puballtables
          and not exists (
              select from pg_catalog.pg_publication_namespace s where s.pnpubid = p.oid and s.pnnspid = c.relnamespace
          )
    where %s::oid is null or c.oid = %s::oid
    order by d.nspname, d.relname
"""  # noqa: S608 (texts of ours)

_MEMBERS = """
    select c.oid::int8, n.nspname, c.relname
    from pg_catalog.pg_publication_rel r
    join pg_catalog.pg_publication p on p.oid = r.prpubid
    join pg_catalog.pg_class c on c.oid = r.prrelid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where p.pubname = %s
"""

_CANDIDATES = """
    select c.oid::int8, n.nspname, c.relname,
           array(
               select pn.nspname || '.' || pc.relname
               from pg_catalog.pg_partition_ancestors(c.oid) a
               join pg_catalog.pg_class pc on pc.oid = a.relid
               join pg_catalog.pg_namespace pn on pn.oid = pc.relnamespace
               where c.relispartition and a.relid <> c.oid
           )
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p') and c.relpersistence = 'p'
      and n.nspname !~ '^pg_'
      and n.nspname not in ('information_schema', 'penstock', 'penstock_documents', 'penstock_ddl')
    order by n.nspname, c.relname
"""

_ROOTS = """
    select c.oid::int8
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.relkind = 'p' and n.nspname || '.' || c.relname = any(%s::text[])
"""

logger = logging.getLogger(__name__)

_Action = Literal["add", "drop"]


@dataclass(frozen=True, slots=True)
class Publication:
    """A row of `pg_publication`."""

    oid: int
    name: str
    owner: str
    all_tables: bool
    operations: frozenset[str]
    """Of `insert`, `update`, `delete`, `truncate`."""
    via_root: bool
    """Partitions are sent as their root."""
    generated_columns: bool
    """Stored generated columns are sent too (18 and newer)."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as the server sends it: a root or a leaf, depending on the publication."""

    oid: int
    namespace: str
    name: str
    kind: str
    column_attnums: tuple[int, ...] | None
    """The column list; None without one, which includes columns that are added later."""
    row_filter: str | None
    """The expression, with names of other schemas qualified."""

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class EnsuredPublication:
    """The result of `ensure_publication`."""

    publication: Publication
    created: bool = False
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    members: frozenset[str] = frozenset()
    """Tables that are members of a managed publication now."""
    refused: Mapping[str, SourceError] = field(default_factory=dict[str, SourceError])
    """Tables that the server did not add or remove, with its reason: another owner, dropped meanwhile, locked."""
    left_out: Mapping[str, NotIdentified] = field(default_factory=dict[str, NotIdentified])
    """Tables that match and are not published, so that the server does not reject their updates and deletes."""


def inspect_publication(connection: psycopg.Connection[Any], name: str) -> Publication | None:
    """The publication of this name; None if it does not exist."""
    statement = (
        "select pg_catalog.to_jsonb(p), p.pubowner::regrole::text from pg_catalog.pg_publication p where pubname = %s"
    )
    with translated(connection, f"inspect publication {name!r}"), connection.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(statement, [name]).fetchone()
    if found is None:
        return None
    row, owner = found
    operations = ("insert", "update", "delete", "truncate")
    return Publication(
        oid=int(row["oid"]),
        name=name,
        owner=owner,
        all_tables=row["puballtables"],
        operations=frozenset(operation for operation in operations if row[f"pub{operation}"]),
        via_root=bool(row.get("pubviaroot")),
        generated_columns=row.get("pubgencols") == "s",
    )


def published_tables(
    connection: psycopg.Connection[Any], publication: str, table_id: int | None = None
) -> list[PublishedTable]:
    """The tables that the server sends, sorted by schema and name; or only one. Raises `PublicationMissing`."""
    require_publication(connection, publication)
    statement = _TABLES_15 if connection.info.server_version >= SCHEMAS_SINCE else _TABLES_13
    doing = f"list the tables of publication {publication!r}"
    with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
        return [
            PublishedTable(oid, namespace, name, kind, None if attnums is None else tuple(sorted(attnums)), row_filter)
            for oid, namespace, name, kind, attnums, row_filter in cursor.execute(
                statement, [publication, table_id, table_id]
            )
        ]


def published_attnums(table: CatalogTable, published: PublishedTable, publication: Publication) -> tuple[int, ...]:
    """The columns of a table that the server sends now."""
    if published.column_attnums is not None:
        return published.column_attnums
    sent = {"", "s"} if publication.generated_columns else {""}
    return tuple(attribute.attnum for attribute in table.live_attributes if attribute.generated in sent)


def require_publication(connection: psycopg.Connection[Any], name: str) -> Publication:
    """Return the publication, or raise `PublicationMissing`."""
    publication = inspect_publication(connection, name)
    if publication is None:
        where = Place.of(connection).where
        raise PublicationMissing(f"publication {name!r} does not exist ({where})", publication=name, where=where)
    return publication


def create_publication(
    connection: psycopg.Connection[Any],
    name: str,
    tables: Sequence[TableName],
    *,
    via_root: bool = True,
    generated_columns: bool | None = None,
) -> Publication:
    """Create a publication for exactly these tables. With `via_root`, partitioned tables are sent as their root."""
    statement = sql.SQL(
        "create publication {name}{tables} with (publish_via_partition_root = {via_root}{generated})"
    ).format(
        name=sql.Identifier(name),
        tables=sql.SQL(" for table {}").format(_table_list(tables)) if tables else sql.SQL(""),
        via_root=sql.Literal(via_root),
        generated=sql.SQL(", publish_generated_columns = stored" if generated_columns else ""),
    )
    with translated(connection, f"create publication {name!r}"):
        connection.execute(statement)
    logger.info("publication created publication=%s tables=%d", name, len(tables))
    return require_publication(connection, name)


def drop_publication(connection: psycopg.Connection[Any], name: str) -> None:
    """Drop a publication, if it exists."""
    with translated(connection, f"drop publication {name!r}"):
        connection.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(name)))


def ensure_publication(
    connection: psycopg.Connection[Any],
    name: str,
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    manage: bool = True,
    via_root: bool = True,
    generated_columns: bool | None = None,
    later: Collection[str] = (),
    unidentified: Collection[str] = (),
) -> EnsuredPublication:
    """Make a publication contain exactly the tables that match the patterns; with `manage=False` only inspect it.

    A table whose updates and deletes the server would reject is left out, or removed, unless `unidentified` has its
    name. A table that the server refuses does not keep the others out. Tables in `later` are not added this time.
    `generated_columns` says whether stored generated columns are published; None leaves it as it is.
    Column lists and row filters of tables that stay are left alone, and so are published schemas. A partition is a
    member itself only if a pattern matches it and none matches a table above it. Call this before creating the slot.
    """
    publication = inspect_publication(connection, name) if manage else require_publication(connection, name)
    if not manage:
        assert publication is not None
        return EnsuredPublication(publication)
    if generated_columns and connection.info.server_version < GENERATED_SINCE:
        raise ConfigError(
            "source.generated_columns needs PostgreSQL 18: older servers do not send generated columns",
            hint="Remove source.generated_columns from the config.",
        )
    # By oid: tables may be renamed between two queries.
    wanted, left_out = _publishable(connection, publication, patterns, exclude, generated_columns, unidentified)
    created = publication is None
    members: dict[int, TableName] = {}
    if publication is None:
        try:
            publication = create_publication(
                connection, name, list(wanted.values()), via_root=via_root, generated_columns=generated_columns
            )
            members = wanted
        except SourceError:
            if inspect_publication(connection, name) is not None:
                # A process that was killed had sent the same statement, and its session ended only now.
                return ensure_publication(
                    connection,
                    name,
                    patterns,
                    exclude,
                    via_root=via_root,
                    generated_columns=generated_columns,
                    later=later,
                    unidentified=unidentified,
                )
            # Perhaps because of one table: they are added one by one below. Otherwise this raises the same error.
            publication = create_publication(
                connection, name, [], via_root=via_root, generated_columns=generated_columns
            )
    else:
        if publication.all_tables:
            raise ConfigError(
                f"publication {name!r} is FOR ALL TABLES, so Penstock cannot choose its tables",
                hint="Set manage_publication = false, or use another publication.",
            )
        if generated_columns is not None and publication.generated_columns != generated_columns:
            _publish_generated(connection, name, generated_columns)
        with translated(connection, f"inspect publication {name!r}"):
            cursor = connection.cursor(row_factory=tuple_row)
            rows = cursor.execute(_MEMBERS, [name]).fetchall()
            members = {oid: TableName(namespace, table) for oid, namespace, table in rows}
    refused: dict[str, SourceError] = {}
    missing = [table for oid, table in wanted.items() if oid not in members and str(table) not in later]
    surplus = sorted(table for oid, table in members.items() if oid not in wanted)
    added, removed = missing, surplus
    try:
        with translated(connection, f"alter publication {name!r}"), connection.transaction():
            _alter(connection, name, "add", missing)
            _alter(connection, name, "drop", surplus)
    except ServerUnavailable:
        raise
    except SourceError:
        added = _alter_one_by_one(connection, name, "add", missing, refused)
        removed = _alter_one_by_one(connection, name, "drop", surplus, refused)
    now = (set(members.values()) - set(removed)) | set(added)
    return EnsuredPublication(
        publication,
        created=created,
        added=tuple(str(table) for table in (sorted(now) if created else added)),
        removed=tuple(str(table) for table in removed),
        members=frozenset(str(table) for table in now),
        refused=refused,
        left_out=left_out,
    )


def find_left_out(
    connection: psycopg.Connection[Any],
    publication: Publication | None,
    patterns: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    generated_columns: bool | None = None,
    unidentified: Collection[str] = (),
) -> Mapping[str, NotIdentified]:
    """The tables that match and that `ensure_publication` would not publish."""
    return _publishable(connection, publication, patterns, exclude, generated_columns, unidentified)[1]


def _publishable(
    connection: psycopg.Connection[Any],
    publication: Publication | None,
    patterns: Sequence[str],
    exclude: Sequence[str],
    generated_columns: bool | None,
    unidentified: Collection[str],
) -> tuple[dict[int, TableName], dict[str, NotIdentified]]:
    """The tables to publish, by oid, and those that are left out."""
    wanted = _find_tables(connection, patterns, exclude)
    if generated_columns is None:
        generated_columns = publication is not None and publication.generated_columns
    named = {oid for oid, table in wanted.items() if str(table) in unidentified}
    found = find_unidentified(
        connection,
        wanted.keys() - named,
        generated_columns=generated_columns,
        listed=tables_with_column_list(connection, publication),
    )
    left_out = {str(wanted[oid]): error for oid, error in found.items()}
    return {oid: table for oid, table in wanted.items() if oid not in found}, left_out


def tables_with_column_list(connection: psycopg.Connection[Any], publication: Publication | None) -> frozenset[int]:
    """The members of a publication whose columns are listed."""
    if publication is None or connection.info.server_version < SCHEMAS_SINCE:
        return frozenset()
    statement = "select prrelid::int8 from pg_catalog.pg_publication_rel where prpubid = %s and prattrs is not null"
    with translated(connection, "read column lists"), connection.cursor(row_factory=tuple_row) as cursor:
        return frozenset(oid for (oid,) in cursor.execute(statement, [publication.oid]).fetchall())


def _publish_generated(connection: psycopg.Connection[Any], name: str, generated: bool) -> None:
    statement = sql.SQL("alter publication {} set (publish_generated_columns = {})")
    with translated(connection, f"alter publication {name!r}"):
        connection.execute(statement.format(sql.Identifier(name), sql.SQL("stored" if generated else "none")))
    logger.info("generated columns are %s publication=%s", "published" if generated else "not published", name)


def _alter(connection: psycopg.Connection[Any], name: str, action: _Action, tables: Sequence[TableName]) -> None:
    if tables:
        statement = sql.SQL("alter publication {} {} table {}")
        connection.execute(statement.format(sql.Identifier(name), sql.SQL(action), _table_list(tables)))


def _alter_one_by_one(
    connection: psycopg.Connection[Any],
    name: str,
    action: _Action,
    tables: Sequence[TableName],
    refused: dict[str, SourceError],
) -> list[TableName]:
    """Add or drop what the server takes; the rest is `refused`."""
    taken: list[TableName] = []
    deadline = time.monotonic() + _ALTER_SECONDS
    for table in tables:
        try:
            with translated(connection, f"{action} table {table}, publication {name!r}"):
                if time.monotonic() < deadline:  # locked tables cost a wait each; the rest is for the next time
                    _alter(connection, name, action, [table])
                    taken.append(table)
        except ServerUnavailable:
            raise
        except SourceError as error:
            refused[str(table)] = error
    return taken


def find_tables(
    connection: psycopg.Connection[Any], patterns: Sequence[str], exclude: Sequence[str] = ()
) -> list[TableName]:
    """The tables of the database that match the patterns and can be published."""
    return list(_find_tables(connection, patterns, exclude).values())


def _find_tables(
    connection: psycopg.Connection[Any], patterns: Sequence[str], exclude: Sequence[str]
) -> dict[int, TableName]:
    with translated(connection, "list the tables"), connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_CANDIDATES).fetchall()
    candidates = {TableName(namespace, name): (oid, above) for oid, namespace, name, above in rows}
    chosen = select_tables(candidates, patterns, exclude)
    names = {str(table) for table in chosen}
    found = {table: candidates[table] for table in chosen}
    return {oid: table for table, (oid, above) in found.items() if not names.intersection(above)}


def identity_problems(connection: psycopg.Connection[Any], tables: Iterable[str]) -> dict[str, IdentitiesDiffer]:
    """The partitioned tables among these names whose partitions do not identify its rows, with the reason."""
    with translated(connection, "find partitioned tables"), connection.cursor(row_factory=tuple_row) as cursor:
        roots = [oid for (oid,) in cursor.execute(_ROOTS, [list(tables)]).fetchall()]
    judged = {str(each.root): judge_identity(each).problem for each in load_partitions(connection, roots).values()}
    return {name: problem for name, problem in judged.items() if problem is not None}


def _table_list(tables: Sequence[TableName]) -> sql.Composed:
    # "only": tables that inherit are members only if a pattern matches them.
    return sql.SQL(", ").join(sql.SQL("only {}").format(sql.Identifier(*table)) for table in tables)
