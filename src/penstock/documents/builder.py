"""Documents of a Postgres source: `PostgresDocuments` resolves and builds them, `PostgresTasks` builds them in tasks,
`DocumentKeys` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.copy.plan import TID_RANGES_SINCE, plan_ranges
from penstock.copy.rows import load_leaves
from penstock.documents.base import BackfillScope, DocumentBuilder, SnapshotTable, TaskBuilder
from penstock.documents.build import (
    BuildQuery,
    build_documents,
    build_pieces,
    build_range,
    compile_build,
)
from penstock.documents.catalog import SourceCatalog, complete, load_catalog
from penstock.documents.expressions import rows_of, table_name, values_source
from penstock.documents.images import Changes
from penstock.documents.mapping import IndexMapping, index_mapping, is_built_from
from penstock.documents.paths import entries_of, way_up
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import DEFAULT_CHUNK, Question, Resolution, ResolvedKeys, Resolver
from penstock.documents.statements import OF_VALUES, POOL, explain, read_pieces, run_statement, wait_until_visible
from penstock.errors import ConfigError, PenstockError, QueryFailed, Retry, TableLocked, TableRewritten
from penstock.schema import TableSchema
from penstock.sinks.base import Rejection
from penstock.source.connections import SourceSettings
from penstock.source.patterns import TableName
from penstock.specification.tree import IndexSpecification, columns_read
from penstock.state import IndexBuild

_T = TypeVar("_T")
RANGE_BYTES = 8 << 20
"""Size of a backfill range of the root table, TOAST included: a second or two of work."""
_SMALL_RANGE_BYTES, _RANGES = 1 << 20, 8
_SAMPLED_WHOLE = 100_000
"""A sample reads smaller tables entirely, and about this many rows of larger ones."""

_OID = "select pg_catalog.to_regclass(pg_catalog.format('%I.%I', $1::text, $2::text))::pg_catalog.oid::int8"
# Both read the current state, whatever snapshot the transaction has.
_CURRENT = """
    select pg_catalog.format('%I.%I', t.object_names[1], t.object_names[2]),
           pg_catalog.pg_relation_filenode($1::oid)::int8
    from pg_catalog.pg_identify_object_as_address(1259::oid, $1::oid, 0) t
"""
_ESTIMATE = """
    select coalesce(sum(greatest(c.reltuples, 0)), 0)::float8
    from pg_catalog.pg_partition_tree($1::text::pg_catalog.regclass) p
    join pg_catalog.pg_class c on c.oid = p.relid and p.isleaf
