"""Values that neither a change nor the destination has, from the source's current rows; never NULL in their place.

When an update makes a row match a row filter, it arrives as an insert without its large values. If the source's current
row equals the change in every value that was sent, its other values are the right ones, too. If it differs or no longer
exists, a later change of that row is on its way: the row is left out, and that change adds or deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.compaction import KnownRows, NetChanges, keys_of
from penstock.changes.segment import UNREPRESENTABLE, Texts, field_names, join_texts, split_texts
from penstock.destinations.base import SourceRows
from penstock.errors import ValuesNotSent
from penstock.schema import Column, TableSchema

logger = logging.getLogger(__name__)


def not_sent(table: str) -> ValuesNotSent:
    """The error of a change whose omitted values cannot be found."""
    return ValuesNotSent(
        f"{table}: a change omits values, and the destination does not have the row that it replaces", table=table
    )


def fetch_rows(source: SourceRows | None, schema: TableSchema, keys: pa.Table, texts: Texts) -> tuple[pa.Table, Texts]:
    """Return the source's current rows with these keys, in any order, and the texts that their types cannot hold."""
    if source is None:
        raise not_sent(str(schema))
    maps = join_texts({name: texts[name] for name in keys.column_names if name in texts}, keys.num_rows)
    found = source.fetch(schema, keys if maps is None else keys.append_column(UNREPRESENTABLE, maps)).combine_chunks()
    return found, split_texts(found)


def fetched(net: NetChanges, schema: TableSchema, source: SourceRows | None, key: Sequence[str]) -> NetChanges:
    """Take the unknown values of located changes from the source; both have the same columns."""
    return complete_rows(net, schema, key, partial(fetch_rows, source, schema))


def complete_rows(
    net: NetChanges,
    schema: TableSchema,
    key: Sequence[str],
    fetch: Callable[[pa.Table, Texts], tuple[pa.Table, Texts]],
    names: Sequence[str] | None = None,
) -> NetChanges:
    """Take the unknown values of located changes from the source.

    `fetch` is `fetch_rows` for the source and table, with the names of `net`; `names` are the columns that both have.
    """
    rows, columns = net.incomplete()
    if not len(rows):
        return net
    names = list(net.table.column_names if names is None else names)
    known = net.select(rows)
    asked = known.table.select(list(key))
    found, texts = fetch(asked, known.texts)
    places = pc.index_in(keys_of(asked, known.texts, key), value_set=keys_of(found, texts, key))
    types = pa.schema([net.table.schema.field(name) for name in names])
    found = found.select(names).take(places).cast(types).combine_chunks()
    texts = {name: column.take(places) for name, column in texts.items()}
    complete = net.completed(KnownRows(rows, found.select(columns), texts))
    written = complete.select(rows)
    same = pc.equal(
        keys_of(written.table, written.texts, names, whole=True), keys_of(found, texts, names, whole=True)
    ).to_numpy(zero_copy_only=False)
    log_left_out(schema, int((~same).sum()))
    return complete.without(rows[~same])


def log_left_out(table: TableSchema, rows: int) -> None:
    """Report rows whose source has changed meanwhile, if there are any."""
    if rows:
        logger.info("rows left out until their next change table=%s rows=%d", table, rows)


def names_of(schema: TableSchema, columns: Sequence[Column]) -> list[str]:
    """Return the names of columns in segments."""
    names = dict(zip((column.attnum for column in schema.columns), field_names(schema), strict=True))
    return [names[column.attnum] for column in columns]
