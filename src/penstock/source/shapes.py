"""The shape of a table: the parts of the catalog that reveal changed rows that the stream does not mention.

The stream carries rows and, before a row, the columns of its table. It is silent when rows come or go with a partition,
when only a partition is truncated, when ALTER TABLE computes a column again, and when a label of an enum gets
another name. `load_shapes` reads the catalog and takes no lock on any table; `silent_changes` compares two readings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from penstock.changes.transform import RuledColumn, RulesInForce, Transforms
from penstock.lsn import Lsn, is_in
from penstock.source.columns import AS_OLD
from penstock.source.faults import translated

_FIRST_OWN_OID = 16384
"""Types below it are the server's own, and never change."""
# One statement, so one snapshot. A table that was created as a partition has had no rows that were not sent. ATTACH
# updates all attributes of a table, but not its system columns, so an attribute that is as old as those tells.
_SHAPES = f"""
    with recursive tree (root, id, links, born) as (
        select t, t, '', true from pg_catalog.unnest(%(tables)s::oid[]) t
        union all
        select tree.root, i.inhrelid, tree.links || ' ' || i.xmin::text, tree.born and exists (
            select from pg_catalog.pg_attribute s join pg_catalog.pg_attribute a on a.attrelid = s.attrelid
            where s.attrelid = i.inhrelid and s.attnum = -1 and a.attnum > 0 and {AS_OLD.format(a="a")}
        )
        from tree
        join pg_catalog.pg_class p on p.oid = tree.id and p.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = tree.id
        where pg_catalog.to_jsonb(i) ->> 'inhdetachpending' is distinct from 'true'
    ), used (root, id) as (
        select a.attrelid, a.atttypid from pg_catalog.pg_attribute a
        where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0 and not a.attisdropped
          and a.atttypid >= {_FIRST_OWN_OID}
        union
        select used.root, part.id
        from used
        join pg_catalog.pg_type t on t.oid = used.id
        cross join lateral (
            select t.typelem where t.typelem <> 0
            union all select t.typbasetype where t.typbasetype <> 0
            union all select r.rngsubtype from pg_catalog.pg_range r
                where t.oid::text in (r.rngtypid::text, pg_catalog.to_jsonb(r) ->> 'rngmultitypid')
            union all select a.atttypid from pg_catalog.pg_attribute a
                where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
        ) part (id)
        where part.id >= {_FIRST_OWN_OID}
    )
    select 'heap', tree.root::int8, c.oid::int8, array[
        c.relfilenode::text, c.relpersistence::text, tree.links, tree.born::text, (
            select pg_catalog.string_agg(a.attnum::text || ':' || a.xmin::text, ' ' order by a.attnum)
            from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        ), n.nspname || '.' || c.relname
    ]
    from tree
    join pg_catalog.pg_class c on c.oid = tree.id and c.relkind = 'r'
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    union all
    select case when a.attisdropped then 'dropped' else 'column' end, a.attrelid::int8, a.attnum::int8,
        array[a.attname::text, a.attgenerated::text]
    from pg_catalog.pg_attribute a
    where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0
    union all
    select 'type', used.root::int8, e.oid::int8, array[t.typname::text, e.enumlabel::text, e.xmin::text]
    from used
    join pg_catalog.pg_type t on t.oid = used.id
    join pg_catalog.pg_enum e on e.enumtypid = used.id
    union all
    select 'type', used.root::int8, t.oid::int8, array[
        t.typname::text, coalesce(
            pg_catalog.string_agg(a.attnum::text || ' ' || a.atttypid::text, ',' order by a.attnum)
            filter (where not a.attisdropped), ''
        ), pg_catalog.max(a.attnum)::text
    ]
    from used
    join pg_catalog.pg_type t on t.oid = used.id and t.typtype = 'c'
    join pg_catalog.pg_attribute a on a.attrelid = t.typrelid and a.attnum > 0
    group by used.root, t.oid, t.typname
"""  # noqa: S608 (a constant)
_HAS_ROWS = "select pg_catalog.pg_relation_size(%s::oid) > 0"


