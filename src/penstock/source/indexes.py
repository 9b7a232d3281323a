"""The indexes of a table of the source, as far as another table with the same columns can have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.source.connections import CATALOG_LIMITS, Role, SourceSettings, connect
from penstock.source.faults import translated

# What follows the name of the table. The name may contain anything, also the word USING.
_INDEXES = """
    select r.relname, pg_catalog.substr(
        pg_catalog.pg_get_indexdef(x.indexrelid),
        pg_catalog.length(
            'CREATE ' || case when x.indisunique then 'UNIQUE ' else '' end || 'INDEX '
            || pg_catalog.quote_ident(r.relname) || ' ON ' || case when r.relkind = 'I' then 'ONLY ' else '' end
            || pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname)
        ) + 2
    )
    from pg_catalog.pg_index x
    join pg_catalog.pg_class r on r.oid = x.indexrelid
    join pg_catalog.pg_class c on c.oid = x.indrelid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where x.indrelid = %s and x.indisvalid and x.indislive
      and not x.indisprimary and not x.indisreplident and not x.indisexclusion
    order by r.relname
"""


@dataclass(frozen=True, slots=True)
class SourceIndex:
    """An index besides the key. Unique or not: the source sees to that."""

    name: str
    definition: str
    """What follows `create index name on table`: `USING btree (note)`."""


def load_indexes(connection: psycopg.Connection[Any], table_id: int) -> list[SourceIndex]:
    """Return the indexes of a table, without its key and those of exclusion constraints."""
    with translated(connection, "read the indexes"), connection.cursor(row_factory=tuple_row) as cursor:
        found = [SourceIndex(*row) for row in cursor.execute(_INDEXES, [table_id]).fetchall()]
    return [index for index in found if index.definition.startswith("USING ")]


def read_indexes(source: SourceSettings, table_id: int) -> list[SourceIndex]:
    """Return the indexes of a table, by a connection of its own."""
    with connect(source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
        return load_indexes(connection, table_id)
