"""What of a changed schema a Delta table can follow, and what it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.changes.segment import segment_layout
from penstock.destinations.delta.layout import Mode, TableLayout, new_layout
from penstock.errors import TableRejected
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema

INT4, JSON, JSONB, VARCHAR = (
    PostgresType(23, "int4"),
    PostgresType(114, "json"),
    PostgresType(3802, "jsonb"),
    PostgresType(1043, "varchar"),
)
KEYLESS = TableSchema(
    7,
    "public",
    "t",
    (Column("id", 1, INT4, identity=True), Column("doc", 2, JSON, identity=True), Column("name", 3, VARCHAR, 14)),
    ReplicaIdentity.FULL,
)


def with_key(schema: TableSchema) -> TableSchema:
    first, *others = schema.columns
    return replace(schema, columns=(replace(first, primary_key_position=1), *others))


def with_column(schema: TableSchema, number: int, column: Column) -> TableSchema:
    columns = list(schema.columns)
    columns[number] = column
    return replace(schema, columns=tuple(columns))


def evolve(before: TableSchema, after: TableSchema) -> TableLayout:
    layout = new_layout(before, Mode.MIRROR, segment_layout(before).arrow_schema)
    return layout.evolved(after, segment_layout(after).arrow_schema)


def test_rows_that_were_told_apart_by_all_their_cells_do_not_get_a_key() -> None:
    with pytest.raises(TableRejected, match="its key changed"):
        evolve(KEYLESS, with_key(KEYLESS))
    only_inserts = replace(KEYLESS, replica_identity=ReplicaIdentity.NOTHING)
    assert evolve(only_inserts, with_key(KEYLESS)).key == ["id"]


def test_a_type_that_rewrites_values_is_refused_also_where_it_looks_the_same() -> None:
    after = with_column(KEYLESS, 1, replace(KEYLESS.columns[1], type=JSONB))
    with pytest.raises(TableRejected, match="type of column 'doc' changed"):
        evolve(KEYLESS, after)


def test_a_text_may_become_longer_and_not_shorter() -> None:
    name = KEYLESS.columns[2]
    assert evolve(KEYLESS, with_column(KEYLESS, 2, replace(name, type_modifier=24)))
    with pytest.raises(TableRejected, match="type of column 'name' changed"):
        evolve(KEYLESS, with_column(KEYLESS, 2, replace(name, type_modifier=10)))
