"""By which columns the rows of a partitioned table are found, from the identities of its root and its leaves."""

from __future__ import annotations

import pytest

from penstock.schema import ReplicaIdentity
from penstock.source.identity import Part, Partitions, RowIdentity, fingerprint, judge_identity, lacks
from penstock.source.membership import UNIDENTIFIED, Heap, Membership, RowVersion, changes_between

DEFAULT, INDEX, FULL, NOTHING = ReplicaIdentity
ID, DAY, OTHER = 1, 2, 3
NAMES = {ID: "id", DAY: "Day", OTHER: "other"}


def root(identity: ReplicaIdentity = DEFAULT, *key: int, chosen: tuple[int, ...] = (), by: int | None = DAY) -> Part:
    routed_by = None if by is None else frozenset({by})
    return Part(100, "public", "t", True, identity, key, frozenset(chosen), routed_by)


def leaf(number: int, identity: ReplicaIdentity = DEFAULT, *key: int, chosen: tuple[int, ...] = ()) -> Part:
    return Part(number, "public", f"Leaf {number}", False, identity, key, frozenset(chosen), has_primary_key=bool(key))


def judge(top: Part, *below: Part) -> RowIdentity:
    return judge_identity(Partitions(top, below, NAMES))


def test_without_leaves_the_root_says_it() -> None:
    assert judge(root(DEFAULT, ID, DAY)) == RowIdentity(DEFAULT, frozenset({ID, DAY}))
    assert judge(root(FULL)) == RowIdentity(FULL, frozenset())


@pytest.mark.parametrize("top", [root(), root(FULL), root(DEFAULT, ID, DAY), root(INDEX, chosen=(DAY, OTHER))])
def test_whole_rows_of_every_leaf_are_whole_rows(top: Part) -> None:
    assert judge(top, leaf(1, FULL), leaf(2, FULL)) == RowIdentity(FULL, frozenset())


@pytest.mark.parametrize(
    "leaves",
    [
        (leaf(1, DEFAULT, ID, DAY), leaf(2, DEFAULT, DAY, ID)),
        (leaf(1, DEFAULT, ID, DAY), leaf(2, FULL, ID, DAY)),
        (leaf(1, DEFAULT, ID, DAY), leaf(2, INDEX, ID, DAY, chosen=(ID, DAY, OTHER))),
    ],
)
@pytest.mark.parametrize(
    "top",
    [root(FULL, ID, DAY), root(DEFAULT, ID, DAY), root(NOTHING, ID, DAY), root(INDEX, ID, DAY, chosen=(DAY, ID))],
)
def test_the_key_of_the_root_counts_if_every_leaf_sends_it(top: Part, leaves: tuple[Part, ...]) -> None:
    judged = judge(top, *leaves)
    assert judged.problem is None
    assert judged.attnums == {ID, DAY}
    assert judged.kind is (INDEX if top.identity is INDEX else DEFAULT)


def test_the_primary_key_counts_where_the_chosen_index_does_not() -> None:
    top = root(INDEX, ID, DAY, chosen=(DAY, OTHER))
    assert judge(top, leaf(1, DEFAULT, ID, DAY), leaf(2, FULL)).attnums == {ID, DAY}


def test_a_key_of_all_leaves_counts_if_it_chooses_the_leaf() -> None:
    leaves = leaf(1, DEFAULT, ID, DAY), leaf(2, INDEX, chosen=(DAY, ID))
    assert judge(root(), *leaves) == RowIdentity(INDEX, frozenset({ID, DAY}))
    assert judge(root(FULL), *leaves) == RowIdentity(INDEX, frozenset({ID, DAY}))
    assert judge(root(by=OTHER), *leaves).problem is not None
    assert judge(root(by=None), *leaves).problem is not None
    between = Part(50, "public", "half", True, DEFAULT, (), frozenset(), frozenset({OTHER}))
    assert judge(root(), between, *leaves).problem is not None


