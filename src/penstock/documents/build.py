"""Build documents: one statement for any number of keys, with an answer for each of them.

The keys travel as arrays of text and are read as the columns' types. Each is left joined to its row, so the result has
one row per *requested* key, and "there is no document" is something that the server said, not something that was
missing from an answer. The statement has one snapshot, and takes the version of its documents from it: the number of
transactions that the snapshot has seen end. Two builds of a document with the same version are the same document.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.documents.catalog import SourceCatalog, complete
from penstock.documents.document_sql import DocumentSql, Row
from penstock.documents.expressions import (
    canonical,
    column,
    compare,
    conditions,
    conjunction,
    document_id,
    from_table,
    is_deleted,
    values_source,
)
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import run_statement
from penstock.errors import ConfigError, QueryFailed

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


@dataclass(frozen=True, slots=True)
class BuildQuery:
    """How to build the documents of one index; pickles, and serves any number of batches."""

    index: str
    key_columns: tuple[str, ...]
    text: str
    """One parameter per key column: an array of texts."""
    transform: str = ""


def compile_build(specification: IndexSpecification, catalog: SourceCatalog) -> BuildQuery:
    """The statement for an index; raises `ConfigError` for tables and columns that are not there."""
    specification = complete(specification, catalog)
    root = catalog.table(specification.table)
    key = root.select(specification.doc_id)
    requested = [column("r", f"v{number}") for number in range(len(key))]
    matched = [
        compare("=", column(ROOT, each.name), value, each.base, each.base)
        for each, value in zip(key, requested, strict=True)
    ]
    matched += conditions(specification.filters, ROOT, root)
    if specification.soft_delete is not None:
        matched.append(sql.SQL("not {}").format(is_deleted(specification.soft_delete, ROOT, root)))
    text = sql.SQL(
        "select {id}, {version}, d.body::pg_catalog.text"
        " from {requested} left join lateral (select {body} as body from {root} where {matched}) d on true"
        " order by r.place"
    ).format(
        id=document_id([canonical(value, each) for value, each in zip(requested, key, strict=True)]),
        version=sql.SQL(_VERSION),
        requested=values_source("r", key, 1, ordered=True),
        body=DocumentSql(catalog).object_of(specification.fields, Row(ROOT, root)),
        root=from_table(root, ROOT, specification.filters),
        matched=conjunction(matched),
    )
    return BuildQuery(specification.name, specification.doc_id, text.as_string(None), specification.transform)


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
