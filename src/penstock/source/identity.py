"""By which columns the rows of a table are found again, judged from its partitions.

The server describes a partitioned table by its root, but an old row has what the *leaf* logs: the columns of the leaf's
replica identity, and NULL in all others. So the root's identity is only a proposal. It counts if every leaf sends its
columns; otherwise the columns that all leaves send count, if they are unique in the whole table. What is left cannot be
followed: an update or a delete would not say which row it concerns.

Leaves without an identity are ignored here: the server refuses to update and delete their rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import RESYNC, IdentitiesDiffer
from penstock.schema import ReplicaIdentity, quote_identifier, quote_literal
from penstock.source.faults import translated

# From the catalog alone: functions such as `pg_partition_tree` wait for DDL on any partition. Columns of a partition
# may have other numbers than those of the root, but have the same names.
_PARTS = """
    with recursive tree as (
        select c.oid as root, c.oid, 0 as depth
        from pg_catalog.pg_class c where c.oid = any(%s::pg_catalog.oid[]) and c.relkind = 'p'
        union all
        select t.root, i.inhrelid, t.depth + 1
        from tree t
        join pg_catalog.pg_class above on above.oid = t.oid and above.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = t.oid
    )
    select t.root::int8, c.oid::int8, n.nspname, c.relname, c.relkind = 'p', c.relreplident::text,
           array(
               select r.attnum from pg_catalog.pg_index x
               cross join unnest((x.indkey::int2[])[0:x.indnkeyatts - 1]) with ordinality k (attnum, place)
               join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
               join pg_catalog.pg_attribute r on r.attrelid = t.root and r.attname = a.attname
               where x.indrelid = c.oid and x.indisprimary and x.indimmediate and x.indisvalid
               order by k.place
           ),
           array(
               select r.attnum from pg_catalog.pg_index x
               cross join unnest((x.indkey::int2[])[0:x.indnkeyatts - 1]) k (attnum)
               join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
               join pg_catalog.pg_attribute r on r.attrelid = t.root and r.attname = a.attname
               where x.indrelid = c.oid and x.indisreplident and x.indimmediate and x.indisvalid
           ),
           (
               select case when 0 = any(p.partattrs::int2[]) then null else array(
                   select r.attnum from unnest(p.partattrs::int2[]) k (attnum)
                   join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
                   join pg_catalog.pg_attribute r on r.attrelid = t.root and r.attname = a.attname
               ) end
               from pg_catalog.pg_partitioned_table p where p.partrelid = c.oid
           ),
           exists (select from pg_catalog.pg_index x where x.indrelid = c.oid and x.indisprimary),
           case when t.depth = 0 then (
               select pg_catalog.json_object_agg(a.attnum, a.attname)
               from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0
           ) end
    from tree t
    join pg_catalog.pg_class c on c.oid = t.oid and c.relkind in ('r', 'p')
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    order by t.root, t.depth, n.nspname, c.relname
"""


_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """
    all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation
    column concurrently constraint create cross current_catalog current_date current_role current_schema
    current_time current_timestamp current_user default deferrable desc distinct do else end except false fetch for
    foreign freeze from full grant group having ilike in initially inner intersect into is isnull join lateral
    leading left like limit localtime localtimestamp natural not notnull null offset on only or order outer overlaps
    placing primary references returning right select session_user similar some symmetric system_user table
    tablesample then to trailing true union unique user using variadic verbose when where window with
        """,
    )
)
"""Words that are no names without quotes: `pg_get_keywords()`, of all versions."""
_MOST_STATEMENTS = 5
"""A remedy with more of them becomes a loop."""
_FULL = """do $$ declare leaf regclass; begin for leaf in select t.relid from pg_partition_tree({}) t \
join pg_class c on c.oid = t.relid where c.relkind = 'r' loop \
execute format('alter table %s replica identity full', leaf); end loop; end $$;"""


@dataclass(frozen=True, slots=True)
class Part:
    """A partitioned table or a partition of it; columns are attribute numbers of the table at the top."""

    oid: int
    namespace: str
    name: str
    is_partitioned: bool
    identity: ReplicaIdentity
    key: tuple[int, ...]
    """The primary key, unless it is deferrable or not valid."""
    chosen: frozenset[int]
    """The columns of the index of `replica identity using index`."""
    routed_by: frozenset[int] | None = frozenset()
    """Of a partitioned table, the columns that choose the partition; None if an expression does."""
    has_primary_key: bool = False
    """True also if it is deferrable."""

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def quoted(self) -> str:
        """Its name in SQL."""
        return ".".join(quote_if_needed(each) for each in (self.namespace, self.name))

    @property
    def is_full(self) -> bool:
        return self.identity is ReplicaIdentity.FULL

    @property
    def sent(self) -> frozenset[int]:
        """The columns of an old row that the server logs; empty if there are none, and if there are all (`is_full`)."""
        match self.identity:
            case ReplicaIdentity.DEFAULT:
                return frozenset(self.key)
            case ReplicaIdentity.INDEX:
                return self.chosen
            case _:
                return frozenset()

    @property
    def is_identified(self) -> bool:
        return self.is_full or bool(self.sent)

    def sends(self, columns: frozenset[int]) -> bool:
        """Return whether old rows have these columns."""
        return self.is_full or columns <= self.sent

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity, self.sent)


@dataclass(frozen=True, slots=True)
class Partitions:
    """A partitioned table with all its partitions."""

    root: Part
    below: tuple[Part, ...]
    names: dict[int, str]
    """The root's columns."""

    @property
    def leaves(self) -> tuple[Part, ...]:
        """The partitions that store rows."""
        return tuple(each for each in self.below if not each.is_partitioned)


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """What is known of a row that is updated or deleted."""

    kind: ReplicaIdentity
    attnums: frozenset[int]
    """The columns that are sent; empty for FULL, and if there are none."""
    problem: IdentitiesDiffer | None = None
    """Why the table cannot be followed; then nothing counts as sent."""
    statements: tuple[str, ...] = ()
    """What gives every leaf an identity that fits; empty if all have one."""


