"""Changes of a publication, from two looks at it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.source.membership import Membership, PublicationOptions, RowVersion, changes_between

OLD = Membership(RowVersion(1, "10"), {7: frozenset({RowVersion(70, "11")}), 8: frozenset()}, {7: "a.b", 8: "a.c"})


def test_nothing_changed() -> None:
    assert not changes_between(OLD, OLD)


@pytest.mark.trap(18)
def test_added_removed_and_added_again_are_told_apart() -> None:
    new = Membership(OLD.publication, {7: frozenset({RowVersion(71, "12")}), 9: frozenset()}, {})
    change = changes_between(OLD, new)
    assert (change.added, change.removed, change.readded) == ({9}, {8}, {7})


@pytest.mark.trap(18)
def test_a_publication_made_anew_or_altered_leaves_a_possible_gap_in_every_table() -> None:
    for version in (RowVersion(2, "10"), RowVersion(1, "12")):
        change = changes_between(OLD, Membership(version, OLD.tables, OLD.names))
        assert change.readded == {7, 8}


OPTIONS = PublicationOptions(("delete", "insert"), True, False, "me")


@pytest.mark.parametrize(
    ("changed", "copied"),
    [
        ({"owner": "other"}, set()),
        ({"via_root": False}, set()),
        ({"generated_columns": True}, {8}),
        ({"operations": ("delete", "insert", "update")}, {7, 8}),
        ({}, {7, 8}),
    ],
)
def test_only_tables_whose_content_an_altered_option_changes_are_copied(changed, copied) -> None:
    before = replace(OLD, options=OPTIONS, generated=frozenset({8}))
    after = replace(before, publication=RowVersion(1, "12"), options=OPTIONS._replace(**changed))
    change = changes_between(before, after)
    assert change.readded | change.regenerated == copied
    # No longer published: the stream says so.
    if "generated_columns" in changed:
        assert not changes_between(after, replace(before, publication=RowVersion(1, "13")))
