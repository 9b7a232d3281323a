"""Fills omitted values from the rows that they were in before, or from the source (`omitted`); never with NULL.

Only the rows and columns that are needed are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.columns import in_one_piece
from penstock.changes.compaction import KnownRows, NetChanges
from penstock.changes.segment import UNREPRESENTABLE, Texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.files import iterate_rows
from penstock.destinations.delta.index import FileMatch
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.omitted import complete_rows, fetch_rows
from penstock.destinations.refusals import unknown_row
from penstock.freed_memory import release_freed_memory

logger = logging.getLogger(__name__)


FILL_BYTES = 32 << 20
"""The most bytes of old rows in memory; more if one row group has more. A small change may omit a large value."""


def fill(
    net: NetChanges, matches: Sequence[FileMatch], storage: Storage, layout: TableLayout, source: SourceRows | None
) -> Iterator[NetChanges]:
    """Yield the net changes with all values known: usually at once, or in parts with `FILL_BYTES` of old rows each.

    Raise if a value cannot be found.
    """
    if not net.origins:
        yield net
        return
    parts: list[NetChanges] = []  # emptied as they are yielded, so that the caller can free them
    for before, is_last in _read_before(net, matches, storage, layout):
        if is_last:
            net = net.located(before)
            del before
        else:
            part, net = net.split(before.numbers)
            parts.append(part.located(before))
            del before, part  # its rows are in the located part now
            yield parts.pop()
            release_freed_memory()
    parts.append(_ask(net, layout, source) if len(net.incomplete()[0]) else net)
    del net
    yield parts.pop()


def _read_before(
    net: NetChanges, matches: Sequence[FileMatch], storage: Storage, layout: TableLayout
) -> Iterator[tuple[KnownRows, bool]]:
    """Yield the old rows that values are taken from, some at a time, and whether these are the last ones."""
    wanted, columns = net.wanted()
    numbers: list[NDArray[np.int64]] = []
    tables: list[pa.Table] = []
    left = np.zeros(len(net.touched), np.bool_)
    left[wanted] = True
    read = [*columns, *([UNREPRESENTABLE] if layout.has_texts else [])]
    for match in matches if len(wanted) else ():
        # Any of several rows with one key will do: they are the same row.
        codes, first = np.unique(match.keys, return_index=True)
        needed = left[codes]
        if not needed.any():
            continue
        codes, rows = codes[needed], match.rows[first[needed]]
        left[codes] = False
        order = np.argsort(rows)
        codes, rows = codes[order], rows[order]
        for there, table in iterate_rows(storage, match.file.file, layout.schema, read, rows):
            if tables and sum(each.nbytes for each in (*tables, table)) > FILL_BYTES:
                yield _known(numbers, tables, columns), False
            numbers.append(codes[np.searchsorted(rows, there)])
            tables.append(table)
    yield _known(numbers, tables, columns), True


def _known(numbers: list[NDArray[np.int64]], tables: list[pa.Table], columns: list[str]) -> KnownRows:
    """Return rows that were read, and empty the lists, so that no row is in memory twice."""
    if not tables:
        return KnownRows(np.zeros(0, np.int64), pa.table({}))
    table, found = in_one_piece(pa.concat_tables(tables)), np.concatenate(numbers)
    numbers.clear()
    tables.clear()
    return KnownRows(found, table.select(columns), split_texts(table))


def _ask(net: NetChanges, layout: TableLayout, source: SourceRows | None) -> NetChanges:
    """Take unknown values from the source's rows, if these equal the change in every known value."""
    if source is None or not layout.key:
        raise unknown_row(str(layout.source), "a row has omitted values, and there is no old row to take them from")
    return complete_rows(net, layout.source, layout.key, partial(_fetch, layout, source), layout.columns)


def _fetch(layout: TableLayout, source: SourceRows, keys: pa.Table, texts: Texts) -> tuple[pa.Table, Texts]:
    """Return the source's rows with these keys, with the names and types of the lake."""
    segment_names = {lake: name for name, lake in layout.renames.items()}
    asked = keys.rename_columns([segment_names[name] for name in layout.key])
    own = {segment_names[name]: texts[name] for name in layout.key if name in texts}
    answers, found = fetch_rows(source, layout.source, asked, own)
    answers = answers.select(list(layout.renames)).rename_columns(list(layout.renames.values()))
    return layout.fit(answers).combine_chunks(), {layout.renames[name]: column for name, column in found.items()}
