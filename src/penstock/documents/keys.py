"""The keys of an index's documents, as people and sinks write them, and some of them by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from penstock.documents.catalog import SourceCatalog, complete
from penstock.documents.expressions import canonical, column, conjunction, table_name
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import run_statement
from penstock.errors import ConfigError

_SAMPLED_WHOLE = 100_000
"""Tables up to here are read as a whole for a sample; of larger ones only so many rows, about."""

_ESTIMATE = """
    select coalesce(sum(greatest(c.reltuples, 0)), 0)::float8
    from pg_catalog.pg_partition_tree($1::text::pg_catalog.regclass) p
    join pg_catalog.pg_class c on c.oid = p.relid and p.isleaf
"""


@dataclass(frozen=True, slots=True)
class DocumentKeys:
    """How the documents of an index are named."""

    specification: IndexSpecification
    """Complete."""
    catalog: SourceCatalog

    @classmethod
    def of(cls, specification: IndexSpecification, catalog: SourceCatalog) -> DocumentKeys:
        return cls(complete(specification, catalog), catalog)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.specification.doc_id

    def parse(self, id_: str) -> tuple[str, ...]:
        """The key's texts of a document's id; another number of them than `columns` if it cannot be one."""
        if len(self.columns) == 1:
            return (id_,)
        return tuple(each.replace("%3A", ":").replace("%25", "%") for each in id_.split(":"))

    def named(self, parts: Sequence[str]) -> ResolvedKeys:
        """One document, by what a person wrote: a text for each key column, or its id."""
        key = self.parse(parts[0]) if len(parts) == 1 else tuple(parts)
        if len(key) != len(self.columns):
            wanted = f"{len(self.columns)} value{'s' * (len(self.columns) > 1)}: {', '.join(self.columns)}"
            raise ConfigError(
                f"documents of {self.specification.name!r} are named by {wanted}; {len(key)} were given",
                hint="Give one for each column, or all in one, joined by ':'.",
            )
        return self.resolved([key])

    def resolved(self, keys: Sequence[Sequence[str]]) -> ResolvedKeys:
        """Keys as the builder takes them."""
        columns = [[key[place] for key in keys] for place in range(len(self.columns))]
        return ResolvedKeys(self.specification.name, tuple(columns))

    def some(self, connection: psycopg.Connection[Any], count: int) -> ResolvedKeys:
        """The keys of about so many rows of the root table, by chance."""
        root = self.catalog.table(self.specification.table)
        name = table_name(root.name)
        what = f"choose some documents of {self.specification.name!r}"
        rows = run_statement(connection, _ESTIMATE, [name.as_string(None)], what)[0][0]
        percent = 100.0 if rows <= _SAMPLED_WHOLE else min(100.0, 100.0 * max(count * 3, _SAMPLED_WHOLE) / rows)
        text = sql.SQL(
            "select {keys} from {table} r tablesample bernoulli ({percent}) where {there} order by random() limit $1"
        ).format(
            keys=sql.SQL(", ").join([canonical(column("r", each.name), each) for each in root.select(self.columns)]),
            table=name,
            percent=sql.Literal(percent),
            there=conjunction([sql.SQL("{} is not null").format(column("r", each)) for each in self.columns]),
        )
        return self.resolved(run_statement(connection, text.as_string(None), [count], what))
