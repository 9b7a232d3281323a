"""What tasks do: they put the rows of a range on the stage, and write a table's part of a batch.

A batch is staged first: files, and for mirrors tables of the session with their rows. Then one transaction takes them
over and records the position. Nothing in it is DDL, which would commit what is there so far. A task may run twice: the
second transaction finds another position and is rolled back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows, TableStep
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact, keys_of
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    XID,
    Operation,
    Texts,
    field_names,
    names_not_sent,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.batch_events import read_segment
from penstock.destinations.omitted import not_sent
from penstock.destinations.postgres.encoding import cells_of
from penstock.destinations.postgres.history import BEFORE_ALL, COPIED, TRUNCATED, identities
from penstock.destinations.postgres.new_rows import NewRows, key_cells, take_keys
from penstock.destinations.refusals import other_writer, rejected, unexpected, unknown_row, unreadable
from penstock.destinations.row_groups import group_batches
from penstock.destinations.snowflake.connection import Connection, Session, failure, translated
from penstock.destinations.snowflake.control import Control, Record
from penstock.destinations.snowflake.layout import DELETED_AT, ID, ROW, Layout, Mode, store
from penstock.destinations.table_parts import divide
from penstock.errors import RESYNC, PenstockError
from penstock.lsn import Lsn, reaches
from penstock.observe.reports import may_end_here
from penstock.schema import TableSchema
from penstock.values.cells import large_text

FILE_BYTES = 64 << 20
"""Rows of a file on the stage, in memory."""
SLICE_ROWS, SLICE_BYTES = 500_000, 64 << 20
_OPERATIONS = pa.array([None, *(each.name.lower() for each in Operation)], pa.string())


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """What all ranges of a copy share."""

    connection: Connection
    folder: str
    layout: Layout
    position: Lsn


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows in a folder on the stage."""

    folder: str
    count: int


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table's part of a batch."""

    record: Record
    table: str
    layout: Layout
    """After the batch."""
    steps: tuple[TableStep, ...]
    end: Lsn

    @property
    def table_id(self) -> int:
        return self.record.table_id

    @property
    def row_count(self) -> int:
        return sum(segment.rows for step in self.steps if isinstance(step, Rows) for segment in step.segments)


@dataclass(frozen=True, slots=True)
class Work:
    """What one task writes."""

    connection: Connection
    control: Control
    epoch: int
    lineage: str
    tables: tuple[TableWork, ...]


def stage_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> Staged:
    """Put the rows of a range on the stage, in a folder of this run of the task."""
    layout, count = target.layout, 0
    folder = f"{target.folder}/{part.index}-{secrets.token_hex(6)}"
    table = str(layout.schema)
    try:
        with target.connection.session() as session:
            for number, batches in enumerate(group_batches(reader.read(part), FILE_BYTES)):
                may_end_here()
                rows = pa.Table.from_batches(batches).combine_chunks()
                if rows.num_rows:
                    session.put(folder, f"{number}.parquet", _copied(rows, target))
                    count += rows.num_rows
    except Exception as error:
        raise unexpected(table, failure(table, error)) from None
    return Staged(folder, count)


def write_work(work: Work) -> list[PenstockError | None]:
    """Write the changes of tables; return the error of each. One bad table does not fail the others."""
    outcomes: list[PenstockError | None] = []
    for table in work.tables:
        try:
            may_end_here()
            with translated(table.table), work.connection.session() as session:
                _write(session, work, table)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(unexpected(table.table, error))
    return outcomes


def _write(session: Session, work: Work, table: TableWork) -> None:
    assert table.record.generation is not None
    writer = _Writer(session, table, work.control.folder)
    keeps_all = table.layout.mode is not Mode.MIRROR
    takeovers = [
        writer.truncate(part) if isinstance(part, Truncation) else writer.stage(part)
        for part in divide(table.steps, keeps_all=keeps_all, rows=SLICE_ROWS, size=SLICE_BYTES)
        if isinstance(part, Rows | Truncation)
    ]
    try:
        with session.transaction(work.control.transaction) as transaction:
            for take_over in takeovers:
                may_end_here()
                take_over()
            is_current = work.control.move(
                session,
                table.record,
                work.epoch,
                transaction=transaction,
                lineage=work.lineage,
                position=table.end,
                layout=table.layout,
                generation=table.record.generation,
            )
            if not is_current:
                raise _Overtaken
    except _Overtaken:
        now = work.control.load(session, [table.table_id]).get(table.table_id)
        is_written = now is not None and now.attempt == table.record.attempt and now.position is not None
        if not (is_written and now is not None and now.position is not None and reaches(now.position, table.end)):
            raise other_writer(table.table) from None
    finally:
        writer.clear()
    session.remove(writer.folder)


