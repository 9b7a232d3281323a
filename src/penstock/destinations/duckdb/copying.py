"""Copies: tasks write ranges into files of their own, and one transaction reads them all into a new table.

The files lie in a folder of the attempt, next to the database. Only files that the tasks of this copy have reported are
read, so neither a task that runs twice nor a late one of an earlier attempt adds a row.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.segment import (
    COMMIT_LSN,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNREPRESENTABLE,
    field_names,
    join_texts,
    split_texts,
)
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.duckdb.control import Control, create_schema
from penstock.destinations.duckdb.database import Database, Session
from penstock.destinations.duckdb.layout import definition, extend, sorted_texts, with_texts
from penstock.destinations.postgres.history import BEFORE_ALL, COPIED, COPIED_AGAIN
from penstock.destinations.refusals import unexpected
from penstock.destinations.row_groups import group_batches, worth_a_dictionary
from penstock.destinations.table_layout import DELETED_AT, Known, Layout, Mode, Target
from penstock.lsn import Lsn
from penstock.schema import TableSchema, quote_identifier, quote_literal

_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StagedRange:
    """The file of a range; `name` is empty if it has no rows."""

    name: str
    rows: int
    has_texts: bool


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where the ranges of a copy go."""

    database: Database
    control: Control
    schema: TableSchema
    attempt: str
    position: Lsn
    arrow_schema: pa.Schema
    layout: Layout
    folder: str
    epoch: int
    lineage: str


def write_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> StagedRange:
    """Write one range into a new file."""
    name = f"{part.index:06d}-{uuid.uuid4().hex}.parquet"
    path = Path(target.folder) / name
    count, has_texts = 0, False
    writer: pq.ParquetWriter | None = None
    try:
        for batches in group_batches(reader.read(part), _GROUP_BYTES):
            rows = _named(pa.Table.from_batches(batches, schema=target.arrow_schema), target)
            if not rows.num_rows:
                continue
            if writer is None:
                # Read once, and soon.
                used = cast("bool", worth_a_dictionary(rows))
                writer = pq.ParquetWriter(path, rows.schema, compression="lz4", use_dictionary=used)
            writer.write_table(rows)
            count += rows.num_rows
            has_texts = has_texts or rows.column(UNREPRESENTABLE).null_count < rows.num_rows
        if writer is not None:
            writer.close()
        return StagedRange(name if writer is not None else "", count, has_texts)
    except Exception as error:
        raise unexpected(str(target.schema), error) from None


def _named(rows: pa.Table, target: CopyTarget) -> pa.Table:
    """Return rows with columns `c0`, `c1` …, and texts by the names of the columns at the destination."""
    fields = dict(zip(field_names(target.schema), target.layout.columns, strict=True))
    if any(field != name for field, name in fields.items()):
        maps = join_texts({fields[name]: text for name, text in split_texts(rows).items()}, rows.num_rows)
        if maps is not None:
            rows = rows.set_column(rows.schema.get_field_index(UNREPRESENTABLE), UNREPRESENTABLE, maps)
    return rows.select([*fields, UNREPRESENTABLE]).rename_columns(
        [*(f"c{number}" for number in range(len(fields))), UNREPRESENTABLE]
    )


def finish_copy(target: CopyTarget, ranges: Sequence[StagedRange]) -> Known:
    """Put a complete copy in its place and record its position, in one transaction; in a task."""
    schema = target.schema
    try:
        with target.database.transaction() as session, target.database.translated(str(schema)):
            known = target.control.require(session, schema.table_id, str(schema), target.attempt, target.epoch)
            if known.is_copied:
                return known  # another run of this task has done it
            assert known.target is not None
            layout = replace(target.layout, has_texts=any(each.has_texts for each in ranges))
            layout = _put(session, target, known, layout, [each.name for each in ranges if each.name])
            before = known.readable
            if before is not None and before != known.target:
                others = [each.target for each in target.control.load(session).values()]
                if before not in others:
                    session.run(f"drop table if exists {session.name(before)}")
            known = replace(
                known,
                source=str(schema),
                former=None,
                copied=target.attempt,
                lineage=target.lineage,
                position=target.position,
                epoch=target.epoch,
                layout=layout,
            )
            target.control.save(session, [known])
        return known
    except Exception as error:
        raise unexpected(str(schema), error) from None


