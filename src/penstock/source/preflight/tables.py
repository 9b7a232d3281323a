"""Checks of the publication and its tables.

Some protect *other* sessions: once a table without a replica identity is published, the server rejects their updates
and deletes. A publication that Penstock manages leaves such tables out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.errors import NotIdentified
from penstock.schema import ReplicaIdentity
from penstock.source.columns import CatalogTable
from penstock.source.identity import quote_if_needed
from penstock.source.patterns import TableName, select_tables
from penstock.source.preflight.context import Context, Subject
from penstock.source.preflight.report import Check, Severity, counted, failed, listed, passed
from penstock.source.publications import GENERATED_SINCE, published_tables
from penstock.source.unidentified import REJECTS_UNSENT_SINCE

_UNPUBLISHABLE = """
    select n.nspname, c.relname,
           case when c.relkind = 'f' then 'foreign' when c.relkind = 'm' then 'materialized view'
                when c.relpersistence = 'u' then 'unlogged' else 'temporary' end
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where (c.relkind in ('f', 'm') or (c.relkind in ('r', 'p') and c.relpersistence <> 'p'))
      and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
    order by 1, 2
"""

# A column list needs the privilege on its columns only.
_UNREADABLE = """
    select wanted.oid::int8
    from unnest(%s::pg_catalog.oid[]) wanted (oid)
    join pg_catalog.pg_class c on c.oid = wanted.oid
    where not pg_catalog.has_schema_privilege(c.relnamespace, 'usage')
       or not (
           pg_catalog.has_table_privilege(c.oid, 'select')
           or (select pg_catalog.bool_and(pg_catalog.has_column_privilege(c.oid, a.attnum, 'select'))
               from pg_catalog.pg_attribute a
               where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                 and (c.oid::int8 || '.' || a.attnum) = any(%s::text[]))
       )