class _Overtaken(Exception):
    """The control row is no longer the one that this task knows."""


class _Writer:
    """Stages the rows of a table, and returns what takes them over in the transaction."""

    def __init__(self, session: Session, work: TableWork, folder: str) -> None:
        assert work.record.generation is not None
        self._session = session
        self._work = work
        self._layout = work.layout
        self._target = session.to.name(work.record.generation)
        self._token = secrets.token_hex(6)
        self.folder = f"{folder}/batches/{self._token}"
        self._stages: list[str] = []
        self._folders = 0

    def clear(self) -> None:
        """Drop the tables of this session, if it is still there."""
        try:
            for stage in self._stages:
                self._session.run(f"drop table if exists {stage}")
        except Exception:
            # It ends with them.
            self._session.close()

    def truncate(self, step: Truncation) -> Callable[[], None]:
        """Return what removes all rows, or records that they are gone."""
        moment = f"to_timestamp_tz('{_moment(step.commit_time)}')"
        match self._layout.mode:
            case Mode.HISTORY:
                sql = (
                    f"insert into {self._target} ({OP}, {COMMIT_LSN}, {ORDINAL}, {COMMIT_TIME}, {XID}) select "
                    f"'{TRUNCATED}', {int(step.key.commit_lsn)}, {step.key.ordinal}, {moment}, {step.xid or 'null'}"
                )
            case Mode.SOFT_DELETE:
                sql = f"update {self._target} set {DELETED_AT} = {moment} where {DELETED_AT} is null"
            case Mode.MIRROR:
                # Not `truncate`, which commits.
                sql = f"delete from {self._target}"
        return lambda: _run(self._session, sql)

    def stage(self, step: Rows) -> Callable[[], None]:
        """Stage changes of one schema; return what takes them over."""
        if self._layout.mode is Mode.HISTORY:
            return self._append([_logged(read_segment(segment), step, self._layout) for segment in step.segments])
        try:
            changes = read_changes([step], step.schema)
        except PenstockError:
            raise
        except Exception as error:
            raise unreadable(self._work.table, self._work.table_id, error) from error
        fields = dict(zip((each.attnum for each in step.schema.columns), field_names(step.schema), strict=True))
        key = [fields[column.attnum] for column in step.schema.key]
        net = compact(changes, key, keep_deleted=self._layout.mode is Mode.SOFT_DELETE)
        rows = NewRows.of(net, step.schema)
        return self._merged(changes, net, rows, key) if key else self._counted(net, rows)

    def _append(self, tables: Sequence[pa.Table]) -> Callable[[], None]:
        folder, count = self._put(tables)
        return lambda: self._session.copy(self._target, folder, count) if count else None

    def _put(self, tables: Sequence[pa.Table]) -> tuple[str, int]:
        folder = f"{self.folder}/{self._folders}"
        self._folders += 1
        for number, rows in enumerate(tables):
            if rows.num_rows:
                self._session.put(folder, f"{number}.parquet", rows)
        return folder, sum(rows.num_rows for rows in tables)

    def _staged(self, rows: pa.Table, types: dict[str, str]) -> str:
        """Return a new table of this session that has these rows."""
        name = f"PENSTOCK_{self._token}_{len(self._stages)}".upper()
        columns = ", ".join(f"{column} {types[column]}" for column in rows.column_names)
        self._stages.append(name)
        self._session.run(f"create temporary table {name} ({columns})")
        folder, count = self._put([rows])
        if count:
            with self._session.transaction("penstock_stage"):
                self._session.copy(name, folder, count)
        return name

    def _merged(self, changes: ChangeColumns, net: NetChanges, rows: NewRows, key: Sequence[str]) -> Callable[[], None]:
        """Stage the net effect on a table with a key."""
        layout, schema = self._layout, rows.schema
        if rows.unknown.any():
            raise not_sent(self._work.table)
        gone = np.ones(len(net.touched), np.bool_)
        assert net.keys is not None
        gone[net.keys] = False
        removed = np.flatnonzero(gone) if layout.mode is Mode.MIRROR else np.zeros(0, np.int64)
        keys = key_cells(changes, net, schema, key)
        rows = rows.with_keys(take_keys(keys, schema, rows.own))
        count = rows.count + len(removed)
        found = layout.physical(schema, rows.cells)
        places = {column.attnum: number for number, column in enumerate(schema.columns)}
        stored = {each.attnum: each for each in (*layout.kept, *layout.stored)}
        key_names = [stored[column.attnum].column for column in schema.key]
        gone_keys = dict(zip(key_names, map(store, take_keys(keys, schema, removed)), strict=True))
        columns = {
            name: pa.concat_arrays(
                [array, gone_keys[name].cast(array.type) if name in gone_keys else pa.nulls(len(removed), array.type)]
            )
            for name, array in found.items()
        }
        _require_keys(layout, columns, key_names)
        types = dict(layout.columns) | {"_GONE": "BOOLEAN"}
        columns["_GONE"] = pa.array(np.arange(count) >= rows.count)
        if rows.deleted_at is not None:
            columns[DELETED_AT] = rows.deleted_at
        flags: dict[str, str] = {}
        moved: NDArray[np.bool_] = np.zeros(rows.count, np.bool_)
        if rows.omitted is not None:
            moved = np.asarray(rows.omitted.any(axis=1) & (rows.previous != rows.own), np.bool_)
            for attnum, number in places.items():
                if rows.omitted[:, number].any() and attnum in stored:
                    flag = f"_U{attnum}"
                    columns[flag] = pa.array(np.append(rows.omitted[:, number], np.zeros(len(removed), np.bool_)))
                    types[flag] = "BOOLEAN"
                    flags |= dict.fromkeys(stored[attnum].columns, flag)
        old_names = [f"_O{number}" for number in range(len(key_names))]
        if moved.any():
            origins = take_keys(keys, schema, np.append(np.where(moved, rows.previous, -1), np.full(len(removed), -1)))
            columns |= dict(zip(old_names, map(store, origins), strict=True))
            types |= {old: types[name] for old, name in zip(old_names, key_names, strict=True)}
        stage = self._staged(pa.table(columns), types)
        merge = _Merge(stage, self._target, key_names, list(found), flags, is_soft=rows.deleted_at is not None)

        def take_over() -> None:
            if moved.any():
                self._session.run(merge.fill(old_names))
            if flags and self._session.rows(merge.count_lost())[0][0]:
                raise not_sent(self._work.table)
            self._session.run(merge.merge())

        return take_over

    def _counted(self, net: NetChanges, rows: NewRows) -> Callable[[], None]:
        """Stage the net effect on a table without a key: whole rows that go, and rows that come."""
        if rows.omitted is not None or rows.count != len(net.images):
            raise not_sent(self._work.table)
        layout, schema = self._layout, rows.schema
        table, texts = net.rows()
        columns = layout.physical(schema, rows.cells) | _bag_columns(table, texts, schema, self._token, self._folders)
        if rows.deleted_at is not None:
            columns[DELETED_AT] = rows.deleted_at
        append = self._append([pa.table(columns)])
        if not len(net.touched):
            return append
        assert net.limits is not None
        removed = pa.table({ROW: net.touched.cast(pa.large_binary()), "_N": pa.array(net.limits, pa.int64())})
        stage = self._staged(removed, {ROW: "BINARY", "_N": "NUMBER(38,0)"})
        live = f" where {DELETED_AT} is null" if layout.mode is Mode.SOFT_DELETE else ""
        numbered = f"select {ID}, {ROW}, row_number() over (partition by {ROW} order by {ID}) as N from {self._target}"
        sql = (
            f"delete from {self._target} using (select T.{ID} as GONE from ({numbered}{live}) as T "
            f"join {stage} as S on T.{ROW} = S.{ROW} where T.N <= S._N) as D where {ID} = D.GONE"
        )
        expected = int(net.limits.sum())

        def take_over() -> None:
            if self._session.run(sql) != expected:
                raise unknown_row(str(schema), "a changed or deleted row does not exist")
            append()

        return take_over


