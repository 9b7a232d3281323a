"""An index specification as plain objects: every default filled in, every table with its schema.

The root is an `IndexSpecification`. Its `fields` are of six kinds. Three take their value from the current row
(`Scalar`, `Geo`, `Group`), one is constant (`Constant`), and two use rows of another table: a `Join` embeds them, an
`Aggregate` counts them or adds them up. Both have a `Relation`, which selects those rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.source.patterns import TableName


class ScalarType(StrEnum):
    """The type of a value in the index."""

    TEXT = "text"
    IDENTIFIER = "identifier"
    KEYWORD = "keyword"
    ENUM = "enum"
    UUID = "uuid"
    BOOLEAN = "boolean"
    SHORT = "short"
    INTEGER = "integer"
    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    DECIMAL = "decimal"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BINARY = "binary"
    JSON = "json"
    MAP = "map"
    CUSTOM = "custom"
    VECTOR = "vector"


class Transform(StrEnum):
    """A conversion of texts."""

    LOWERCASE = "lowercase"
    TRIM = "trim"


class Operation(StrEnum):
    """How an aggregate reduces rows to one value."""

    COUNT = "count"
    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    IDS = "ids"


class Verb(StrEnum):
    """Which of two tables has the foreign key, and how many rows there can be."""

    BELONGS_TO = "belongs_to"
    HAS_ONE = "has_one"
    HAS_MANY = "has_many"
    MANY_TO_MANY = "many_to_many"


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on rows: `column operator value`, or SQL as it was written."""

    column: str = ""
    operator: str = ""
    """`eq neq lt lte gt gte like ilike in not_in between is_null is_not_null`; empty for SQL."""
    values: tuple[str, ...] = ()
    """As texts; Postgres casts them to the column's type."""
    raw: str = ""
    junction: bool = False
    """True for a column of the junction."""


@dataclass(frozen=True, slots=True)
class OrderBy:
    column: str
    descending: bool = False
    junction: bool = False


@dataclass(frozen=True, slots=True)
class Junction:
    """The table between two others."""

    table: TableName
    left_key: tuple[str, ...]
    """Points at the parent's key."""
    right_key: tuple[str, ...]
    """Points at the related table's key."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Selects the rows of another table that belong to a row.

    Without a junction, those whose `columns` equal the parent's `parent_columns`. Through a junction, those whose
    `columns` equal the junction's right key where its left key equals `parent_columns`. Empty columns mean the primary
    key in the catalog.
    """

    table: TableName
    primary_key: tuple[str, ...]
    """Of the related table."""
    parent_columns: tuple[str, ...]
    columns: tuple[str, ...]
    junction: Junction | None = None
    filters: tuple[Filter, ...] = ()
    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Scalar:
    """A column, or an expression over the columns of its row."""

    name: str
    type: ScalarType
    column: str
    """Empty if there is an expression."""
    junction: bool = False
    required: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    transforms: tuple[Transform, ...] = ()
    default: Any = None
    variants: tuple[str, ...] = ()
    """Values of an enum, in order."""
    values: ScalarType | None = None
    """Type of all values of a map."""
    postgres: tuple[str, ...] = ()
    """Column types that a custom field accepts."""
    opensearch: str = ""
    """Index type of a custom field."""
    dimensions: int = 0
    """Length of a vector."""
    expression: str = ""
    """SQL on the columns of this table alone."""
    place: str = field(default="", compare=False)
    """Where the file has the expression: `customers.schema.yml:12:17`."""


