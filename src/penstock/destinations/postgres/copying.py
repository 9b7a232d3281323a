"""Copies: tasks fill a new table range by range, and one transaction puts it in the place of the old one.

Each range is one transaction that also records the range, so a task that runs twice writes its rows once. The new table
is named after its attempt: late tasks of an earlier attempt cannot reach it. Readers see the old rows until the end.

A table that others depend on (views, grants, indexes, constraints or defaults that Penstock did not create) stays, and
gets the rows of the new one; otherwise the new table takes its name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg
import pyarrow as pa

from penstock.changes.segment import split_texts
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.postgres.control import Control, Known, create_schema
from penstock.destinations.postgres.encoding import cells_of, copy_text
from penstock.destinations.postgres.history import append_copy_marker, copied_cells, copied_columns
from penstock.destinations.postgres.layout import (
    DELETED_AT,
    OWN_COLUMNS,
    Layout,
    Mode,
    Target,
    equality,
    follow,
    new_layout,
)
from penstock.destinations.postgres.server import BY_HASH, Server, Session
from penstock.destinations.refusals import fenced_copy, rejected, unexpected
from penstock.destinations.row_groups import group_batches
from penstock.lsn import Lsn
from penstock.schema import TableSchema, quote_identifier, quote_literal
from penstock.schema.types import keeps_values
from penstock.source.indexes import SourceIndex

logger = logging.getLogger(__name__)

_GROUP_BYTES = 16 << 20
_NAME_BYTES = 63
_MADE = "created by Penstock for the index "
"""Begins the comment on an index that a later copy may replace; the index's name at the source follows."""
_DEPENDENTS = f"""
    select exists (
        select from pg_catalog.pg_depend d
        where d.refclassid = 'pg_catalog.pg_class'::regclass and d.refobjid = %(table)s and d.deptype = 'n'
          and d.classid::regclass::text in ('pg_rewrite', 'pg_policy', 'pg_proc')
    ) or exists (
        select from pg_catalog.pg_publication_rel p where p.prrelid = %(table)s
    ) or exists (
        select from pg_catalog.pg_index i where i.indrelid = %(table)s and not i.indisprimary
          and not pg_catalog.starts_with(coalesce(pg_catalog.obj_description(i.indexrelid, 'pg_class'), ''), '{_MADE}')
    ) or exists (
        select from pg_catalog.pg_constraint c
        where c.confrelid = %(table)s or (c.conrelid = %(table)s and c.contype not in ('p', 'n'))
    ) or exists (
        select from pg_catalog.pg_trigger t where t.tgrelid = %(table)s and not t.tgisinternal
    ) or exists (
        select from pg_catalog.pg_attribute a
        where a.attrelid = %(table)s and a.attnum > 0 and not a.attisdropped
          and (a.attacl is not null or a.atthasdef or a.attidentity <> '')
    ) or exists (
        select from pg_catalog.pg_statistic_ext s where s.stxrelid = %(table)s
    ) or (
        select c.relacl is not null or c.relrowsecurity or c.reloptions is not null
        from pg_catalog.pg_class c where c.oid = %(table)s
    )
"""


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """What tasks need to know to copy a range."""

    server: Server
    control: Control
    schema: TableSchema
    attempt: str
    position: Lsn
    arrow_schema: pa.Schema
    generation: Target
    layout: Layout


def begin_generation(session: Session, control: Control, schema: TableSchema, attempt: str, mode: Mode) -> Layout:
    """Create the table that a copy fills, unless it exists; return its columns."""
    layout = new_layout(session, schema, mode)
    generation = control.generation(schema.table_id, attempt)
    session.run(f"create table if not exists {generation.sql} ({layout.definition(OWN_COLUMNS[mode])})")
    return layout


