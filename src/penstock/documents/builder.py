"""Documents of a Postgres source: `PostgresDocuments` resolves and builds them, `DocumentKeys` names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.base import BackfillScope, DocumentBuilder, Rejection, SnapshotTable
from penstock.documents.build import build_documents, compile_build
from penstock.documents.catalog import SourceCatalog, complete, load_catalog
from penstock.documents.expressions import canonical, column, conjunction, from_table, rows_of, table_name
from penstock.documents.images import Changes
from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import DEFAULT_CHUNK, Resolution, ResolvedKeys, Resolver
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import run_statement, wait_until_visible
from penstock.errors import ConfigError, QueryFailed
from penstock.source.faults import translated
from penstock.source.patterns import TableName

_OF_VALUES = ("22", "54")
"""Classes of SQLSTATE that a value causes: it is out of a type's range, or the result too large for the server."""
_SAMPLED_WHOLE = 100_000
"""A sample reads smaller tables entirely, and about this many rows of larger ones."""

_ESTIMATE = """
    select coalesce(sum(greatest(c.reltuples, 0)), 0)::float8
    from pg_catalog.pg_partition_tree($1::text::pg_catalog.regclass) p
    join pg_catalog.pg_class c on c.oid = p.relid and p.isleaf
"""


class PostgresDocuments(DocumentBuilder):
    """Resolves and builds on separate connections: keys are streamed from one while the other builds documents."""

    def __init__(
        self,
        resolving: psycopg.Connection[Any],
        building: psycopg.Connection[Any],
        specifications: Sequence[IndexSpecification],
        relation_map: RelationMap | None = None,
        *,
        catalog: SourceCatalog | None = None,
        chunk: int = DEFAULT_CHUNK,
        owner: str = "",
    ) -> None:
        """`owner` is the output that writes the indexes, and no other one may."""
        tables = {name for each in specifications for name in each.tables()}
        self._catalog = catalog or load_catalog(building, tables)
        self._specifications = {each.name: complete(each, self._catalog) for each in specifications}
        self._written = {each.name: each for each in specifications}
        self._queries = {each.name: compile_build(each, self._catalog) for each in specifications}
        self._resolving = resolving
        self._building = building
        self._chunk = chunk
        self._owner = owner
        self.resolver = Resolver(specifications, self._catalog, relation_map, chunk=chunk)

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        """See `DocumentBuilder`."""
        wait_until_visible(self._resolving, sorted(changes.xids))
        return self.resolver.resolve(self._resolving, changes, scope)

    def build(self, keys: ResolvedKeys) -> pa.Table:
        """See `DocumentBuilder`."""
        return build_documents(self._building, self._queries[keys.index], keys.keys)

    def remember(self, resolution: Resolution) -> None:
        """See `DocumentBuilder`."""
        self.resolver.remember(resolution)

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        """See `DocumentBuilder`. All from one snapshot."""
        specification = self._specifications[index]
        root = self._catalog.table(specification.table)
        keys = [canonical(column("r", each.name), each) for each in root.select(specification.doc_id)]
        text = sql.SQL("select {} from {} where {}").format(
            sql.SQL(", ").join(keys),
            from_table(root, "r"),
            conjunction([sql.SQL("{} is not null").format(column("r", name)) for name in specification.doc_id]),
        )
        with (
            translated(self._resolving, f"list the documents of {index!r}"),
            self._resolving.transaction(),
            psycopg.ServerCursor(self._resolving, "penstock_every_key", row_factory=tuple_row) as cursor,
        ):
            cursor.execute(text)
            while rows := cursor.fetchmany(self._chunk):
                yield ResolvedKeys(index, tuple(list(each) for each in zip(*rows, strict=True)))

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        """See `DocumentBuilder`. Indexes with the same root share the reading of its rows."""
        columns: dict[TableName, dict[str, None]] = {}
        for each in self._specifications.values():
            columns.setdefault(each.table, {}).update(dict.fromkeys(each.doc_id))
        return [
            BackfillScope(name, SnapshotTable(each.table, tuple(columns[each.table])))
            for name, each in self._specifications.items()
        ]

    def index_mappings(self) -> Sequence[IndexMapping]:
        """See `DocumentBuilder`."""
        return [index_mapping(each, self._catalog, owner=self._owner) for each in self._written.values()]

    def named(self, index: str, ids: Sequence[str]) -> Iterator[ResolvedKeys]:
        """See `DocumentBuilder`."""
        return DocumentKeys(self._specifications[index], self._catalog).of_ids(ids, self._chunk)


