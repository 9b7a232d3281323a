"""Builds documents: one statement for any number of keys, with an answer for each of them.

The keys travel as arrays of text and are cast to the columns' types. Each is left joined to its row, so the result has
one row per *requested* key: the server states explicitly that a document does not exist. The statement has one snapshot
and takes the version of its documents from it: the number of transactions that the snapshot has seen end. Two builds of
a document with the same version are the same document.

A document is the whole tree below a row of the root table as one JSON value. Every level is a row turned into an
object. To-one relations are a subquery that returns at most one row; to-many relations are an ordered array, never
null; aggregates are subqueries of their own. The order of an array is total: the primary key decides what `order_by`
leaves open, so the same rows give the same document. Objects are built from rows, not by `json_build_object`, which
takes at most fifty fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.catalog import SourceCatalog, SourceTable, complete
from penstock.documents.expressions import (
    Sql,
    canonical,
    column,
    conditions,
    conjunction,
    convert,
    document_id,
    equal_columns,
    from_table,
    geo_value,
    is_deleted,
    json_literal,
    raw_conditions,
    same_key,
    scalar_value,
    values_source,
)
from penstock.documents.statements import as_literal, without_values
from penstock.errors import ConfigError, QueryFailed
from penstock.source.faults import translated
from penstock.specification.tree import (
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
)

ROOT = "root"
BUILT = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("body", pa.large_string()),
    ]
)
"""The columns of built documents: id, version, and JSON; a null body means that there is no document."""

PIECE_BYTES = 8 << 20
"""About this many bytes of documents are in memory at once, or `_ROWS_AT_ONCE` documents that are larger."""
_ROWS_AT_ONCE = 10 if psycopg.pq.version() >= 170000 else 1
"""Documents that the driver reads at once. Earlier versions of libpq read either one or all."""

# The statement's own snapshot. xip has the transactions below xmax that had not ended.
_VERSION = """
    (select pg_catalog.pg_snapshot_xmax(s)::text::int8
            - (select pg_catalog.count(*) from pg_catalog.pg_snapshot_xip(s))
     from pg_catalog.pg_current_snapshot() s)
"""


@dataclass(frozen=True, slots=True)
class BuildQuery:
    """The statements that build the documents of one index; can be pickled and reused for any number of batches."""

    index: str
    key_columns: tuple[str, ...]
    text: str
    """One parameter per key column: an array of texts."""
    transform: str = ""
    range_head: str = ""
    """Followed by a heap and `range_tail`, it builds the documents of all rows of that heap."""
    range_tail: str = ""
    range_condition: str = ""
    """More conditions, where only the row's own columns are in scope; may be empty."""
    keys_head: str = ""
    """Followed by a heap and `keys_tail`, it returns the keys of all rows of that heap."""
    keys_tail: str = ""

    def keys_of(self, rows: str) -> str:
        """Return the statement for the keys of rows; `rows` is a heap, or a subquery in parentheses."""
        return f"{self.keys_head}{rows}{self.keys_tail}"


