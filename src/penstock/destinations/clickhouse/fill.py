"""Omitted values: taken from the rows that they were in before the changes, or from the source; never NULL.

A row of the table counts only if its version is older than the changes: if they were written before, in a batch whose
outcome nobody knows, the table has newer rows under the same keys. The source's row counts only if it equals the change
in every value that was sent; otherwise a later change of that row is on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.columns import ChangeColumns
from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Texts, field_names
from penstock.destinations.base import SourceRows
from penstock.destinations.clickhouse.encoding import decode, encode, literals, one_array, order_keys, selected
from penstock.destinations.clickhouse.layout import NULL_ARRAYS, VERSION, Layout, StoredColumn
from penstock.destinations.clickhouse.server import Server
from penstock.destinations.omitted import complete_rows, fetch_rows
from penstock.schema import Column, TableSchema

logger = logging.getLogger(__name__)

FILL_BYTES = 32 << 20
"""The most bytes of old rows in memory; more if one row has more, or if rows changed their keys."""
_ASKED_KEYS = 1_000
"""Keys in one query."""

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowsBefore:
    """The rows of a table that changes touch, as they were before."""

    server: Server
    generation: str
    layout: Layout
    first: tuple[int, int]
    """The order key of the first change."""
    floor: int
    changes: ChangeColumns
    touched: pa.Array
    """The keys, as in `NetChanges`."""
    keys: tuple[pa.Table, Texts]
    """Their cells."""

    def versions(self, codes: _Numbers, columns: Sequence[str]) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return for each touched key the order key of its row now, and the bytes of some columns of it.

        Only of the keys with these numbers; -1 if the table has no row.
        """
        stored = [each.stored for each in self._stored(columns)]
        commits, ordinals, sizes = (np.full(len(self.touched), -1, np.int64) for _ in range(3))
        size = f"toInt64(byteSize({', '.join(stored)}))" if stored else "toInt64(0)"
        for found, rows in self._read(codes, [], f"{size} as _size"):
            commits[found], ordinals[found] = order_keys(one_array(rows.column(VERSION)))
            sizes[found] = rows.column("_size").to_numpy()
        return commits, ordinals, sizes

    def read(self, codes: _Numbers, columns: Sequence[str]) -> KnownRows:
        """Return the rows of some keys, as far as they are older than the changes."""
        numbers: list[_Numbers] = []
        tables: list[pa.Table] = []
        texts: list[dict[str, pa.Array]] = []
        for found, rows in self._read(codes, self._stored(columns), ""):
            commits, ordinals = order_keys(one_array(rows.column(VERSION)))
            keep = pa.array(self.is_before(commits, ordinals))
            values, kept = decode(rows.filter(keep), self.changes.schema, self.layout)
            numbers.append(found[keep.to_numpy(zero_copy_only=False)])
            tables.append(self._cast(values.select(list(columns))))
            texts.append(kept)
        if not tables:
            return KnownRows(np.zeros(0, np.int64), pa.table({}))
        names = {name for each in texts for name in each}
        joined = {
            name: pa.concat_arrays(
                [
                    pc.cast(each[name], pa.string()) if name in each else pa.nulls(len(table), pa.string())
                    for each, table in zip(texts, tables, strict=True)
                ]
            )
            for name in names
        }
        return KnownRows(np.concatenate(numbers), pa.concat_tables(tables).combine_chunks(), joined)

    def is_before(self, commits: _Numbers, ordinals: _Numbers) -> NDArray[np.bool_]:
        """Return for order keys of rows whether the rows exist and are older than the changes."""
        older = (commits < self.first[0]) | ((commits == self.first[0]) & (ordinals < self.first[1]))
        floor = divmod(self.floor, 1 << 64)
        is_left = (commits > floor[0]) | ((commits == floor[0]) & (ordinals + 1 > floor[1]))
        return older & is_left & (commits >= 0)

    def _stored(self, columns: Sequence[str]) -> list[StoredColumn]:
        pairs = zip(field_names(self.changes.schema), self.changes.schema.columns, strict=True)
        found = (self.layout.of(column.attnum) for name, column in pairs if name in columns)
        return [each for each in found if each is not None]

    def _read(
        self, codes: _Numbers, columns: Sequence[StoredColumn], extra: str
    ) -> Iterator[tuple[_Numbers, pa.Table]]:
        """Yield rows with the numbers of their keys."""
        schema, layout = self.changes.schema, self.layout
        cells, texts = self.keys
        key = layout.key
        taken = pa.array(codes)
        asked = encode(cells.take(taken), {name: text.take(taken) for name, text in texts.items()}, schema, layout)
        tuples = literals([asked[each.stored] for each in key])
        if tuples is None:
            return
        wanted = list(dict.fromkeys([*key, *columns]))
        more = [*([UNREPRESENTABLE] if layout.has_texts else []), *([NULL_ARRAYS] if layout.has_lists else [])]
        shown = ", ".join([*(selected(each) for each in wanted), *more, VERSION, *([extra] if extra else [])])
        names = ", ".join(f"t.{each.stored}" for each in key)
        for start in range(0, len(tuples), _ASKED_KEYS):
            listed = ", ".join(tuples.slice(start, _ASKED_KEYS).to_pylist())
            rows = self.server.read(
                f"select {shown} from {self.server.name(self.generation)} as t final where ({names}) in ({listed})",
                str(schema),
            )
            if not rows.num_rows:
                continue
            found, kept = decode(rows, schema, layout)
            own = self._cast(found.select(names_of(schema, schema.key)))
            places = pc.index_in(keys_of(own, kept, own.column_names), value_set=self.touched)
            # Keys that only a text tells apart are found together.
            is_asked = places.is_valid()
            yield places.filter(is_asked).to_numpy().astype(np.int64), rows.filter(is_asked)

    def _cast(self, rows: pa.Table) -> pa.Table:
        """Return columns with the types that they have in the changes."""
        return rows.cast(
            pa.schema([self.changes.rows.schema.field(name) for name in rows.column_names])
        ).combine_chunks()


