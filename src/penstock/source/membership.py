"""The membership of a publication: its tables and options, and how they changed between two readings.

Membership is compared by the versions of catalog rows, not by names: a table that was removed and added again looks the
same, but the server omitted its changes in between. One case goes unnoticed: a table that left a published *schema* and
came back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from penstock.source.faults import translated
from penstock.source.identity import Partitions, fingerprint, judge_identity, lacks, load_partitions
from penstock.source.patterns import TableName
from penstock.source.publications import (
    GENERATED_SINCE,
    PUBLISHED_13,
    PUBLISHED_15,
    SCHEMAS_SINCE,
    require_publication,
)

_MEMBERSHIP = """
    with recursive {published},
    lineages as (
        select publication, relation, relation as member, namespace from published
        union
        select d.publication, d.relation, a.relid, c.relnamespace
        from published d
        cross join lateral pg_catalog.pg_partition_ancestors(d.relation) a
        join pg_catalog.pg_class c on c.oid = a.relid
    ),
    entries as (
        select l.relation, r.oid, r.xmin::text as version
        from lineages l join pg_catalog.pg_publication_rel r on r.prpubid = l.publication and r.prrelid = l.member
        {schemas}
    )
    select d.relation::int8, d.nspname, d.relname, e.oid::int8, e.version
    from published d left join entries e on e.relation = d.relation
"""

_MEMBERSHIP_SCHEMAS = """
        union
        select l.relation, s.oid, s.xmin::text
        from lineages l
        join pg_catalog.pg_publication_namespace s on s.pnpubid = l.publication and s.pnnspid = l.namespace
"""

_GENERATED = """
    select distinct a.attrelid::int8
    from pg_catalog.pg_attribute a
    where a.attrelid = any(%s::oid[]) and a.attnum > 0 and not a.attisdropped and a.attgenerated = 's'
      and not exists (
          select from pg_catalog.pg_publication_rel r
          where r.prpubid = %s::oid and r.prrelid = a.attrelid and r.prattrs is not null
      )
