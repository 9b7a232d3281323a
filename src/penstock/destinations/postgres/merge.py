"""The net effect of changes on a table: rows that are gone are deleted, and new ones are inserted or updated.

Rows that only inserts touched are copied straight into the table. All others go to temporary tables, and from there by
key: rows with omitted values are updated in place, so that these values stay where they are. Rows of a table without a
key are found as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Operation, Texts, field_names, join_texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.destinations.postgres.encoding import Cells, cells_of, copy_text, printed
from penstock.destinations.postgres.layout import DELETED_AT, Layout, Mode, Target, equality
from penstock.destinations.postgres.new_rows import NewRows, key_cells, not_sent, take_keys
from penstock.destinations.postgres.server import Session
from penstock.destinations.refusals import unknown_row
from penstock.schema import TableSchema, quote_identifier

logger = logging.getLogger(__name__)

_STAGES = 40
"""Temporary tables that a connection keeps."""


def merge_rows(session: Session, target: Target, layout: Layout, step: Rows, source: SourceRows | None) -> None:
    """Apply changes of one schema to a table; `source` has values that neither they nor the table have."""
    schema = step.schema
    fields = dict(zip((column.attnum for column in schema.columns), field_names(schema), strict=True))
    key = [fields[column.attnum] for column in schema.key]
    changes = read_changes([step], schema)
    net = compact(changes, key, keep_deleted=layout.mode is Mode.SOFT_DELETE, mark_new=True)
    rows = NewRows.of(net, schema)
    if not key:
        if rows.omitted is not None:
            raise not_sent(str(schema))
        _remove_rows(session, target, layout, changes, net)
        _insert(session, target, layout, rows)
        return
    gone = np.ones(len(net.touched), np.bool_)
    gone[net.keys] = False
    keys = key_cells(changes, net, schema, key)
    rows = rows.with_keys(take_keys(keys, schema, rows.own))
    assert net.new is not None
    fresh = net.new[rows.own]
    if rows.omitted is not None:
        fresh &= ~rows.omitted.any(axis=1)
    known = np.flatnonzero(~fresh)
    if len(known) or gone.any():
        old = rows if len(known) == rows.count else rows.take(known)
        _merge(session, target, layout, old, keys, np.flatnonzero(gone), source)
    if fresh.any():
        new = rows if not len(known) else rows.take(np.flatnonzero(fresh))
        if not _inserted(session, target, layout, new):
            # The table has one of them: a row that a filter left out before, or that somebody else wrote.
            _merge(session, target, layout, new, keys, np.zeros(0, np.int64), source)


def _columns(layout: Layout, schema: TableSchema) -> list[str]:
    names = [layout.names[column.attnum] for column in schema.columns]
    return [*names, DELETED_AT] if layout.mode is Mode.SOFT_DELETE else names


def _with_times(rows: NewRows) -> list[Cells]:
    return rows.cells if rows.deleted_at is None else [*rows.cells, Cells(rows.deleted_at)]


def _insert(session: Session, target: Target, layout: Layout, rows: NewRows) -> None:
    if rows.count:
        session.copy(target.sql, _columns(layout, rows.schema), copy_text(_with_times(rows), rows.count))


def _inserted(session: Session, target: Target, layout: Layout, rows: NewRows) -> bool:
    """Copy new rows straight into a table with a key; False, with nothing changed, if it has one of them."""
    session.run("savepoint penstock_insert")
    try:
        _insert(session, target, layout, rows)
    except psycopg.errors.UniqueViolation:
        session.run("rollback to savepoint penstock_insert")
        return False
    session.run("release savepoint penstock_insert")
    return True


def _merge(
    session: Session,
    target: Target,
    layout: Layout,
    rows: NewRows,
    keys: tuple[pa.Table, Texts],
    gone: NDArray[np.int64],
    source: SourceRows | None,
) -> None:
    """Write rows of a table with a key by way of temporary tables."""
    stage = _stage(session, target, layout, rows.schema)
    merge = _Statements(target, layout, rows.schema, stage, equality(session, target, layout))
    # By index, whatever the server takes the size of a temporary table for: the cost grows with the changes alone.
    session.run("set local enable_hashjoin = off; set local enable_mergejoin = off")
    names = [*(f"c{number}" for number in range(len(rows.cells))), *(["d"] if rows.deleted_at is not None else [])]
    cells, omitted = _with_times(rows), rows.omitted
    moved = np.zeros(rows.count, np.bool_)
    if omitted is not None:
        some = np.asarray(omitted.any(axis=1), np.bool_)
        moved = some & (rows.previous != rows.own) & ~rows.unknown
        origins = take_keys(keys, rows.schema, np.where(moved, rows.previous, -1))
        bits = _bitmaps(np.packbits(omitted, axis=1, bitorder="little"), some)
        more = [*cells, Cells(bits), Cells(pa.array(np.arange(rows.count))), *origins]
        known = np.flatnonzero(~rows.unknown)
        cells = more if len(known) == rows.count else [each.take(pa.array(known)) for each in more]
        names = [*names, "omits", "n", *(f"o{number}" for number in range(len(rows.schema.key)))]
    session.copy(f"{stage}_rows", names, copy_text(cells, len(cells[0].array)))
    if omitted is not None and moved.any():
        session.run(merge.fill(omitted))
    if len(gone) and layout.mode is Mode.MIRROR:
        wanted = take_keys(keys, rows.schema, gone)
        session.copy(f"{stage}_keys", [f"k{number}" for number in range(len(wanted))], copy_text(wanted, len(gone)))
        session.run(merge.delete())
    if omitted is not None:
        session.run(merge.update_in_place(omitted))
        lost = [number for (number,) in session.rows(merge.lost())]
        missing = np.concatenate([np.flatnonzero(rows.unknown), np.array(lost, np.int64)])
        if len(missing):
            found, count = _fetched(rows, missing, source)
            own = [f"c{number}" for number in range(len(found))]
            session.copy(f"{stage}_rows", own, copy_text(found, count))
    if session.run(merge.update()) < rows.count:
        session.run(merge.insert())


def _fetched(rows: NewRows, missing: NDArray[np.int64], source: SourceRows | None) -> tuple[list[Cells], int]:
    """Return new rows whose omitted values the destination does not have, from the source.

    A row that has changed since then is left out; its next change brings it.
    """
    schema = rows.schema
    if source is None or rows.omitted is None:
        raise not_sent(str(schema))
    own = [each.take(pa.array(missing)) for each in rows.cells]
    numbers = {column.attnum: number for number, column in enumerate(schema.columns)}
    fields = field_names(schema)
    key = {fields[numbers[column.attnum]]: own[numbers[column.attnum]] for column in schema.key}
    texts = {name: cells.texts for name, cells in key.items() if cells.texts is not None}
    asked = pa.table({name: cells.array for name, cells in key.items()})
    maps = join_texts(texts, asked.num_rows)
    answers = source.fetch(schema, asked if maps is None else asked.append_column(UNREPRESENTABLE, maps))
    answers = answers.combine_chunks()
    answered = split_texts(answers)
    places = pc.index_in(keys_of(asked, texts, [*key]), value_set=keys_of(answers, answered, [*key]))
    found = [each.take(places) for each in cells_of(answers, answered, schema)]
    same = places.is_valid().to_numpy(zero_copy_only=False)
    for number, (mine, theirs) in enumerate(zip(own, found, strict=True)):
        one, other = printed(mine), printed(theirs)
        equal = pc.fill_null(pc.equal(one, other), False).to_numpy(zero_copy_only=False)
        both = pc.and_(one.is_null(), other.is_null()).to_numpy(zero_copy_only=False)
        same = same & (equal | both | rows.omitted[missing, number])
    kept = pa.array(np.flatnonzero(same))
    if len(kept) < len(missing):
        logger.info("rows left out until their next change table=%s rows=%d", schema, len(missing) - len(kept))
    return [each.take(kept) for each in found], len(kept)


class _Statements:
    """The statements that take temporary tables over into a table with a key."""

    def __init__(
        self, target: Target, layout: Layout, schema: TableSchema, stage: str, operators: Sequence[str]
    ) -> None:
        self._target = target.sql
        self._stage = stage
        self._names = [quote_identifier(layout.names[column.attnum]) for column in schema.columns]
        places = {column.attnum: number for number, column in enumerate(schema.columns)}
        self._key = [places[column.attnum] for column in schema.key]
        self._operators = operators
        self._is_soft = layout.mode is Mode.SOFT_DELETE

    def fill(self, omitted: NDArray[np.bool_]) -> str:
        """Give staged rows whose key changed the omitted values of the rows that they were."""
        sets = self._sets(omitted, staged=True)
        same = self._same("o{}")
        where = f"s.o0 is not null and s.omits is not null and {same}"
        return f"update {self._stage}_rows s set {sets}, omits = null from {self._target} t where {where}"

    def delete(self) -> str:
        """Delete the rows of keys that are gone."""
        return f"delete from {self._target} t using {self._stage}_keys s where {self._same('k{}')}"

    def update_in_place(self, omitted: NDArray[np.bool_]) -> str:
        """Update rows with omitted values, which stay where they are."""
        sets = self._sets(omitted, staged=False)
        where = f"s.omits is not null and s.o0 is null and {self._same_key()}"
        return f"update {self._target} t set {sets} from {self._stage}_rows s where {where}"

    def lost(self) -> str:
        """Find the live rows whose omitted values the table does not have."""
        live = " and s.d is null" if self._is_soft else ""
        return (
            f"select s.n from {self._stage}_rows s where s.omits is not null{live} and (s.o0 is not null "
            f"or not exists (select from {self._target} t where {self._same_key()}))"
        )

    def update(self) -> str:
        """Update the other rows, if the table has them; without a column besides the key, only count them."""
        sets = [f"{name} = s.c{number}" for number, name in enumerate(self._names) if number not in self._key]
        sets += [f"{DELETED_AT} = s.d"] if self._is_soft else []
        where = f"s.omits is null and {self._same_key()}"
        if not sets:
            return f"select from {self._target} t, {self._stage}_rows s where {where}"
        return f"update {self._target} t set {', '.join(sets)} from {self._stage}_rows s where {where}"

    def insert(self) -> str:
        """Insert the rows that the table does not have."""
        names = [*self._names, *([DELETED_AT] if self._is_soft else [])]
        staged = [*(f"c{number}" for number in range(len(self._names))), *(["d"] if self._is_soft else [])]
        return (
            f"insert into {self._target} ({', '.join(names)}) select {', '.join(staged)} from {self._stage}_rows s "
            f"where s.omits is null and not exists (select from {self._target} t where {self._same_key()})"
        )

    def _sets(self, omitted: NDArray[np.bool_], *, staged: bool) -> str:
        """Return assignments that keep omitted values, for staged rows or those of the table."""
        columns = np.asarray(omitted.any(axis=0), np.bool_)
        sets: list[str] = []
        for number, name in enumerate(self._names):
            if columns[number]:
                kept = f"case when get_bit(s.omits, {number}) = 1 then t.{name} else s.c{number} end"
                sets.append(f"{f'c{number}' if staged else name} = {kept}")
            elif not staged:
                sets.append(f"{name} = s.c{number}")
        return ", ".join([*sets, *([f"{DELETED_AT} = s.d"] if self._is_soft and not staged else [])])

    def _same(self, pattern: str) -> str:
        """Return the condition for rows of the table whose key is in staged columns; `{}` stands for their number."""
        pairs = zip(self._key, self._operators, strict=True)
        same = (f"t.{self._names[at]} {each} s.{pattern.format(number)}" for number, (at, each) in enumerate(pairs))
        return " and ".join(same)

    def _same_key(self) -> str:
        pairs = zip(self._key, self._operators, strict=True)
        return " and ".join(f"t.{self._names[at]} {operator} s.c{at}" for at, operator in pairs)


def _bitmaps(bits: NDArray[np.uint8], some: NDArray[np.bool_]) -> pa.Array:
    width = bits.shape[1]
    offsets = np.arange(len(bits) + 1, dtype=np.int64) * width
    validity = pa.array(some).buffers()[1]
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(bits))]
    return pa.Array.from_buffers(pa.large_binary(), len(bits), buffers)


def _stage(session: Session, target: Target, layout: Layout, schema: TableSchema) -> str:
    """Return the name of empty temporary tables for the rows of a table: add `_rows` or `_keys`."""
    stage = f"pg_temp.stage_{schema.table_id}"
    names = [quote_identifier(layout.names[column.attnum]) for column in schema.columns]
    key = [quote_identifier(layout.names[column.attnum]) for column in schema.key]
    wanted = (target.sql, layout.mode.value, *names, "", *key, *layout.types.values())
    if session.stages.get(stage) == wanted:
        session.run(f"truncate {stage}_rows, {stage}_keys")
        return stage
    if len(session.stages) >= _STAGES:
        for other in session.stages:
            session.run(f"drop table if exists {other}_rows, {other}_keys")
        session.stages.clear()
    session.run(f"drop table if exists {stage}_rows, {stage}_keys")
    columns = [f"{name} as c{number}" for number, name in enumerate(names)]
    columns += ["null::timestamptz as d"] if layout.mode is Mode.SOFT_DELETE else []
    columns += ["null::bytea as omits", "null::int8 as n", *(f"{name} as o{number}" for number, name in enumerate(key))]
    create = f"create temporary table {stage.partition('.')[2]}"
    session.run(f"{create}_rows as select {', '.join(columns)} from {target.sql} with no data")
    listed = ", ".join(f"{name} as k{number}" for number, name in enumerate(key))
    session.run(f"{create}_keys as select {listed} from {target.sql} with no data")
    session.stages[stage] = wanted
    return stage


def _remove_rows(session: Session, target: Target, layout: Layout, changes: ChangeColumns, net: NetChanges) -> None:
    """Remove as many equal rows of a table without a key as the changes say."""
    if not len(net.touched):
        return
    assert net.limits is not None
    schema, names = changes.schema, list(changes.rows.column_names)
    is_update = changes.operations[changes.old_at] == Operation.UPDATE
    removed = np.concatenate(
        [np.flatnonzero(changes.operations == Operation.DELETE), changes.count + np.flatnonzero(is_update)]
    )
    taken = pa.array(removed)
    table = net.table.take(taken).combine_chunks()
    texts = {name: column.take(taken) for name, column in net.texts.items()}
    first = pc.index_in(net.touched, value_set=keys_of(table, texts, names, whole=True))
    table = table.take(first)
    texts = {name: column.take(first) for name, column in texts.items()}
    stage = f"pg_temp.removed_{schema.table_id}"
    listed = [quote_identifier(layout.names[column.attnum]) for column in schema.columns]
    session.run(f"drop table if exists {stage}")
    columns = [*(f"{name} as c{number}" for number, name in enumerate(listed)), "0::int8 as wanted"]
    session.run(
        f"create temporary table {stage.partition('.')[2]} on commit drop as "
        f"select {', '.join(columns)} from {target.sql} with no data"
    )
    cells = [*cells_of(table, texts, schema), Cells(pa.array(net.limits))]
    staged = [f"c{number}" for number in range(len(listed))]
    session.copy(stage, [*staged, "wanted"], copy_text(cells, table.num_rows))
    # No index helps here, and a table with a key may have been merged in this transaction before.
    session.run("set local enable_hashjoin = on; set local enable_mergejoin = on")
    # As text: not every type has an operator for equality, and equal numbers may print differently.
    live = f" where {DELETED_AT} is null" if layout.mode is Mode.SOFT_DELETE else ""
    count = session.run(
        f"delete from {target.sql} where ctid in (select place from ("
        "select t.place, row_number() over (partition by t.whole) as number, s.wanted "
        f"from (select ctid as place, row({', '.join(listed)})::text as whole from {target.sql}{live}) t "
        f"join (select row({', '.join(staged)})::text as whole, wanted from {stage}) s using (whole)"
        ") n where number <= wanted)"
    )
    if count != int(net.limits.sum()):
        raise unknown_row(str(schema), "a changed or deleted row does not exist")
