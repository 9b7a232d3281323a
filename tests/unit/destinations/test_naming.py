"""Names at destinations: readable where possible, allowed always, never two tables with one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.naming import FOLDERS, IDENTIFIERS, Naming

NAMINGS = pytest.mark.parametrize("naming", [FOLDERS, IDENTIFIERS], ids=["folders", "identifiers"])
# Names that are near to each other, and some that are not; Postgres has no zero byte in a name, and no empty one.
PARTS = st.one_of(
    st.text(alphabet="aA_.-~/ 0", min_size=1, max_size=6),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63),
)


@pytest.mark.parametrize(
    ("namespace", "table", "folder", "identifier"),
    [
        ("public", "orders", "public/orders", "public__orders"),
        ("public", "order_items", "public/order_items", "public__order_items"),
        ("public", "User", "public/User", "public__user___6b55d381f2"),
        ("app", "size 1/2", "app/size_1_2--4e3e52805c", "app__size_1_2___fb4253d50f"),
    ],
)
def test_names_look_as_documented(namespace: str, table: str, folder: str, identifier: str) -> None:
    assert FOLDERS.name(namespace, table) == folder
    assert IDENTIFIERS.name(namespace, table) == identifier


@NAMINGS
@given(first=st.tuples(PARTS, PARTS), second=st.tuples(PARTS, PARTS))
def test_two_tables_never_get_one_name(naming: Naming, first: tuple[str, str], second: tuple[str, str]) -> None:
    if first != second:
        names = [naming.name(*each) for each in (first, second)]
        assert len(set(names if naming.case_sensitive else map(str.lower, names))) == 2


@given(name=st.tuples(PARTS, PARTS))
def test_names_are_allowed(name: tuple[str, str]) -> None:
    namespace, table = FOLDERS.name(*name).split("/")
    for part in (namespace, table):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", part)
        assert len(part) <= 120
    assert re.fullmatch(r"[a-z0-9][a-z0-9_]*", IDENTIFIERS.name(*name))
    assert len(IDENTIFIERS.name(*name)) <= 63


def test_long_names_are_cut_and_stay_different() -> None:
    names = {IDENTIFIERS.name("n" * 63, "t" * 62 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) == 63 for name in names)
