"""Checks whether a specification fits the database: findings as data, each with its remedy.

It finds missing tables and columns, types that an index cannot take, keys that are not unique, deletes that the server
would not send, lookups without an index, and changes that polling will not see. The server itself checks the rest:
every statement that the index will run is explained once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.builder import statements_of
from penstock.documents.catalog import SourceCatalog, SourceColumn, SourceTable, complete
from penstock.documents.expressions import KEY_TYPES, VECTOR_TYPES, expression_sql, rows_of
from penstock.documents.field_types import accepts, accepts_custom, accepts_number, accepts_point
from penstock.documents.paths import entries_of, link_columns
from penstock.documents.polling import XMIN, sees_all_sessions, why_unpollable
from penstock.documents.statements import as_literal, explain, is_standby, run_statement
from penstock.errors import ConfigError, SourceError
from penstock.schema import ReplicaIdentity, TypeKind
from penstock.source.catalog import load_types, unknown_type
from penstock.source.faults import Place
from penstock.source.identity import full_identity, quote_if_needed
from penstock.source.patterns import TableName
from penstock.source.preflight.report import Check, Report, Severity, failed, passed
from penstock.specification.tree import (
    EVERY_COLUMN,
    Aggregate,
    Constant,
    Field,
    Geo,
    Group,
    IndexSpecification,
    Join,
    Operation,
    Relation,
    Scalar,
    ScalarType,
    Verb,
    columns_named,
)

_PARTITIONED = "p"
_CAPTURED = ("r", _PARTITIONED)
_TABLES = """
    select c.relname from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1 and c.relkind in ('r', 'p')