def drop_generations(server: Server, control: Control, table_id: int, *, but: str | None = None) -> None:
    """Drop what earlier attempts have left behind. One that a late task is still writing stays until the next time."""
    kept = None if but is None else control.generation(table_id, but).name
    with server.transaction() as session:
        query = "select tablename from pg_catalog.pg_tables where schemaname = %s and starts_with(tablename, %s)"
        names = [name for (name,) in session.rows(query, [control.namespace, control.generations(table_id)])]
        session.run("set local lock_timeout = '100ms'")
        for name in names:
            if name == kept:
                continue
            session.run("savepoint penstock_drop")
            try:
                session.run(f"drop table if exists {Target(control.namespace, name).sql}")
            except psycopg.errors.LockNotAvailable:
                session.run("rollback to savepoint penstock_drop")


def write_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> int:
    """Copy one range in one transaction; return its rows. Does nothing if another run of the task has done it."""
    schema, layout = target.schema, target.layout
    rows = 0
    try:
        with target.server.transaction(str(schema)) as session:
            if not target.control.take_range(session, schema.table_id, target.attempt, part.index):
                return 0
            columns = copied_columns(layout) if layout.mode is Mode.HISTORY else layout.columns
            for batches in group_batches(reader.read(part), _GROUP_BYTES):
                table = pa.Table.from_batches(batches, schema=target.arrow_schema).combine_chunks()
                if not table.num_rows:
                    continue
                if layout.mode is Mode.HISTORY:
                    cells = copied_cells(table, schema, target.position, layout.version)
                else:
                    cells = cells_of(table, split_texts(table), schema)
                session.copy(target.generation.sql, columns, copy_text(cells, table.num_rows))
                rows += table.num_rows
        return rows
    except Exception as error:
        raise unexpected(str(schema), error) from None


def add_key(session: Session, generation: Target, layout: Layout) -> None:
    """Give the new table its primary key; a repeated call does nothing."""
    if layout.mode is Mode.HISTORY:
        return
    if not layout.key:
        # A database that publishes all its tables refuses to delete rows that it cannot identify.
        session.run(f"alter table {generation.sql} replica identity full")
        return
    found = session.rows(
        "select 1 from pg_catalog.pg_index where indrelid = pg_catalog.to_regclass(%s) and indisprimary",
        [generation.sql],
    )
    if not found:
        listed = ", ".join(map(quote_identifier, layout.key))
        session.run(f"alter table {generation.sql} add primary key ({listed})")


def add_indexes(session: Session, before: Target | None, generation: Target, indexes: Sequence[SourceIndex]) -> None:
    """Give the new table the indexes of the source; a repeated call does nothing.

    An index that the destination cannot have (a function, a type or a column is missing) is left out. A table that
    stays has its indexes.
    """
    if before is not None and _stays(session, before):
        return
    for number, index in enumerate(indexes):
        made = Target(generation.namespace, f"{generation.name}_{number}")
        if session.rows("select 1 where pg_catalog.to_regclass(%s) is not null", [made.sql]):
            continue
        session.run("savepoint penstock_index")
        try:
            session.run(f"create index {quote_identifier(made.name)} on {generation.sql} {index.definition}")
            session.run(f"comment on index {made.sql} is {quote_literal(_MADE + index.name)}")
        except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
            session.run("rollback to savepoint penstock_index")
            logger.warning("index left out index=%s table=%s sqlstate=%s", index.name, generation, error.sqlstate)


def finish_copy(session: Session, control: Control, known: Known, target: CopyTarget, lineage: str, epoch: int) -> None:
    """Put the new table in its place and record its position, in the session's transaction."""
    assert known.target is not None
    schema, layout, place = target.schema, target.layout, known.target
    before = known.readable
    is_known = before is not None and known.layout is not None and known.layout.mode is layout.mode
    if is_known and before is not None and known.layout is not None and layout.mode is Mode.HISTORY:
        layout = _append_copy(session, before, known.layout, target)
        if before != place:
            _rename(session, before, place)
    else:
        if is_known and before is not None and known.layout is not None and layout.mode is Mode.SOFT_DELETE:
            _keep_deleted(session, target.generation, layout, before, known.layout)
        _put(session, schema, target.generation, layout, place, known.layout)
        if before is not None and before != place:
            _drop_former(session, control, before)
    control.complete(session, schema.table_id, target.attempt)
    control.move(session, schema.table_id, position=target.position, lineage=lineage, epoch=epoch, layout=layout)