def _put(session: Session, target: CopyTarget, known: Known, layout: Layout, files: Sequence[str]) -> Layout:
    """Make the table of the copy; return its layout."""
    place, before, former = known.target, known.readable, known.layout
    assert place is not None
    create_schema(session, place.namespace)
    is_same = before is not None and former is not None and former.mode is layout.mode and session.exists(before)
    if is_same and before is not None and former is not None and layout.mode is Mode.HISTORY:
        if before != place:
            session.run(f"create table {session.name(place)} as select * from {session.name(before)}")
        has_texts = layout.has_texts
        layout = extend(session, place, former, target.schema, target.arrow_schema)
        layout = with_texts(session, place, layout) if has_texts else layout
        session.run(
            f"insert into {session.name(place)} ({OP}, {COMMIT_LSN}, {ORDINAL}, {SCHEMA_VERSION}) "
            f"values ('{COPIED_AGAIN}', {int(target.position)}, {BEFORE_ALL - 1}, {layout.version})"
        )
        _load(session, target, place, layout, files)
        return layout
    new = Target(place.namespace, f"penstock_copy_{target.schema.table_id}")
    session.run(f"drop table if exists {session.name(new)}")
    session.run(f"create table {session.name(new)} ({definition(layout)})")
    _load(session, target, new, layout, files)
    if is_same and before is not None and former is not None and layout.mode is Mode.SOFT_DELETE:
        if former.has_texts:
            layout = with_texts(session, new, layout)
        _keep_deleted(session, new, layout, before, former)
    session.run(f"drop table if exists {session.name(place)}")
    session.run(f"alter table {session.name(new)} rename to {quote_identifier(place.name)}")
    return layout


def _load(session: Session, target: CopyTarget, into: Target, layout: Layout, files: Sequence[str]) -> None:
    """Insert the rows of files."""
    if not files:
        return
    paths = ", ".join(quote_literal(str(Path(target.folder) / name)) for name in files)
    names, values = list(layout.columns), [f"c{number}" for number in range(len(layout.columns))]
    if layout.has_texts:
        names.append(UNREPRESENTABLE)
        values.append(UNREPRESENTABLE)
    if layout.mode is Mode.HISTORY:
        names = [OP, COMMIT_LSN, ORDINAL, SCHEMA_VERSION, *names]
        values = [f"'{COPIED}'", str(int(target.position)), str(BEFORE_ALL), str(layout.version), *values]
    listed = ", ".join(map(quote_identifier, names))
    session.run(f"insert into {session.name(into)} ({listed}) select {', '.join(values)} from read_parquet([{paths}])")


def _keep_deleted(session: Session, new: Target, layout: Layout, before: Target, known: Layout) -> None:
    """Add the rows that the destination keeps to a new copy: those that were deleted, and those that are gone now."""
    shared = [attnum for attnum in layout.names if attnum in known.names]
    key = [column.attnum for column in layout.source.key]
    if any(attnum not in known.names for attnum in key):
        return
    into = [quote_identifier(layout.names[attnum]) for attnum in shared]
    # A value that its new type cannot hold is not kept: its text would be under a name of before.
    taken = [f"try_cast(o.{quote_identifier(known.names[attnum])} as {layout.types[attnum]})" for attnum in shared]
    texts = ([UNREPRESENTABLE], [f"o.{UNREPRESENTABLE}"]) if known.has_texts else ([], [])
    name, old, gone = session.name(new), session.name(before), f"o.{DELETED_AT}"
    is_known = f", {sorted_texts(f'o.{UNREPRESENTABLE}')}" if known.has_texts else ""
    if key:
        pairs = [(layout.names[attnum], known.names[attnum], layout.types[attnum]) for attnum in key]
        same = [
            f"g.{quote_identifier(one)} is not distinct from try_cast(o.{quote_identifier(other)} as {type_})"
            for one, other, type_ in pairs
        ]
        if known.has_texts:
            same += [
                f"g.{UNREPRESENTABLE}[{quote_literal(one)}] is not distinct from "
                f"o.{UNREPRESENTABLE}[{quote_literal(other)}]"
                for one, other, _ in pairs
            ]
        source, where = f"{old} o", f"not exists (select 1 from {name} g where {' and '.join(same)})"
    else:
        # As many of equal rows as the new copy lacks.
        whole = f"row({', '.join(taken)}{is_known})::varchar"
        has = f", {sorted_texts(f'g.{UNREPRESENTABLE}')}" if known.has_texts else ""
        rows = f"select row({', '.join(f'g.{each}' for each in into)}{has})::varchar as penstock_row from {name} g"
        source = (
            f"(select o.*, {whole} as penstock_row, row_number() over (partition by {whole}, {gone} is null) as "
            f"penstock_number from {old} o) o left join (select penstock_row, count(*) as penstock_count "
            f"from ({rows}) group by penstock_row) g using (penstock_row)"
        )
        where = f"{gone} is not null or penstock_number > coalesce(penstock_count, 0)"
    session.run(
        f"insert into {name} ({', '.join([*into, *texts[0], DELETED_AT])}) "
        f"select {', '.join([*taken, *texts[1], f'coalesce({gone}, now())'])} from {source} where {where}"
    )


def clear_stage(folder: Path) -> None:
    """Remove files of copies; those that another task writes at this moment may stay until the next time."""
    shutil.rmtree(folder, ignore_errors=True)
