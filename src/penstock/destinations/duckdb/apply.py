"""What the task of a batch does: all tables, and their positions, in one transaction.

So readers see whole transactions of the source. A table that fails is left out, and the others are written again. The
task may run twice: a table whose position has moved is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.changes.batch import Rows, SchemaChange
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    field_names,
    join_texts,
    names_not_sent,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.batch_events import read_segment
from penstock.destinations.duckdb.control import Control
from penstock.destinations.duckdb.database import Database, Session
from penstock.destinations.duckdb.layout import follow, with_texts
from penstock.destinations.duckdb.merge import merge_rows
from penstock.destinations.postgres.history import OPERATIONS, TRUNCATED, identities
from penstock.destinations.refusals import busy, concerns_all_tables, not_copied, unexpected
from penstock.destinations.table_layout import DELETED_AT, Known, Layout, Mode, Target
from penstock.destinations.table_parts import TableWork, arrow_after, divide
from penstock.errors import PenstockError
from penstock.lsn import reaches
from penstock.observe.reports import may_end_here
from penstock.schema import quote_identifier

SLICE_ROWS = 500_000
SLICE_BYTES = 64 << 20
"""The most that a task reads at once, in rows and in bytes of memory; more if one segment has more."""
_ROWS = "penstock_rows"


@dataclass(frozen=True, slots=True)
class Work:
    """A batch."""

    database: Database
    control: Control
    epoch: int
    lineage: str
    records_ddl: bool
    tables: tuple[TableWork, ...]
    source: SourceRows | None = None


def apply_work(work: Work) -> list[Known | PenstockError]:
    """Write a batch; return the new record of each table, or its error."""
    outcomes: dict[int, Known | PenstockError] = {}
    try:
        with work.database.session() as session:
            while not _committed(session, work, outcomes):
                pass
    except Exception as error:
        failed = unexpected(work.database.location, error)
        return [failed for _ in work.tables]
    return [outcomes[table.table_id] for table in work.tables]


def _committed(session: Session, work: Work, outcomes: dict[int, Known | PenstockError]) -> bool:
    """Write and commit the tables that have not failed; False if one of them fails now."""
    session.run("begin")
    for table in work.tables:
        if isinstance(outcomes.get(table.table_id), PenstockError):
            continue
        may_end_here()
        try:
            with work.database.translated(table.table):
                outcomes[table.table_id] = _apply(session, work, table)
        except Exception as error:
            failed = outcomes[table.table_id] = unexpected(table.table, error)
            if concerns_all_tables(failed):
                raise failed from None
            session.run("rollback")
            return False
    session.run("commit")
    return True


def _apply(session: Session, work: Work, table: TableWork) -> Known:
    known = work.control.require(session, table.table_id, table.table, table.attempt, work.epoch)
    target, layout = known.target, known.layout
    if target is None or layout is None or known.position is None or not known.is_copied:
        raise not_copied(table.table)
    if known.position != table.position:
        if reaches(known.position, table.end):
            return known  # another run of this task has written it
        # A task of an earlier process was faster: the position is read again.
        raise busy(table.table)
    for part in divide(table.steps, keeps_all=layout.mode is not Mode.MIRROR, rows=SLICE_ROWS, size=SLICE_BYTES):
        may_end_here()
        match part:
            case SchemaChange():
                layout = follow(
                    *(session, target, layout, part.new, arrow_after(table.steps, part)),
                    keeps_dropped=table.keeps_dropped,
                    records_ddl=work.records_ddl,
                    is_lake=work.database.is_lake,
                )
            case Truncation():
                _truncate(session, target, layout, part)
            case Rows() if layout.mode is Mode.HISTORY:
                layout = _append(session, target, layout, part)
            case Rows():
                layout = merge_rows(session, target, layout, part, work.source)
    known = replace(
        known,
        position=table.end,
        lineage=work.lineage,
        epoch=work.epoch,
        layout=layout,
        source=str(layout.source),
    )
    work.control.save(session, [known])
    return known


def _truncate(session: Session, target: Target, layout: Layout, step: Truncation) -> None:
    name = session.name(target)
    moment = f"make_timestamptz({step.commit_time})"
    match layout.mode:
        case Mode.HISTORY:
            session.run(
                f"insert into {name} ({OP}, {COMMIT_LSN}, {ORDINAL}, {COMMIT_TIME}, {XID}, {SCHEMA_VERSION}) values "
                f"('{TRUNCATED}', {int(step.key.commit_lsn)}, {step.key.ordinal}, {moment}, {step.xid}, "
                f"{layout.version})"
            )
        case Mode.SOFT_DELETE:
            session.run(f"update {name} set {DELETED_AT} = {moment} where {DELETED_AT} is null")
        case Mode.MIRROR:
            session.run(f"delete from {name}")


def _append(session: Session, target: Target, layout: Layout, step: Rows) -> Layout:
    """Append changes to a log of them."""
    schema = step.schema
    names = [layout.names[column.attnum] for column in schema.columns]
    fields = dict(zip(field_names(schema), names, strict=True))
    for segment in step.segments:
        rows = read_segment(segment)
        texts = split_texts(rows)
        columns: dict[str, pa.Array | pa.ChunkedArray] = {
            OP: OPERATIONS.take(rows.column(OP).combine_chunks().cast(pa.int64())),
            COMMIT_LSN: rows.column(COMMIT_LSN),
            ORDINAL: rows.column(ORDINAL),
            COMMIT_TIME: rows.column(COMMIT_TIME),
            XID: rows.column(XID),
            SCHEMA_VERSION: pa.repeat(pa.scalar(layout.version), rows.num_rows),
            UNCHANGED: names_not_sent(rows.column(UNCHANGED), names),
            OLD: identities(rows, texts, schema, names),
        }
        columns |= {name: rows.column(field) for field, name in fields.items()}
        maps = join_texts({fields[name]: text for name, text in texts.items() if name in fields}, rows.num_rows)
        if maps is not None:
            layout = with_texts(session, target, layout)
            columns[UNREPRESENTABLE] = maps
        # By number: names of columns may differ from those of Penstock only by case.
        staged = pa.table(list(columns.values()), names=[f"c{number}" for number in range(len(columns))])
        with session.staged(**{_ROWS: staged}):
            listed = ", ".join(map(quote_identifier, columns))
            session.run(
                f"insert into {session.name(target)} ({listed}) select {', '.join(staged.column_names)} from {_ROWS}"
            )
    return layout