def build_apart(
    build: Callable[[ResolvedKeys], Iterable[pa.Table]], keys: ResolvedKeys
) -> Iterator[pa.Table | Rejection]:
    """Yield the documents of these keys; those with a value that the server cannot compute are reported instead.

    They are found by halving. After a failure, documents that were built before it are built once more.
    """
    try:
        yield from build(keys)
    except QueryFailed as error:
        if not is_about_values(error):
            raise
        if len(keys) == 1:
            id_ = join_key([column[0] for column in keys.keys])
            state = error.facts["sqlstate"]
            yield Rejection(keys.index, id_, f"the document cannot be built from its rows (SQLSTATE {state})")
            return
        half = len(keys) // 2
        for part in (slice(None, half), slice(half, None)):
            yield from build_apart(build, ResolvedKeys(keys.index, tuple(each[part] for each in keys.keys)))


def is_about_values(error: QueryFailed) -> bool:
    """Return True if a value of a row made a statement fail; the same statement succeeds for other rows."""
    return str(error.facts.get("sqlstate", "")).startswith(_OF_VALUES)


def join_key(parts: Sequence[str]) -> str:
    """Return the id of a document from the canonical texts of its key, as `document_id` does on the server."""
    if len(parts) == 1:
        return parts[0]
    return ":".join(each.replace("%", "%25").replace(":", "%3A") for each in parts)


def split_id(id_: str, width: int) -> tuple[str, ...]:
    """Split a document's id into its key; an invalid id gives another number of values than `width`."""
    if width == 1:
        return (id_,)
    return tuple(each.replace("%3A", ":").replace("%25", "%") for each in id_.split(":"))


@dataclass(frozen=True, slots=True)
class DocumentKeys:
    """The keys and ids of an index's documents."""

    specification: IndexSpecification
    """With all keys filled in (`complete`)."""
    catalog: SourceCatalog

    @classmethod
    def of(cls, specification: IndexSpecification, catalog: SourceCatalog) -> DocumentKeys:
        return cls(complete(specification, catalog), catalog)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.specification.doc_id

    def parse(self, id_: str) -> tuple[str, ...]:
        """Split a document's id into its key; an invalid id gives another number of values than `columns`."""
        return split_id(id_, len(self.columns))

    def named(self, parts: Sequence[str]) -> ResolvedKeys:
        """Return the key of one document, given as a value for each key column or as its id."""
        key = self.parse(parts[0]) if len(parts) == 1 else tuple(parts)
        if len(key) != len(self.columns):
            wanted = f"{len(self.columns)} value{'s' * (len(self.columns) > 1)} ({', '.join(self.columns)})"
            raise ConfigError(
                f"documents of index {self.specification.name!r} are identified by {wanted}, but {len(key)} were given",
                hint="Give one value for each column, or one id in which they are joined by ':'.",
            )
        return self.resolved([key])

    def of_ids(self, ids: Sequence[str], chunk: int) -> Iterator[ResolvedKeys]:
        """Yield the keys of documents in pieces; ids with another number of values are left out."""
        parsed = [key for key in map(self.parse, ids) if len(key) == len(self.columns)]
        for first in range(0, len(parsed), chunk):
            yield self.resolved(parsed[first : first + chunk])

    def resolved(self, keys: Sequence[Sequence[str]]) -> ResolvedKeys:
        """Return keys in the form that the builder takes."""
        columns = [[key[place] for key in keys] for place in range(len(self.columns))]
        return ResolvedKeys(self.specification.name, tuple(columns))

    def some(self, connection: psycopg.Connection[Any], count: int) -> ResolvedKeys:
        """Return the keys of a random sample of about `count` rows of the root table."""
        root = self.catalog.table(self.specification.table)
        name = table_name(root.name)
        what = f"sample documents of {self.specification.name!r}"
        rows = run_statement(connection, _ESTIMATE, [name.as_string(None)], what)[0][0]
        percent = 100.0 if rows <= _SAMPLED_WHOLE else min(100.0, 100.0 * max(count * 3, _SAMPLED_WHOLE) / rows)
        text = sql.SQL(
            "select {keys} from {table} r tablesample bernoulli ({percent}) where {there} order by random() limit $1"
        ).format(
            keys=sql.SQL(", ").join([canonical(column("r", each.name), each) for each in root.select(self.columns)]),
            table=rows_of(root),
            percent=sql.Literal(percent),
            there=conjunction([sql.SQL("{} is not null").format(column("r", each)) for each in self.columns]),
        )
        return self.resolved(run_statement(connection, text.as_string(None), [count], what))
