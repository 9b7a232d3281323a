"""Tables whose updates and deletes the server rejects once they are published.

The server accepts an update or a delete of a published table only if it can log which row it concerns. So publishing a
table without a replica identity breaks the application that writes it. Penstock leaves such tables out, unless the
config names them. docs/decisions/0022-never-harm-the-source.md says why it does not publish their inserts alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import NotIdentified
from penstock.schema import ReplicaIdentity
from penstock.source.faults import translated
from penstock.source.identity import judge_identity, load_partitions, quote_if_needed

REJECTS_UNSENT_SINCE = 180000
"""Since 18 the server also rejects updates if generated columns of the replica identity are not published."""

# From the catalog alone: functions such as `pg_partition_tree` wait for DDL on any partition.
_UNIDENTIFIED = """
    with recursive tree as (
        select root, root as oid from unnest(%(tables)s::pg_catalog.oid[]) root
        union
        select t.root, i.inhrelid
        from tree t
        join pg_catalog.pg_class above on above.oid = t.oid and above.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = t.oid
    ),
    usable as (
        -- not a join: a partition that was just attached is in the tree twice
        select x.* from pg_catalog.pg_index x
        where x.indrelid in (select t.oid from tree t)
          and x.indisunique and x.indimmediate and x.indisvalid and x.indpred is null
    ),
    judged as (
        select t.root, c.oid, n.nspname, c.relname, c.relreplident,
               case c.relreplident
                   when 'f' then (
                       select pg_catalog.array_agg(a.attnum) from pg_catalog.pg_attribute a
                       where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                   )
                   when 'd' then (
                       select x.indkey::int2[] from usable x where x.indrelid = c.oid and x.indisprimary
                   )
                   when 'i' then (
                       select x.indkey::int2[] from usable x where x.indrelid = c.oid and x.indisreplident
                   )
               end as sent,
               array(
                   select a.attnum from pg_catalog.pg_attribute a
                   where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                     and a.attgenerated::text = any(%(unsent)s::text[])
               ) as unsent
        from tree t
        join pg_catalog.pg_class c on c.oid = t.oid and c.relkind = 'r'
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    )
    select j.root::int8, j.oid::int8, j.nspname, j.relname, j.relreplident::text, j.sent is not null,
           exists (
               select from pg_catalog.pg_attribute a
               where a.attrelid = j.oid and a.attnum = any(j.unsent) and a.attgenerated::text = 'v'
           ),
           pg_catalog.cardinality(j.unsent) > 0,
           exists (
               select from usable x
               where x.indrelid = j.oid and x.indisprimary and not x.indkey::int2[] && j.unsent
           ),
           (
               select i.relname
               from usable x join pg_catalog.pg_class i on i.oid = x.indexrelid
               where x.indrelid = j.oid and not x.indisprimary and x.indexprs is null and not exists (
                   select from unnest(x.indkey::int2[]) k (attnum)
                   join pg_catalog.pg_attribute a on a.attrelid = j.oid and a.attnum = k.attnum
                   where not a.attnotnull or a.attnum = any(j.unsent)
               )
               order by x.indnatts, i.relname limit 1
           )
    from judged j
    where j.sent is null or j.sent && j.unsent
    order by j.nspname, j.relname
"""


@dataclass(frozen=True, slots=True)
class _Part:
    """A table that stores rows and whose updates would be rejected: a whole table, or a leaf of one."""

    oid: int
    namespace: str
    name: str
    identity: ReplicaIdentity
    is_identified: bool
    """True if only generated columns that are not published are in the way."""
    has_virtual: bool
    has_generated: bool
    has_key: bool
    index: str | None
    """A unique index that could be the replica identity."""

    @property
    def quoted(self) -> str:
        return ".".join(quote_if_needed(each) for each in (self.namespace, self.name))

    @property
    def statement(self) -> str | None:
        """What gives it an identity; None if no single statement does."""
        if self.has_key:
            what = "default"
        elif self.index is not None:
            what = f"using index {quote_if_needed(self.index)}"
        elif self.has_generated:
            return None
        else:
            what = "full"
        return f"alter table {self.quoted} replica identity {what};"


def find_unidentified(
    connection: psycopg.Connection[Any],
    tables: Collection[int],
    *,
    generated_columns: bool = False,
    listed: Collection[int] = (),
) -> dict[int, NotIdentified]:
    """Return the tables whose updates and deletes the server rejects if they are published. Takes no locks.

    `generated_columns` says whether stored generated columns are published; `listed` are tables with a column list of
    their own, which says it for them.
    """
    unsent: list[str] = []
    if connection.info.server_version >= REJECTS_UNSENT_SINCE:
        unsent = ["v"] if generated_columns else ["s", "v"]
    found: dict[int, list[_Part]] = {}
    with translated(connection, "read replica identities"), connection.cursor(row_factory=tuple_row) as cursor:
        for root, oid, namespace, name, identity, *rest in cursor.execute(
            _UNIDENTIFIED, {"tables": list(tables), "unsent": unsent}
        ).fetchall():
            part = _Part(oid, namespace, name, ReplicaIdentity(identity), *rest)
            if not (part.is_identified and root in listed):
                found.setdefault(root, []).append(part)
    partitioned = {root for root, parts in found.items() if parts[0].oid != root}
    partitions = load_partitions(connection, sorted(partitioned))
    errors: dict[int, NotIdentified] = {}
    for root, parts in found.items():
        if root not in partitions:
            errors[root] = _error(f"{parts[0].namespace}.{parts[0].name}", parts, [parts[0].statement])
        elif all(part.is_identified for part in parts):
            errors[root] = _error(str(partitions[root].root), parts, [None])
        else:
            errors[root] = _error(str(partitions[root].root), parts, judge_identity(partitions[root]).statements)
    return errors


def _error(table: str, parts: Sequence[_Part], statements: Sequence[str | None]) -> NotIdentified:
    known = tuple(each for each in statements if each is not None)
    names = [f"{part.namespace}.{part.name}" for part in parts]
    where = "" if names == [table] else f" in {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    if all(part.is_identified for part in parts):
        what = f"generated columns of its replica identity are not published{where}"
    else:
        what = f"it has no replica identity{where}"
    if len(known) == len(statements):
        remedy = f"Run: {' '.join(known)}"
    elif any(part.has_virtual for part in parts):
        remedy = f"Add a primary key to {table}."
    else:
        remedy = "Set source.generated_columns = true and give the table a replica identity."
    return NotIdentified(
        f"{table} is left out: {what}, so publishing it would make the server reject its updates and deletes",
        hint=f'If its rows are only inserted, set publish_without_identity = true in [tables."{table}"]. {remedy}',
        table=table,
        parts=tuple(names),
        statements=known,
        remedy=remedy,
        only_generated=all(part.is_identified for part in parts),
    )
