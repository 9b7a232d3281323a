"""The rows of a table at one position, in ranges that tasks can read: the input of a destination's copy.

`prepare_copy` plans them from the catalog as it was in the snapshot.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import tuple_row

from penstock.changes.frames import frame_of
from penstock.changes.segment import require_exact_key
from penstock.changes.transform import Transforms
from penstock.copy.plan import TID_RANGES_SINCE, CopyRange, CopySettings, Leaf, plan_ranges
from penstock.copy.reader import RangeReader
from penstock.copy.resume import ResumableCopy, Resuming, blocks_by_heap, fingerprint
from penstock.errors import RESYNC, PublicationChanged, QueryFailed, SourceError, TableLocked, TableRewritten
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.source.bounds import Bounds, load_bounds
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import SourceSettings
from penstock.source.faults import is_lock_timeout, translated
from penstock.source.membership import load_membership
from penstock.source.publications import published_attnums, published_tables, require_publication
from penstock.source.shapes import TableShape, load_shapes
from penstock.source.snapshots import Snapshot
from penstock.values import TypeSettings

# Read from the catalog's tables, so that partitions and files are those of the snapshot. Only the sizes are current.
_LEAVES = """
    with recursive tree as (
        select c.oid, c.relkind from pg_catalog.pg_class c where c.oid = %s::oid
        union all
        select c.oid, c.relkind
        from tree t
        join pg_catalog.pg_inherits i on i.inhparent = t.oid
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        where t.relkind = 'p' and pg_catalog.to_jsonb(i) ->> 'inhdetachpending' is distinct from 'true'
    )
    select c.oid::int8, c.relpersistence, c.oid::regclass::text, c.relfilenode::int8,
           coalesce(pg_catalog.pg_relation_size(c.oid), 0) / pg_catalog.current_setting('block_size')::int8,
           coalesce(pg_catalog.pg_table_size(c.oid), 0), c.reltuples::float8,
           (
               select pg_catalog.json_object_agg(a.attname, a.attnum)
               from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
           )
    from tree t
    join pg_catalog.pg_class c on c.oid = t.oid
    where c.relkind = 'r'
    order by c.oid
"""
_VERSIONS = """
    select pg_catalog.string_agg(c.oid::text || ':' || c.xmin::text, ' ' order by c.oid)
    from pg_catalog.pg_class c
    where c.oid = any(%(heaps)s::oid[])
       or c.oid in (select a.relid::oid from pg_catalog.pg_partition_ancestors(%(table)s::oid::regclass) a)
"""


logger = logging.getLogger(__name__)


def prepare_copy(
    snapshot: Snapshot,
    source: SourceSettings,
    publication: str,
    table_id: int,
    *,
    types: TypeSettings | None = None,
    transforms: Transforms | None = None,
    settings: CopySettings | None = None,
    attempt: str | None = None,
    with_bounds: bool = False,
    resuming: Resuming | None = None,
) -> CopyRows:
    """Plan the copy of a published table: its schema at the snapshot's position, and its ranges.

    `attempt` identifies this copy among all copies of the table; the default is a new id. Does not read the table
    itself. Raises `PublicationChanged` if the publication does not contain the table, `TableLocked` if DDL on the
    table prevents reading its size, and `ConfigError` if the settings do not fit the table. With `resuming`, the copy
    can be continued, and leaves out the ranges that are done.
    """
    settings, types = settings or CopySettings(), types or TypeSettings()
    with snapshot.connect(parameters=settings.session_parameters) as connection, _locks_named():
        schema, row_filter, unpublished = _describe(connection, publication, table_id)
        require_exact_key(schema, types)
        transform = None if transforms is None else transforms.resolve(schema, types)
        where = None
        if transform is not None:
            where = None if transform.filter is None else transform.filter.sql()
            transform = transform.for_copy()
            schema = transform.source
        leaves = load_leaves(connection, schema)
        shape = replace(load_shapes(connection, [table_id])[table_id], copied_at=snapshot.position)
        bounds = load_bounds(connection, schema, types) if with_bounds else {}
        can_seek = connection.info.server_version >= TID_RANGES_SINCE
        resumable = None
        if resuming is not None and transform is None:
            membership, relations = load_membership(connection, publication), _versions(connection, table_id, leaves)
            wanted = fingerprint(schema, shape, row_filter, membership, relations, types, snapshot.timeline)
            resumable = None if wanted is None else resuming.at(snapshot.position, schema, wanted, tuple(leaves))
    ranges = plan_ranges(
        table_id,
        leaves,
        range_bytes=settings.range_bytes,
        can_seek=can_seek,
        finished=None if resumable is None else blocks_by_heap(resumable.finished),
    )
    rows = CopyRows(
        reader=RangeReader(source, snapshot.name, schema, types, row_filter, settings, transform, where),
        attempt=attempt or uuid.uuid4().hex,
        position=snapshot.position,
        ranges=ranges,
        shape=shape,
        unpublished=unpublished,
        bounds=bounds,
        resumable=resumable,
    )
    logger.info(
        "copy planned table=%s attempt=%s position=%s heaps=%d ranges=%d bytes=%d",
        *(schema, rows.attempt, rows.position, len(leaves), len(ranges), rows.estimated_bytes),
    )
    return rows


@contextmanager
def _locks_named() -> Iterator[None]:
    """Raise `TableLocked` for lock timeouts: the server's functions for sizes and publications wait for DDL."""
    try:
        yield
    except QueryFailed as error:
        if not is_lock_timeout(error):
            raise
        raise TableLocked(error.message, **error.facts) from None