def test_a_leaf_that_sends_nothing_is_ignored_and_gets_an_identity_that_fits() -> None:
    judged = judge(root(), leaf(1, DEFAULT, ID, DAY), leaf(2))
    assert judged.problem is None
    assert judged.statements == ('alter table public."Leaf 2" add primary key (id, "Day");',)
    assert judge(root(DEFAULT, ID, DAY), leaf(1, DEFAULT, ID, DAY), leaf(2, NOTHING, ID, DAY)).statements == (
        'alter table public."Leaf 2" replica identity default;',
    )
    assert judge(root(), leaf(1, FULL), leaf(2)).statements == ('alter table public."Leaf 2" replica identity full;',)
    assert len(judge(root(), leaf(1), leaf(2)).statements) == 2
    assert judge(root(), leaf(1, DEFAULT, ID, DAY), leaf(2, NOTHING, DAY, ID)).statements == (
        'alter table public."Leaf 2" replica identity default;',
    )
    # A table has one primary key.
    assert judge(root(), leaf(1, DEFAULT, ID, DAY), leaf(2, NOTHING, OTHER)).statements == (
        'alter table public."Leaf 1" replica identity full;',
        'alter table public."Leaf 2" replica identity full;',
    )


def test_a_difference_names_the_leaves_and_the_statements() -> None:
    judged = judge(root(DEFAULT, ID, DAY), leaf(1, DEFAULT, ID, DAY), leaf(2, INDEX, ID, DAY, chosen=(OTHER,)))
    assert judged.problem is not None
    assert (judged.kind, judged.attnums) == (NOTHING, frozenset())
    assert judged.problem.message == (
        "changes of public.t cannot be matched to its rows: the replica identity of public.Leaf 2 lacks columns of the "
        "table's key"
    )
    assert judged.problem.hint.endswith('Run: alter table public."Leaf 2" replica identity default;')


def test_the_remedy_of_many_leaves_is_one_statement() -> None:
    judged = judge(root(), *(leaf(number, DEFAULT, ID) for number in range(100)))
    assert judged.problem is not None
    assert "unique within a partition only" in judged.problem.message
    (statement,) = judged.statements
    assert "pg_partition_tree('public.t')" in statement
    assert len(judged.problem.hint) < 500


def test_what_old_rows_may_lack() -> None:
    key, wide = fingerprint(DEFAULT, frozenset({ID})), fingerprint(INDEX, frozenset({ID, 12}))
    full = fingerprint(FULL, frozenset())
    assert [lacks(key, each) for each in (key, wide, full)] == [False, True, True]
    assert [lacks(wide, each) for each in (key, wide, full)] == [False, False, True]
    assert not any(lacks(full, each) for each in (key, wide, full))
    assert [lacks(UNIDENTIFIED, each) for each in (key, full, UNIDENTIFIED)] == [True, True, False]
    assert not lacks(key, UNIDENTIFIED)


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({100: "d 1", 1: "d 1"}, {100: "d 1", 1: "d 1", 2: "f"}, False),
        ({100: "f", 1: "f"}, {100: "d 1", 1: "f", 2: "d 1"}, False),
        ({100: "d 1", 1: "d 1"}, {100: "f", 1: "f"}, True),
        ({100: "d 1", 1: "f", 2: "d 1"}, {100: "f", 1: "f"}, True),
        ({100: UNIDENTIFIED, 1: "i 3"}, {100: "d 1", 1: "d 1"}, True),
        ({100: "d 1", 1: "d 1"}, {100: UNIDENTIFIED, 1: "i 3"}, False),
        ({}, {100: "d 1", 1: "d 1"}, False),
    ],
)
def test_a_table_is_reidentified_if_captured_changes_may_lack_columns(
    before: dict[int, str], now: dict[int, str], changed: bool
) -> None:
    def membership(identities: dict[int, str]) -> Membership:
        heaps = frozenset(Heap(oid, identity) for oid, identity in identities.items())
        return Membership(RowVersion(1, "1"), {100: frozenset()}, {100: "public.t"}, {"public.t": heaps})

    change = changes_between(membership(before), membership(now))
    assert change.reidentified == ({100} if changed else frozenset())
    assert bool(change) is changed
    assert membership(now).is_unidentified(100) is (UNIDENTIFIED in now.values())