def compile_build(specification: IndexSpecification, catalog: SourceCatalog) -> BuildQuery:
    """Compile the statements of an index; raises `ConfigError` for missing tables and columns."""
    specification = complete(specification, catalog)
    root = catalog.table(specification.table)
    key = root.select(specification.doc_id)
    there = conditions(specification.filters, ROOT, root)
    if specification.soft_delete is not None:
        there.append(sql.SQL("not {}").format(is_deleted(specification.soft_delete, ROOT, root)))
    body = DocumentSql(catalog).object_of(specification.fields, Row(ROOT, root))
    requested = [column("r", f"v{number}") for number in range(len(key))]
    matched = [same_key(column(ROOT, each.name), value, each) for each, value in zip(key, requested, strict=True)]
    text = sql.SQL(
        "select {id}, {version}, d.body::pg_catalog.text"
        " from {requested} left join lateral (select {body} as body from {root} where {matched}) d on true"
        " order by r.place"
    ).format(
        id=document_id([canonical(value, each) for value, each in zip(requested, key, strict=True)]),
        version=sql.SQL(_VERSION),
        requested=values_source("r", key, 1, ordered=True),
        body=body,
        root=from_table(root, ROOT, specification.filters),
        matched=conjunction([*matched, *there]),
    )
    named = [sql.SQL("{} is not null").format(column(ROOT, each.name)) for each in key]
    head = sql.SQL("select {id}, {version}, {body}::pg_catalog.text from ").format(
        id=document_id([canonical(column(ROOT, each.name), each) for each in key]), version=sql.SQL(_VERSION), body=body
    )
    tail = sql.SQL(" {} where {}").format(sql.Identifier(ROOT), conjunction([*named, *there]))
    keys = sql.SQL(", ").join([canonical(column(ROOT, each.name), each) for each in key])
    keys_tail = sql.SQL(" {} where {}").format(sql.Identifier(ROOT), conjunction(named))
    return BuildQuery(
        specification.name,
        specification.doc_id,
        text.as_string(None),
        specification.transform,
        head.as_string(None),
        tail.as_string(None),
        " and ".join(each.as_string(None) for each in raw_conditions(specification.filters)),
        sql.SQL("select {} from ").format(keys).as_string(None),
        keys_tail.as_string(None),
    )


def build_range(
    connection: psycopg.Connection[Any], query: BuildQuery, heap: str, condition: str, *, chunk: int
) -> Iterator[pa.Table]:
    """Yield the documents of the rows of a heap that match a condition, as `BUILT`, in pieces.

    One statement, one snapshot, one version. `heap` is quoted. Rows without a document are left out.
    """
    where = " and ".join(filter(None, [condition, query.range_condition])) or "true"
    text = f"{query.range_head}(select * from only {heap} where {where}){query.range_tail}"  # noqa: S608 (quoted)
    return _streamed(connection, query, text, None, chunk)


def build_pieces(
    connection: psycopg.Connection[Any], query: BuildQuery, keys: Sequence[Sequence[str]], *, chunk: int
) -> Iterator[pa.Table]:
    """Yield the documents with these keys as `build_documents` does, but only as many at a time as fit in memory."""
    count = 0
    for piece in _streamed(connection, query, query.text, [list(each) for each in keys], chunk):
        count += piece.num_rows
        yield piece
    if count != len(keys[0]):
        raise QueryFailed(
            f"{len(keys[0])} documents of index {query.index!r} were requested, but the query returned "
            f"{count}: the key is not unique",
            hint=f"Create a unique index on ({', '.join(query.key_columns)}), or name other columns in doc_id.",
        )


def build_documents(connection: psycopg.Connection[Any], query: BuildQuery, keys: Sequence[Sequence[str]]) -> pa.Table:
    """Build the documents with these keys, one list per key column; returns `BUILT`, in the order of the keys.

    One statement, in the connection's snapshot if it has one. Different texts of equal keys give the same id.
    """
    pieces = build_pieces(connection, query, keys, chunk=len(keys[0])) if keys[0] else ()
    return pa.concat_tables([BUILT.empty_table(), *pieces])


def _streamed(
    connection: psycopg.Connection[Any], query: BuildQuery, text: str, parameters: list[list[str]] | None, chunk: int
) -> Iterator[pa.Table]:
    """Run a statement and yield its documents in pieces of up to `chunk` documents or about `PIECE_BYTES`."""
    doing = f"build documents of {query.index!r}"
    with translated(connection, doing):
        try:
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                rows: list[tuple[Any, ...]] = []
                size = 0
                # The driver hands out rows, and this only counts their bytes.
                for row in cursor.stream(as_literal(text), parameters, size=_ROWS_AT_ONCE):
                    rows.append(row)
                    size += len(row[2] or "")
                    if len(rows) >= chunk or size >= PIECE_BYTES:
                        yield _as_table(query, rows)
                        rows, size = [], 0
                if rows:
                    yield _as_table(query, rows)
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


