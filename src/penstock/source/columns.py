"""Which attribute each column of a RELATION message is.

The message names columns; only the attribute number says which column it is (a name can move to another column, a
dropped column can come back under the same name). Numbers come from the catalog, which may be newer than the
message: columns may have been renamed or dropped since. Two facts help. Columns are sent in the order of their
numbers, and a number is never used twice nor removed, so the columns sent are a subsequence of the attributes.

- If every name is a live attribute and the numbers rise, these are the numbers: the usual case. A column that was
  dropped and added again thus has its new number.
- Otherwise the best alignment that keeps the order is taken: names in the catalog weigh most, then the names that
  the previous schema had for a number, then types. What is equally good goes to the lowest numbers, as columns are
  added at the end.
- If the table is gone: the previous schema's numbers by name, and new numbers after them.

One case cannot be told apart without a record of the DDL itself: a message from *before* a column was dropped and
added again as the last one, read after that. It gets the new number, as the catalog says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.source.identity import Partitions, RowIdentity, judge_identity

_NAME = 1000
_PREVIOUS_NAME = 600
_TYPE = 20
_UNKNOWN_TYPE = 5
_MODIFIER = 2
_GENERATED = -10


# Not by `pg_partition_tree`, which waits for locks on partitions.
_BELOW = """
    with recursive below (id) as (
        select i.inhrelid from pg_catalog.pg_inherits i
        join pg_catalog.pg_class p on p.oid = i.inhparent and p.relkind = 'p'
        where i.inhparent = a.attrelid
        union all
        select i.inhrelid from below b join pg_catalog.pg_inherits i on i.inhparent = b.id
    )
"""

_IN_PARTITIONS = f"""
    {_BELOW}
    select pg_catalog.min(m.attmissingval::pg_catalog.text) from below b
    join pg_catalog.pg_attribute m on m.attrelid = b.id and m.attname = a.attname and m.atthasmissing
"""  # noqa: S608 (a constant)

AS_OLD = """
    {a}.xmin = s.xmin and {a}.cmin = s.cmin and {a}.xmax = '0' and s.xmax = '0' and exists (
        select from pg_catalog.pg_inherits h
        where h.inhrelid = s.attrelid and h.cmin::text::int8 > s.cmin::text::int8
    )
"""
"""Whether an attribute `{a}` of a partition is as old as the partition, whose system column -1 is `s`.

Within a transaction only the numbers of commands tell, and they are fragile: a DROP that is rolled back leaves its own
in all rows, and recovery after a crash or on a standby sets all of them to 0. The row that makes the table a partition
is written by a later command, so a 0 there gives recovery away. In doubt false."""

BACKFILLED = rf"""
    a.atthasmissing or a.attidentity <> '' or a.attgenerated <> '' or exists (
        select from pg_catalog.pg_attrdef d
        cross join lateral pg_catalog.regexp_matches(d.adbin::text, ':(?:op)?funcid (\d+)', 'g') f (found)
        join pg_catalog.pg_proc p on p.oid = f.found[1]::oid and p.provolatile = 'v'
        where d.adrelid = a.attrelid and d.adnum = a.attnum
    ) or exists ({_IN_PARTITIONS} having pg_catalog.count(*) > 0)
"""
"""`Attribute.backfilled`, of a row `a` of `pg_attribute`. Of a partitioned table the partitions have the values."""

FORGOTTEN = f"""
    a.atthasdef and exists (
        {_BELOW}
        select from pg_catalog.pg_class c
        where (c.oid = a.attrelid or c.oid in (select id from below)) and c.relkind = 'r' and c.relfilenode <> c.oid
    )
"""  # noqa: S608 (a constant)
"""Whether a rewrite (VACUUM FULL, CLUSTER) may have put the constant of an added column into the rows. From then on the
catalog looks as if the default had been set later. Who asks right after the DDL does not need it."""

MISSING = f"""
    coalesce(a.attmissingval::pg_catalog.text, (
        {_IN_PARTITIONS} having pg_catalog.count(distinct m.attmissingval::pg_catalog.text) = 1 and not exists (
            select from below o
            join pg_catalog.pg_class c on c.oid = o.id and c.relkind = 'r'
            join pg_catalog.pg_attribute n on n.attrelid = o.id and n.attname = a.attname and not n.atthasmissing
            join pg_catalog.pg_attribute s on s.attrelid = o.id and s.attnum = -1
            where not ({AS_OLD.format(a="n")})
        )
    ))