def _put(
    session: Session, schema: TableSchema, generation: Target, layout: Layout, place: Target, known: Layout | None
) -> None:
    create_schema(session, place.namespace)
    if _stays(session, place):
        new, old = (set(_definition(session, table)) for table in (generation, place))
        own = set() if known is None else {*known.names.values(), *OWN_COLUMNS[known.mode]}
        # Columns that others added may stay.
        if not new <= old or any(name in own or not name for name, _ in old - new):
            raise rejected(
                str(schema),
                f"its columns changed, and other objects at the destination depend on {place}",
                hint="Drop these views, indexes, constraints and grants, then run: penstock rollback.",
            )
        listed = ", ".join(map(quote_identifier, [*layout.columns, *OWN_COLUMNS[layout.mode]]))
        session.run("set constraints all deferred")
        session.run(f"delete from {place.sql}")
        session.run(f"insert into {place.sql} ({listed}) select {listed} from {generation.sql}")
        session.run(f"drop table {generation.sql}")
        return
    session.run(f"drop table if exists {place.sql}")
    _rename(session, generation, place)


def _stays(session: Session, table: Target) -> bool:
    """Return True if a table exists that others depend on."""
    ((oid,),) = session.rows("select pg_catalog.to_regclass(%s)::oid::int8", [table.sql])
    return oid is not None and session.rows(_DEPENDENTS.replace("%(table)s", str(int(oid))))[0][0]


def _definition(session: Session, table: Target) -> list[tuple[str, str]]:
    """Return the columns and the key of a table, for comparison."""
    return session.rows(
        """
        select a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
        from pg_catalog.pg_attribute a
        where a.attrelid = pg_catalog.to_regclass(%s) and a.attnum > 0 and not a.attisdropped
        union all
        select '', pg_catalog.pg_get_constraintdef(c.oid)
        from pg_catalog.pg_constraint c where c.conrelid = pg_catalog.to_regclass(%s) and c.contype = 'p'
        order by 1, 2
        """,
        [table.sql, table.sql],
    )


def _rename(session: Session, table: Target, to: Target) -> None:
    """Move a table to another schema under another name."""
    create_schema(session, to.namespace)
    if table.namespace != to.namespace:
        # A name that is free in both schemas, as that of a generation is.
        session.run(f"alter table {table.sql} set schema {quote_identifier(to.namespace)}")
    if table.name != to.name:
        moved = Target(to.namespace, table.name)
        session.run(f"alter table {moved.sql} rename to {quote_identifier(to.name)}")
    found = session.rows(
        """
        select c.conname, pg_catalog.to_regclass(%s) is null from pg_catalog.pg_constraint c
        where c.conrelid = pg_catalog.to_regclass(%s) and c.contype = 'p'
        """,
        [Target(to.namespace, f"{to.name}_pkey").sql, to.sql],
    )
    for name, is_free in found:
        if is_free and len(f"{to.name}_pkey".encode()) <= _NAME_BYTES:
            natural = quote_identifier(f"{to.name}_pkey")
            session.run(f"alter table {to.sql} rename constraint {quote_identifier(name)} to {natural}")

    found = session.rows(
        """
        select r.relname, d.name from pg_catalog.pg_index x
        join pg_catalog.pg_class r on r.oid = x.indexrelid
        cross join lateral (
            select pg_catalog.substr(pg_catalog.obj_description(r.oid, 'pg_class'), pg_catalog.length(%s) + 1) as name
            where pg_catalog.starts_with(pg_catalog.obj_description(r.oid, 'pg_class'), %s)
        ) d
        where x.indrelid = pg_catalog.to_regclass(%s) and r.relname <> d.name and not exists (
            select from pg_catalog.pg_class other where other.relnamespace = r.relnamespace and other.relname = d.name
        )
        """,
        [_MADE, _MADE, to.sql],
    )
    for name, natural in found:
        session.run(f"alter index {Target(to.namespace, name).sql} rename to {quote_identifier(natural)}")