def _describe(
    connection: psycopg.Connection[Any], publication: str, table_id: int
) -> tuple[TableSchema, str | None, tuple[str, ...]]:
    """Return the published table, the publication's row filter, and the columns that it omits."""
    published = next(iter(published_tables(connection, publication, table_id)), None)
    table = load_table(connection, table_id)
    if published is None or table is None:
        raise PublicationChanged(
            f"publication {publication!r} does not contain the table {table or table_id}",
            tables=[str(table or table_id)],
        )
    attnums = published_attnums(table, published, require_publication(connection, publication))
    found = load_types(connection, [attribute.type_oid for attribute in table.live_attributes])
    unpublished = tuple(each.name for each in table.live_attributes if each.attnum not in set(attnums))
    return schema_from_catalog(table, found, attnums), published.row_filter, unpublished


def _versions(connection: psycopg.Connection[Any], table_id: int, leaves: Iterable[Leaf]) -> str:
    """Return the versions of a table's own rows in the catalog, with those of its leaves and of tables above it."""
    heaps = [table_id, *(leaf.oid for leaf in leaves)]
    with translated(connection, "read the catalog"), connection.cursor(row_factory=tuple_row) as cursor:
        ((versions,),) = cursor.execute(_VERSIONS, {"heaps": heaps, "table": table_id}).fetchall()
        return versions


def load_leaves(connection: psycopg.Connection[Any], schema: TableSchema, *, with_unlogged: bool = False) -> list[Leaf]:
    """Return the heaps of a table in the connection's snapshot, with the attribute numbers of its columns in each.

    `with_unlogged` accepts heaps whose changes the server does not send.
    """
    doing = f"list the heaps of {schema}"
    with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_LEAVES, [schema.table_id]).fetchall()
    leaves: list[Leaf] = []
    for oid, persistence, name, filenode, blocks, size, row_count, attnums in rows:
        if persistence != "p" and not with_unlogged:
            raise SourceError(
                f"partition {name} of {schema} is unlogged, so the server does not send its changes",
                hint=f"Run: alter table {name} set logged; then: {RESYNC}.",
                table=str(schema),
            )
        missing = [column.name for column in schema.columns if column.name not in (attnums or {})]
        if missing:
            raise TableRewritten(
                f"a partition of {schema} lacks columns that the table has: {', '.join(missing)}", table=str(schema)
            )
        numbers = tuple(attnums[column.name] for column in schema.columns)
        leaves.append(Leaf(oid, filenode, blocks, size, numbers, row_count))
    return leaves


@dataclass(frozen=True, slots=True)
class CopyRows:
    """A table as of `position`: exactly the rows of the transactions before this boundary.

    Rows are read lazily and inside one snapshot, so reading again, or on another machine that reaches the source, gives
    the same rows, in any order. They can be read until `Destination.write_table_rows` returns, which ends the snapshot.

    Everything here pickles, except `resumable`. A job over ranges ships the ranges as its items and `reader` with its
    function:

        def write_range(reader, folder, part):
            for index, batch in enumerate(reader.read(part)):
                ...  # a file named by (attempt, part.index, index): tasks may run twice

        tasks.run(rows.ranges, partial(write_range, rows.reader, folder), description=f"copy {rows.schema}")

    Identify what tasks write by (`attempt`, `CopyRange.index`, number of the batch), never by content: two equal
    batches of a table without a key are two batches. `TableRewritten` and `SnapshotLost` from any range invalidate the
    whole attempt: raise them from `write_table_rows`, and another attempt follows.
    """

    reader: RangeReader
    attempt: str
    """Identifies this copy among all copies of the table."""
    position: Lsn
    ranges: tuple[CopyRange, ...]
    """Each row is in exactly one, or in one that is done. There may be none (a partitioned table without partitions),
    and an empty table has ranges without rows; create the table in both cases."""
    shape: TableShape | None = None
    """What the catalog said of it in the snapshot."""
    unpublished: tuple[str, ...] = ()
    """Columns of the table that the publication omits."""
    bounds: Mapping[int, Bounds] = field(default_factory=dict[int, Bounds])
    """The bounds of its leaves by oid, if they were asked for, without those that cannot be applied elsewhere."""
    resumable: ResumableCopy | None = None
    """What is done of the copy, if the next attempt can continue it."""

    @property
    def schema(self) -> TableSchema:
        """The table's schema at `position`."""
        return self.reader.output

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of every batch: the columns with the names and types of segments, and last `_unrepresentable` (see
        `penstock.changes.segment`), which is NULL in most tables."""
        return self.reader.arrow_schema

    @property
    def estimated_bytes(self) -> int:
        """Size on the source's disk."""
        return sum(part.estimated_bytes for part in self.ranges)

    @property
    def estimated_rows(self) -> int | None:
        """From the server's statistics, ignoring row filters; None if it has none."""
        heaps = {part.leaf.oid: part.leaf.rows for part in self.ranges}
        return None if any(rows < 0 for rows in heaps.values()) else round(sum(heaps.values()))

    def read(self, part: CopyRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one range. In tasks use `reader`, which is smaller to send."""
        return self.reader.read(part)

    def arrow(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, one range after the other: for small tables, and for destinations without tasks."""
        for part in self.ranges:
            yield from self.reader.read(part)

    def frame(self, session: Any, *, partitions: int | None = None) -> Any:
        """Return all rows as a data frame of the given Spark session, read each time that the frame is computed.

        Columns as in `arrow_schema`; on Spark 4.0, which has no type for times of day, they are text. One core is left
        free unless `partitions` says otherwise.
        """
        return frame_of(session, self.arrow_schema, self.ranges, self.reader.read, partitions=partitions)