def judge_identity(partitions: Partitions) -> RowIdentity:
    """Return the identity of the rows of a partitioned table, from its root and its leaves."""
    root, leaves = partitions.root, partitions.leaves
    identified = [leaf for leaf in leaves if leaf.is_identified]
    proposals = [columns for columns in dict.fromkeys((root.sent, frozenset(root.key))) if columns]
    wanted = frozenset(root.key) or (proposals[0] if proposals else None)
    if not identified:
        return RowIdentity(root.identity, root.sent, statements=_statements(partitions, wanted))
    if all(leaf.is_full for leaf in identified):
        return RowIdentity(ReplicaIdentity.FULL, frozenset(), statements=_statements(partitions, None))
    for columns in proposals:
        if all(leaf.sends(columns) for leaf in identified):
            kind = ReplicaIdentity.INDEX if root.identity is ReplicaIdentity.INDEX else ReplicaIdentity.DEFAULT
            return RowIdentity(kind, columns, statements=_statements(partitions, columns))
    if (common := _common_key(partitions, identified)) is not None:
        return RowIdentity(ReplicaIdentity.INDEX, common, statements=_key_statements(partitions, common))
    statements = _statements(partitions, wanted)
    problem = IdentitiesDiffer(
        f"changes of {root} cannot be matched to its rows: {_difference(identified, wanted)}",
        hint=f"Once its partitions agree, Penstock copies the table again, as {RESYNC} does. "
        f"Run: {' '.join(statements)}",
        table=str(root),
    )
    return RowIdentity(ReplicaIdentity.NOTHING, frozenset(), problem, statements)


def fingerprint(kind: ReplicaIdentity, columns: frozenset[int]) -> str:
    """Return an identity as text; `lacks` compares two of them."""
    return " ".join([kind.value, ",".join(map(str, sorted(columns)))]).rstrip()


def lacks(before: str, now: str) -> bool:
    """Return whether old rows that were sent under one fingerprint may lack what another one promises."""
    (kind, *columns), (kind_now, *columns_now) = before.split(), now.split()
    if kind == ReplicaIdentity.FULL.value:
        return False
    if kind_now == ReplicaIdentity.FULL.value:
        return True
    return not set(",".join(columns_now).split(",")) - {""} <= set(",".join(columns).split(","))


