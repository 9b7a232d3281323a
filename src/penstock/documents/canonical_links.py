"""The keys and links of changed rows as canonical texts, as maps of relations hold them.

The server itself brings values to their texts: one statement per table and batch. A link that was not sent (a large
value that stayed the same) is read from the row as it is now: if it has changed since, that change is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.documents.catalog import SourceColumn
from penstock.documents.expressions import canonical, column, document_id, equal_columns, from_table, values_source
from penstock.documents.images import Cells, RowChanges
from penstock.documents.relation_map import TrackedRelation, link_update_schema
from penstock.documents.statements import run_statement


@dataclass(frozen=True, slots=True)
class CanonicalLinks:
    """Change by change: the row's key before and after (null if it was not there), and its links after."""

    rows: RowChanges
    old: pa.StringArray
    new: pa.StringArray
    links: Mapping[str, pa.StringArray]

    def old_keys(self) -> list[str]:
        """The keys of rows that were there before, each once."""
        return self.old.drop_null().unique().to_pylist()

    def after(self) -> dict[str, Cells]:
        """What the rows hang on after the changes, also where that was not sent."""
        there = self.new.is_valid()
        sent = np.ones(len(self.new) - self.new.null_count, np.bool_)
        return {name: Cells(values.filter(there), sent) for name, values in self.links.items()}

    def update_of(self, relation: TrackedRelation) -> pa.Table:
        """What a map has to learn: keys that are left, and keys with their links."""
        count = len(self.rows)
        schema = link_update_schema(relation)
        order = [pa.array(self.rows.commit_lsn), pa.array(self.rows.ordinal)]
        absent = [pa.nulls(count, pa.string()) for _ in relation.links]
        links = [self.links[name] for name in relation.links]
        left = pc.and_(self.old.is_valid(), pc.coalesce(pc.not_equal(self.old, self.new), pa.scalar(True)))
        removed = pa.table([self.old, *absent, pa.array(np.zeros(count, np.bool_)), *order], schema=schema)
        there = pa.table([self.new, *links, pa.array(np.ones(count, np.bool_)), *order], schema=schema)
        return pa.concat_tables([removed.filter(left), there.filter(self.new.is_valid())])


def canonical_links(
    connection: psycopg.Connection[Any], relations: Sequence[TrackedRelation], rows: RowChanges
) -> CanonicalLinks:
    """The links of all these relations of one table, for changes of that table."""
    table, key = relations[0].table, relations[0].key
    links = sorted({name for each in relations for name in each.links})
    gone = ~rows.new[key[0]].sent
    all_sent = all(bool(np.all(rows.new[name].sent | gone)) for name in links)
    parameters = [rows.old[name].texts.to_pylist() for name in key]
    parameters += [rows.new[name].texts.to_pylist() for name in (*key, *links)]
    text = _statement(relations[0], links, all_sent)
    found = run_statement(connection, text, parameters, f"read the relations of {table.name}")
    old, new, *values = (pa.array(each, pa.string()) for each in zip(*found, strict=True))
    return CanonicalLinks(rows, old, new, dict(zip(links, values, strict=True)))


def _statement(relation: TrackedRelation, links: Sequence[str], all_sent: bool) -> str:
    """Takes old keys, new keys and new links as arrays; gives old key, new key and links, canonical, in their order."""
    key = relation.table.select(relation.key)
    linked = relation.table.select(links)
    width = len(key)
    old = [canonical(column("s", f"v{number}"), each) for number, each in enumerate(key)]
    new = [canonical(column("s", f"v{number + width}"), each) for number, each in enumerate(key)]
    values: list[sql.Composable] = []
    for number, each in enumerate(linked):
        value: sql.Composable = column("s", f"v{number + 2 * width}")
        if not all_sent:
            value = sql.SQL("coalesce({}, {})").format(value, column("now", each.name))
        values.append(canonical(value, each))
    current = sql.SQL("")
    if not all_sent:
        sent_key: list[SourceColumn] = [replace(each, name=f"v{number + width}") for number, each in enumerate(key)]
        current = sql.SQL("left join {} on {}").format(
            from_table(relation.table, "now"), equal_columns("now", key, "s", sent_key)
        )
    return (
        sql.SQL("select {}, {}, {} from {} {} order by s.place")
        .format(
            document_id(old),
            document_id(new),
            sql.SQL(", ").join(values),
            values_source("s", [*key, *key, *linked], 1, ordered=True),
            current,
        )
        .as_string(None)
    )
