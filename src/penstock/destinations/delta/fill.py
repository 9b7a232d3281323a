"""Fills omitted values from the rows that they were in before, or from the source; never with NULL.

Only the rows and columns that are needed are read. When an update makes a row match a publication's row filter, it
arrives as an insert without its large values, and no file has them. Then the task fetches the current row from the
source. If it equals the insert in every value that was sent, the other values are the right ones, too. If it differs or
no longer exists, the values cannot be determined; but then a later change of that row is on its way, so the task leaves
the row out, and that change adds or deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.columns import in_one_piece
from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Texts, join_texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.destinations.delta.files import iterate_rows
from penstock.destinations.delta.index import FileMatch
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.storage import Storage
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
    rows, columns = net.incomplete()
    parts.append(_ask(net, rows, columns, layout, source) if len(rows) else net)
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


def _ask(
    net: NetChanges, rows: NDArray[np.int64], columns: Sequence[str], layout: TableLayout, source: SourceRows | None
) -> NetChanges:
    """Take unknown values from the source's rows, if these equal the change in every known value."""
    table = str(layout.source)
    if source is None or not layout.key:
        raise unknown_row(table, "a row has omitted values, and there is no old row to take them from")
    known = net.select(rows)
    keys = keys_of(known.table, known.texts, layout.key)
    found, texts = _fetch(known, layout, source)
    places = pc.index_in(keys, value_set=keys_of(found, texts, layout.key))
    found = found.take(places).combine_chunks()
    texts = {name: column.take(places) for name, column in texts.items()}
    complete = net.completed(KnownRows(rows, found.select(list(columns)), texts))
    written = complete.select(rows)
    same = pc.equal(
        keys_of(written.table, written.texts, layout.columns, whole=True),
        keys_of(found, texts, layout.columns, whole=True),
    )
    changed = rows[~same.to_numpy(zero_copy_only=False)]
    if len(changed):
        logger.info("rows left out until their next change table=%s rows=%d", layout.source, len(changed))
    return complete.without(changed)


def _fetch(known: KnownRows, layout: TableLayout, source: SourceRows) -> tuple[pa.Table, Texts]:
    """Return the source's rows with these keys, with the names and types of the lake."""
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