class HeapShape(NamedTuple):
    """A relation that stores rows of the table: the table itself, or a leaf."""

    filenode: str
    """Another one after TRUNCATE, VACUUM FULL, CLUSTER and any ALTER TABLE that rewrites all rows."""
    persistence: str
    links: str
    """The versions of the catalog rows that make it a partition: other ones if it was detached and attached again."""
    born: bool
    """It was created as what it is; false of a leaf that was attached later, or with a table above it, and in doubt."""
    columns: str
    """The versions of its columns in the catalog, by attribute number."""
    name: str


class TypePart(NamedTuple):
    """A label of an enum, or the attributes of a composite type."""

    type_name: str
    content: str
    version: str = ""
    """Another one after it was changed, even if it was changed back: rows that were sent meanwhile have other texts."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """One table at one moment."""

    heaps: Mapping[int, HeapShape]
    """By oid; of a partitioned table its leaves, of any other the table itself."""
    columns: Mapping[int, str]
    """The names of its columns by attribute number."""
    types: Mapping[int, TypePart] = field(default_factory=dict[int, TypePart])
    """The parts of types that the database defines, by their oids."""
    is_partitioned: bool = False
    copied_at: Lsn | None = field(default=None, compare=False)
    """The position of the copy that the table had at this moment."""
    former: frozenset[int] = field(default=frozenset(), compare=False)
    """Leaves that have gone since that copy, and whose rows were dealt with."""
    rules: RulesInForce | None = None
    """The rules of the config for its columns and rows. The catalog does not say them."""
    known_as: str | None = None
    """The name under which the config had a policy for it; the table may have another name by now."""
    attributes: int | None = None
    """The highest attribute number that a column has or had; None in a shape that an earlier version has stored."""
    generated: frozenset[int] = frozenset()
    """The columns that are generated."""
    silent_change: str | None = field(default=None, compare=False)
    """What changed rows without a word in the stream since the copy; only of a table whose destination keeps every
    change, where the changes go on. The catalog does not know it."""

    def following(self, before: TableShape, mentioned: Mapping[int, Lsn]) -> TableShape:
        """This reading, with what is remembered since the copy."""
        gone = (before.heaps.keys() | vanished(before, self, mentioned)) - self.heaps.keys()
        return replace(
            self,
            copied_at=before.copied_at,
            former=before.former | gone,
            silent_change=before.silent_change,
        )


def load_shapes(connection: psycopg.Connection[Any], tables: Collection[int]) -> dict[int, TableShape]:
    """The shapes of tables, by oid; those that are gone are left out."""
    found: dict[int, TableShape] = {}
    heaps: dict[int, dict[int, HeapShape]] = {table: {} for table in tables}
    columns: dict[int, dict[int, str]] = {table: {} for table in tables}
    types: dict[int, dict[int, TypePart]] = {table: {} for table in tables}
    highest = dict.fromkeys(tables, 0)
    generated: dict[int, set[int]] = {table: set() for table in tables}
    with translated(connection, "inspect the tables"), connection.cursor(row_factory=tuple_row) as cursor:
        for kind, table, number, values in cursor.execute(_SHAPES.encode(), {"tables": list(tables)}):
            match kind:
                case "heap":
                    filenode, persistence, links, born, versions, name = values
                    is_born = born == "true"
                    heaps[table][number] = HeapShape(filenode, persistence, links, is_born, versions or "", name)
                case "column" | "dropped":
                    highest[table] = max(highest[table], number)
                    if kind == "column":
                        columns[table][number] = values[0]
                        generated[table] |= {number} if values[1] else set()
                case _:
                    types[table][number] = TypePart(*values)
    for table in tables:
        if heaps[table] or columns[table]:
            found[table] = TableShape(
                heaps[table],
                columns[table],
                types[table],
                table not in heaps[table],
                attributes=highest[table],
                generated=frozenset(generated[table]),
            )
    return found


def may_have_rows(connection: psycopg.Connection[Any], heap: int) -> bool:
    """Return False if a relation has no rows, by its size, so that uncommitted rows count. Waits for its lock."""
    doing = "check whether a partition is empty"
    with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(_HAS_ROWS, [heap]).fetchone() != (False,)


def shape_to_json(shape: TableShape) -> dict[str, Any]:
    """The shape as plain dictionaries and lists."""
    return {
        "heaps": {str(oid): list(heap) for oid, heap in shape.heaps.items()},
        "columns": {str(attnum): name for attnum, name in shape.columns.items()},
        "types": {str(oid): list(part) for oid, part in shape.types.items()},
        "partitioned": shape.is_partitioned,
        "copied_at": None if shape.copied_at is None else str(shape.copied_at),
        "former": sorted(shape.former),
        "rules": shape.rules,
        "known_as": shape.known_as,
        "attributes": shape.attributes,
        "generated": sorted(shape.generated),
        "silent_change": shape.silent_change,
    }


def shape_from_json(record: Mapping[str, Any]) -> TableShape:
    """Read what `shape_to_json` returned."""
    return TableShape(
        {int(oid): HeapShape(*heap) for oid, heap in record["heaps"].items()},
        {int(attnum): name for attnum, name in record["columns"].items()},
        {int(oid): TypePart(*part) for oid, part in record["types"].items()},
        record["partitioned"],
        None if record.get("copied_at") is None else Lsn.parse(record["copied_at"]),
        frozenset(record.get("former", ())),
        _rules_from_json(*record["rules"]) if record.get("rules") else None,
        record.get("known_as"),
        record.get("attributes"),
        frozenset(record.get("generated", ())),
        record.get("silent_change"),
    )


def _rules_from_json(table: str, fingerprint: str, columns: Mapping[str, Sequence[Any]] | None = None) -> RulesInForce:
    ruled = {name: RuledColumn(*column) for name, column in (columns or {}).items()}
    return RulesInForce(table, fingerprint, ruled)


def remembering(transforms: Transforms, shapes: Mapping[int, TableShape]) -> Transforms:
    """The transforms, with the names under which tables and columns had rules when their shapes were stored."""
    known = {table_id: shape.rules for table_id, shape in shapes.items() if shape.rules is not None}
    return Transforms(transforms.rules, known)


class SilentChange(NamedTuple):
    """A difference between two moments that the stream does not carry, or not yet."""

    text: str
    """What happened, after the table's name."""
    leaves: bool = False
    """Rows left the table with their partition, and nothing else happened to it."""
    attached: int | None = None
    """The leaf that was attached; if it has no rows, nothing changed."""
    of_partition: bool = False
    """Rows came or went with a partition, and a new copy of that partition is enough."""
    in_stream: bool = False
    """The stream carries it with the next row; until then, readers see the earlier columns."""
    moved: bool = False
    """A column has the name that another one had, so changes from before may be taken for those of this column."""
    readded: bool = False
    """The column itself is new."""