def fill(
    net: NetChanges,
    before: RowsBefore,
    order: tuple[_Numbers, _Numbers],
    source: SourceRows | None,
    key: Sequence[str],
) -> Iterator[NetChanges]:
    """Yield the net changes with all values known, in parts with `FILL_BYTES` of old rows each.

    `order` are the order keys of the changes. Raise `ValuesNotSent` if a value cannot be found.
    """
    assert net.keys is not None
    count = net.table.num_rows
    previous = np.max([np.where(found < net.unknown, found, 0) - count for found in net.origins.values()], axis=0)
    needs = np.logical_or.reduce([found >= count for found in net.origins.values()])
    wanted, columns = net.wanted()
    commits, ordinals, sizes = before.versions(np.union1d(wanted, net.keys[needs]), columns)
    # Another run of this task, or one before a crash, has written these.
    own, of = (commits[net.keys], ordinals[net.keys]), (order[0][net.images], order[1][net.images])
    landed = needs & ((own[0] > of[0]) | ((own[0] == of[0]) & (own[1] >= of[1])))
    moved = np.unique(previous[needs & ~landed & (previous >= 0) & (previous != net.keys)])
    net = net.without(np.flatnonzero(landed))
    wanted, columns = net.wanted()
    wanted = wanted[before.is_before(commits[wanted], ordinals[wanted])]
    # Rows that changed their keys first: later parts may overwrite the rows that they were.
    groups = [np.intersect1d(wanted, moved), *_groups(np.setdiff1d(wanted, moved), sizes)]
    for group in groups:
        if len(group):
            part, net = net.split(group)
            yield _known(part.located(before.read(group, columns)), before, source, key)
    yield _known(net.located(KnownRows(np.zeros(0, np.int64), pa.table({}))), before, source, key)


def _groups(codes: _Numbers, sizes: _Numbers) -> list[_Numbers]:
    borders = np.cumsum(np.maximum(sizes[codes], 0)) // FILL_BYTES
    return np.split(codes, np.flatnonzero(np.diff(borders)) + 1) if len(codes) else []


def _known(net: NetChanges, before: RowsBefore, source: SourceRows | None, key: Sequence[str]) -> NetChanges:
    """Take values that the table does not have from the source."""
    schema = before.changes.schema
    return complete_rows(net, schema, key, partial(fetch_rows, source, schema))


def names_of(schema: TableSchema, columns: Sequence[Column]) -> list[str]:
    """Return the names of columns in segments."""
    names = dict(zip((column.attnum for column in schema.columns), field_names(schema), strict=True))
    return [names[column.attnum] for column in columns]