def load_partitions(connection: psycopg.Connection[Any], table_oids: Sequence[int]) -> dict[int, Partitions]:
    """Load the partitions of those tables that have some. Takes no locks."""
    parts: dict[int, list[Part]] = {}
    names: dict[int, dict[int, str]] = {}
    with (
        translated(connection, "read the identities of partitions"),
        connection.cursor(row_factory=tuple_row) as cursor,
    ):
        for row in cursor.execute(_PARTS, [list(table_oids)]).fetchall():
            root, oid, namespace, name, is_partitioned, identity, key, chosen, routed_by, keyed, columns = row
            parts.setdefault(root, []).append(
                Part(
                    oid,
                    namespace,
                    name,
                    is_partitioned,
                    ReplicaIdentity(identity),
                    tuple(key),
                    frozenset(chosen),
                    None if is_partitioned and routed_by is None else frozenset(routed_by or ()),
                    keyed,
                )
            )
            if columns is not None:
                names[root] = {int(number): column for number, column in columns.items()}
    return {root: Partitions(top, tuple(below), names.get(root, {})) for root, (top, *below) in parts.items()}


def quote_if_needed(name: str) -> str:
    """A name as a person would type it: quoted only if necessary."""
    is_plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name) is not None and name not in _RESERVED
    return name if is_plain else quote_identifier(name)


def full_identity(table: str, leaves: Sequence[str]) -> tuple[str, ...]:
    """Return the statements after which the server sends whole old rows of a table's leaves; names as in SQL."""
    if len(leaves) > _MOST_STATEMENTS:
        return (_FULL.format(quote_literal(table)),)
    return tuple(f"alter table {leaf} replica identity full;" for leaf in leaves)


def _statements(partitions: Partitions, wanted: frozenset[int] | None) -> tuple[str, ...]:
    """What makes every leaf send some columns, or None for all."""
    wrong = [leaf for leaf in partitions.leaves if not (leaf.is_full if wanted is None else leaf.sends(wanted))]
    if wanted is None or len(wrong) > _MOST_STATEMENTS:
        return full_identity(partitions.root.quoted, [leaf.quoted for leaf in wrong])
    return tuple(
        f"alter table {leaf.quoted} replica identity {'default' if wanted <= frozenset(leaf.key) else 'full'};"
        for leaf in wrong
    )


def _key_statements(partitions: Partitions, common: frozenset[int]) -> tuple[str, ...]:
    """What gives the leaves without an identity the key that the others have in common."""
    missing = [leaf for leaf in partitions.leaves if not leaf.is_identified]
    if any(leaf.has_primary_key and frozenset(leaf.key) != common for leaf in missing):
        return _statements(partitions, None)
    names = ", ".join(quote_if_needed(partitions.names[each]) for each in sorted(common))
    return tuple(
        f"alter table {leaf.quoted} {'replica identity default' if leaf.key else f'add primary key ({names})'};"
        for leaf in missing
    )


def _common_key(partitions: Partitions, leaves: Sequence[Part]) -> frozenset[int] | None:
    """The key that all leaves have, if no two leaves can have the same one: it chooses the leaf."""
    keys = {leaf.sent for leaf in leaves}
    if len(keys) != 1 or any(leaf.is_full for leaf in leaves):
        return None
    (key,) = keys
    above = [partitions.root, *(each for each in partitions.below if each.is_partitioned)]
    return key if all(each.routed_by is not None and each.routed_by <= key for each in above) else None


def _difference(leaves: Sequence[Part], wanted: frozenset[int] | None) -> str:
    if wanted is not None:
        wrong = [str(leaf) for leaf in leaves if not leaf.sends(wanted)]
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return f"the replica identity of {', '.join(wrong[:3])}{more} lacks columns of the table's key"
    if len({leaf.fingerprint for leaf in leaves}) > 1:
        return "the table has no key, and its partitions have different replica identities"
    return "the table has no key, and the replica identities of its partitions are unique within a partition only"
