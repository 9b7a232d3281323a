"""Cells that were not sent: read from the rows that they were in before, or asked from the source; never NULL.

Only the rows and columns that are needed are read. A row that comes into view by a publication's row filter arrives as
an insert without its large cells, and no file has them: then the source is asked for the row as it is now. If that is
the same in all that was sent, so are the other cells. If it is not, or is gone, nobody can tell any more what the cells
were; but then a later change of that row is on its way, so it is left out, and that change brings it, or ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Texts, join_texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.files import read_rows
from penstock.destinations.delta.index import FileMatch
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.refusals import unknown_row

logger = logging.getLogger(__name__)


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
    """Take unknown cells from the source's rows, if these are the same in all that is known of them."""
    table = str(layout.source)
    if source is None or not layout.key:
        raise unknown_row(table, "a row came without some of its cells, and there is no old one to take them from")
    known = net.select(rows)
    keys = keys_of(known.table, known.texts, layout.key)
    found, texts = _fetch(known, layout, source)
    places = pc.index_in(keys, value_set=keys_of(found, texts, layout.key))
    found = found.take(places).combine_chunks()
    texts = {name: column.take(places) for name, column in texts.items()}
    complete = net.completed(KnownRows(rows, found.select(list(columns)), texts))
    written = complete.select(rows)
    same = pc.equal(keys_of(written.table, written.texts, layout.columns), keys_of(found, texts, layout.columns))
    changed = rows[~same.to_numpy(zero_copy_only=False)]
    if len(changed):
        logger.info("rows wait for their next change table=%s rows=%d", layout.source, len(changed))
    return complete.without(changed)


def _fetch(known: KnownRows, layout: TableLayout, source: SourceRows) -> tuple[pa.Table, Texts]:
    """The source's rows of some keys, in the names and types of the lake."""
    segment_names = {lake: name for name, lake in layout.renames.items()}
    asked = known.table.select(layout.key)
    asked = asked.rename_columns([segment_names[name] for name in layout.key])
    maps = join_texts(
        {segment_names[name]: known.texts[name] for name in layout.key if name in known.texts}, len(asked)
    )
    answers = source.fetch(layout.source, asked if maps is None else asked.append_column(UNREPRESENTABLE, maps))
    texts = {layout.renames[name]: column for name, column in split_texts(answers).items()}
    answers = answers.select(list(layout.renames))
    return layout.fit(answers.rename_columns(list(layout.renames.values()))).combine_chunks(), texts