"""


def check_index(
    connection: psycopg.Connection[Any], specification: IndexSpecification, catalog: SourceCatalog
) -> Report:
    """Return all findings about one index; the more detailed checks run only if the first find nothing critical."""
    name = specification.name
    checks = [*_check_tables(connection, specification, catalog)]
    if is_standby(connection):
        what = "the server is a standby, whose snapshots have no versions for documents"
        checks.append(failed("server_role", Severity.CRITICAL, what, "Use the primary as source."))
    if not checks:
        checks += _check_columns(specification, catalog)
        checks += _check_root(specification, catalog.table(specification.table))
        checks += _Walk(connection, catalog).fields(specification.fields, catalog.table(specification.table), None, "")
    if not any(each.severity is Severity.CRITICAL for each in checks):
        try:
            completed = complete(specification, catalog)
        except ConfigError as error:
            checks.append(failed("key", Severity.CRITICAL, error.message, error.hint))
        else:
            checks += _check_identities(completed, catalog)
            checks += missing_indexes(completed, catalog)
            checks += _check_statements(connection, completed, catalog)
    checks = checks or [passed("index", f"{name}: matches the database")]
    return Report(Place.of(connection).where, tuple(checks))


def _tables_in(connection: psycopg.Connection[Any], namespace: str) -> list[str]:
    return [row[0] for row in run_statement(connection, _TABLES, [namespace], "list tables")]


def _check_tables(
    connection: psycopg.Connection[Any], specification: IndexSpecification, catalog: SourceCatalog
) -> Iterator[Check]:
    for name in sorted(specification.tables()):
        table = catalog.tables.get(name)
        if table is None:
            near = difflib.get_close_matches(name.name, _tables_in(connection, name.namespace), n=1)
            what = f"there is no table {name}" + (f"; did you mean {near[0]!r}?" if near else "")
            yield failed("table", Severity.CRITICAL, what, "Correct its name or schema, or create it.", [str(name)])
        elif table.kind not in _CAPTURED:
            yield failed(
                "table",
                Severity.CRITICAL,
                f"{name} is not a table, so its changes cannot be followed",
                "Use the tables on which it is based instead.",
                [str(name)],
            )


def _check_columns(specification: IndexSpecification, catalog: SourceCatalog) -> Iterator[Check]:
    for where, name, column in columns_named(specification):
        table = catalog.table(name)
        if column != EVERY_COLUMN and column not in table.columns:
            near = difflib.get_close_matches(column, list(table.columns), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield failed(
                "column",
                Severity.CRITICAL,
                f"{where}: {name} has no column {column!r}{hint}",
                f"Its columns: {', '.join(table.columns)}.",
                [f"{name}.{column}"],
            )


def _check_root(specification: IndexSpecification, table: SourceTable) -> Iterator[Check]:
    key = specification.doc_id or specification.primary_key or table.primary_key
    what = "doc_id" if specification.doc_id else "primary_key"
    if not key:
        yield failed(
            "key",
            Severity.CRITICAL,
            f"{table.name} has no primary key",
            "Add one, or name columns with a unique index in primary_key.",
            [str(table.name)],
        )
    if not key or not table.columns.keys() >= set(key):
        return
    if specification.routing and specification.routing not in key:
        yield failed(
            "key",
            Severity.CRITICAL,
            f"routing: {specification.routing} is not part of the document id ({', '.join(key)}), so documents could"
            " move to another shard",
            f"Add it to doc_id: [{', '.join((specification.routing, *key))}].",
            [str(table.name)],
        )
    if not table.is_unique(key):
        yield failed(
            "key",
            Severity.CRITICAL,
            f"{what}: ({', '.join(key)}) is not unique in {table.name}, so it cannot identify a document",
            f"Run: create unique index on {table.name} ({', '.join(key)});",
            [str(table.name)],
        )
    for each in table.select(key):
        if each.base.name not in KEY_TYPES and each.base.kind is not TypeKind.ENUM:
            yield failed(
                "key",
                Severity.CRITICAL,
                f"{what}: equal values of type {each.type} can have different texts, so {each.name} cannot be an id",
                "Use a column of another type as doc_id.",
                [f"{table.name}.{each.name}"],
            )
        if not each.not_null:
            yield failed(
                "key",
                Severity.WARNING,
                f"{what}: {each.name} may be null; rows where it is null have no document",
                f"Run: alter table {table.name} alter {each.name} set not null;",
                [f"{table.name}.{each.name}"],
            )


@dataclass(frozen=True, slots=True)
class _Walk:
    """Checks every field of a specification; columns that do not exist are not its concern."""

    connection: psycopg.Connection[Any]
    catalog: SourceCatalog

    def fields(
        self, fields: Sequence[Field], table: SourceTable, junction: SourceTable | None, path: str
    ) -> Iterator[Check]:
        for each in fields:
            where = f"{path}{each.name}"
            match each:
                case Scalar():
                    own = junction if each.junction and junction else table
                    if each.expression:
                        yield from _check_expression(self.connection, each, own, where)
                    else:
                        yield from _check_scalar(each, own, where)
                case Geo():
                    yield from _check_geo(each, table, where)
                case Group():
                    yield from self.fields(each.fields, table, junction, f"{where}.")
                case Join():
                    if each.verb is Verb.BELONGS_TO:
                        yield from self._check_unique(each.relation, where)
                    inner = each.relation.junction and self.catalog.table(each.relation.junction.table)
                    yield from self.fields(each.fields, self.catalog.table(each.relation.table), inner, f"{where}.")
                case Aggregate():
                    yield from self._check_aggregate(each, where)
                case Constant():
                    pass

    def _check_unique(self, relation: Relation, where: str) -> Iterator[Check]:
        table = self.catalog.table(relation.table)
        if set(relation.columns) <= table.columns.keys() and not table.is_unique(relation.columns):
            yield failed(
                "key",
                Severity.WARNING,
                f"{where}: ({', '.join(relation.columns)}) is not unique in {table.name}; one of several rows is used",
                f"Run: create unique index on {table.name} ({', '.join(relation.columns)});",
                [str(table.name)],
            )

    def _check_aggregate(self, field: Aggregate, where: str) -> Iterator[Check]:
        table = self.catalog.table(field.relation.table)
        if field.operation is Operation.IDS and len(table.primary_key) != 1:
            yield failed(
                "type",
                Severity.CRITICAL,
                f"{where}: 'ids' needs a table whose primary key has one column, unlike that of {table.name}",
                "Use has_many with the columns of the key.",
                [str(table.name)],
            )
        source = table.columns.get(field.column)
        numeric = field.operation in (Operation.SUM, Operation.AVG)
        if source is not None and numeric and not accepts_number(source.base):
            yield _wrong_type(table, field.column, where, f"{field.operation.value} needs numbers")


def _check_scalar(field: Scalar, table: SourceTable, where: str) -> Iterator[Check]:
    source = table.columns.get(field.column)
    if source is None:
        return
    element = source.element
    if field.type is ScalarType.CUSTOM:
        fits = accepts_custom(field.postgres, element)
    else:
        fits = accepts(field.type, element)
    if not fits:
        yield _wrong_type(table, field.column, where, f"a field of type '{field.type.value}' cannot hold it")
    elif field.type is ScalarType.VECTOR:
        yield from _check_vector(field, table, source, where)
    if field.transforms and source.base.kind is TypeKind.ARRAY:
        yield _wrong_type(table, field.column, where, "transforms do not work on arrays")
    if field.required and not source.not_null and field.default is None:
        yield failed(
            "nullable",
            Severity.WARNING,
            f"{where} is required, but {table.name}.{field.column} may be null",
            f"Run: alter table {table.name} alter {field.column} set not null; or give the field a default.",
            [f"{table.name}.{field.column}"],
        )


def _check_expression(
    connection: psycopg.Connection[Any], field: Scalar, table: SourceTable, where: str
) -> Iterator[Check]:
    """Let the server plan the expression alone: it names what it does not understand, its type, and what it reads."""

    def wrong(what: str, remedy: str) -> Check:
        return failed("expression", Severity.CRITICAL, f"{where} ({field.place}): {what}", remedy, [str(table.name)])

    head = "select "
    # Below a subquery, as when documents are built: system columns are not in scope there.
    rows = sql.SQL("(select * from {}) {}").format(rows_of(table), sql.Identifier(table.name.name))
    text = f"{head}{expression_sql(field.expression).as_string(None)} from {rows.as_string(None)}"
    try:
        with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(as_literal(f"explain (format json, verbose) {text}"))
            [(plan,)] = cursor.fetchall()
            cursor.execute(as_literal(f"{text} limit 0"))
            assert cursor.description is not None
            oid = cursor.description[0].type_code
    except psycopg.Error as error:
        said = str(error.diag.message_primary or error).splitlines()[0]
        # Counted from 1, in the statement that was explained.
        at = int(error.diag.statement_position or 0) - len(f"explain (format json, verbose) {head}(")
        hint = "Use columns of this table alone; functions and types outside pg_catalog need their schema."
        yield wrong(f"{said}, at character {at}" if 1 <= at <= len(field.expression) else said, hint)
        return
    others = sorted({name for name in _relations(plan) if name != table.name and name not in table.leaves})
    if others:
        what = f"the expression reads {', '.join(map(str, others))}, whose changes it would not follow"
        yield wrong(what, "Use columns of this table alone, or a relation or an aggregate.")
    type_ = load_types(connection, [oid]).get(oid) or unknown_type(oid)
    element = SourceColumn(field.name, type_, not_null=False).element
    if not accepts(field.type, element):
        yield wrong(
            f"it is {type_}; a field of type '{field.type.value}' cannot hold it", "Cast it, or use another type."
        )


def _relations(plan: Any) -> Iterator[TableName]:
    """Yield the tables that a plan reads."""
    if isinstance(plan, list):
        for each in plan:
            yield from _relations(each)
    elif isinstance(plan, dict):
        if "Relation Name" in plan:
            yield TableName(str(plan.get("Schema")), str(plan["Relation Name"]))
        for each in plan.values():
            yield from _relations(each)


def _check_vector(field: Scalar, table: SourceTable, source: SourceColumn, where: str) -> Iterator[Check]:
    if source.base.kind is not TypeKind.ARRAY and source.base.name not in VECTOR_TYPES:
        yield _wrong_type(table, field.column, where, "a vector needs a column of pgvector, or an array of numbers")
    elif source.base.name in VECTOR_TYPES and source.modifier not in (-1, field.dimensions):
        yield failed(
            "type",
            Severity.CRITICAL,
            f"{where}: {table.name}.{field.column} has {source.modifier} dimensions, not {field.dimensions}",
            f"Set dimensions: {source.modifier}.",
            [f"{table.name}.{field.column}"],
        )


def _check_geo(field: Geo, table: SourceTable, where: str) -> Iterator[Check]:
    names = [field.column] if field.column else [field.latitude, field.longitude]
    for name in names:
        source = table.columns.get(name)
        fits = accepts_point if field.column else accepts_number
        if source is not None and not fits(source.base):
            yield _wrong_type(table, name, where, "a point needs two numbers, or one column of json or text")


def _check_identities(specification: IndexSpecification, catalog: SourceCatalog) -> Iterator[Check]:
    entries = entries_of(specification)
    for name in sorted({each.table for each in entries}):
        table = catalog.table(name)
        links = link_columns(entries, name)
        yield from _check_generated(table, links)
        if table.identity is ReplicaIdentity.NOTHING or not table.identity_columns:
            yield failed(
                "identity",
                Severity.CRITICAL,
                f"{name} has no replica identity: once it is published, the server rejects updates and deletes on it",
                f"Give it a primary key, or run: {_send_old_rows(table)}",
                [str(name)],
            )
        elif not table.identity_columns.issuperset(links):
            unsent = [each for each in links if each not in table.identity_columns]
            yield failed(
                "identity",
                Severity.INFO,
                f"the server does not send {', '.join(unsent)} of deleted and moved rows of {name}: a relation map"
                " stores these values, in one small row for each row of the table",
                f"To avoid the map, run: {_send_old_rows(table)}",
                [str(name)],
            )


def _send_old_rows(table: SourceTable) -> str:
    """The statements after which the server sends old rows whole: the partitions decide, and none inherits it."""
    statements = full_identity(_in_sql(table.name), [_in_sql(each) for each in table.heap_names])
    ending = " New partitions need it, too." if table.kind == _PARTITIONED else ""
    return " ".join(statements) + ending


def _check_generated(table: SourceTable, links: Sequence[str]) -> Iterator[Check]:
    for each in table.select(links):
        if each.generated:
            yield failed(
                "generated",
                Severity.CRITICAL,
                f"{table.name}.{each.name} is generated: the server does not send it, so moved rows cannot be followed",
                "Connect the tables by the columns from which it is computed.",
                [f"{table.name}.{each.name}"],
            )


def missing_indexes(specification: IndexSpecification, catalog: SourceCatalog) -> Iterator[Check]:
    """Find lookups without an index: building looks up rows by columns that point at the parent, resolving by the
    parent's."""
    wanted: dict[tuple[TableName, tuple[str, ...]], None] = {}
    for entry in entries_of(specification):
        parent = specification.table
        for relation in entry.relations:
            wanted[parent, relation.parent_columns] = None
            if relation.junction is None:
                wanted[relation.table, relation.columns] = None
            else:
                wanted[relation.junction.table, relation.junction.left_key] = None
                wanted[relation.junction.table, relation.junction.right_key] = None
                wanted[relation.table, relation.columns] = None
            parent = relation.table
    for name, columns in wanted:
        if not catalog.table(name).has_index_on(columns):
            yield failed(
                "index",
                Severity.WARNING,
                f"{name} has no index on ({', '.join(columns)}): each lookup reads the whole table",
                _create_index(catalog.table(name), columns),
                [str(name)],
            )