@dataclass(frozen=True, slots=True)
class Geo:
    """A point, from two columns or from one that already has the shape."""

    name: str
    latitude: str = ""
    longitude: str = ""
    column: str = ""
    required: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Group:
    """Columns of the same row under one key (`object`)."""

    name: str
    fields: tuple[Field, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Constant:
    name: str
    value: str | int | float | bool | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Embeds rows of another table: one object, or an array of them."""

    name: str
    verb: Verb
    relation: Relation
    fields: tuple[Field, ...]
    required: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def to_many(self) -> bool:
        return self.verb in (Verb.HAS_MANY, Verb.MANY_TO_MANY)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One value computed from rows of another table."""

    name: str
    operation: Operation
    relation: Relation
    column: str = ""
    value_type: ScalarType | None = None
    """Type of the result of `sum`, `min` and `max`, and of each key of `ids`."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


Field = Scalar | Geo | Group | Constant | Join | Aggregate


@dataclass(frozen=True, slots=True)
class SoftDelete:
    """Marks rows that count as deleted: `column` is true or, if it is not boolean, not null."""

    column: str
    when: tuple[Filter, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexSpecification:
    """One document per row of `table`."""

    name: str
    table: TableName
    fields: tuple[Field, ...]
    primary_key: tuple[str, ...] = ()
    """If empty, the catalog's primary key."""
    doc_id: tuple[str, ...] = ()
    """The columns that identify a document; if empty, the primary key."""
    filters: tuple[Filter, ...] = ()
    soft_delete: SoftDelete | None = None
    transform: str = ""
    """`module:function`, called with the built documents; may be empty."""
    routing: str = ""
    """The column of the document id that decides in which shard a document is; if empty, the whole id does."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the index that are fixed when it is created, by the server's names; `analysis` is nested."""
    dynamic_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings that an existing index can get."""
    source_excludes: tuple[str, ...] = ()
    """Fields that are searched but not stored."""
    aliases: tuple[str, ...] = ()
    """Further names of the index, which other indexes may have, too."""
    id_prefix: str = ""
    """What ids begin with in the index, so that indexes that share an alias have different ones."""

    def tables(self) -> set[TableName]:
        """Return every table whose rows can change a document."""
        found = {self.table}
        for relation in relations_in(self.fields):
            found.add(relation.table)
            if relation.junction is not None:
                found.add(relation.junction.table)
        return found


EVERY_COLUMN = "*"


def columns_read(specification: IndexSpecification) -> dict[TableName, set[str]]:
    """Return the columns that the documents of a complete specification depend on, by table (`columns_named`)."""
    found: dict[TableName, set[str]] = {name: set() for name in specification.tables()}
    for _, table, column in columns_named(specification):
        found[table].add(column)
    return found


def columns_named(specification: IndexSpecification) -> Iterator[tuple[str, TableName, str]]:
    """Yield every column that a specification names: where it does, the table, and the column.

    The column is `EVERY_COLUMN` for a filter or an expression in SQL, which may name any of the table's.
    """
    table, deleted = specification.table, specification.soft_delete
    yield from (("doc_id", table, each) for each in specification.doc_id)
    yield from (("primary_key", table, each) for each in specification.primary_key)
    yield from (("filters", table, _filtered(each)) for each in specification.filters)
    if deleted is not None:
        yield "soft_delete", table, deleted.column
        yield from (("soft_delete.when", table, _filtered(each)) for each in deleted.when)
    yield from _named(specification.fields, table, None, "")


def _named(
    fields: tuple[Field, ...], table: TableName, junction: TableName | None, path: str
) -> Iterator[tuple[str, TableName, str]]:
    for each in fields:
        where = f"{path}{each.name}"
        match each:
            case Scalar():
                own = junction if each.junction and junction else table
                yield where, own, EVERY_COLUMN if each.expression else each.column
            case Geo():
                names = (each.latitude, each.longitude, each.column)
                yield from ((where, table, name) for name in names if name)
            case Group():
                yield from _named(each.fields, table, junction, f"{where}.")
            case Join() | Aggregate():
                yield from _named_by(each.relation, table, where)
                if isinstance(each, Join):
                    between = each.relation.junction
                    yield from _named(each.fields, each.relation.table, between and between.table, f"{where}.")
                elif each.column:
                    yield where, each.relation.table, each.column
            case Constant():
                pass


def _named_by(relation: Relation, parent: TableName, where: str) -> Iterator[tuple[str, TableName, str]]:
    own = between = relation.table
    yield from ((where, parent, each) for each in relation.parent_columns)
    yield from ((where, own, each) for each in (*relation.columns, *relation.primary_key))
    if relation.junction is not None:
        between = relation.junction.table
        yield from ((where, between, each) for each in (*relation.junction.left_key, *relation.junction.right_key))
    yield from ((where, between if each.junction else own, each.column) for each in relation.order_by)
    for each in relation.filters:
        yield f"{where}.filters", between if each.junction else own, _filtered(each)


def _filtered(condition: Filter) -> str:
    return EVERY_COLUMN if condition.raw else condition.column


def field_paths(fields: tuple[Field, ...], prefix: str = "") -> Iterator[str]:
    """Yield the paths of these fields in documents, and of all fields below them."""
    for each in fields:
        yield f"{prefix}{each.name}"
        if isinstance(each, Join | Group):
            yield from field_paths(each.fields, f"{prefix}{each.name}.")


def relations_in(fields: tuple[Field, ...]) -> Iterator[Relation]:
    """Yield the relations of these fields and of all fields below them."""
    for each in fields:
        if isinstance(each, Join | Aggregate):
            yield each.relation
        if isinstance(each, Join | Group):
            yield from relations_in(each.fields)
