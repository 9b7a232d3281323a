"""Which folder a table gets: that of its name, never one with the rows of another table that stays there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from penstock.destinations.folders import RenameRules, RenameTable, TableFolders
from penstock.schema import TableSchema
from penstock.source.patterns import TableName

FOLLOW, KEEP = RenameTable.FOLLOW, RenameTable.KEEP


def folders(
    held: Mapping[int, str], names: Mapping[int, str], rules: RenameRules | None = None, keeping: Collection[int] = ()
) -> TableFolders:
    made = TableFolders(rules or RenameRules(), held.get)
    made.publish({table_id: TableName("public", name) for table_id, name in names.items()}, keeping)
    return made


def schema(table_id: int, name: str) -> TableSchema:
    return TableSchema(table_id, "public", name, ())


def test_a_table_that_was_never_copied_gets_the_folder_of_its_name() -> None:
    made = folders({}, {1: "a"})
    assert made.misplaced() == {}
    assert made.waits_for(1, [1]) is None
    assert made.take(schema(1, "a")) == "public/a"


def test_a_renamed_table_moves_and_the_next_one_waits_until_its_copy_is_complete() -> None:
    made = folders({1: "public/t"}, {1: "t_2025", 2: "t"})
    assert made.misplaced() == {1: ("public/t", "public/t_2025")}
    assert made.waits_for(1, [1, 2]) is None
    assert made.waits_for(2, [1, 2]) == 1
    assert made.take(schema(1, "t_2025")) == "public/t_2025"
    assert made.misplaced() == {}
    assert made.waits_for(2, [1, 2]) == 1
    made.finish([1])
    assert made.waits_for(2, [2]) is None
    assert made.take(schema(2, "t")) == "public/t"


def test_tables_in_a_circle_go_at_once_when_no_worker_writes_to_them() -> None:
    made = folders({1: "public/a", 2: "public/b", 3: "public/c"}, {1: "b", 2: "c", 3: "a", 4: "d"})
    assert made.misplaced().keys() == {1, 2, 3}
    assert made.waits_for(1, [1, 3]) == 2
    assert [made.waits_for(each, [1, 2, 3]) for each in (1, 2, 3)] == [None, None, None]
    assert [made.take(schema(each, name)) for each, name in ((1, "b"), (2, "c"), (3, "a"))] == [
        "public/b", "public/c", "public/a",
    ]  # fmt: skip
    made.finish([1, 2, 3])
    assert made.misplaced() == {}


def test_a_table_that_waits_for_a_circle_is_not_part_of_it() -> None:
    # 2 and 3 exchanged their names, and 1 got the name that 3 had in between.
    made = folders({2: "public/b", 3: "public/c"}, {1: "x", 2: "c", 3: "b"})
    assert made.waits_for(1, [1, 2, 3]) is None
    chained = folders({2: "public/b", 3: "public/c", 4: "public/d"}, {2: "c", 3: "b", 4: "e", 5: "d"})
    assert chained.waits_for(5, [2, 3, 4, 5]) == 4


def test_a_folder_that_is_kept_is_never_given_away() -> None:
    made = folders({1: "public/t"}, {1: "t_2025", 2: "t"}, RenameRules(KEEP))
    assert made.misplaced() == {}
    assert made.waits_for(2, [2]) is None
    assert made.take(schema(2, "t")) == "public/t--oid2"
    made.finish([2])
    assert made.misplaced() == {}
    # The table in it was dropped: the other one keeps its own folder, unless it follows its name.
    made.publish({2: TableName("public", "t")})
    assert made.misplaced() == {}
    followed = folders({2: "public/t--oid2"}, {2: "t"})
    assert followed.misplaced() == {2: ("public/t--oid2", "public/t")}


@pytest.mark.parametrize("name", ["public.t", "public.t_2025", "public.t*"])
def test_a_rule_of_a_table_is_found_by_its_name_and_by_that_of_its_folder(name: str) -> None:
    made = folders({1: "public/t", 2: "public/b"}, {1: "t_2025", 2: "c"}, RenameRules(FOLLOW, {name: KEEP}))
    assert made.misplaced() == {2: ("public/b", "public/c")}


def test_by_default_a_table_that_is_not_copied_again_unasked_stays() -> None:
    assert folders({1: "public/t", 2: "public/b"}, {1: "u", 2: "c"}, keeping=[1]).misplaced().keys() == {2}
    assert folders({1: "public/t"}, {1: "u"}, RenameRules(FOLLOW), keeping=[1]).misplaced().keys() == {1}


def test_a_table_that_left_gives_up_its_folder() -> None:
    made = folders({1: "public/t"}, {1: "t"})
    made.publish({2: TableName("public", "t")})
    assert made.waits_for(2, [2]) is None
    assert made.take(schema(2, "t")) == "public/t"


def test_a_name_that_was_not_published_yet_takes_no_folder_of_another_table() -> None:
    made = folders({1: "public/a", 2: "public/b"}, {1: "a", 2: "b"})
    assert made.take(schema(2, "a")) == "public/a--oid2"
    # The names are published now: the table goes where it belongs.
    made.publish({1: TableName("public", "b"), 2: TableName("public", "a")})
    assert made.misplaced() == {1: ("public/a", "public/b"), 2: ("public/a--oid2", "public/a")}


def test_a_schema_with_a_dot_in_its_name_has_one_folder() -> None:
    made = TableFolders(RenameRules(), {1: "a.b/c"}.get)
    made.publish({1: TableName("a.b", "c")})
    assert made.misplaced() == {}
