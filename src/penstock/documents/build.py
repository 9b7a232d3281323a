"""Build documents: one statement for any number of keys, with an answer for each of them.

The keys travel as arrays of text and are read as the columns' types. Each is left joined to its row, so the result has
one row per *requested* key, and "there is no document" is something that the server said, not something that was
missing from an answer. The statement has one snapshot, and takes the version of its documents from it: the number of
transactions that the snapshot has seen end. Two builds of a document with the same version are the same document.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.catalog import SourceCatalog, complete
from penstock.documents.document_sql import DocumentSql, Row
from penstock.documents.expressions import (
    canonical,
    column,
    conditions,
    conjunction,
    document_id,
    from_table,
    is_deleted,
    raw_conditions,
    same_key,
    values_source,
)
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import as_literal, run_statement, without_values
from penstock.errors import ConfigError, QueryFailed, UnsupportedServer
from penstock.source.faults import Place, translated

ROOT = "root"
BUILT = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("body", pa.large_string()),
    ]
)
"""What building gives: the document's id, its version, and its JSON; a null body says that there is no document."""

# The snapshot is the statement's own. xip has the transactions below xmax that had not ended.
_VERSION = """
    (select pg_catalog.pg_snapshot_xmax(s)::text::int8
            - (select pg_catalog.count(*) from pg_catalog.pg_snapshot_xip(s))
     from pg_catalog.pg_current_snapshot() s)
"""


def is_standby(connection: psycopg.Connection[Any]) -> bool:
    """Whether snapshots do not say which transactions still run, so that different documents have the same version."""
    return run_statement(connection, "select pg_catalog.pg_is_in_recovery()", [], "look at the server's role")[0][0]


def require_primary(connection: psycopg.Connection[Any]) -> None:
    """`UnsupportedServer` where documents would have no versions."""
    if is_standby(connection):
        where = Place.of(connection).where
        raise UnsupportedServer(
            f"documents cannot be made from a standby, which does not know their versions ({where})",
            hint="Use the primary as source.",
            where=where,
        )


@dataclass(frozen=True, slots=True)
class BuildQuery:
    """How to build the documents of one index; pickles, and serves any number of batches."""

    index: str
    key_columns: tuple[str, ...]
    text: str
    """One parameter per key column: an array of texts."""
    transform: str = ""
    range_head: str = ""
    """With a heap and `range_tail` behind it: the documents of all rows of that heap."""
    range_tail: str = ""
    range_condition: str = ""
    """What else is asked of rows, where only their own columns are in scope; empty for nothing."""


def compile_build(specification: IndexSpecification, catalog: SourceCatalog) -> BuildQuery:
    """The statement for an index; raises `ConfigError` for tables and columns that are not there."""
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
    return BuildQuery(
        specification.name,
        specification.doc_id,
        text.as_string(None),
        specification.transform,
        head.as_string(None),
        tail.as_string(None),
        " and ".join(each.as_string(None) for each in raw_conditions(specification.filters)),
    )


def build_range(
    connection: psycopg.Connection[Any], query: BuildQuery, heap: str, condition: str, *, chunk: int
) -> Iterator[pa.Table]:
    """The documents of the rows of a heap that a condition names, as `BUILT`, in pieces; those that there are.

    One statement, one snapshot, one version. `heap` is quoted. Documents without a row are not in it.
    """
    where = " and ".join(filter(None, [condition, query.range_condition])) or "true"
    text = f"{query.range_head}(select * from only {heap} where {where}){query.range_tail}"  # noqa: S608 (quoted)
    doing = f"build documents of {query.index!r}"
    with translated(connection, doing):
        try:
            with psycopg.RawServerCursor(connection, "penstock_range", row_factory=tuple_row) as cursor:
                cursor.execute(as_literal(text))
                while rows := cursor.fetchmany(chunk):
                    yield _as_built(query, rows)
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


def build_documents(connection: psycopg.Connection[Any], query: BuildQuery, keys: Sequence[Sequence[str]]) -> pa.Table:
    """Build the documents with these keys, one array per key column; a table as `BUILT`, in the keys' order.

    One statement, in the connection's snapshot if it has one. Different texts of equal keys give the same id.
    """
    wanted = len(keys[0])
    if wanted == 0:
        return BUILT.empty_table()
    rows = run_statement(connection, query.text, [list(each) for each in keys], f"build documents of {query.index!r}")
    if len(rows) != wanted:
        raise QueryFailed(
            f"{wanted} documents of {query.index!r} were asked for, and {len(rows)} came: its key is not unique",
            hint=f"Put a unique index on ({', '.join(query.key_columns)}), or name other columns in doc_id.",
        )
    return _as_built(query, rows)


def _as_built(query: BuildQuery, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = [pa.array(values, each.type) for values, each in zip(zip(*rows, strict=True), BUILT, strict=True)]
    built = pa.Table.from_arrays(columns, schema=BUILT)
    return transform_documents(query.transform, built) if query.transform else built


def transform_documents(reference: str, built: pa.Table) -> pa.Table:
    """Hand the documents to a function of the user's, which gives them back with other bodies.

    It gets and returns an Arrow table with `id`, `version` and `body` (JSON as text; null where there is none). Rows
    keep their number, their order, their ids and versions; a body that it makes null removes the document.
    """
    changed = load_function(reference)(built)
    if not isinstance(changed, pa.Table) or changed.num_rows != built.num_rows:
        raise ConfigError(
            f"{reference} should return a table with as many rows as it was given",
            hint="To remove a document, return null as its body.",
        )
    body = changed.column("body").cast(pa.large_string())
    return built.set_column(BUILT.get_field_index("body"), BUILT.field("body"), body)


def load_function(reference: str) -> Callable[[pa.Table], Any]:
    """The function that `module:function` names."""
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the transform {reference!r} cannot be imported: {error}",
            hint="It must be installed wherever documents are built.",
        ) from None