"""
"""What `parse_missing` reads, of the same row. Every partition must have the same value, or have been created with the
column: one without a value may have rows that are older than the column, and have NULL in it."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row of `pg_attribute`; a dropped one keeps its number, and has neither name nor type (`type_oid` 0)."""

    attnum: int
    name: str
    type_oid: int
    type_modifier: int = -1
    dropped: bool = False
    generated: str = ""
    """`s` stored, `v` virtual (18), empty if not generated."""
    not_null: bool = False
    backfilled: bool = False
    """When it was added, rows that were there got a value: a default, an identity or a generation expression. In doubt
    true: of a volatile default the catalog does not say whether it came with the column or later, and of any default it
    does not in a table that was rewritten."""
    missing: str | None = None
    """The text of that value, where all those rows have the same, until the table is rewritten."""


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table as the catalog has it now."""

    oid: int
    namespace: str
    name: str
    kind: str
    """`pg_class.relkind`: `r` table, `p` partitioned table, `f` foreign table, …"""
    persistence: str
    """`pg_class.relpersistence`: `p` permanent, `u` unlogged, `t` temporary."""
    replica_identity: ReplicaIdentity
    identity_attnums: tuple[int, ...]
    """What the server logs as key: of the primary key or the chosen index; empty for FULL, NOTHING and no key."""
    primary_key_attnums: tuple[int, ...]
    """In the order of the key."""
    is_partition: bool
    partition_parent_oid: int | None
    partition_root_oid: int | None
    """The table at the top, for partitioned tables and for partitions; the table itself if it is the top."""
    attributes: tuple[Attribute, ...]
    deferrable_key: bool = False
    """True if two rows may have the same primary key until their transaction ends."""
    partitions: Partitions | None = None
    """None unless it is partitioned."""

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def has_identity(self) -> bool:
        """True if the server can send updates and deletes; otherwise it refuses them once the table is published."""
        return self.replica_identity is ReplicaIdentity.FULL or bool(self.identity_attnums)

    @property
    def row_identity(self) -> RowIdentity:
        """By what updated and deleted rows are found; of a partitioned table, its partitions decide."""
        if self.partitions is not None:
            return judge_identity(self.partitions)
        return RowIdentity(self.replica_identity, frozenset(self.identity_attnums))

    @property
    def unique_key_attnums(self) -> tuple[int, ...]:
        """The primary key, if it tells rows apart at every moment: changes are followed one by one."""
        return () if self.deferrable_key else self.primary_key_attnums

    @property
    def live_attributes(self) -> tuple[Attribute, ...]:
        return tuple(attribute for attribute in self.attributes if not attribute.dropped)


class RelationColumn(NamedTuple):
    """A column as a RELATION message describes it."""

    name: str
    type_oid: int
    type_modifier: int = -1
    is_key: bool = False


def identify_columns(
    columns: Sequence[RelationColumn], attributes: Sequence[Attribute], previous: TableSchema | None = None
) -> list[int]:
    """The attribute number of each column, strictly rising; see the module for the rules."""
    live = {attribute.name: attribute.attnum for attribute in attributes if not attribute.dropped}
    named = [live.get(column.name, 0) for column in columns]
    if _rises(named):
        return named
    if len(attributes) < len(columns):
        return _number_without_catalog(columns, previous)
    return _align(columns, sorted(attributes, key=lambda attribute: attribute.attnum), previous)


def build_schema(
    table_id: int,
    namespace: str,
    name: str,
    replica_identity: ReplicaIdentity | str,
    columns: Iterable[RelationColumn],
    catalog: CatalogTable | None,
    types: Mapping[int, PostgresType],
    previous: TableSchema | None = None,
    identity: RowIdentity | None = None,
) -> TableSchema:
    """The schema of a RELATION message. `types` as `load_types` returns it; a type it lacks is taken as text.

    `identity` replaces that of the message, which describes the root of a partitioned table and not its leaves.
    """
    sent = list(columns)
    attnums = identify_columns(sent, catalog.attributes if catalog else (), previous)
    if identity is None:
        keyed = frozenset(attnum for column, attnum in zip(sent, attnums, strict=True) if column.is_key)
        identity = RowIdentity(ReplicaIdentity(replica_identity), keyed)
    added = {attribute.attnum: attribute for attribute in catalog.attributes if attribute.backfilled} if catalog else {}
    if catalog is not None:
        positions = sent_key(catalog.unique_key_attnums, attnums)
        # Others that are missing came later: the catalog may be ahead of the message.
        omitted = {attribute.attnum for attribute in catalog.attributes if attribute.generated} - set(attnums)
        if omitted.intersection(catalog.identity_attnums) and identity.kind is catalog.replica_identity:
            identity = RowIdentity(identity.kind, frozenset())
    else:
        known = previous.columns if previous else ()
        positions = {column.attnum: column.primary_key_position for column in known if column.primary_key_position}
    full = identity.kind is ReplicaIdentity.FULL
    return TableSchema(
        table_id=table_id,
        namespace=namespace,
        name=name,
        columns=tuple(
            Column(
                name=column.name,
                attnum=attnum,
                type=types.get(column.type_oid) or unknown_type(column.type_oid),
                type_modifier=column.type_modifier,
                identity=full or attnum in identity.attnums,
                primary_key_position=positions.get(attnum),
                backfilled=attnum in added,
                missing=added[attnum].missing if attnum in added else None,
            )
            for column, attnum in zip(sent, attnums, strict=True)
        ),
        replica_identity=identity.kind,
    )


def sent_key(key: Sequence[int], sent: Collection[int]) -> dict[int, int]:
    """The positions of columns in a unique key, by number; none if one is not sent: the others need not be unique.

    The server omits generated columns (unless it is told otherwise, from 18 on) and what a column list leaves out.
    """
    return {attnum: index for index, attnum in enumerate(key, start=1)} if set(key) <= set(sent) else {}


def parse_missing(text: str | None) -> str | None:
    """The value in the text of an array that has no other, as `pg_attribute` keeps one for rows from before."""
    if text is None:
        return None
    element = text[1:-1]
    return re.sub(r"\\(.)", r"\1", element[1:-1], flags=re.DOTALL) if element.startswith('"') else element


def unknown_type(oid: int) -> PostgresType:
    """A stand-in for a type that was dropped before we could ask; its values are text."""
    return PostgresType(oid=oid, name=f"oid{oid}", namespace="")


def _align(
    columns: Sequence[RelationColumn], attributes: Sequence[Attribute], previous: TableSchema | None
) -> list[int]:
    """The order-preserving assignment with the highest score; each column may only go as far as the rest leaves room.

    `best[i][k]` is the score of the first i columns within the first i + k attributes, k up to the surplus.
    """
    earlier = {column.attnum: column.name for column in previous.columns} if previous else {}
    surplus = len(attributes) - len(columns)
    best = [[0] * (surplus + 1)]
    for index, column in enumerate(columns):
        row: list[int] = []
        for skipped in range(surplus + 1):
            taken = best[index][skipped] + _score(column, attributes[index + skipped], earlier)
            row.append(taken if not row else max(row[-1], taken))
        best.append(row)
    attnums: list[int] = []
    skipped = surplus
    for index in range(len(columns), 0, -1):
        # Step back while an earlier attribute does as well: the lowest number wins.
        while skipped and best[index][skipped - 1] == best[index][skipped]:
            skipped -= 1
        attnums.append(attributes[index - 1 + skipped].attnum)
    return attnums[::-1]


def _score(column: RelationColumn, attribute: Attribute, earlier: Mapping[int, str]) -> int:
    score = _GENERATED if attribute.generated else 0
    if not attribute.dropped and attribute.name == column.name:
        score += _NAME
    if earlier.get(attribute.attnum) == column.name:
        score += _PREVIOUS_NAME
    if attribute.type_oid == column.type_oid:
        score += _TYPE
    elif attribute.dropped:
        score += _UNKNOWN_TYPE
    return score + (_MODIFIER if attribute.type_modifier == column.type_modifier else 0)


def _number_without_catalog(columns: Sequence[RelationColumn], previous: TableSchema | None) -> list[int]:
    earlier = {column.name: column.attnum for column in previous.columns} if previous else {}
    named = [earlier.get(column.name, 0) for column in columns]
    if _rises(named):
        return named
    attnums: list[int] = []
    for attnum in named:
        last = attnums[-1] if attnums else 0
        attnums.append(attnum if attnum > last else last + 1)
    return attnums


def _rises(attnums: Sequence[int]) -> bool:
    return all(before < after for before, after in zip((0, *attnums), attnums, strict=False))
