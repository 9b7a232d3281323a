"""Cells that were not sent: read from the rows that they were in before, or asked from the source; never NULL.

Only the rows and columns that are needed are read. A row that comes into view by a publication's row filter arrives as
an insert without its large cells, and no file has them: then the source is asked for the row as it is now, which is
right or about to be overwritten by a change that is on its way. What nobody has stops the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE
from penstock.changes.texts import split_texts
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.match import FileMatch
from penstock.destinations.delta.rows import read_rows
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.storage import Storage
from penstock.destinations.refusals import unknown_row


def fill(
    net: NetChanges, matches: Sequence[FileMatch], storage: Storage, layout: TableLayout, source: SourceRows | None
) -> NetChanges:
    """The net changes with all cells known. Raises if some are nowhere."""
    if not net.origins:
        return net
    filled = net.located(_read_before(net, matches, storage, layout))
    rows, columns = filled.incomplete()
    if not len(rows):
        return filled
    return _ask(filled, rows, columns, layout, source)


def _read_before(net: NetChanges, matches: Sequence[FileMatch], storage: Storage, layout: TableLayout) -> KnownRows:
    """The rows from before that cells are taken from."""
    wanted, columns = net.wanted()
    numbers: list[NDArray[np.int64]] = []
    tables: list[pa.Table] = []
    left = np.zeros(len(net.touched), np.bool_)
    left[wanted] = True
    read = [*columns, *([UNREPRESENTABLE] if layout.has_texts else [])]
    for match in matches if len(wanted) else ():
        # Of several rows of a key any will do: they are the same row.
        codes, first = np.unique(match.keys, return_index=True)
        needed = left[codes]
        if not needed.any():
            continue
        codes, rows = codes[needed], match.rows[first[needed]]
        left[codes] = False
        order = np.argsort(rows)
        numbers.append(codes[order])
        tables.append(read_rows(storage, match.file.file, layout.schema, read, rows[order]))
    if not tables:
        return KnownRows(np.zeros(0, np.int64), pa.table({}))
    table = pa.concat_tables(tables).combine_chunks()
    return KnownRows(np.concatenate(numbers), table.select(columns), split_texts(table))


def _ask(
    net: NetChanges, rows: NDArray[np.int64], columns: Sequence[str], layout: TableLayout, source: SourceRows | None
) -> NetChanges:
    table = str(layout.source)
    if source is None or not layout.key:
        raise unknown_row(table, "a row came without some of its cells, and there is no old one to take them from")
    taken = pa.array(net.images[rows])
    asked = net.table.select(layout.key).take(taken).combine_chunks()
    texts = {name: column.take(taken) for name, column in net.texts.items() if name in layout.key}
    segment_names = {lake: name for name, lake in layout.renames.items()}
    keys = keys_of(asked, texts, layout.key)
    answers = source.fetch(layout.source, asked.rename_columns([segment_names[name] for name in layout.key]))
    names = layout.renames
    answers = answers.rename_columns([names.get(name, name) for name in answers.column_names])
    schema = layout.with_texts().schema
    needed = dict.fromkeys([*layout.key, *columns, UNREPRESENTABLE])
    read = fit(answers, pa.schema([schema.field(name) for name in needed])).combine_chunks()
    there = keys_of(read, split_texts(read), layout.key)
    places = pc.index_in(keys, value_set=there)
    if places.null_count:
        raise unknown_row(
            table, "a row came without some of its cells, and it is not at the source any more to ask for them"
        )
    read = read.take(places)
    return net.completed(KnownRows(rows, read.select(list(columns)), split_texts(read)))
