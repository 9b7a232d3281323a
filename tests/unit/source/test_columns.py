"""Which attribute a column of a RELATION message is, when the catalog may be newer than the message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.source import Attribute, CatalogTable, RelationColumn, build_schema, identify_columns

INT4, TEXT, BOOL = 23, 25, 16


def dropped(attnum: int) -> Attribute:
    return Attribute(attnum, f"........pg.dropped.{attnum}........", 0, dropped=True)


def sent(*columns: tuple[str, int]) -> list[RelationColumn]:
    return [RelationColumn(name, oid) for name, oid in columns]


def previous(*columns: tuple[str, int]) -> TableSchema:
    type_ = PostgresType(INT4, "int4")
    return TableSchema(1, "public", "t", tuple(Column(name, attnum, type_) for name, attnum in columns))


def test_names_that_match_give_the_catalogs_numbers() -> None:
    catalog = [Attribute(1, "id", INT4), dropped(2), Attribute(3, "a", TEXT), Attribute(4, "b", TEXT)]
    assert identify_columns(sent(("id", INT4), ("a", TEXT), ("b", TEXT)), catalog) == [1, 3, 4]


def test_a_column_list_leaves_gaps() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "hidden", TEXT), Attribute(3, "b", TEXT)]
    assert identify_columns(sent(("id", INT4), ("b", TEXT)), catalog) == [1, 3]


@pytest.mark.trap(15)
def test_a_column_dropped_and_added_again_has_its_new_number() -> None:
    catalog = [Attribute(1, "id", INT4), dropped(2), Attribute(3, "a", TEXT)]
    before = previous(("id", 1), ("a", 2))
    assert identify_columns(sent(("id", INT4), ("a", TEXT)), catalog, before) == [1, 3]


@pytest.mark.trap(15)
def test_a_message_from_before_the_drop_keeps_the_old_number_where_order_shows_it() -> None:
    catalog = [Attribute(1, "id", INT4), dropped(2), Attribute(3, "b", TEXT), Attribute(4, "a", TEXT)]
    assert identify_columns(sent(("id", INT4), ("a", TEXT), ("b", TEXT)), catalog) == [1, 2, 3]


@pytest.mark.trap(15)
def test_a_column_renamed_since_the_message_keeps_its_number() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "new_name", TEXT), Attribute(3, "c", TEXT)]
    assert identify_columns(sent(("id", INT4), ("old_name", TEXT), ("c", TEXT)), catalog) == [1, 2, 3]


def test_a_renamed_last_column_is_not_mistaken_for_one_added_later() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "new_name", TEXT), Attribute(3, "added", TEXT)]
    assert identify_columns(sent(("id", INT4), ("old_name", TEXT)), catalog) == [1, 2]


def test_types_decide_between_candidates_in_a_gap() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "x", BOOL), Attribute(3, "y", TEXT), Attribute(4, "z", TEXT)]
    assert identify_columns(sent(("id", INT4), ("old", TEXT), ("z", TEXT)), catalog) == [1, 3, 4]


def test_the_previous_schema_decides_what_names_and_types_cannot() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "x", TEXT), Attribute(3, "y", TEXT)]
    before = previous(("id", 1), ("old", 3))
    assert identify_columns(sent(("id", INT4), ("old", TEXT)), catalog, before) == [1, 3]


def test_generated_columns_are_the_last_choice() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "g", TEXT, generated="s"), Attribute(3, "y", TEXT)]
    assert identify_columns(sent(("id", INT4), ("old", TEXT)), catalog) == [1, 3]


def test_a_swap_of_names_keeps_the_order() -> None:
    catalog = [Attribute(1, "id", INT4), Attribute(2, "b", TEXT), Attribute(3, "a", TEXT)]
    assert identify_columns(sent(("id", INT4), ("a", TEXT), ("b", TEXT)), catalog) == [1, 2, 3]


def test_without_a_catalog_the_previous_numbers_are_kept_and_new_ones_follow() -> None:
    before = previous(("id", 1), ("a", 4))
    assert identify_columns(sent(("id", INT4), ("a", TEXT)), [], before) == [1, 4]
    assert identify_columns(sent(("id", INT4), ("a", TEXT), ("b", TEXT)), [], before) == [1, 4, 5]
    assert identify_columns(sent(("id", INT4), ("a", TEXT)), []) == [1, 2]


NAMES = st.sampled_from("abcdef")


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Attribute], list[RelationColumn], list[int]]:
    """A table, a message that describes it, and the table after a few renames, drops and additions."""
    names = draw(st.lists(NAMES, unique=True, min_size=1))
    table = [Attribute(number, name, INT4) for number, name in enumerate(names, start=1)]
    chosen = sorted(draw(st.sets(st.sampled_from(table), min_size=1)), key=lambda attribute: attribute.attnum)
    for _ in range(draw(st.integers(0, 4))):
        action = draw(st.sampled_from(["rename", "drop", "add"]))
        index = draw(st.integers(0, len(table) - 1))
        fresh = f"n{draw(st.integers(0, 9))}"
        if fresh in {attribute.name for attribute in table}:
            continue
        if action == "add":
            table.append(Attribute(len(table) + 1, fresh, INT4))
        elif not table[index].dropped:
            table[index] = dropped(index + 1) if action == "drop" else Attribute(index + 1, fresh, INT4)
    return table, [RelationColumn(a.name, a.type_oid) for a in chosen], [a.attnum for a in chosen]


@given(histories())
def test_numbers_always_rise_exist_and_keep_what_the_previous_schema_knew(
    history: tuple[list[Attribute], list[RelationColumn], list[int]],
) -> None:
    catalog, message, truth = history
    numbers = identify_columns(message, catalog)
    assert numbers == sorted(set(numbers))
    assert set(numbers) <= {attribute.attnum for attribute in catalog}
    known = previous(*zip([column.name for column in message], truth, strict=True))
    assert identify_columns(message, catalog, known) == truth


def test_a_schema_takes_names_and_types_from_the_message_and_the_key_from_the_catalog() -> None:
    catalog = CatalogTable(
        oid=7,
        namespace="s",
        name="renamed_since",
        kind="r",
        persistence="p",
        replica_identity=ReplicaIdentity.DEFAULT,
        identity_attnums=(3, 1),
        primary_key_attnums=(3, 1),
        is_partition=False,
        partition_parent_oid=None,
        partition_root_oid=None,
        attributes=(Attribute(1, "id", INT4), dropped(2), Attribute(3, "k", TEXT)),
    )
    types = {INT4: PostgresType(INT4, "int4")}
    columns = [RelationColumn("id", INT4, -1, True), RelationColumn("k", 99999, 8, True)]
    schema = build_schema(7, "s", "t", "d", columns, catalog, types)
    assert str(schema) == "s.t"
    assert [(c.attnum, c.primary_key_position, c.identity) for c in schema.columns] == [(1, 2, True), (3, 1, True)]
    assert schema.columns[0].type.name == "int4"
    assert schema.columns[1].type.oid == 99999
    assert schema.columns[1].type_modifier == 8
    again = build_schema(7, "s", "t", "d", columns, None, types, schema)
    assert again == schema
