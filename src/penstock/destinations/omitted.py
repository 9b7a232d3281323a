"""Values that the server omitted and that a destination does not have: the source has them.

The source's row counts only if it equals the change in every value that was sent; otherwise a later change of that row
is on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow.compute as pc

from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, field_names, join_texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.errors import ValuesNotSent
from penstock.schema import Column, TableSchema

logger = logging.getLogger(__name__)


def fetched(net: NetChanges, schema: TableSchema, source: SourceRows | None, key: Sequence[str]) -> NetChanges:
    """Take values that the destination does not have from the source; rows that changed since then are left out.

    Raise `ValuesNotSent` if the source cannot be asked.
    """
    rows, columns = net.incomplete()
    if not len(rows):
        return net
    if source is None:
        raise not_sent(str(schema))
    known = net.select(rows)
    asked = known.table.select(list(key))
    maps = join_texts({name: known.texts[name] for name in key if name in known.texts}, asked.num_rows)
    answers = source.fetch(schema, asked if maps is None else asked.append_column(UNREPRESENTABLE, maps))
    answers = answers.combine_chunks()
    texts = split_texts(answers)
    names = list(net.table.column_names)
    places = pc.index_in(keys_of(asked, known.texts, list(key)), value_set=keys_of(answers, texts, list(key)))
    found = answers.select(names).take(places).cast(net.table.schema).combine_chunks()
    texts = {name: column.take(places) for name, column in texts.items()}
    complete = net.completed(KnownRows(rows, found.select(columns), texts))
    written = complete.select(rows)
    same = pc.equal(
        keys_of(written.table, written.texts, names, whole=True), keys_of(found, texts, names, whole=True)
    ).to_numpy(zero_copy_only=False)
    if not same.all():
        logger.info("rows left out until their next change table=%s rows=%d", schema, int((~same).sum()))
    return complete.without(rows[~same])


def names_of(schema: TableSchema, columns: Sequence[Column]) -> list[str]:
    """Return the names of columns in segments."""
    names = dict(zip((column.attnum for column in schema.columns), field_names(schema), strict=True))
    return [names[column.attnum] for column in columns]


def not_sent(table: str) -> ValuesNotSent:
    """The error of a change whose omitted values cannot be found."""
    return ValuesNotSent(
        f"{table}: a change omits values, and the destination does not have the row that it replaces", table=table
    )
