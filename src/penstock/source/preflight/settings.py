"""Checks of what the config says about tables and columns: types, keys, rules and policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.changes.segment import inexact_keys
from penstock.errors import ConfigError, for_table
from penstock.schema import PostgresType, TypeKind, resolve_domain
from penstock.source.catalog import schema_from_catalog
from penstock.source.preflight.context import Context
from penstock.source.preflight.report import Check, Severity, counted, failed, listed, passed
from penstock.values import codec_for

_STRINGS = ("text", "varchar", "bpchar", "name", "char", "json", "jsonb", "uuid", "citext")


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


def _becomes_text(type_: PostgresType, modifier: int) -> bool:
    resolved, _modifier = resolve_domain(type_, modifier)
    if resolved.kind is TypeKind.BASE and resolved.name in _STRINGS:
        return False
    return str(codec_for(type_, modifier).arrow_type) in ("string", "large_string")


CHECKS: dict[str, Callable[[Context], Iterator[Check]]] = {
    "types_as_text": check_types,
    "exact_keys": check_keys,
    "type_overrides": check_overrides,
    "column_rules": check_rules,
    "schema_changes": check_schema_changes,
}