def silent_changes(before: TableShape, now: TableShape, mentioned: Mapping[int, Lsn]) -> list[SilentChange]:
    """Why the rows may differ from what the stream said between two moments; empty if they cannot.

    In doubt there is a reason. `mentioned` has the leaves that the stream described, from before the second moment.
    """
    rules = [each.rules and each.rules.fingerprint for each in (before, now)]
    changed = [SilentChange("its settings for columns or rows in the config changed")] if rules[0] != rules[1] else []
    partitions = _changed_partitions(before, now, mentioned)
    return [*changed, *partitions, *_changed_values(before, now), *_changed_names(before, now)]


def vanished(before: TableShape, now: TableShape, mentioned: Mapping[int, Lsn]) -> set[int]:
    """Leaves that sent rows since the copy and that no reading of the catalog has shown."""
    if not now.is_partitioned:
        return set()
    known = before.heaps.keys() | before.former | now.heaps.keys()
    return {
        leaf
        for leaf, at in mentioned.items()
        if leaf not in known and not (before.copied_at is not None and is_in(at, before.copied_at))
    }


def unchanged_leaves(before: TableShape, now: TableShape) -> set[int]:
    """Return the leaves that were partitions with the same bounds all the time, so that the stream has their rows."""
    return {
        oid
        for oid, heap in now.heaps.items()
        if (earlier := before.heaps.get(oid)) is not None
        and (earlier.filenode, earlier.persistence, earlier.links) == (heap.filenode, heap.persistence, heap.links)
    }