def _drop_former(session: Session, control: Control, former: Target) -> None:
    """Drop the table that a renamed one has left, unless another table has taken its place or depends on it."""
    taken = any(each.target == former for each in control.load(session).values())
    if taken:
        return
    session.run("savepoint penstock_former")
    try:
        session.run(f"drop table if exists {former.sql}")
    except psycopg.errors.DependentObjectsStillExist:
        session.run("rollback to savepoint penstock_former")
        logger.warning("the former place of a renamed table stays, because other objects depend on it place=%s", former)
        return
    control.release(session, former)


def _append_copy(session: Session, place: Target, before: Layout, target: CopyTarget) -> Layout:
    """Append a copy to a log of changes, which keeps what it has."""
    layout = follow(session, place, before, target.schema, keeps_dropped=True, records_ddl=True)
    append_copy_marker(session, place, layout, target.position)
    own = [name for name in OWN_COLUMNS[Mode.HISTORY] if name != "_schema_version"]
    into = ", ".join(map(quote_identifier, [*own, *layout.columns]))
    taken = ", ".join(map(quote_identifier, [*own, *target.layout.columns]))
    session.run(
        f"insert into {place.sql} ({into}, _schema_version) "
        f"select {taken}, {layout.version} from {target.generation.sql}"
    )
    session.run(f"drop table {target.generation.sql}")
    return layout


def _keep_deleted(session: Session, generation: Target, layout: Layout, before: Target, known: Layout) -> None:
    """Add the rows that the destination keeps to a new copy: those that were deleted, and those that are gone now.

    They have NULL in a column whose type no longer holds its values: there is no source row to convert them from.
    """
    shared = [attnum for attnum in layout.names if attnum in known.names and _converts(layout, known, attnum)]
    into = [quote_identifier(layout.names[attnum]) for attnum in shared]
    taken = [f"o.{quote_identifier(known.names[attnum])}::{layout.types[attnum]}" for attnum in shared]
    deleted_at = f"o.{DELETED_AT}"
    if layout.key:
        key = [column.attnum for column in layout.source.key]
        if any(attnum not in shared for attnum in key):
            logger.warning("deleted rows are not kept, because the key changed table=%s", layout.source)
            return
        own = [quote_identifier(layout.names[attnum]) for attnum in key]
        old = [f"o.{quote_identifier(known.names[attnum])}::{layout.types[attnum]}" for attnum in key]
        operators = equality(session, generation, layout)
        matched = zip(own, operators, old, strict=True)
        same = " and ".join(f"g.{one} {operator} {other}" for one, operator, other in matched)
        session.run(f"{BY_HASH}; analyze {generation.sql}")
        condition = f"not exists (select from {generation.sql} g where {same})"
        source = f"{before.sql} o"
    else:
        # As many of equal rows as the new copy lacks.
        whole = f"row({', '.join(taken)})::text"
        new = f"row({', '.join(f'g.{name}' for name in into)})::text"
        source = (
            f"(select o.*, row_number() over (partition by {whole}, {deleted_at} is null) as penstock_number, "
            f"(select count(*) from {generation.sql} g where {new} = {whole}) as penstock_count from {before.sql} o) o"
        )
        condition = f"{deleted_at} is not null or penstock_number > penstock_count"
    session.run(
        f"insert into {generation.sql} ({', '.join([*into, DELETED_AT])}) "
        f"select {', '.join([*taken, f'coalesce({deleted_at}, now())'])} from {source} where {condition}"
    )


def _converts(layout: Layout, known: Layout, attnum: int) -> bool:
    """Return True if the column of a new copy holds every value of the earlier one."""
    before, after = (next(c for c in each.source.columns if c.attnum == attnum) for each in (known, layout))
    return (
        known.types.get(attnum) == layout.types[attnum]
        or layout.types[attnum] == "text"
        or keeps_values((before.type, before.type_modifier), (after.type, after.type_modifier))
    )


def require_begun(known: Known | None, schema: TableSchema, attempt: str) -> Known:
    """Return the row of a table whose newest attempt this is; raise for any other."""
    if known is None or known.attempt != attempt or known.target is None:
        raise fenced_copy(str(schema), attempt)
    return known