def _create_index(table: SourceTable, columns: Sequence[str]) -> str:
    """The statement that creates an index. Postgres refuses `concurrently` for a partitioned table."""
    target = f"on {_in_sql(table.name)} ({', '.join(map(quote_if_needed, columns))});"
    if table.kind != _PARTITIONED:
        return f"Run: create index concurrently {target}"
    return (
        f"Run: create index {target} It blocks writes meanwhile, unless you create the index on each partition first,"
        " concurrently."
    )


def _in_sql(name: TableName) -> str:
    return f"{quote_if_needed(name.namespace)}.{quote_if_needed(name.name)}"


def _check_statements(
    connection: psycopg.Connection[Any], specification: IndexSpecification, catalog: SourceCatalog
) -> Iterator[Check]:
    for what, text, count in statements_of(specification, catalog):
        try:
            explain(connection, text, count, what)
        except SourceError as error:
            yield failed(
                "statement",
                Severity.CRITICAL,
                f"the server rejects the statement that would {what}: {error.message}",
                "Check that the joined columns have matching types, and check the raw filters.",
                [specification.name],
            )


def _wrong_type(table: SourceTable, name: str, where: str, why: str) -> Check:
    return failed(
        "type",
        Severity.CRITICAL,
        f"{where}: {table.name}.{name} is {table.column(name).type}; {why}",
        "Choose another type for the field, or use custom.",
        [f"{table.name}.{name}"],
    )