"""

UNIDENTIFIED = "-"
"""In `Membership.heaps`, of a partitioned table: its partitions do not fit together."""


@dataclass(frozen=True, slots=True)
class RowVersion:
    """The version of a catalog row: changes with every update, and if the row is deleted and created again."""

    oid: int
    xmin: str


@dataclass(frozen=True, slots=True)
class Heap:
    """A table that stores rows: the table itself, or one of its partitions. A partitioned table may be listed with
    them, with the identity that results from theirs."""

    oid: int
    identity: str
    """A fingerprint of its replica identity, to be compared."""


class PublicationOptions(NamedTuple):
    """What ALTER PUBLICATION changes in the publication itself."""

    operations: tuple[str, ...]
    via_root: bool
    generated_columns: bool
    owner: str


@dataclass(frozen=True, slots=True)
class Membership:
    """A publication's tables, each with the versions of the catalog rows that put it there."""

    publication: RowVersion
    tables: Mapping[int, frozenset[RowVersion]]
    names: Mapping[int, str]
    heaps: Mapping[str, frozenset[Heap]] = field(default_factory=dict[str, frozenset[Heap]])
    """Of some tables, by name: shows that a partition with rows was attached or detached, or has another identity."""
    namespaces: Mapping[int, str] = field(default_factory=dict[int, str], compare=False)
    """The part of each name before the dot, which may contain dots itself."""
    options: PublicationOptions | None = None
    """None if an earlier version of Penstock stored it."""
    generated: frozenset[int] = frozenset()
    """Tables whose stored generated columns are sent if the publication says so (18 and newer)."""

    def table_names(self) -> dict[int, TableName]:
        """Return the names in two parts."""
        found: dict[int, TableName] = {}
        for table_id, name in self.names.items():
            namespace = self.namespaces.get(table_id, name.partition(".")[0])
            found[table_id] = TableName(namespace, name[len(namespace) + 1 :])
        return found

    def is_unidentified(self, table_id: int) -> bool:
        """Return whether the partitions of a table identify its rows in ways that do not fit together."""
        return self.identities(table_id).get(table_id) == UNIDENTIFIED

    def identities(self, table_id: int) -> dict[int, str]:
        """Return the identities of a partitioned table and its partitions, as far as they are known."""
        return {heap.oid: heap.identity for heap in self.heaps.get(self.names.get(table_id, ""), ())}


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """How a publication changed between two checks, by table oid."""

    added: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()
    readded: frozenset[int] = frozenset()
    """Tables that were removed in between, or published with other columns, rows or operations: a possible gap."""
    reidentified: frozenset[int] = frozenset()
    """Partitioned tables of which captured changes may lack columns that now identify rows."""
    regenerated: frozenset[int] = frozenset()
    """Tables whose generated columns are published now: existing rows lack their values."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.readded or self.reidentified or self.regenerated)


def load_membership(connection: psycopg.Connection[Any], publication: str) -> Membership:
    """The fingerprint of a publication, to be compared with an earlier one by `changes_between`."""
    has_schemas = connection.info.server_version >= SCHEMAS_SINCE
    schemas = _MEMBERSHIP_SCHEMAS if has_schemas else ""
    published = PUBLISHED_15 if has_schemas else PUBLISHED_13
    doing = f"read the membership of publication {publication!r}"
    with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
        own = cursor.execute(
            "select oid::int8, xmin::text from pg_catalog.pg_publication where pubname = %s", [publication]
        ).fetchone()
        rows = cursor.execute(
            _MEMBERSHIP.format(published=published, schemas=schemas).encode(), [publication]
        ).fetchall()
        generated = frozenset[int]()
        if own is not None and connection.info.server_version >= GENERATED_SINCE:
            found = cursor.execute(_GENERATED, [[row[0] for row in rows], own[0]]).fetchall()
            generated = frozenset(oid for (oid,) in found)
    inspected = require_publication(connection, publication)
    if own is None or inspected.oid != own[0]:
        return load_membership(connection, publication)
    entries: dict[int, set[RowVersion]] = {}
    names: dict[int, str] = {}
    namespaces: dict[int, str] = {}
    for relation, namespace, name, oid, version in rows:
        names[relation] = f"{namespace}.{name}"
        namespaces[relation] = namespace
        versions = entries.setdefault(relation, set())
        if oid is not None:
            versions.add(RowVersion(oid, version))
    heaps = {names[root]: _heaps(partitions) for root, partitions in load_partitions(connection, list(names)).items()}
    return Membership(
        RowVersion(*own),
        {relation: frozenset(versions) for relation, versions in entries.items()},
        names,
        heaps,
        namespaces,
        PublicationOptions(
            tuple(sorted(inspected.operations)), inspected.via_root, inspected.generated_columns, inspected.owner
        ),
        generated,
    )


def _heaps(partitions: Partitions) -> frozenset[Heap]:
    """The leaves that send old rows, and their root with what all of them send."""
    judged = judge_identity(partitions)
    root = UNIDENTIFIED if judged.problem is not None else fingerprint(judged.kind, judged.attnums)
    leaves = {Heap(leaf.oid, leaf.fingerprint) for leaf in partitions.leaves if leaf.is_identified}
    return frozenset({Heap(partitions.root.oid, root), *leaves} if leaves else ())


def changes_between(old: Membership, new: Membership) -> MembershipChange:
    """Compare two memberships; a change of the publication itself may have left a gap in tables that stayed."""
    stayed = old.tables.keys() & new.tables.keys()
    altered = _altered(old, new)
    return MembershipChange(
        added=frozenset(new.tables.keys() - old.tables.keys()),
        removed=frozenset(old.tables.keys() - new.tables.keys()),
        readded=frozenset(table for table in stayed if table in altered or old.tables[table] != new.tables[table]),
        reidentified=frozenset(table for table in stayed if _promises_more(old, new, table)),
        regenerated=_regenerated(old, new) & stayed,
    )


def _altered(old: Membership, new: Membership) -> Collection[int]:
    """The tables of which a change of the publication itself, not of its tables, may have left out something.

    Another owner changes nothing. The root option decides which tables are published, and not how; those that it adds
    or removes have other oids. Generated columns are those of some tables (`_regenerated`). If the options are as
    before, they may have been others in between.
    """
    before, now = old.options, new.options
    if old.publication == new.publication:
        return ()
    if before is None or now is None or before == now or old.publication.oid != new.publication.oid:
        return new.tables.keys()
    return () if before.operations == now.operations else new.tables.keys()


def _regenerated(old: Membership, new: Membership) -> frozenset[int]:
    """If they are no longer published, the stream says so before the next row, as of a dropped column."""
    before, now = old.options, new.options
    is_new = before is not None and now is not None and now.generated_columns and not before.generated_columns
    return new.generated if is_new else frozenset()


def _promises_more(old: Membership, new: Membership, table_id: int) -> bool:
    """Return whether changes of a partitioned table may lack what now identifies its rows.

    The catalog may be ahead of the stream, whose messages do not say what a partition sent.
    """
    promised = new.identities(table_id).get(table_id)
    sent = old.identities(table_id)
    return promised is not None and table_id in sent and any(lacks(each, promised) for each in sent.values())