@dataclass(frozen=True, slots=True)
class _Merge:
    """The statements that take a stage table over into a table with a key."""

    stage: str
    target: str
    key: Sequence[str]
    columns: Sequence[str]
    """The columns of the rows, in both tables."""
    flags: dict[str, str]
    """The stage's column that says whether the server omitted the value, by column."""
    is_soft: bool

    def fill(self, old: Sequence[str]) -> str:
        """Give staged rows whose key changed the omitted values of the rows that they were."""
        stage = self.stage
        sets = [f"{name} = iff({stage}.{flag}, T.{name}, {stage}.{name})" for name, flag in self.flags.items()]
        sets += [f"{flag} = false" for flag in dict.fromkeys(self.flags.values())]
        same = " and ".join(f"T.{name} = {stage}.{other}" for name, other in zip(self.key, old, strict=True))
        return f"update {self.stage} set {', '.join(sets)} from {self.target} as T where {same}"

    def count_lost(self) -> str:
        """Count live rows whose omitted values the table does not have."""
        live = f" and S.{DELETED_AT} is null" if self.is_soft else ""
        missing = f"not exists (select 1 from {self.target} as T where {self._same})"
        return f"select count(*) from {self.stage} as S where ({self._omits}){live} and {missing}"

    def merge(self) -> str:
        """Delete, update and insert."""
        extra = [DELETED_AT] if self.is_soft else []
        sets = [
            f"{name} = iff(S.{self.flags[name]}, T.{name}, S.{name})" if name in self.flags else f"{name} = S.{name}"
            for name in (*self.columns, *extra)
            if name not in self.key
        ]
        names = [*self.columns, *extra]
        update = f"when matched then update set {', '.join(sets)} " if sets else ""
        # A deleted row with omitted values, which the table does not have, never existed.
        known = f" and not ({self._omits})" if self.flags else ""
        return (
            f"merge into {self.target} T using {self.stage} S on {self._same} "
            f"when matched and S._GONE then delete {update}"
            f"when not matched and not S._GONE{known} then insert ({', '.join(names)}) "
            f"values ({', '.join(f'S.{name}' for name in names)})"
        )

    @property
    def _same(self) -> str:
        return " and ".join(f"T.{name} = S.{name}" for name in self.key)

    @property
    def _omits(self) -> str:
        return " or ".join(f"S.{flag}" for flag in dict.fromkeys(self.flags.values()))


