"""Removes rows by the bounds of partitions: which rows of a file are outside, and which files need not be read.

Rows that leave become dead by a vector, as deleted ones do; a file without other rows leaves the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import LiveFile, dead_rows, read_rows
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector
from penstock.destinations.delta.write import LostRows, WrittenFiles, bury
from penstock.destinations.refusals import not_followed, unexpected
from penstock.errors import PenstockError
from penstock.source.bounds import Bounds, Edge, InList, InRange
from penstock.values import TypeSettings, codec_for


@dataclass(frozen=True, slots=True)
class PartFilter:
    """The rows that stay; pickles."""

    columns: tuple[str, ...]
    """The columns of the lake that it needs."""
    leaves: tuple[tuple[InRange | InList, ...], ...]
    """By the names of the lake."""
    inside: bool
    """True if the rows inside the bounds of the leaves stay, False if the others do."""
    values: dict[tuple[str, str], pa.Scalar]
    """The values of bounds, by column and text."""

    def stays(self, rows: pa.Table) -> pa.Array:
        """Return which rows stay."""
        found: pa.Array = pa.repeat(False, rows.num_rows)
        for leaf in self.leaves:
            found = pc.or_(found, self._in_leaf(rows, leaf))
        return found if self.inside else pc.invert(found)

    def keeps_all(self, file: Add) -> bool:
        """True if the statistics of a file show that all its rows stay."""
        if not self.leaves:
            return not self.inside
        extremes = self._extremes(file)
        if extremes is None:
            return False
        # Each level is an interval in one column, so all values between two that are in it are in it, too.
        simple = [
            leaf for leaf in self.leaves if all(isinstance(each, InRange) and len(each.low) == 1 for each in leaf)
        ]
        if self.inside:
            return any(pc.all(self._in_leaf(extremes, leaf)).as_py() for leaf in simple)
        return len(simple) == len(self.leaves) == 1 and self._is_beside(extremes, simple[0])

    def _is_beside(self, extremes: pa.Table, leaf: tuple[InRange | InList, ...]) -> bool:
        """True if in some column all values are below the range, or all are above."""
        for each in leaf:
            assert isinstance(each, InRange)
            above, below = (
                self._at_least(extremes, each.columns, each.low),
                self._below(extremes, each.columns, each.high),
            )
            if not pc.any(above).as_py() or not pc.any(below).as_py():
                return True
        return False

    def _extremes(self, file: Add) -> pa.Table | None:
        """Return the lowest and the highest value of each column, in two rows; None if they are not known."""
        statistics = json.loads(file.stats or "{}")
        lowest, highest = statistics.get("minValues", {}), statistics.get("maxValues", {})
        found: dict[str, pa.Array] = {}
        for name in self.columns:
            kind = next((value.type for (column, _), value in self.values.items() if column == name), None)
            if (
                kind is None
                or name not in lowest
                or name not in highest
                or statistics.get("nullCount", {}).get(name) != 0
            ):
                return None
            if not (pa.types.is_integer(kind) or pa.types.is_temporal(kind)):
                return None  # texts are shortened
            found[name] = pa.array([str(lowest[name]), str(highest[name])]).cast(kind)
        return pa.table(found) if found else None

    def _in_leaf(self, rows: pa.Table, leaf: tuple[InRange | InList, ...]) -> pa.Array:
        found: pa.Array = pa.repeat(True, rows.num_rows)
        for each in leaf:
            if isinstance(each, InList):
                column = rows.column(each.column).combine_chunks()
                values = [self.values[each.column, text] for text in each.values]
                inside = pc.is_in(column, value_set=pa.array([value.as_py() for value in values], column.type))
                inside = pc.or_(inside, column.is_null()) if each.with_null else pc.and_(inside, column.is_valid())
            else:
                low, high = self._at_least(rows, each.columns, each.low), self._below(rows, each.columns, each.high)
                inside = pc.and_(low, high)
                for name in each.columns:
                    inside = pc.and_(inside, rows.column(name).combine_chunks().is_valid())
            found = pc.and_(found, pc.fill_null(inside, False))
        return found

    def _at_least(self, rows: pa.Table, columns: Sequence[str], edges: Sequence[str | Edge]) -> pa.Array:
        if not columns:
            return pa.repeat(True, rows.num_rows)
        if isinstance(edges[0], Edge):
            return pa.repeat(edges[0] is Edge.LOWEST, rows.num_rows)
        column, value = rows.column(columns[0]).combine_chunks(), self.values[columns[0], edges[0]]
        equal = pc.and_(pc.equal(column, value), self._at_least(rows, columns[1:], edges[1:]))
        return pc.or_(pc.greater(column, value), equal)

    def _below(self, rows: pa.Table, columns: Sequence[str], edges: Sequence[str | Edge]) -> pa.Array:
        if not columns:
            return pa.repeat(False, rows.num_rows)
        if isinstance(edges[0], Edge):
            return pa.repeat(edges[0] is Edge.HIGHEST, rows.num_rows)
        column, value = rows.column(columns[0]).combine_chunks(), self.values[columns[0], edges[0]]
        equal = pc.and_(pc.equal(column, value), self._below(rows, columns[1:], edges[1:]))
        return pc.or_(pc.less(column, value), equal)


def part_filter(layout: TableLayout, leaves: Iterable[Bounds], *, inside: bool) -> PartFilter:
    """Return the filter for a table; raise `SchemaNotFollowed` if its rows cannot be compared exactly."""
    names = {column.name: layout.names[column.attnum] for column in layout.source.columns}
    by_name = {column.name: column for column in layout.source.columns}
    values: dict[tuple[str, str], pa.Scalar] = {}
    renamed: list[tuple[InRange | InList, ...]] = []
    for leaf in leaves:
        levels: list[InRange | InList] = []
        for each in leaf:
            sources = each.columns if isinstance(each, InRange) else (each.column,)
            texts = (*each.low, *each.high) if isinstance(each, InRange) else each.values
            for number, text in enumerate(texts):
                source = sources[number % len(sources)]
                if not isinstance(text, Edge):
                    column, kind = by_name[source], layout.schema.field(names[source]).type
                    decoded = codec_for(column.type, column.type_modifier, TypeSettings()).decode(
                        pa.array([text], pa.large_string())
                    )
                    is_time = pa.types.is_temporal(kind)
                    if decoded.rejected is not None or (is_time and layout.has_texts):
                        raise not_followed(str(layout.source), f"its column {source!r} may have values without a place")
                    values[names[source], text] = decoded.array.cast(kind)[0]
            if isinstance(each, InRange):
                levels.append(each._replace(columns=tuple(names[source] for source in sources)))
            else:
                levels.append(each._replace(column=names[each.column]))
        renamed.append(tuple(levels))
    columns = {name for leaf in renamed for each in leaf for name in _columns(each)}
    return PartFilter(tuple(sorted(columns)), tuple(renamed), inside, values)


@dataclass(frozen=True, slots=True)
class PartWork:
    """One file from which a task removes rows."""

    table: str
    storage: Storage
    layout: TableLayout
    file: LiveFile
    filter: PartFilter
    deletion_vectors: bool


def remove_rows(work: PartWork) -> WrittenFiles | PenstockError:
    """Remove the rows of a file that do not stay; errors are values."""
    try:
        rows = read_rows(work.storage, work.file.file, work.layout.schema, work.filter.columns)
        dead = dead_rows(work.storage, work.file)
        goes = ~work.filter.stays(rows).to_numpy(zero_copy_only=False) & dead.alive(rows.num_rows)
        gone = np.flatnonzero(goes).astype(np.int64)
        if not len(gone):
            return WrittenFiles()
        lost = LostRows(work.file, rows.num_rows, dead.union(Vector.of(gone)), len(gone))
        return bury(work.storage, work.layout, [lost], deletion_vectors=work.deletion_vectors)
    except Exception as error:
        return unexpected(work.table, error)


def _columns(each: InRange | InList) -> tuple[str, ...]:
    return each.columns if isinstance(each, InRange) else (each.column,)
