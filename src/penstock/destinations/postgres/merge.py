"""The net effect of changes on a table: rows that are gone are deleted, and new ones are inserted or updated.

Rows that only inserts touched are copied straight into the table. All others go to temporary tables, and from there by
key: rows with omitted values are updated in place, so that these values stay where they are. Rows of a table without a
key are found as a whole.
"""

from __future__ import annotations

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact, keys_of
from penstock.changes.segment import Operation, Texts, field_names
from penstock.destinations.base import SourceRows
from penstock.destinations.omitted import fetch_rows, log_left_out, not_sent
from penstock.destinations.postgres.encoding import Cells, cells_of, copy_text, printed
from penstock.destinations.postgres.layout import DELETED_AT, Layout, Mode, Target, equality
from penstock.destinations.postgres.new_rows import NewRows, key_cells, take_keys
from penstock.destinations.postgres.server import BY_HASH, BY_INDEX, Session
from penstock.destinations.postgres.stages import Statements, has_exact_key, stage_tables
from penstock.destinations.refusals import unknown_row
from penstock.schema import TableSchema, quote_identifier


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
    schema = rows.schema
    stage = stage_tables(session, target, layout, schema)
    merge = Statements(target, layout, schema, stage, equality(session, target, layout))
    names = [*(f"c{number}" for number in range(len(rows.cells))), *(["d"] if rows.deleted_at is not None else [])]
    cells, omitted = _with_times(rows), rows.omitted
    moved = np.zeros(rows.count, np.bool_)
    deletes = len(gone) > 0 and layout.mode is Mode.MIRROR
    if omitted is not None:
        some = np.asarray(omitted.any(axis=1), np.bool_)
        moved = some & ~rows.unknown
        if has_exact_key(schema) or not deletes:
            moved &= rows.previous != rows.own
        # Otherwise the key of a row that stays may equal one that is gone, and its values go with that.
        origins = take_keys(keys, schema, np.where(moved, rows.previous, -1))
        bits = _bitmaps(np.packbits(omitted, axis=1, bitorder="little"), some)
        more = [*cells, Cells(bits), Cells(pa.array(np.arange(rows.count))), *origins]
        known = np.flatnonzero(~rows.unknown)
        cells = more if len(known) == rows.count else [each.take(pa.array(known)) for each in more]
        names = [*names, "omits", "n", *(f"o{number}" for number in range(len(schema.key)))]
    session.copy(f"{stage}_rows", names, copy_text(cells, len(cells[0].array)))
    if layout.mode is Mode.SOFT_DELETE and not has_exact_key(schema):
        session.run(merge.forget_renamed())
    if omitted is not None and moved.any():
        session.run(merge.fill(omitted, moved=True))
    if deletes:
        wanted = take_keys(keys, schema, gone)
        session.copy(f"{stage}_keys", [f"k{number}" for number in range(len(wanted))], copy_text(wanted, len(gone)))
    session.run(f"savepoint penstock_merge; {merge.delete()}" if deletes else "savepoint penstock_merge")
    try:
        if omitted is not None:
            session.run(merge.update_in_place(omitted))
            _fetch_lost(session, merge, stage, rows, source)
        if session.run(merge.update()) < rows.count:
            session.run(merge.insert())
    except psycopg.errors.UniqueViolation:
        # Rows may exchange values of a unique index; between two statements none of them may have both.
        session.run("rollback to savepoint penstock_merge")
        if omitted is not None:
            session.run(merge.fill(omitted, moved=False))
            _fetch_lost(session, merge, stage, rows, source)
        if deletes:
            session.run(merge.delete())
        session.run(merge.delete_staged())
        session.run(merge.insert())


def _fetch_lost(session: Session, merge: Statements, stage: str, rows: NewRows, source: SourceRows | None) -> None:
    """Stage the rows whose omitted values neither the changes nor the table have."""
    lost = [number for (number,) in session.rows(merge.lost())]
    missing = np.concatenate([np.flatnonzero(rows.unknown), np.array(lost, np.int64)])
    if len(missing):
        found, count = _fetched(rows, missing, source)
        own = [f"c{number}" for number in range(len(found))]
        session.copy(f"{stage}_rows", own, copy_text(found, count))


def _fetched(rows: NewRows, missing: NDArray[np.int64], source: SourceRows | None) -> tuple[list[Cells], int]:
    """Return new rows whose omitted values the destination does not have, from the source.

    A row that has changed since then is left out; its next change brings it.
    """
    schema = rows.schema
    assert rows.omitted is not None
    own = [each.take(pa.array(missing)) for each in rows.cells]
    numbers = {column.attnum: number for number, column in enumerate(schema.columns)}
    fields = field_names(schema)
    key = {fields[numbers[column.attnum]]: own[numbers[column.attnum]] for column in schema.key}
    texts = {name: cells.texts for name, cells in key.items() if cells.texts is not None}
    asked = pa.table({name: cells.array for name, cells in key.items()})
    answers, answered = fetch_rows(source, schema, asked, texts)
    places = pc.index_in(keys_of(asked, texts, [*key]), value_set=keys_of(answers, answered, [*key]))
    found = [each.take(places) for each in cells_of(answers, answered, schema)]
    same = places.is_valid().to_numpy(zero_copy_only=False)
    for number, (mine, theirs) in enumerate(zip(own, found, strict=True)):
        one, other = printed(mine), printed(theirs)
        equal = pc.fill_null(pc.equal(one, other), False).to_numpy(zero_copy_only=False)
        both = pc.and_(one.is_null(), other.is_null()).to_numpy(zero_copy_only=False)
        same = same & (equal | both | rows.omitted[missing, number])
    kept = pa.array(np.flatnonzero(same))
    log_left_out(schema, len(missing) - len(kept))
    return [each.take(kept) for each in found], len(kept)


def _bitmaps(bits: NDArray[np.uint8], some: NDArray[np.bool_]) -> pa.Array:
    width = bits.shape[1]
    offsets = np.arange(len(bits) + 1, dtype=np.int64) * width
    validity = pa.array(some).buffers()[1]
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(bits))]
    return pa.Array.from_buffers(pa.large_binary(), len(bits), buffers)


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
    # No index helps here.
    session.run(BY_HASH)
    # As text: not every type has an operator for equality, and equal numbers may print differently.
    live = f" where {DELETED_AT} is null" if layout.mode is Mode.SOFT_DELETE else ""
    count = session.run(
        f"delete from {target.sql} where ctid in (select place from ("
        "select t.place, row_number() over (partition by t.whole) as number, s.wanted "
        f"from (select ctid as place, row({', '.join(listed)})::text as whole from {target.sql}{live}) t "
        f"join (select row({', '.join(staged)})::text as whole, wanted from {stage}) s using (whole)"
        ") n where number <= wanted)"
    )
    session.run(BY_INDEX)
    if count != int(net.limits.sum()):
        raise unknown_row(str(schema), "a changed or deleted row does not exist")