"""


class PostgresDocuments(DocumentBuilder):
    """Specifications compiled against a database, and the connections that resolve and build with them.

    Keys are streamed from one connection while another builds documents. It is compiled once: after DDL on one of its
    tables, make another. A thread that still uses an older one finishes with it; the server reports what the DDL broke.
    """

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
        source: SourceSettings | None = None,
        range_bytes: int = RANGE_BYTES,
        stopped: Mapping[str, PenstockError] | None = None,
    ) -> None:
        """`owner` is the output that writes the indexes, and no other one may. With `source`, tasks can build.

        Raises `ConfigError` if the specifications do not match the database. `stopped` has indexes that are not among
        them because they no longer do (`fitting`).
        """
        tables = {name for each in specifications for name in each.tables()}
        self.connection = resolving
        self.catalog = catalog or load_catalog(building, tables)
        self.specifications = {each.name: each for each in specifications}
        self.completed = {each.name: complete(each, self.catalog) for each in specifications}
        """With all keys filled in."""
        self.mappings = {each.name: index_mapping(each, self.catalog, owner=owner) for each in specifications}
        """What creates each index."""
        self.queries = {each.name: compile_build(each, self.catalog) for each in specifications}
        self.resolver = Resolver(specifications, self.catalog, relation_map, chunk=chunk)
        self.wanted = self.resolver.wanted
        """The columns to read of changes; partitions are listed under their own names, too."""
        self.stopped = stopped or {}
        self._building = building
        self._chunk = chunk
        self._source = source
        self._range_bytes = range_bytes

    @property
    def names(self) -> dict[int, TableName]:
        """The tables of `wanted` by their oids, which the stream has."""
        return {each.oid: name for name, each in self.wanted.items()}

    def reads(self, index: str, table: TableName) -> Collection[str]:
        """Return the columns of a table that the documents of an index depend on."""
        return columns_read(self.completed[index])[table]

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        wait_until_visible(self.connection, sorted(changes.xids))
        return self.resolver.resolve(self.connection, changes, scope)

    def answer(self, question: Question, *, apart: bool = False) -> Generator[ResolvedKeys, None, None]:
        if self._source is None or not apart:
            return self.resolver.answer(self.connection, question)
        return self._answer_apart(self._source, question)

    def _answer_apart(self, source: SourceSettings, question: Question) -> Generator[ResolvedKeys, None, None]:
        with POOL.borrow(source) as connection, closing(self.resolver.answer(connection, question)) as parts:
            yield from parts

    def build(self, keys: ResolvedKeys) -> pa.Table:
        return build_documents(self._building, self.queries[keys.index], keys.keys)

    def remember(self, resolution: Resolution) -> None:
        self.resolver.remember(resolution)

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        """See `DocumentBuilder`. All from one snapshot."""
        query, root = self.queries[index], self.catalog.table(self.specifications[index].table)
        text = query.keys_of(rows_of(root).as_string(None))
        for rows in read_pieces(self.connection, text, [], self._chunk, f"list the documents of {index!r}"):
            yield ResolvedKeys.of_rows(index, rows, len(query.key_columns))

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        return [BackfillScope(name, SnapshotTable(each.table, each.doc_id)) for name, each in self.completed.items()]

    def index_mappings(self) -> Sequence[IndexMapping]:
        return list(self.mappings.values())

    def named(self, index: str, ids: Sequence[str]) -> Iterator[ResolvedKeys]:
        return DocumentKeys(_compiled(self.completed, index), self.catalog).of_ids(ids, self._chunk)

    def for_tasks(self) -> TaskBuilder | None:
        return None if self._source is None else PostgresTasks(self._source, self.queries, self._chunk)

    def ranges(self, index: str) -> list[Any] | None:
        """See `DocumentBuilder`. Each has the oid and the file of a heap, and a condition on `ctid`."""
        if self._source is None:
            return None
        with POOL.borrow(self._source) as connection:
            leaves = self._leaves(connection, index)
            can_seek = connection.info.server_version >= TID_RANGES_SINCE
        # A small table has smaller ranges, so that tasks end at about the same time.
        even = max(_SMALL_RANGE_BYTES, sum(leaf.bytes for leaf in leaves) // _RANGES)
        planned = plan_ranges(0, leaves, range_bytes=min(self._range_bytes, even), can_seek=can_seek)
        return [[each.leaf.oid, each.leaf.filenode, each.condition] for each in planned]

    def require_unchanged(self, index: str, ranges: Sequence[Any]) -> None:
        if self._source is None:
            return
        with POOL.borrow(self._source) as connection:
            heaps = {(leaf.oid, leaf.filenode) for leaf in self._leaves(connection, index)}
        if heaps != {(oid, filenode) for oid, filenode, _ in ranges}:
            raise TableRewritten("the root table of the index was rewritten, or its partitions changed")

    def _leaves(self, connection: psycopg.Connection[Any], index: str) -> list[Any]:
        table = _compiled(self.specifications, index).table
        [(oid,)] = run_statement(connection, _OID, [*table], f"find {table}")
        if oid is None:
            raise TableRewritten(f"table {table} no longer exists")
        return load_leaves(connection, TableSchema(oid, table.namespace, table.name, ()))


def _compiled(known: Mapping[str, _T], index: str) -> _T:
    """Return what was compiled for an index. A thread may still build one that no longer fits the database."""
    if index not in known:
        raise TableRewritten(f"index {index!r} no longer fits the database")
    return known[index]


def fitting(
    connection: psycopg.Connection[Any],
    specifications: Sequence[IndexSpecification],
    catalog: SourceCatalog,
    builds: Mapping[str, IndexBuild],
) -> tuple[list[IndexSpecification], dict[str, PenstockError]]:
    """Return the specifications that fit the database, and why others no longer do, by index.

    Raises the reason if no index fits, or if one never did: it is new, or its specification changed since its build.
    """
    stopped: dict[str, PenstockError] = {}
    for each in specifications:
        try:
            statements = list(statements_of(complete(each, catalog), catalog))
            Resolver([each], catalog)
            for what, text, count in statements:
                explain(connection, text, count, what)
        except TableLocked:
            continue  # a start does not wait for it; a statement that does not fit fails later
        except (ConfigError, QueryFailed) as error:
            build = builds.get(each.name)
            if error.retry is Retry.TIMED or build is None or not is_built_from(build.fingerprint, each):
                raise
            stopped[each.name] = error
    if stopped and len(stopped) == len(specifications):
        raise next(iter(stopped.values()))
    return [each for each in specifications if each.name not in stopped], stopped


def statements_of(specification: IndexSpecification, catalog: SourceCatalog) -> Iterator[tuple[str, str, int]]:
    """Yield the statements of a complete specification: what each does, its text, and its number of parameters."""
    build = compile_build(specification, catalog)
    yield f"build documents of {specification.name!r}", build.text, len(build.key_columns)
    for entry in entries_of(specification):
        text = way_up(entry, specification, catalog, 1).as_string(None)
        yield f"find the documents of a row of {entry.table}", text, len(entry.columns)


@dataclass(frozen=True, slots=True)
class PostgresTasks(TaskBuilder):
    """Builds documents in tasks, on the connections of their process."""

    source: SourceSettings
    queries: Mapping[str, BuildQuery]
    chunk: int
    """Documents per statement of a range, and per write to the sink."""

    def pieces(self, keys: ResolvedKeys) -> Iterator[pa.Table | Rejection]:
        query = _compiled(self.queries, keys.index)
        with POOL.borrow(self.source) as connection:
            yield from build_apart(lambda part: build_pieces(connection, query, part.keys, chunk=len(keys)), keys)

    def range_pieces(self, index: str, part: Any, *, apart: bool = False) -> Iterator[pa.Table | Rejection]:
        query, (oid, filenode, condition) = _compiled(self.queries, index), part
        with POOL.borrow(self.source) as connection, connection.transaction():
            heap = lock_heap(connection, oid, filenode)
            if not apart:
                yield from build_range(connection, query, heap, condition, chunk=self.chunk)
                return
            text = query.keys_of(f"(select * from only {heap} where {condition or 'true'})")  # noqa: S608 (quoted)
            rows = run_statement(connection, text, [], f"list the documents of {index!r}")
        keys = ResolvedKeys.of_rows(index, rows, len(query.key_columns))
        for first in range(0, len(keys), self.chunk):
            yield from self.pieces(keys.part(first, first + self.chunk))


@dataclass(frozen=True, slots=True)
class BuildsHere(TaskBuilder):
    """Builds with a builder that only this process has; it has no ranges."""

    documents: DocumentBuilder

    def pieces(self, keys: ResolvedKeys) -> Iterator[pa.Table | Rejection]:
        return build_apart(lambda part: [self.documents.build(part)], keys)

    def range_pieces(self, index: str, part: Any, *, apart: bool = False) -> Iterator[pa.Table | Rejection]:
        return iter(())


def lock_heap(connection: psycopg.Connection[Any], oid: int, filenode: int) -> str:
    """Lock a heap against rewriting until the transaction ends, and return its quoted name.

    Raises `TableRewritten` unless it still has this file. The next statement has a newer snapshot, so it sees every
    current row of the heap.
    """

    def look() -> tuple[Any, ...]:
        return next(iter(run_statement(connection, _CURRENT, [oid], doing)), (None, None))

    doing = "read a table of an index"
    heap, _ = look()
    if heap is not None:
        run_statement(connection, f"lock table only {heap} in access share mode", [], doing)
        # The locked heap is the planned one, and still has the file that the ranges refer to.
        if look() == (heap, filenode):
            return heap
    name = heap or "a table of an index"
    raise TableRewritten(f"{name} was rewritten, truncated, renamed or dropped while documents were built from it")


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
        for part in (keys.part(0, half), keys.part(half)):
            yield from build_apart(build, part)


def is_about_values(error: QueryFailed) -> bool:
    """Return True if a value of a row made a statement fail; the same statement succeeds for other rows."""
    return str(error.facts.get("sqlstate", "")).startswith(OF_VALUES)


def join_key(parts: Sequence[str]) -> str:
    """Return the id of a document from the canonical texts of its key, as `document_id` does on the server."""
    if len(parts) == 1:
        return parts[0]
    return ":".join(each.replace("%", "%25").replace(":", "%3A") for each in parts)


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
        if len(self.columns) == 1:
            return (id_,)
        return tuple(each.replace("%3A", ":").replace("%25", "%") for each in id_.split(":"))

    def named(self, connection: psycopg.Connection[Any], parts: Sequence[str]) -> ResolvedKeys:
        """Return the key of one document, given as a value for each key column or as its id."""
        key = self.parse(parts[0]) if len(parts) == 1 else tuple(parts)
        if len(key) != len(self.columns):
            wanted = f"{len(self.columns)} value{'s' * (len(self.columns) > 1)} ({', '.join(self.columns)})"
            raise ConfigError(
                f"documents of index {self.specification.name!r} are identified by {wanted}, but {len(key)} were given",
                hint="Give one value for each column, or one id in which they are joined by ':'.",
            )
        resolved = self.resolved([key])
        self._require_typed(connection, resolved)
        return resolved

    def of_ids(self, ids: Sequence[str], chunk: int) -> Iterator[ResolvedKeys]:
        """Yield the keys of documents in pieces; ids with another number of values are left out."""
        keys = self.resolved([key for key in map(self.parse, ids) if len(key) == len(self.columns)])
        for first in range(0, len(keys), chunk):
            yield keys.part(first, first + chunk)

    def resolved(self, keys: Sequence[Sequence[str]]) -> ResolvedKeys:
        """Return keys in the form that the builder takes."""
        return ResolvedKeys.of_rows(self.specification.name, keys, len(self.columns))

    def some(self, connection: psycopg.Connection[Any], count: int) -> ResolvedKeys:
        """Return the keys of a random sample of about `count` rows of the root table."""
        root = self.catalog.table(self.specification.table)
        what = f"sample documents of {self.specification.name!r}"
        rows = run_statement(connection, _ESTIMATE, [table_name(root.name).as_string(None)], what)[0][0]
        percent = 100.0 if rows <= _SAMPLED_WHOLE else min(100.0, 100.0 * max(count * 3, _SAMPLED_WHOLE) / rows)
        sample = sql.SQL("(select * from {} tablesample bernoulli ({}))").format(rows_of(root), sql.Literal(percent))
        text = compile_build(self.specification, self.catalog).keys_of(sample.as_string(None))
        return self.resolved(run_statement(connection, f"{text} order by random() limit $1", [count], what))

    def read(self, connection: psycopg.Connection[Any], keys: ResolvedKeys) -> None:
        """Raise `QueryFailed` (`is_about_values`) unless the values have the types of the key columns."""
        columns = self.catalog.table(self.specification.table).select(self.columns)
        text = sql.SQL("select * from {}").format(values_source("k", columns, 1)).as_string(None)
        run_statement(connection, text, keys.keys, f"read a key of {keys.index!r}")

    def _require_typed(self, connection: psycopg.Connection[Any], keys: ResolvedKeys) -> None:
        """Raise `ConfigError` unless the values have the types of the key columns."""
        try:
            self.read(connection, keys)
        except QueryFailed as error:
            if not is_about_values(error):
                raise
            columns = self.catalog.table(self.specification.table).select(self.columns)
            prefix = self.specification.id_prefix
            wanted = ", ".join(f"{each.name} ({each.type})" for each in columns)
            raise ConfigError(
                f"this is not a key of index {keys.index!r}, whose documents are identified by {wanted}",
                hint=f"Give the values of these columns in {self.specification.table}"
                + (f", without the prefix {prefix!r}." if prefix else "."),
            ) from None