def check_polling(
    connection: psycopg.Connection[Any],
    tables: Iterable[TableName],
    catalog: SourceCatalog,
    cursors: Mapping[TableName, str],
) -> list[Check]:
    """Return findings about polling the tables of an index; `cursors` has one for each. Skips missing tables."""
    there = [catalog.tables[name] for name in sorted(tables) if name in catalog.tables]
    found = [
        failed(
            "polling",
            Severity.WARNING,
            "polling does not see deleted rows, changed primary keys or truncated tables",
            "Mark rows as deleted (soft_delete), or compare with `penstock index diff --full` and rebuild.",
            [str(table.name) for table in there],
        )
    ]
    for table in there:
        found += _check_cursor(table, cursors[table.name])
    by_column = [str(table.name) for table in there if cursors[table.name] != XMIN]
    if by_column and not sees_all_sessions(connection):
        found.append(
            failed(
                "polling",
                Severity.WARNING,
                "this role cannot see when other sessions' transactions started: changes in transactions that take "
                "longer than polling.overlap can be missed",
                "Run: grant pg_read_all_stats to the role, or raise polling.overlap.",
                by_column,
            )
        )
    return found


def _check_cursor(table: SourceTable, cursor: str) -> Iterator[Check]:
    problem = why_unpollable(table, cursor)
    if problem is not None:
        yield failed("polling", Severity.CRITICAL, *problem, [str(table.name)])
        return
    if cursor == XMIN:
        yield failed(
            "polling",
            Severity.INFO,
            f"{table.name} is polled by {XMIN}: each poll reads the whole table",
            "Set polling.cursor or polling.tables to a column with the time of the last change.",
            [str(table.name)],
        )
        return
    subject = [f"{table.name}.{cursor}"]
    yield failed(
        "polling",
        Severity.INFO,
        f"{table.name}: polling does not see changes that leave {cursor} as it is",
        "Set the column with a trigger.",
        subject,
    )
    if not table.column(cursor).not_null:
        yield failed(
            "polling",
            Severity.WARNING,
            f"{table.name}.{cursor} may be null; rows where it is null are not seen",
            f"Run: alter table {table.name} alter {cursor} set not null;",
            subject,
        )
    if not table.has_index_on([cursor]):
        yield failed(
            "polling",
            Severity.WARNING,
            f"{table.name} has no index on ({cursor}): each poll reads the whole table",
            _create_index(table, [cursor]),
            subject,
        )
