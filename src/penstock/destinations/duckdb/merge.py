"""The net effect of changes on a table: touched rows are deleted, and new ones inserted.

DuckDB stores columns: deleting and inserting rows costs a fraction of updating them in place, which writes whole
columns again. Values that the server omitted come from the row that is about to be deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import LIVE, KnownRows, NetChanges, compact, keys_of, touched_keys
from penstock.changes.segment import (
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Operation,
    Texts,
    field_names,
    join_texts,
)
from penstock.destinations.base import SourceRows
from penstock.destinations.duckdb.database import Session
from penstock.destinations.duckdb.layout import TEXTS_TYPE, may_not_fit, sorted_texts, with_texts
from penstock.destinations.omitted import fetched, names_of, not_sent
from penstock.destinations.refusals import unknown_row
from penstock.destinations.table_layout import DELETED_AT, Layout, Mode, Target
from penstock.schema import TableSchema, quote_identifier, quote_literal

_TIME = pa.timestamp("us", "UTC")
_NOTHING = KnownRows(np.zeros(0, np.int64), pa.table({}))
_ROWS, _KEYS, _FILLED = "penstock_rows", "penstock_keys", "penstock_filled"


def merge_rows(session: Session, target: Target, layout: Layout, step: Rows, source: SourceRows | None) -> Layout:
    """Apply changes of one schema to a table; return its layout, which may have become another one."""
    schema = step.schema
    changes = read_changes([step], schema)
    key = names_of(schema, schema.key)
    net = compact(changes, key, keep_deleted=layout.mode is Mode.SOFT_DELETE)
    if changes.texts or changes.old_texts:
        layout = with_texts(session, target, layout)
    merge = _Merge(session, target, layout, schema)
    if not key:
        if any((found >= net.table.num_rows).any() for found in net.origins.values()):
            raise not_sent(str(schema))
        merge.remove(changes, net)
        merge.insert(net)
        return layout
    lost = merge.keyed(changes, net, key)
    if len(lost):
        rows = net.without(np.setdiff1d(np.arange(len(net.images)), lost)).located(_NOTHING)
        rows = fetched(rows, schema, source, key)
        if rows.texts:
            layout = with_texts(session, target, layout)
        _Merge(session, target, layout, schema).insert(rows)
    return layout


class _Merge:
    """Writes net changes of one schema to a table."""

    def __init__(self, session: Session, target: Target, layout: Layout, schema: TableSchema) -> None:
        self._session = session
        self._table = session.name(target)
        self._layout = layout
        self._schema = schema
        self._is_soft = layout.mode is Mode.SOFT_DELETE
        self._names = [layout.names[column.attnum] for column in schema.columns]
        self._types = [layout.types[column.attnum] for column in schema.columns]
        self._extra = [*([DELETED_AT] if self._is_soft else []), *([UNREPRESENTABLE] if layout.has_texts else [])]

    def keyed(self, changes: ChangeColumns, net: NetChanges, key: Sequence[str]) -> NDArray[np.int64]:
        """Write the changes of a table with a key; return the new rows whose omitted values the table does not have."""
        omitted = {name: found >= net.table.num_rows for name, found in net.origins.items()}
        omitted = {name: flags for name, flags in omitted.items() if flags.any()}
        lost = np.zeros(0, np.int64)
        with self._session.staged(**{_KEYS: self._keys(changes, net, key)}):
            if omitted:
                lost = self._fill(net, omitted)
            self._session.run(f"delete from {self._table} t using {_KEYS} k where {self._same_key()}")
        if omitted:
            self._insert_from(_FILLED, " where is_known")
            self._session.run(f"drop table {_FILLED}")
        else:
            self.insert(net)
        return lost

    def insert(self, net: NetChanges) -> None:
        """Insert new rows, whose values are all known."""
        rows, texts = net.rows()
        if not rows.num_rows:
            return
        with self._session.staged(**{_ROWS: self._staged(rows, texts, net)}):
            self._insert_from(_ROWS)

    def _insert_from(self, stage: str, where: str = "") -> None:
        names = ", ".join(map(quote_identifier, [*self._names, *self._extra]))
        extra = [*(["d"] if self._is_soft else []), *(["u"] if self._layout.has_texts else [])]
        staged = ", ".join([*(f"c{number}" for number in range(len(self._names))), *extra])
        self._session.run(f"insert into {self._table} ({names}) select {staged} from {stage}{where}")

    def remove(self, changes: ChangeColumns, net: NetChanges) -> None:
        """Remove as many equal rows of a table without a key as the changes say."""
        if not len(net.touched):
            return
        assert net.limits is not None
        names = list(changes.rows.column_names)
        is_update = changes.operations[changes.old_at] == Operation.UPDATE
        removed = np.concatenate(
            [np.flatnonzero(changes.operations == Operation.DELETE), changes.count + np.flatnonzero(is_update)]
        )
        table, texts = _taken(net.table, net.texts, removed)
        first = pc.index_in(net.touched, value_set=keys_of(table, texts, names, whole=True))
        table, texts = _taken(table, texts, first.to_numpy())
        rows = self._staged(table, texts, None).append_column("wanted", pa.array(net.limits))
        same = [self._equal(name, f"s.c{at}", type_) for at, (name, type_) in enumerate(self._cells())]
        if self._layout.has_texts:
            same.append(f"{sorted_texts(f't.{UNREPRESENTABLE}')} = {sorted_texts('s.u')}")
        if self._is_soft:
            same.append(f"t.{DELETED_AT} is null")
        with self._session.staged(**{_ROWS: rows.append_column("n", pa.array(np.arange(rows.num_rows)))}):
            found = (
                "select t.rowid as place, row_number() over (partition by s.n) as number, s.wanted "
                f"from {self._table} t join {_ROWS} s on {' and '.join(same)}"
            )
            count = self._session.run(
                f"delete from {self._table} where rowid in (select place from ({found}) where number <= wanted)"
            )
        if count != int(net.limits.sum()):
            raise unknown_row(str(self._schema), "a changed or deleted row does not exist")

    def _fill(self, net: NetChanges, omitted: dict[str, NDArray[np.bool_]]) -> NDArray[np.int64]:
        """Create a table of the new rows with their omitted values; return the rows whose values are unknown."""
        count, fields = len(net.images), field_names(self._schema)
        known = net.select(np.arange(count))
        previous = np.full(count, -1, np.int64)
        for name, flags in omitted.items():
            previous = np.maximum(previous, np.where(flags, net.origins[name] - net.table.num_rows, -1))
        rows = self._staged(known.table, known.texts, net)
        rows = rows.append_column("n", pa.array(np.arange(count)))
        rows = rows.append_column("previous", pa.array(previous, mask=previous < 0))
        columns: list[str] = []
        kept: list[str] = []
        for number, (field, name) in enumerate(zip(fields, self._names, strict=True)):
            if field not in omitted:
                columns.append(f"s.c{number}")
                continue
            rows = rows.append_column(f"o{number}", pa.array(omitted[field]))
            columns.append(f"case when s.o{number} then t.{quote_identifier(name)} else s.c{number} end as c{number}")
            kept.append(f"case when s.o{number} then {quote_literal(name)} end")
        if self._is_soft:
            columns.append("s.d")
        if self._layout.has_texts:
            columns.append(_texts_of(kept))
        # A live row takes nothing from one that is deleted; a deleted row with unknown values never existed.
        live = f" and (t.{DELETED_AT} is null or s.d is not null)" if self._is_soft else ""
        with self._session.staged(**{_ROWS: rows}):
            self._session.run(
                f"create or replace temp table {_FILLED} as "
                f"select {', '.join(columns)}, s.n, s.previous is null or t.rowid is not null as is_known "
                f"from {_ROWS} s left join {_KEYS} k on k.number = s.previous "
                f"left join {self._table} t on {self._same_key()}{live}"
            )
        wanted = " and d is null" if self._is_soft else ""
        lost = self._session.rows(f"select n from {_FILLED} where not is_known{wanted}")
        return np.array([number for (number,) in lost], np.int64)

    def _keys(self, changes: ChangeColumns, net: NetChanges, key: Sequence[str]) -> pa.Table:
        """Return the touched keys, in the order of `net.touched`."""
        texts: Texts = {}
        if pa.types.is_integer(net.touched.type):
            cells = pa.table({key[0]: net.touched})
        else:
            _, cells, texts = touched_keys(changes, key)
        columns = {f"k{number}": cells.column(name) for number, name in enumerate(key)}
        if self._layout.has_texts:
            columns["u"] = self._maps(texts, cells.num_rows)
        return pa.table({**columns, "number": pa.array(np.arange(cells.num_rows))})

    def _same_key(self) -> str:
        same: list[str] = []
        for number, name in enumerate(self._layout.key):
            type_ = self._layout.types[self._layout.source.key[number].attnum]
            if self._layout.has_texts and may_not_fit(type_):
                text = quote_literal(name)
                same.append(f"t.{quote_identifier(name)} is not distinct from k.k{number}")
                same.append(f"coalesce(t.{UNREPRESENTABLE}[{text}], '') = coalesce(k.u[{text}], '')")
            else:
                same.append(f"t.{quote_identifier(name)} = k.k{number}")
        return " and ".join(same)

    def _equal(self, name: str, other: str, type_: str) -> str:
        """Return the condition for the same value: to DuckDB, 0 equals -0."""
        own = f"t.{quote_identifier(name)}"
        same = f"{own} is not distinct from {other}"
        is_float = type_.removesuffix("[]") in ("float", "double")
        return f"{same} and {own}::varchar is not distinct from {other}::varchar" if is_float else same

    def _cells(self) -> list[tuple[str, str]]:
        return list(zip(self._names, self._types, strict=True))

    def _staged(self, rows: pa.Table, texts: Texts, net: NetChanges | None) -> pa.Table:
        """Return rows with the names of staged columns."""
        columns: dict[str, pa.Array | pa.ChunkedArray] = {
            f"c{number}": rows.column(name) for number, name in enumerate(field_names(self._schema))
        }
        if self._is_soft and net is not None:
            assert net.gone_at is not None
            columns["d"] = pa.array(net.gone_at, pa.int64(), mask=net.gone_at == LIVE).cast(_TIME)
        if self._layout.has_texts:
            columns["u"] = self._maps(texts, rows.num_rows)
        return pa.table(columns)

    def _maps(self, texts: Texts, count: int) -> pa.Array:
        """Return texts as maps, by the names of the columns at the destination."""
        fields = dict(zip(field_names(self._schema), self._names, strict=True))
        maps = join_texts({fields[name]: text for name, text in texts.items()}, count)
        return pa.nulls(count, UNREPRESENTABLE_TYPE) if maps is None else maps


def _texts_of(omitted: Sequence[str]) -> str:
    """Return the expression for the texts of a row: its own, and those of omitted values."""
    names = f"[{', '.join(omitted)}]"
    own = f"coalesce(map_entries(s.u::{TEXTS_TYPE}), [])"
    old = f"coalesce(map_entries(t.{UNREPRESENTABLE}), [])"
    both = f"list_concat({own}, list_filter({old}, lambda e: list_contains({names}, e.key)))"
    return f"case when len({both}) > 0 then map_from_entries({both}) end as u"


def _taken(rows: pa.Table, texts: Texts, at: NDArray[np.int64]) -> tuple[pa.Table, Texts]:
    index = pa.array(at)
    return rows.take(index).combine_chunks(), {name: text.take(index) for name, text in texts.items()}
