"""What tasks do with changes: they write a table's part of a batch and its position in one transaction.

A task may run twice: it locks the row of the table in `destination_tables` first, and does nothing if the position has
moved. Steps are applied in their order: rows by their net effect (`merge`), or in mode `history` as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from penstock.changes.batch import Rows, SchemaChange
from penstock.changes.steps import Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.postgres.control import Control
from penstock.destinations.postgres.history import append_rows, append_truncate
from penstock.destinations.postgres.layout import DELETED_AT, Layout, Mode, Target, follow
from penstock.destinations.postgres.merge import merge_rows
from penstock.destinations.postgres.server import Server, Session
from penstock.destinations.refusals import concerns_all_tables, not_copied, other_writer, unexpected
from penstock.destinations.table_parts import TableWork, divide
from penstock.errors import DestinationUnavailable, PenstockError, TableBusy
from penstock.lsn import reaches
from penstock.observe.reports import may_end_here
from penstock.source.faults import Place

SLICE_ROWS = 500_000
SLICE_BYTES = 64 << 20
"""The most that a task reads at once, in rows and in bytes of memory; more if one segment has more."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one task writes."""

    server: Server
    control: Control
    epoch: int
    lineage: str
    records_ddl: bool
    tables: tuple[TableWork, ...]
    together: bool
    """All tables in one transaction."""
    source: SourceRows | None = None


def apply_work(work: Work) -> list[PenstockError | None]:
    """Write the changes of tables; return the error of each. One bad table does not fail the others."""
    return _apply_together(work) if work.together else _apply_each(work)


def _apply_each(work: Work) -> list[PenstockError | None]:
    outcomes: list[PenstockError | None] = []
    for table in work.tables:
        if outcomes and (last := outcomes[-1]) is not None and concerns_all_tables(last):
            outcomes.append(last)
            continue
        try:
            may_end_here()
            with work.server.transaction(table.table) as session:
                _apply(session, work, table)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(unexpected(table.table, error))
    return outcomes


def _apply_together(work: Work) -> list[PenstockError | None]:
    """Write all tables in one transaction. A table that fails is left out, and fails alone."""
    errors: dict[int, PenstockError] = {}
    try:
        with work.server.session() as session:
            while not _committed(session, work, errors):
                pass
    except Exception as error:
        failed = unexpected(work.server.location, error)
        errors = {table.table_id: errors.get(table.table_id, failed) for table in work.tables}
    return [errors.get(table.table_id) for table in work.tables]


def _committed(session: Session, work: Work, errors: dict[int, PenstockError]) -> bool:
    """Try to write and commit the tables without an error; False if one of them prevented the commit."""
    targets: dict[Target, TableWork] = {}
    for table in work.tables:
        if table.table_id in errors:
            continue
        may_end_here()
        session.run("savepoint penstock_table")
        try:
            with work.server.translated(session.connection, table.table):
                target = _apply(session, work, table)
        except Exception as error:
            failed = unexpected(table.table, error)
            if isinstance(failed, TableBusy):
                # Without this table, others might violate foreign keys to it, and stop for good.
                raise DestinationUnavailable(f"{failed.message}; all tables of the batch wait") from None
            errors[table.table_id] = failed
            if concerns_all_tables(failed):
                raise
            session.run("rollback to savepoint penstock_table")
            session.stages.clear()
            continue
        targets[target] = table
        session.run("release savepoint penstock_table")
    try:
        session.connection.commit()
    except psycopg.IntegrityError as error:
        # A constraint that was deferred; the transaction is rolled back.
        failed = targets.get(Target(error.diag.schema_name or "", error.diag.table_name or ""))
        if failed is None:
            raise
        errors[failed.table_id] = work.server.error(error, Place.of(session.connection), failed.table)
        session.stages.clear()
        return False
    return True


def _apply(session: Session, work: Work, table: TableWork) -> Target:
    """Apply a table's part in the session's transaction; return the table at the destination."""
    known = work.control.lock(session, table.table_id, table.table, table.attempt, work.epoch)
    target, before = known.target, known.layout
    if target is None or before is None or known.position is None or not known.is_copied:
        raise not_copied(table.table)
    if known.position != table.position:
        if reaches(known.position, table.end):
            return target  # another run of this task has written it
        raise other_writer(table.table)
    layout = before
    for part in divide(table.steps, keeps_all=before.mode is not Mode.MIRROR, rows=SLICE_ROWS, size=SLICE_BYTES):
        may_end_here()
        match part:
            case SchemaChange():
                layout = follow(
                    session,
                    target,
                    layout,
                    part.new,
                    keeps_dropped=table.keeps_dropped,
                    records_ddl=work.records_ddl,
                )
            case Truncation():
                _truncate(session, target, layout, part)
            case Rows() if layout.mode is Mode.HISTORY:
                append_rows(session, target, layout, part)
            case Rows():
                merge_rows(session, target, layout, part, work.source)
    work.control.move(
        session,
        table.table_id,
        position=table.end,
        lineage=work.lineage,
        epoch=work.epoch,
        layout=None if layout == before else layout,
    )
    return target


def _truncate(session: Session, target: Target, layout: Layout, step: Truncation) -> None:
    match layout.mode:
        case Mode.HISTORY:
            append_truncate(session, target, layout, step)
        case Mode.SOFT_DELETE:
            moment = f"timestamptz 'epoch' + interval '{step.commit_time} microseconds'"
            session.run(f"update {target.sql} set {DELETED_AT} = {moment} where {DELETED_AT} is null")
        case Mode.MIRROR:
            referenced = "select 1 from pg_catalog.pg_constraint where contype = 'f' and confrelid = %s::regclass"
            # The server refuses to truncate a table that another one refers to.
            is_referenced = session.rows(referenced, [target.sql])
            session.run(f"delete from {target.sql}" if is_referenced else f"truncate {target.sql}")
