"""An index specification as plain objects: every default filled in, every table with its schema.

The root is an `IndexSpecification`. Below it, `fields` of six sorts. Three take their value from the row that they
stand on (`Scalar`, `Geo`, `Group`), one from nowhere (`Constant`), and two from rows of another table: a `Join` embeds
them, an `Aggregate` counts or adds them up. Both have a `Relation`, which says which rows those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.source.patterns import TableName


class ScalarType(StrEnum):
    """What a value is to the index."""

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


class Transform(StrEnum):
    """What is done to a text before it enters the document."""

    LOWERCASE = "lowercase"
    TRIM = "trim"


class Operation(StrEnum):
    """How an aggregate makes one value of many rows."""

    COUNT = "count"
    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    IDS = "ids"


class Verb(StrEnum):
    """Which table holds the key that connects two of them, and how many rows there can be."""

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
    """As texts; Postgres reads them as the column's type."""
    raw: str = ""
    junction: bool = False
    """The column is one of the junction's."""


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
    """Which rows of another table belong to a row.

    Directly, those where `columns` equal the parent's `parent_columns`. Through a junction, those whose `columns` equal
    the junction's right key where its left key equals `parent_columns`. Empty columns mean the table's primary key, as
    the catalog has it.
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
    """A column."""

    name: str
    type: ScalarType
    column: str
    junction: bool = False
    required: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    transforms: tuple[Transform, ...] = ()
    default: Any = None
    variants: tuple[str, ...] = ()
    """Of an enum: its values in their order."""
    values: ScalarType | None = None
    """Of a map: what all its values are."""
    postgres: tuple[str, ...] = ()
    """Of a custom field: which types its column may have."""
    opensearch: str = ""
    """Of a custom field: what it is in the index."""


@dataclass(frozen=True, slots=True)
class Geo:
    """A point, from two columns or from one that has the shape already."""

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
    """Rows of another table: one object, or an array of them."""

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
    """One value made of rows of another table."""

    name: str
    operation: Operation
    relation: Relation
    column: str = ""
    value_type: ScalarType | None = None
    """Of `sum`, `min` and `max` their result; of `ids` each key."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


Field = Scalar | Geo | Group | Constant | Join | Aggregate


@dataclass(frozen=True, slots=True)
class SoftDelete:
    """Rows that are there and count as deleted: `column` is true, or, unless it is boolean, not null."""

    column: str
    when: tuple[Filter, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexSpecification:
    """One document per row of `table`."""

    name: str
    table: TableName
    fields: tuple[Field, ...]
    primary_key: tuple[str, ...] = ()
    """Empty: as the catalog has it."""
    doc_id: tuple[str, ...] = ()
    """The columns that name a document; empty: the primary key."""
    filters: tuple[Filter, ...] = ()
    soft_delete: SoftDelete | None = None
    transform: str = ""
    """`module:function`, called with the built documents; empty if there is none."""

    def tables(self) -> set[TableName]:
        """Every table whose rows can change a document."""
        found = {self.table}
        for relation in relations_in(self.fields):
            found.add(relation.table)
            if relation.junction is not None:
                found.add(relation.junction.table)
        return found


def relations_in(fields: tuple[Field, ...]) -> Iterator[Relation]:
    """The relations of these fields and of all below them."""
    for each in fields:
        if isinstance(each, Join | Aggregate):
            yield each.relation
        if isinstance(each, Join | Group):
            yield from relations_in(each.fields)