"""


def check_publication(context: Context) -> Iterator[Check]:
    """Does the publication exist, and does it publish anything?"""
    name = context.request.publication
    if name is None:
        return
    publication = context.publication
    if publication is None:
        tables = ", ".join(_quoted(subject.catalog) for subject in context.subjects)
        as_roots = " with (publish_via_partition_root = true)" * any(
            each.published.kind == "p" for each in context.subjects
        )
        statement = f"create publication {quote_if_needed(name)}{f' for table {tables}' if tables else ''}{as_roots};"
        if context.request.manage_publication:
            yield passed("publication", f"publication {name!r} does not exist; Penstock creates it at the first start")
        else:
            yield failed(
                "publication", Severity.CRITICAL, f"publication {name!r} does not exist", f"Create it: {statement}"
            )
        return
    names = [str(table) for table in published_tables(context.connection, name)]
    if context.request.manage_publication:
        yield passed("publication", f"publication {name!r} has {counted(names)}; Penstock adds and removes some", names)
    elif not names:
        yield failed(
            "publication",
            Severity.CRITICAL,
            f"publication {name!r} has no tables",
            f"Add some: alter publication {quote_if_needed(name)} add table "
            f"{', '.join(_quoted(table) for table in context.candidates) or '…'};",
        )
    else:
        scope = " (for all tables)" if publication.all_tables else ""
        yield passed("publication", f"publication {name!r} has {counted(names)}{scope}", names)


def check_operations(context: Context) -> Iterator[Check]:
    """Does the publication include all kinds of changes?"""
    if context.publication is None:
        return
    missing = sorted({"insert", "update", "delete", "truncate"} - context.publication.operations)
    if missing:
        yield failed(
            "publication_operations",
            Severity.WARNING,
            f"the publication omits {' and '.join(missing)}: the destination will differ from the source",
            f"Run: alter publication {quote_if_needed(context.publication.name)} "
            "set (publish = 'insert, update, delete, truncate');",
            missing,
        )
    else:
        yield passed("publication_operations", "inserts, updates, deletes and truncates are published")


def check_patterns(context: Context) -> Iterator[Check]:
    """Does every pattern match a published table?"""
    request = context.request
    if not request.patterns:
        return
    subjects = [TableName(subject.published.namespace, subject.published.name) for subject in context.matching]
    chosen = select_tables(subjects, request.patterns, request.exclude)
    lost = [pattern for pattern in request.patterns if not select_tables(subjects, [pattern], request.exclude)]
    if lost:
        where = "can be published" if request.manage_publication or context.publication is None else "is published"
        yield failed(
            "table_patterns",
            # Penstock adds a table that matches later.
            Severity.WARNING if request.manage_publication else Severity.CRITICAL,
            f"no table that {where} matches {listed(lost)}",
            "Check the schema, name and case of the pattern."
            if request.manage_publication
            else "Check the schema, name and case, then add the tables to the publication.",
            lost,
        )
    else:
        yield passed("table_patterns", f"{counted([str(table) for table in chosen])} match", [str(t) for t in chosen])


def check_excluded(context: Context) -> Iterator[Check]:
    """Which matching tables cannot be replicated?"""
    kinds = {TableName(namespace, name): kind for namespace, name, kind in context.rows(_UNPUBLISHABLE)}
    chosen = select_tables(kinds, context.request.patterns or ("*",), context.request.exclude)
    if chosen:
        names = [f"{table} ({kinds[table]})" for table in chosen]
        unlogged = [_quoted(table) for table in chosen if kinds[table] == "unlogged"]
        yield failed(
            "unpublishable_tables",
            Severity.INFO,
            f"{counted(names)} cannot be replicated: {listed(names)}",
            "Their changes are not in the WAL."
            + (f" Run: {_each('alter table {} set logged;', unlogged)}" if unlogged else ""),
            names,
        )


def check_left_out(context: Context) -> Iterator[Check]:
    """Which published tables are not followed?"""
    empty = [str(subject) for subject in context.subjects if not subject.attnums]
    if empty:
        yield failed(
            "tables_without_columns",
            Severity.INFO,
            f"{counted(empty)} without published columns, skipped until they have some: {listed(empty)}",
            "Nothing to do, unless they should be replicated.",
            empty,
        )
    alike: dict[str, list[str]] = {}
    for subject in context.subjects:
        alike.setdefault(str(subject), []).append(_as_pattern(subject))
    for tables in (each for each in alike.values() if len(each) > 1):
        yield failed(
            "names_alike",
            Severity.WARNING,
            f"the names of {' and '.join(tables)} read alike, and only one of them is replicated",
            "Rename a table, or exclude all but one.",
            tables,
        )


def check_privileges(context: Context) -> Iterator[Check]:
    """Can the role read every table?"""
    subjects = {subject.published.oid: subject for subject in context.subjects}
    columns = [f"{oid}.{attnum}" for oid, subject in subjects.items() for attnum in subject.attnums]
    hidden = [subjects[oid] for (oid,) in context.rows(_UNREADABLE, list(subjects), columns)]
    names = [str(subject) for subject in hidden]
    user = context.connection.info.user
    if names:
        role = quote_if_needed(user)
        schemas = ", ".join(sorted({quote_if_needed(subject.published.namespace) for subject in hidden}))
        tables = ", ".join(_quoted(subject.catalog) for subject in hidden)
        yield failed(
            "select_privilege",
            context.severity,
            f"role {user!r} cannot read {counted(names)}: {listed(names)}",
            f"Run: grant usage on schema {schemas} to {role}; grant select on {tables} to {role};",
            names,
        )
    elif subjects:
        yield passed("select_privilege", f"role {user!r} can read every table")


def check_row_security(context: Context) -> Iterator[Check]:
    """Would row-level security hide rows from a copy?"""
    oids = {subject.published.oid: str(subject) for subject in context.subjects}
    statement = """
        select oid::int8 from unnest(%s::pg_catalog.oid[]) oid
        where pg_catalog.has_table_privilege(oid, 'select') and pg_catalog.row_security_active(oid)
    """
    names = [oids[oid] for (oid,) in context.rows(statement, list(oids))]
    if names:
        user = context.connection.info.user
        yield failed(
            "row_security",
            context.severity,
            f"row-level security hides rows of {counted(names)} from role {user!r}: {listed(names)}",
            f"Run: alter role {quote_if_needed(user)} bypassrls;",
            names,
        )


def check_identity(context: Context) -> Iterator[Check]:
    """Can updates and deletes be replicated, and does the server still accept them once the table is published?"""
    if context.publication is not None and not context.publication.operations & {"update", "delete"}:
        return
    bare = [error for error in context.rejecting.values() if not error.only_generated]
    left_out = [error for error in context.left_out.values() if not error.only_generated]
    if bare:
        names = _parts(bare)
        by_name = context.request.manage_publication
        yield failed(
            "replica_identity",
            Severity.WARNING if by_name else context.severity,
            f"{counted(names)} without a replica identity{', published because the config says so' * by_name}; "
            f"publishing makes the server reject updates and deletes on such tables: {listed(names)}",
            _run_all(bare),
            names,
        )
    if left_out:
        names = _parts(left_out)
        yield failed(
            "replica_identity",
            Severity.WARNING,
            f"{counted(names)} without a replica identity, left out because publishing would make the server reject "
            f"updates and deletes on such tables: {listed(names)}",
            _run_all(left_out),
            names,
        )
    if context.subjects and not bare and not left_out:
        yield passed("replica_identity", "every table has a replica identity")
    full = _stored_tables(context, lambda table: table.replica_identity is ReplicaIdentity.FULL)
    if full:
        # Partitions need the same identity as the others of their table, and row filters the columns that they use.
        filtered = {each.published.oid for each in context.subjects if _filter_columns(each) - _key_of(each)}
        keyed = [
            _quoted(table)
            for table in full
            if table.primary_key_attnums and not table.is_partition and table.oid not in filtered
        ]
        names = [str(table) for table in full]
        yield failed(
            "replica_identity_full",
            Severity.WARNING,
            f"{counted(names)} with replica identity full: every update and delete logs the whole old row: "
            f"{listed(names)}",
            f"Run: {_each('alter table {} replica identity default;', keyed)}"
            if keyed
            else "Nothing to do, unless the tables can have a primary key.",
            names,
        )


def check_partition_identity(context: Context) -> Iterator[Check]:
    """Do the partitions of a table identify its rows alike?"""
    roots = [subject for subject in context.matching if subject.catalog.partitions is not None]
    judged = {str(subject): subject.catalog.row_identity for subject in roots}
    problems = {name: identity.problem for name, identity in judged.items() if identity.problem is not None}
    if problems:
        statements = [each for name in problems for each in judged[name].statements]
        yield failed(
            "partition_identity",
            context.severity if problems.keys() - context.left_out.keys() else Severity.WARNING,
            "; ".join(problem.message for problem in problems.values()),
            f"Run: {' '.join(statements)}",
            list(problems),
        )
    elif roots:
        yield passed(
            "partition_identity", f"the rows of {counted(list(judged), 'partitioned table')} can be identified"
        )


def check_column_lists(context: Context) -> Iterator[Check]:
    """Do column lists include the replica identity?"""
    lists = [subject for subject in context.subjects if subject.published.column_attnums is not None]
    if not lists:
        return
    wrong = [subject for subject in lists if not _identity_of(subject) <= set(subject.attnums)]
    bad = [str(subject) for subject in wrong]
    if bad and context.publication is not None:
        publication = quote_if_needed(context.publication.name)
        yield failed(
            "column_lists",
            Severity.CRITICAL,
            f"{counted(bad, 'column list')} without the replica identity: the server rejects updates and deletes on "
            f"{listed(bad)}",
            f"Run: {' '.join(_with_identity(publication, subject) for subject in wrong)}",
            bad,
        )
    else:
        yield passed("column_lists", f"{counted([str(s) for s in lists])} with a column list", [str(s) for s in lists])


def check_row_filters(context: Context) -> Iterator[Check]:
    """Do row filters use only columns of the replica identity?"""
    filtered = [subject for subject in context.subjects if subject.published.row_filter]
    if not filtered:
        return
    operations = context.publication.operations if context.publication else frozenset[str]()
    wrong = [subject for subject in filtered if _filter_columns(subject) - _identity_of(subject)]
    bad = [str(subject) for subject in wrong]
    if bad and operations & {"update", "delete"}:
        yield failed(
            "row_filters",
            Severity.CRITICAL,
            f"{counted(bad, 'row filter')} on columns outside the replica identity: the server rejects updates and "
            f"deletes on {listed(bad)}",
            "Filter only by columns of the replica identity. "
            f"Or run: {_full(table for subject in wrong for table in subject.stored)}",
            bad,
        )
    else:
        names = [str(subject) for subject in filtered]
        yield passed("row_filters", f"{counted(names)} with a row filter: {listed(names)}", names)


def check_partitions(context: Context) -> Iterator[Check]:
    """How are partitioned tables published?"""
    roots = [str(subject) for subject in context.subjects if subject.published.kind == "p"]
    leaves = [str(subject) for subject in context.subjects if subject.catalog.is_partition]
    if roots:
        yield passed(
            "partitions", f"{counted(roots, 'partitioned table')} replicated as a whole: {listed(roots)}", roots
        )
    if leaves:
        what = f"{counted(leaves, 'partition')} replicated as separate tables: {listed(leaves)}"
        yield failed(
            "partitions_as_leaves",
            Severity.INFO,
            what,
            f"To replicate partitioned tables as one, run: alter publication {_publication(context)} set "
            "(publish_via_partition_root = true);",
            leaves,
        )


def check_generated(context: Context) -> Iterator[Check]:
    """Which generated columns does the server omit?"""
    will_be_sent = "s" if context.request.generated_columns else ""
    names = [
        f"{subject}.{attribute.name}"
        for subject in context.subjects
        for attribute in subject.catalog.live_attributes
        if attribute.generated and attribute.generated != will_be_sent and attribute.attnum not in subject.attnums
    ]
    if names:
        yield failed(
            "generated_columns",
            Severity.INFO,
            f"{counted(names, 'generated column')} not replicated: {listed(names)}",
            "PostgreSQL 18 and newer can publish stored ones."
            if context.version < GENERATED_SINCE
            else "To publish stored ones, set source.generated_columns = true, or run: alter publication "
            f"{_publication(context)} set (publish_generated_columns = stored); only the tables that have some are "
            "then copied again.",
            names,
        )


def check_generated_identity(context: Context) -> Iterator[Check]:
    """Does the server omit generated columns that belong to the replica identity?"""
    publication = context.publication
    if publication is not None and not publication.operations & {"update", "delete"}:
        return
    rejected = [error for error in context.rejecting.values() if error.only_generated]
    left_out = [error for error in context.left_out.values() if error.only_generated]
    what = "with generated columns in the replica identity that are not published"
    for errors, severity, ending in (
        (rejected, context.severity, "; publishing makes the server reject updates and deletes on such tables"),
        (left_out, Severity.WARNING, ", left out because the server would reject updates and deletes on such tables"),
    ):
        if errors:
            names = _parts(errors)
            sentence = f"{counted(names)} {what}{ending}: {listed(names)}"
            yield failed("generated_identity", severity, sentence, _run_all(errors), names)
    if context.version < REJECTS_UNSENT_SINCE:
        listed_columns = {subject.published.oid for subject in context.subjects if subject.published.column_attnums}

        def is_concerned(table: CatalogTable) -> bool:
            identity = set(table.identity_attnums)
            return any(each.generated and each.attnum in identity for each in table.live_attributes)

        tables = _stored_tables(context, lambda table: table.oid not in listed_columns and is_concerned(table))
        names = [str(table) for table in tables]
        if names:
            yield failed(
                "generated_identity",
                Severity.WARNING,
                f"{counted(names)} {what}; updates and deletes make Penstock copy such tables again: {listed(names)}",
                f"Run: {_full(tables)}",
                names,
            )


def _stored_tables(context: Context, wanted: Callable[[CatalogTable], bool]) -> list[CatalogTable]:
    """Tables that store rows: of a partitioned table its leaves, because their identity counts."""
    tables = {table.oid: table for subject in context.subjects for table in subject.stored}
    return sorted((table for table in tables.values() if wanted(table)), key=str)


def _parts(errors: Sequence[NotIdentified]) -> list[str]:
    """The tables that store rows: of a partitioned table its leaves, because their identity counts."""
    return sorted({part for error in errors for part in error.parts})


def _run_all(errors: Sequence[NotIdentified]) -> str:
    """All remedies, with the statements last."""
    others = list(dict.fromkeys(error.remedy for error in errors if not error.statements))
    statements = [statement for error in errors for statement in error.statements]
    return " ".join([*others, *([f"Run: {' '.join(statements)}"] if statements else [])])


def _identity_of(subject: Subject) -> set[int]:
    table = subject.catalog
    if table.replica_identity is ReplicaIdentity.FULL:
        return {attribute.attnum for attribute in table.live_attributes if attribute.generated != "v"}
    return set(table.identity_attnums)


def _key_of(subject: Subject) -> set[int]:
    return set(subject.catalog.primary_key_attnums)


def _filter_columns(subject: Subject) -> set[int]:
    text = re.sub(r"'(?:[^']|'')*'", "''", subject.published.row_filter or "")
    words = {word.strip('"') for word in re.findall(r'"[^"]+"|\w+', text)}
    return {attribute.attnum for attribute in subject.catalog.live_attributes if attribute.name in words}


def _as_pattern(subject: Subject) -> str:
    return TableName(subject.published.namespace, subject.published.name).quoted


def _quoted(table: TableName | CatalogTable) -> str:
    return f"{quote_if_needed(table.namespace)}.{quote_if_needed(table.name)}"


def _publication(context: Context) -> str:
    return quote_if_needed(context.publication.name if context.publication is not None else "<publication>")


def _each(statement: str, names: Iterable[str]) -> str:
    """A statement for each table."""
    return " ".join(statement.format(name) for name in names)


def _full(tables: Iterable[CatalogTable]) -> str:
    return _each("alter table {} replica identity full;", (_quoted(table) for table in tables))


def _with_identity(publication: str, subject: Subject) -> str:
    """The statements that add the replica identity to the column list of a table."""
    wanted = _identity_of(subject) | set(subject.attnums)
    columns = [quote_if_needed(each.name) for each in subject.catalog.live_attributes if each.attnum in wanted]
    table, row_filter = _quoted(subject.catalog), subject.published.row_filter
    rows = "" if row_filter is None else f" where ({row_filter})"
    added = f"{table} ({', '.join(columns)}){rows}"
    return f"alter publication {publication} drop table {table}; alter publication {publication} add table {added};"


CHECKS: dict[str, Callable[[Context], Iterator[Check]]] = {
    "publication": check_publication,
    "publication_operations": check_operations,
    "table_patterns": check_patterns,
    "unpublishable_tables": check_excluded,
    "tables_left_out": check_left_out,
    "select_privilege": check_privileges,
    "row_security": check_row_security,
    "replica_identity": check_identity,
    "partition_identity": check_partition_identity,
    "column_lists": check_column_lists,
    "row_filters": check_row_filters,
    "partitions": check_partitions,
    "generated_columns": check_generated,
    "generated_identity": check_generated_identity,
}
