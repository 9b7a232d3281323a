"""The SQL of a document: for a row of the root table, the whole tree below it as one JSON value.

Every level is a row turned into an object. To-one relations are a subquery that gives one row at most, to-many ones an
ordered array, never null; aggregates are subqueries of their own. The order of an array is total: what `order_by`
leaves open the primary key decides, so that the same rows give the same document. Objects are made of rows and not by
`json_build_object`, which takes at most fifty fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from psycopg import sql

from penstock.documents.catalog import SourceCatalog, SourceTable
from penstock.documents.expressions import (
    Sql,
    column,
    conditions,
    conjunction,
    convert,
    equal_columns,
    from_table,
    geo_value,
    json_literal,
    scalar_value,
)
from penstock.documents.specification import (
    Aggregate,
    Constant,
    Field,
    Geo,
    Group,
    Join,
    Operation,
    Relation,
    Scalar,
    ScalarType,
)
from penstock.documents.statements import as_literal


@dataclass(frozen=True, slots=True)
class Row:
    """A row in scope: its alias and table, and those of the junction through which it was reached."""

    alias: str
    table: SourceTable
    junction: tuple[str, SourceTable] | None = None


class DocumentSql:
    """Writes the SQL of a completed specification's documents; aliases are unique within one instance."""

    def __init__(self, catalog: SourceCatalog) -> None:
        self._catalog = catalog
        self._numbers = count(1)

    def object_of(self, fields: Sequence[Field], row: Row) -> Sql:
        """An object of these fields, as an expression over a row that is in scope."""
        members = [sql.SQL("{} as {}").format(self._value(each, row), sql.Identifier(each.name)) for each in fields]
        return sql.SQL("(select pg_catalog.row_to_json(o) from (select {}) o)").format(sql.SQL(", ").join(members))

    def _value(self, field: Field, row: Row) -> Sql:
        match field:
            case Scalar():
                if field.junction and row.junction is not None:
                    return scalar_value(field, *row.junction)
                return scalar_value(field, row.alias, row.table)
            case Geo():
                return geo_value(field, row.alias)
            case Constant():
                return json_literal(field.value)
            case Group():
                return self.object_of(field.fields, row)
            case Join():
                return self._array(field, row) if field.to_many else self._object(field, row)
            case Aggregate():
                return self._aggregate(field, row)

    def _object(self, join: Join, parent: Row) -> Sql:
        source, where, row = self._related(join.relation, parent)
        order = sql.SQL(", ").join([each for each, _ in self._order(join.relation, row)])
        return sql.SQL("(select {} from {} where {} order by {} limit 1)").format(
            self.object_of(join.fields, row), source, where, order
        )

    def _array(self, join: Join, parent: Row) -> Sql:
        source, where, row = self._related(join.relation, parent)
        order = self._order(join.relation, row)
        columns = [
            sql.SQL("{} as {}").format(expression, sql.Identifier(f"o{number}"))
            for number, (expression, _) in enumerate(self._order(join.relation, row, plain=True))
        ]
        limited = sql.SQL("")
        if join.relation.limit is not None:
            limited = sql.SQL(" order by {} limit {}").format(
                sql.SQL(", ").join([each for each, _ in order]), sql.Literal(join.relation.limit)
            )
        alias = self._alias("a")
        outer = [
            sql.SQL("{}{}").format(column(alias, f"o{number}"), sql.SQL(" desc" if descending else ""))
            for number, (_, descending) in enumerate(order)
        ]
        return sql.SQL(
            "(select coalesce(pg_catalog.json_agg({body} order by {outer}), '[]'::pg_catalog.json)"
            " from (select {object} as body, {columns} from {source} where {where}{limited}) {alias})"
        ).format(
            body=column(alias, "body"),
            outer=sql.SQL(", ").join(outer),
            object=self.object_of(join.fields, row),
            columns=sql.SQL(", ").join(columns),
            source=source,
            where=where,
            limited=limited,
            alias=sql.Identifier(alias),
        )

    def _aggregate(self, field: Aggregate, parent: Row) -> Sql:
        source, where, row = self._related(field.relation, parent)
        return sql.SQL("(select {} from {} where {})").format(self._reduced(field, row), source, where)

    def _reduced(self, field: Aggregate, row: Row) -> Sql:
        if field.operation is Operation.COUNT:
            return sql.SQL("pg_catalog.count(*)")
        if field.operation is Operation.IDS:
            key = field.relation.primary_key[0]
            value = convert(column(row.alias, key), field.value_type or ScalarType.KEYWORD, row.table.column(key))
            return sql.SQL("coalesce(pg_catalog.json_agg({} order by {}), '[]'::pg_catalog.json)").format(
                value, column(row.alias, key)
            )
        value = column(row.alias, field.column)
        if row.table.column(field.column).base.name == "money":
            value = sql.SQL("{}::pg_catalog.numeric").format(value)
        reduced = sql.SQL("pg_catalog.{}({})").format(sql.SQL(as_literal(field.operation.value)), value)
        if field.operation is Operation.AVG:
            return sql.SQL("{}::pg_catalog.float8").format(reduced)
        if field.operation in (Operation.MIN, Operation.MAX) and field.value_type is not None:
            return convert(reduced, field.value_type, row.table.column(field.column))
        return reduced

    def _related(self, relation: Relation, parent: Row) -> tuple[Sql, Sql, Row]:
        """What follows `from` and `where` to have the related rows of a parent, and what they are called there."""
        table = self._catalog.table(relation.table)
        alias = self._alias("t")
        own = [each for each in relation.filters if not each.junction]
        source = from_table(table, alias, own)
        where = conditions(own, alias, table)
        link = table.select(relation.columns)
        above = parent.table.select(relation.parent_columns)
        if relation.junction is None:
            return source, conjunction([equal_columns(alias, link, parent.alias, above), *where]), Row(alias, table)
        junction = self._catalog.table(relation.junction.table)
        between = self._alias("j")
        right = equal_columns(alias, link, between, junction.select(relation.junction.right_key))
        left = equal_columns(between, junction.select(relation.junction.left_key), parent.alias, above)
        where += conditions([each for each in relation.filters if each.junction], between, junction)
        source = sql.SQL("{} join {} on {}").format(source, from_table(junction, between), right)
        return source, conjunction([left, *where]), Row(alias, table, (between, junction))

    def _order(self, relation: Relation, row: Row, *, plain: bool = False) -> list[tuple[Sql, bool]]:
        """The expressions of a total order, and whether each goes down; `plain` without the direction."""
        wanted = [(each.column, each.descending, each.junction) for each in relation.order_by]
        wanted += [(each, False, False) for each in relation.primary_key]
        if row.junction is not None:
            wanted += [(each, False, True) for each in row.junction[1].primary_key]
        order: list[tuple[Sql, bool]] = []
        for name, descending, junction in wanted:
            alias = row.junction[0] if junction and row.junction is not None else row.alias
            down = sql.SQL(" desc" if descending and not plain else "")
            order.append((sql.SQL("{}{}").format(column(alias, name), down), descending))
        return order

    def _alias(self, letter: str) -> str:
        return f"{letter}{next(self._numbers)}"
