"""What is behind an alias, as plain values."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.documents.mapping import IndexMapping
from penstock.errors import IndexUnusable
from penstock.sinks.opensearch.generations import describe, new_generation, paths_of, read_state

MAPPING = IndexMapping("people", "bb22", {}, {})


def found(
    number: int, fingerprint: str = "aa11", *aliases: str, seeded: bool = False, retired_at: float | None = None
) -> dict[str, Any]:
    name = f"people_{fingerprint}_{number}"
    meta = describe(
        "people",
        IndexMapping("people", fingerprint, {}, {}),
        seeded=f"id{number}" if seeded else None,
        retired_at=retired_at,
    )
    return {
        name: {
            "aliases": {key: {} for key in [f"{name}_WRITE", *aliases]},
            "mappings": {"_meta": meta},
            "settings": {"index": {"uuid": f"id{number}"}},
        }
    }


FOREIGN = {"aliases": {"people": {}}, "settings": {"index": {"uuid": "x"}}}


def test_nothing_is_there_at_first() -> None:
    state = read_state("people", {})
    assert (state.generations, state.serving, state.unserved, state.former) == ((), None, None, ())
    assert new_generation(state, MAPPING, 0.0) == "people_bb22_19700101000000"


def test_what_serves_is_behind_the_alias() -> None:
    state = read_state("people", found(2, "aa11", seeded=False) | found(1, "aa11", "people", seeded=True))
    assert [each.number for each in state.generations] == [1, 2]
    assert state.serving is state.find("people_aa11_1")
    assert state.filling("aa11") is state.find("people_aa11_2")
    assert state.filling("bb22") is None, "what was begun has another shape"
    assert state.unserved is None


def test_a_generation_that_is_complete_and_does_not_serve_is_found() -> None:
    state = read_state("people", found(1, "aa11", "people", seeded=True) | found(2, "bb22", seeded=True))
    assert state.unserved is state.find("people_bb22_2")
    gone = found(1, "aa11", seeded=True, retired_at=1.0) | found(2, "bb22", "people", seeded=True)
    assert read_state("people", gone).unserved is None
    assert [each.number for each in read_state("people", gone).former] == [1]


@pytest.mark.trap(47)
def test_what_was_restored_from_a_backup_is_not_complete() -> None:
    restored = found(1, "aa11", "people", seeded=True)
    restored["people_aa11_1"]["settings"]["index"]["uuid"] = "another"
    serving = read_state("people", restored).serving
    assert serving is not None
    assert not serving.seeded


def test_a_name_is_never_used_twice() -> None:
    state = read_state("people", found(20300101000000))
    assert new_generation(state, MAPPING, 0.0) == "people_bb22_20300101000001"


def test_indexes_with_similar_names_are_others() -> None:
    answer = found(1, "aa11", "people", seeded=True)
    other = {
        "people_archive_aa11_1": {
            "aliases": {},
            "mappings": {"_meta": describe("people_archive", IndexMapping("people_archive", "aa11", {}, {}))},
        }
    }
    mine = {"people_zz_7": {"aliases": {}, "mappings": {}, "settings": {"index": {"uuid": "y"}}}}
    assert len(read_state("people", answer | other | mine).generations) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"people": {"aliases": {}}}, "an index named 'people'"),
        ({"theirs": FOREIGN}, "'theirs', which is not an index of Penstock"),
        (found(1, "aa11", "people") | {"theirs": FOREIGN}, "'theirs', which is not"),
        (found(1, "aa11", "people") | found(2, "aa11", "people"), "several indexes: people_aa11_1, people_aa11_2"),
    ],
)
def test_what_is_not_ours_is_refused_with_a_remedy(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexUnusable, match=message) as caught:
        read_state("people", answer)
    assert caught.value.hint
    assert caught.value.index == "people"


def test_names_are_quoted_in_addresses() -> None:
    [path] = paths_of(["ä/b", "c"])
    assert path.startswith("/%C3%A4%2Fb,%C3%A4%2Fb_*,c,c_*?")
    assert list(paths_of([])) == []


def test_many_names_take_several_requests() -> None:
    names = [f"{'index' * 10}{number}" for number in range(300)]
    paths = list(paths_of(names))
    assert max(map(len, paths)) < 2_500, "a server reads 4 KB"
    asked = [name for path in paths for name in path[1:].partition("?")[0].split(",")]
    assert asked == [each for name in names for each in (name, f"{name}_*")]