def _as_table(query: BuildQuery, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = [pa.array(values, each.type) for values, each in zip(zip(*rows, strict=True), BUILT, strict=True)]
    built = pa.Table.from_arrays(columns, schema=BUILT)
    return transform_documents(query.transform, built) if query.transform else built


def transform_documents(reference: str, built: pa.Table) -> pa.Table:
    """Pass the documents to a user's function, which returns them with other bodies.

    It takes and returns an Arrow table with `id`, `version` and `body` (JSON as text, or null). It must keep the number
    and order of rows, ids and versions; a null body removes the document.
    """
    changed = load_function(reference)(built)
    if not isinstance(changed, pa.Table) or changed.num_rows != built.num_rows:
        raise ConfigError(
            f"{reference} must return a table with as many rows as it received",
            hint="To remove a document, return null as its body.",
        )
    body = changed.column("body").cast(pa.large_string())
    return built.set_column(BUILT.get_field_index("body"), BUILT.field("body"), body)


def load_function(reference: str) -> Callable[[pa.Table], Any]:
    """Import the function that `module:function` names."""
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the transform {reference!r} cannot be imported: {error}",
            hint="Install it wherever documents are built, including Spark's workers.",
        ) from None


@dataclass(frozen=True, slots=True)
class Row:
    """A row in scope: its alias and table, and those of the junction that leads to it."""

    alias: str
    table: SourceTable
    junction: tuple[str, SourceTable] | None = None