def _copied(rows: pa.Table, target: CopyTarget) -> pa.Table:
    """Return copied rows as rows of a generation."""
    layout, count = target.layout, rows.num_rows
    texts = split_texts(rows)
    columns = layout.physical(layout.schema, cells_of(rows, texts, layout.schema))
    if layout.mode is Mode.HISTORY:
        columns |= {
            OP.upper(): pa.repeat(pa.scalar(COPIED), count),
            COMMIT_LSN.upper(): pa.repeat(pa.scalar(int(target.position), pa.int64()), count),
            ORDINAL.upper(): pa.repeat(pa.scalar(BEFORE_ALL, pa.int64()), count),
        }
    elif layout.is_bag:
        columns |= _bag_columns(rows, texts, layout.schema, secrets.token_hex(6), 0)
    else:
        _require_keys(layout, columns, layout.key)
    return pa.table(columns)


def _bag_columns(rows: pa.Table, texts: Texts, schema: TableSchema, token: str, part: int) -> dict[str, pa.Array]:
    """Return what tells rows without a key apart."""
    whole = keys_of(rows, texts, list(field_names(schema)), whole=True)
    numbers = pc.cast(pa.array(np.arange(rows.num_rows)), pa.large_string())
    ids = pc.binary_join_element_wise(large_text(f"{token}-{part}"), numbers, large_text("-"))
    return {ROW: whole.cast(pa.large_binary()), ID: ids}


def _logged(segment: pa.Table, step: Rows, layout: Layout) -> pa.Table:
    """Return changes as rows of a log."""
    segment = segment.combine_chunks()
    texts, schema = split_texts(segment), step.schema
    names = [column.name for column in schema.columns]
    unsent = names_not_sent(segment.column(UNCHANGED), [json.dumps(name) for name in names])
    listed = pc.binary_join_element_wise("[", pc.binary_join(unsent, ","), "]", "")
    return pa.table(
        {
            OP.upper(): _OPERATIONS.take(segment.column(OP).combine_chunks().cast(pa.int64())),
            **{name.upper(): segment.column(name) for name in (COMMIT_LSN, ORDINAL, COMMIT_TIME, XID)},
            UNCHANGED.upper(): listed,
            OLD.upper(): identities(segment, texts, schema, names),
            **layout.physical(schema, cells_of(segment, texts, schema)),
        }
    )


def _require_keys(layout: Layout, columns: dict[str, pa.Array], key: Sequence[str]) -> None:
    if any(columns[name].null_count for name in key):
        raise rejected(
            str(layout.schema),
            "a key has a value that its type cannot hold",
            hint=f'Set out_of_range = "text" for the columns of its key, then copy the table again: {RESYNC}.',
        )


def _moment(microseconds: int) -> str:
    text = pa.array([microseconds]).cast(pa.timestamp("us")).cast(pa.string())[0].as_py()
    return f"{text} +00:00"


def _run(session: Session, sql: str) -> None:
    session.run(sql)