def attached_leaves(before: TableShape, now: TableShape) -> set[int]:
    """Return the leaves that may have brought rows when they became partitions."""
    earlier = before.heaps
    return {
        oid
        for oid, heap in now.heaps.items()
        if (heap.links != earlier[oid].links if oid in earlier else not heap.born)
    }


def _changed_partitions(before: TableShape, now: TableShape, mentioned: Mapping[int, Lsn]) -> Iterator[SilentChange]:
    if vanished(before, now, mentioned):
        yield SilentChange("a partition was created, filled, and detached or dropped", leaves=True, of_partition=True)
    for oid, heap in before.heaps.items():
        if oid not in now.heaps:
            yield SilentChange(f"partition {heap.name} was detached or dropped", leaves=True, of_partition=True)
    for oid, heap in now.heaps.items():
        earlier = before.heaps.get(oid)
        # The catalog does not tell TRUNCATE from VACUUM FULL: after both, and more so later, it looks the same.
        truncated = SilentChange(f"partition {heap.name} was truncated or rewritten", leaves=True, of_partition=True)
        if earlier is None:
            if not heap.born:
                yield SilentChange(f"partition {heap.name} was attached", attached=oid, of_partition=True)
            if heap.filenode != str(oid):  # a new relation has its oid as the number of its file
                yield truncated
        elif heap.links != earlier.links:
            yield SilentChange(f"partition {heap.name} was detached and attached again", of_partition=True)
        elif heap.persistence != earlier.persistence:
            yield SilentChange(f"partition {heap.name} was set logged or unlogged")
        elif now.is_partitioned and heap.filenode != earlier.filenode:
            yield truncated


def _changed_values(before: TableShape, now: TableShape) -> Iterator[SilentChange]:
    for oid, heap in now.heaps.items():
        earlier = before.heaps.get(oid)
        if earlier is None or heap.filenode == earlier.filenode:
            continue
        # Also after VACUUM FULL of a table with an added default, which it stores in the rows: it looks the same.
        altered = dict(_versions(heap)).items() - dict(_versions(earlier)).items()
        if altered:
            what = f"partition {heap.name} was altered"
            if not now.is_partitioned:
                what = _altered_columns(before, now, [attnum for attnum, _ in altered])
            yield SilentChange(f"{what} and all its rows were rewritten")
    for oid, part in before.types.items():
        if (other := now.types.get(oid)) is not None and (
            other.content != part.content or (part.version and other.version != part.version)
        ):
            yield SilentChange(f"type {other.type_name!r} was altered")
    for attnum in sorted(before.generated - now.generated):
        if attnum in now.columns:  # rows have had its values all the time, but the server did not send them
            yield SilentChange(f"column {now.columns[attnum]!r} is no longer generated")


def _altered_columns(before: TableShape, now: TableShape, attnums: Sequence[int]) -> str:
    """Name the first column of each kind: any of them may be why the rows were rewritten."""
    names = {attnum: now.columns.get(attnum, "") for attnum in sorted(attnums)}
    added = [f"column {name!r} was added" for attnum, name in names.items() if attnum not in before.columns]
    altered = [f"column {name!r} was altered" for attnum, name in names.items() if attnum in before.columns]
    return " and ".join([*added[:1], *altered[:1]])


def _changed_names(before: TableShape, now: TableShape) -> Iterator[SilentChange]:
    known = set(before.columns.values())
    for attnum, name in now.columns.items():
        earlier = before.columns.get(attnum)
        if earlier is not None and earlier != name:
            yield SilentChange(f"column {earlier!r} was renamed to {name!r}", in_stream=True, moved=name in known)
        elif earlier is None and name in known:
            yield SilentChange(f"column {name!r} was dropped and added again", in_stream=True, moved=True, readded=True)
    # Rows may have been sent with a column that came and went, under a name that a later column has.
    passed = set(range((before.attributes or 0) + 1, max(now.columns, default=0))) - now.columns.keys()
    if before.attributes is not None and passed:
        yield SilentChange(
            "a column was added, dropped, and another one added", in_stream=True, moved=True, readded=True
        )


def _versions(heap: HeapShape) -> Iterator[tuple[int, str]]:
    for each in heap.columns.split():
        attnum, _, version = each.partition(":")
        yield int(attnum), version