class DocumentSql:
    """Composes the SQL of a completed specification's documents; aliases are unique within one instance."""

    def __init__(self, catalog: SourceCatalog) -> None:
        self._catalog = catalog
        self._numbers = count(1)

    def object_of(self, fields: Sequence[Field], row: Row) -> Sql:
        """Return an object of these fields, as an expression over a row in scope."""
        members = [sql.SQL("{} as {}").format(self._value(each, row), sql.Identifier(each.name)) for each in fields]
        return sql.SQL("(select pg_catalog.row_to_json(o) from (select {}) o)").format(sql.SQL(", ").join(members))

    def _value(self, field: Field, row: Row) -> Sql:
        match field:
            case Scalar():
                if field.junction and row.junction is not None:
                    return scalar_value(field, *row.junction)
                return scalar_value(field, row.alias, row.table)
            case Geo():
                return geo_value(field, row.alias)
            case Constant():
                return json_literal(field.value)
            case Group():
                return self.object_of(field.fields, row)
            case Join():
                return self._array(field, row) if field.to_many else self._object(field, row)
            case Aggregate():
                return self._aggregate(field, row)

    def _object(self, join: Join, parent: Row) -> Sql:
        source, where, row = self._related(join.relation, parent)
        order = sql.SQL(", ").join([each for each, _ in self._order(join.relation, row)])
        return sql.SQL("(select {} from {} where {} order by {} limit 1)").format(
            self.object_of(join.fields, row), source, where, order
        )

    def _array(self, join: Join, parent: Row) -> Sql:
        source, where, row = self._related(join.relation, parent)
        order = self._order(join.relation, row)
        columns = [
            sql.SQL("{} as {}").format(expression, sql.Identifier(f"o{number}"))
            for number, (expression, _) in enumerate(self._order(join.relation, row, plain=True))
        ]
        limited = sql.SQL("")
        if join.relation.limit is not None:
            limited = sql.SQL(" order by {} limit {}").format(
                sql.SQL(", ").join([each for each, _ in order]), sql.Literal(join.relation.limit)
            )
        alias = self._alias("a")
        outer = [
            sql.SQL("{}{}").format(column(alias, f"o{number}"), sql.SQL(" desc" if descending else ""))
            for number, (_, descending) in enumerate(order)
        ]
        return sql.SQL(
            "(select coalesce(pg_catalog.json_agg({body} order by {outer}), '[]'::pg_catalog.json)"
            " from (select {object} as body, {columns} from {source} where {where}{limited}) {alias})"
        ).format(
            body=column(alias, "body"),
            outer=sql.SQL(", ").join(outer),
            object=self.object_of(join.fields, row),
            columns=sql.SQL(", ").join(columns),
            source=source,
            where=where,
            limited=limited,
            alias=sql.Identifier(alias),
        )

    def _aggregate(self, field: Aggregate, parent: Row) -> Sql:
        source, where, row = self._related(field.relation, parent)
        return sql.SQL("(select {} from {} where {})").format(self._reduced(field, row), source, where)

    def _reduced(self, field: Aggregate, row: Row) -> Sql:
        if field.operation is Operation.COUNT:
            return sql.SQL("pg_catalog.count(*)")
        if field.operation is Operation.IDS:
            key = field.relation.primary_key[0]
            value = convert(column(row.alias, key), field.value_type or ScalarType.KEYWORD, row.table.column(key))
            return sql.SQL("coalesce(pg_catalog.json_agg({} order by {}), '[]'::pg_catalog.json)").format(
                value, column(row.alias, key)
            )
        value = column(row.alias, field.column)
        if row.table.column(field.column).base.name == "money":
            value = sql.SQL("{}::pg_catalog.numeric").format(value)
        reduced = sql.SQL("pg_catalog.{}({})").format(sql.SQL(as_literal(field.operation.value)), value)
        if field.operation is Operation.AVG:
            return sql.SQL("{}::pg_catalog.float8").format(reduced)
        if field.operation in (Operation.MIN, Operation.MAX) and field.value_type is not None:
            return convert(reduced, field.value_type, row.table.column(field.column))
        return reduced

    def _related(self, relation: Relation, parent: Row) -> tuple[Sql, Sql, Row]:
        """Return what follows `from` and `where` to select the related rows of a parent, and their aliases."""
        table = self._catalog.table(relation.table)
        alias = self._alias("t")
        own = [each for each in relation.filters if not each.junction]
        source = from_table(table, alias, own)
        where = conditions(own, alias, table)
        link = table.select(relation.columns)
        above = parent.table.select(relation.parent_columns)
        if relation.junction is None:
            return source, conjunction([equal_columns(alias, link, parent.alias, above), *where]), Row(alias, table)
        junction = self._catalog.table(relation.junction.table)
        between = self._alias("j")
        right = equal_columns(alias, link, between, junction.select(relation.junction.right_key))
        left = equal_columns(between, junction.select(relation.junction.left_key), parent.alias, above)
        where += conditions([each for each in relation.filters if each.junction], between, junction)
        source = sql.SQL("{} join {} on {}").format(source, from_table(junction, between), right)
        return source, conjunction([left, *where]), Row(alias, table, (between, junction))

    def _order(self, relation: Relation, row: Row, *, plain: bool = False) -> list[tuple[Sql, bool]]:
        """Return the expressions of a total order, and whether each is descending; `plain` omits the direction."""
        wanted = [(each.column, each.descending, each.junction) for each in relation.order_by]
        wanted += [(each, False, False) for each in relation.primary_key]
        if row.junction is not None:
            wanted += [(each, False, True) for each in row.junction[1].primary_key]
        keyless = [] if relation.primary_key else [row.alias]
        if row.junction is not None and not row.junction[1].primary_key:
            keyless.append(row.junction[0])
        order: list[tuple[Sql, bool]] = []
        for name, descending, junction in wanted:
            alias = row.junction[0] if junction and row.junction is not None else row.alias
            down = sql.SQL(" desc" if descending and not plain else "")
            order.append((sql.SQL("{}{}").format(column(alias, name), down), descending))
        # Without a key, the whole row decides: rows that are equal in everything may change places.
        whole = sql.SQL('({}.*)::pg_catalog.text collate pg_catalog."C"')
        return [*order, *((whole.format(sql.Identifier(alias)), False) for alias in keyless)]

    def _alias(self, letter: str) -> str:
        return f"{letter}{next(self._numbers)}"
