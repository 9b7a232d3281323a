"""Checks of the publication and its tables.

Some protect *other* sessions: once a table without a replica identity is published, the server rejects their updates
and deletes. A publication that Penstock manages leaves such tables out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from penstock.changes.segment import inexact_keys
from penstock.errors import ConfigError, NotIdentified, for_table
from penstock.schema import PostgresType, ReplicaIdentity, TypeKind, resolve_domain
from penstock.source.catalog import schema_from_catalog
from penstock.source.columns import CatalogTable
from penstock.source.identity import quote_if_needed
from penstock.source.patterns import TableName, select_tables
from penstock.source.preflight.context import Context, Subject
from penstock.source.preflight.report import Check, Severity, counted, failed, listed, passed
from penstock.source.publications import published_tables
from penstock.source.unidentified import REJECTS_UNSENT_SINCE
from penstock.values import codec_for

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

_STRINGS = ("text", "varchar", "bpchar", "name", "char", "json", "jsonb", "uuid", "citext")


def check_publication(context: Context) -> Iterator[Check]:
    """Does the publication exist, and does it publish anything?"""
    name = context.request.publication
    if name is None:
        return
    publication = context.publication
    if publication is None:
        tables = ", ".join(_quoted(subject) for subject in context.subjects[:5])
        more = ", …" if len(context.subjects) > 5 else ""
        statement = f"create publication {quote_if_needed(name)}{f' for table {tables}{more}' if tables else ''};"
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
            f"Add some: alter publication {quote_if_needed(name)} add table …;",
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
        yield failed(
            "unpublishable_tables",
            Severity.INFO,
            f"{counted(names)} cannot be replicated: {listed(names)}",
            "Their changes are not in the WAL. For unlogged tables, run: alter table … set logged;",
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
    names = [str(subjects[oid]) for (oid,) in context.rows(_UNREADABLE, list(subjects), columns)]
    user = context.connection.info.user
    if names:
        yield failed(
            "select_privilege",
            context.severity,
            f"role {user!r} cannot read {counted(names)}: {listed(names)}",
            f"Run: grant usage on schema … to {quote_if_needed(user)}; grant select on … to {quote_if_needed(user)};",
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
        yield failed(
            "replica_identity_full",
            Severity.WARNING,
            f"{counted(full)} with replica identity full: every update and delete logs the whole old row: "
            f"{listed(full)}",
            "For tables with a primary key, run: alter table … replica identity default;",
            full,
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
    bad = [str(subject) for subject in lists if not _identity_of(subject) <= set(subject.attnums)]
    if bad:
        yield failed(
            "column_lists",
            Severity.CRITICAL,
            f"{counted(bad, 'column list')} without the replica identity: the server rejects updates and deletes on "
            f"{listed(bad)}",
            "Add the columns of the replica identity to the column list (with replica identity full: all columns).",
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
    bad = [str(subject) for subject in filtered if _filter_columns(subject) - _identity_of(subject)]
    if bad and operations & {"update", "delete"}:
        yield failed(
            "row_filters",
            Severity.CRITICAL,
            f"{counted(bad, 'row filter')} on columns outside the replica identity: the server rejects updates and "
            f"deletes on {listed(bad)}",
            "Filter only by columns of the replica identity, or run: alter table … replica identity full;",
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
            "To replicate partitioned tables as one: alter publication … set (publish_via_partition_root = true);",
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
            "PostgreSQL 18 can publish stored ones: set source.generated_columns = true, or run: alter publication … "
            "set (publish_generated_columns = stored); only the tables that have some are then copied again.",
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

        names = _stored_tables(context, lambda table: table.oid not in listed_columns and is_concerned(table))
        if names:
            yield failed(
                "generated_identity",
                Severity.WARNING,
                f"{counted(names)} {what}; updates and deletes make Penstock copy such tables again: {listed(names)}",
                "Run: alter table … replica identity full;",
                names,
            )


def check_types(context: Context) -> Iterator[Check]:
    """Which columns are replicated as text?"""
    types = context.types
    names = [
        f"{subject}.{attribute.name} ({types[attribute.type_oid]})"
        for subject in context.subjects
        for attribute in subject.catalog.live_attributes
        if attribute.attnum in subject.attnums
        and attribute.type_oid in types
        and _becomes_text(types[attribute.type_oid], attribute.type_modifier)
    ]
    if names:
        yield failed(
            "types_as_text",
            Severity.INFO,
            f"{counted(names, 'column')} replicated as text, exactly as the server prints it: {listed(names, 3)}",
            "Nothing to do; the values are complete.",
            names,
        )


def check_keys(context: Context) -> Iterator[Check]:
    """Does a setting in [types] make different keys the same?"""
    problems = [
        problem
        for subject in context.subjects
        for problem in inexact_keys(
            schema_from_catalog(subject.catalog, context.types, subject.attnums), context.request.types
        )
    ]
    if problems:
        names = [f"{problem.table}.{problem.column}" for problem in problems]
        more = f" (also {listed(names[1:])})" if len(names) > 1 else ""
        remedy = for_table(problems[0].hint, problems[0].table)
        yield failed("exact_keys", context.severity, f"{problems[0]}{more}", remedy, names)


def check_overrides(context: Context) -> Iterator[Check]:
    """Does every table and column with types of its own in [tables] exist?"""
    known = {str(subject): {each.name for each in subject.catalog.live_attributes} for subject in context.subjects}
    for table, rules in context.request.transforms.rules.items():
        if table in known:
            known[table] |= {rule.rename for _, rule in rules.columns if rule.rename is not None}
    lost = [
        override.table if override.column is None else f"{override.table}.{override.column}"
        for override in context.request.types.overrides
        if (
            override.table not in context.names
            if override.table not in known
            else override.column is not None and override.column not in known[override.table]
        )
    ]
    if lost:
        yield failed(
            "type_overrides",
            Severity.WARNING,
            f"[tables] sets types for tables or columns that are not published: {listed(lost)}",
            'Write tables as "schema.table", and check the case of the names.',
            lost,
        )


def check_schema_changes(context: Context) -> Iterator[Check]:
    """How does each table follow changes of its schema, and does every table with a policy of its own exist?"""
    policies = context.request.schema_changes
    if not policies:
        return
    own = {name: policy for name, policy in policies.items() if name}
    known = context.request.transforms.known
    former = {known[each.published.oid].table for each in context.subjects if each.published.oid in known}
    lost = sorted(own.keys() - context.names - former)
    if lost:
        yield failed(
            "schema_changes",
            Severity.WARNING,
            f"[tables] sets schema_changes for tables that are not published: {listed(lost)}",
            'Write tables as "schema.table", and check the case of the names.',
            lost,
        )
    shown = [f"tables are {policies['']}", *(f"{name} is {own[name]}" for name in own if name not in lost)]
    yield passed("schema_changes", "; ".join(shown), [name for name in own if name not in lost])


def check_rules(context: Context) -> Iterator[Check]:
    """Do the rules of [tables] for columns and rows fit the tables, and what do they do?"""
    transforms = context.request.transforms
    problems: list[ConfigError] = []
    shown: list[str] = []
    for subject in context.subjects:
        rules = transforms.of(subject.published.oid, str(subject))
        if rules is None:
            continue
        schema = schema_from_catalog(subject.catalog, context.types, subject.attnums)
        try:
            transforms.resolve(schema, context.request.types)
            shown.append(f"{subject}: {rules}")
        except ConfigError as error:
            problems.append(error)
    for problem in problems:
        remedy = for_table(problem.hint, problem.table)
        yield failed("column_rules", context.severity, problem.message, remedy, [problem.table])
    former = {transforms.name_of(each.published.oid, str(each)) for each in context.subjects}
    lost = sorted(transforms.rules.keys() - context.names - former)
    if lost:
        yield failed(
            "column_rules",
            Severity.WARNING,
            f"[tables] has rules for columns or rows of tables that are not published: {listed(lost)}",
            'Write tables as "schema.table", and check the case of the names: a misspelled rule protects nothing.',
            lost,
        )
    if shown:
        yield failed(
            "column_rules",
            Severity.INFO,
            f"rules of the config: {'. '.join(shown)}",
            "Nothing to do. The spool contains the original values.",
            [each.partition(":")[0] for each in shown],
        )


def _stored_tables(context: Context, wanted: Callable[[CatalogTable], bool]) -> list[str]:
    """Tables that store rows: of a partitioned table its leaves, because their identity counts."""
    tables = {table.oid: table for subject in context.subjects for table in subject.stored}
    return sorted(str(table) for table in tables.values() if wanted(table))


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


def _filter_columns(subject: Subject) -> set[int]:
    text = re.sub(r"'(?:[^']|'')*'", "''", subject.published.row_filter or "")
    words = {word.strip('"') for word in re.findall(r'"[^"]+"|\w+', text)}
    return {attribute.attnum for attribute in subject.catalog.live_attributes if attribute.name in words}


def _becomes_text(type_: PostgresType, modifier: int) -> bool:
    resolved, _modifier = resolve_domain(type_, modifier)
    if resolved.kind is TypeKind.BASE and resolved.name in _STRINGS:
        return False
    return str(codec_for(type_, modifier).arrow_type) in ("string", "large_string")


def _as_pattern(subject: Subject) -> str:
    return TableName(subject.published.namespace, subject.published.name).quoted


def _quoted(subject: Subject) -> str:
    return f"{quote_if_needed(subject.published.namespace)}.{quote_if_needed(subject.published.name)}"


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
    "types_as_text": check_types,
    "exact_keys": check_keys,
    "type_overrides": check_overrides,
    "column_rules": check_rules,
    "schema_changes": check_schema_changes,
}
