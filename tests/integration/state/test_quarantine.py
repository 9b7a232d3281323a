"""Refused documents are kept, asked for again and forgotten: the same in both sorts of stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.documents.base import Rejection
from penstock.lsn import Lsn
from penstock.state.quarantine import Quarantine, open_quarantine
from tests.conftest import Database

Open = Callable[..., Quarantine]


@pytest.fixture(params=["sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """`open_store(owner)` opens the same store each time, as another process would."""
    opened: list[Quarantine] = []
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/state.db"
    else:
        url = request.getfixturevalue("database").dsn

    def make(owner: str = "shop:documents") -> Quarantine:
        opened.append(open_quarantine(url, owner))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def refused(index: str, id_: str, reason: str = "too long", body_hash: str = "aa") -> Rejection:
    return Rejection(index, id_, reason, body_hash)


def test_what_was_refused_survives_the_process(open_store: Open) -> None:
    open_store().add([refused("people", "1"), refused("people", "ü\n"), refused("books", "1")], Lsn(7))
    again = open_store()
    assert again.counts() == {"people": 2, "books": 1}
    [book] = again.entries("books")
    assert (book.index, book.id, book.reason, book.position) == ("books", "1", "too long", Lsn(7))
    assert (book.body_hash, book.attempts, book.wanted) == ("aa", 1, False)
    assert book.first_at == book.last_at
    assert book.first_at.utcoffset() is not None
    assert {(each.index, each.id) for each in again.entries()} == {("people", "1"), ("people", "ü\n"), ("books", "1")}


def test_the_last_refused_come_first(open_store: Open) -> None:
    store = open_store()
    for number in range(3):
        store.add([refused("people", str(number))], None)
    store.add([refused("people", "0")], None)
    assert [each.id for each in store.entries()] == ["0", "2", "1"]
    assert [each.id for each in store.entries(limit=2)] == ["0", "2"]


def test_a_document_that_is_refused_again_counts_its_attempts(open_store: Open) -> None:
    store = open_store()
    store.add([refused("people", "1")], None)
    store.add([refused("people", "1", "too short", "bb")], Lsn(9))
    [entry] = store.entries()
    assert (entry.reason, entry.body_hash, entry.position, entry.attempts) == ("too short", "bb", Lsn(9), 2)
    assert entry.first_at < entry.last_at


def test_one_that_is_refused_twice_in_a_batch_is_there_once(open_store: Open) -> None:
    store = open_store()
    store.add([refused("people", "1", "first"), refused("people", "1", "last")], None)
    [entry] = store.entries()
    assert (entry.reason, entry.attempts) == ("last", 1)


def test_what_is_wanted_again_stays_until_it_was_taken(open_store: Open) -> None:
    store, pipeline = open_store(), open_store()
    store.add([refused("people", each) for each in "123"], None)
    assert store.retry("people", ["3", "1", "never refused"]) == ["1", "3"]
    assert pipeline.wanted("people") == ["1", "3"]
    assert pipeline.wanted("books") == []
    pipeline.add([refused("people", "3")], Lsn(1))
    pipeline.drop("people", ["1"])
    assert pipeline.wanted("people") == [], "it was tried, and refused again"
    assert {each.id: each.attempts for each in store.entries()} == {"2": 1, "3": 2}
    assert store.retry("people") == ["2", "3"], "without ids, all"


def test_dropping(open_store: Open) -> None:
    store = open_store()
    store.add([refused("people", each) for each in "123"] + [refused("books", "1")], None)
    assert store.drop("people", ["2", "9"]) == 1
    assert store.drop("people", []) == 0
    assert store.counts() == {"people": 2, "books": 1}
    assert store.drop("people") == 2
    assert store.counts() == {"books": 1}


def test_pipelines_do_not_see_each_other(open_store: Open) -> None:
    one, two = open_store("one"), open_store("two")
    one.add([refused("people", "1")], None)
    assert two.counts() == {}
    assert two.drop("people") == 0
    assert two.retry("people") == []
    assert len(one.entries()) == 1


def test_many_are_added_at_once(open_store: Open) -> None:
    store = open_store()
    store.add([refused("people", str(number)) for number in range(20_000)], None)
    store.add([], None)
    assert store.counts() == {"people": 20_000}
    assert len(store.retry("people", [str(number) for number in range(10_000)])) == 10_000


def test_a_state_takes_over_the_quarantine_that_was_beside_it(database: Database) -> None:
    database.execute(
        "create schema penstock_documents;"
        "create table penstock_documents.quarantine (owner text, index_name text, id text, reason text, position int8,"
        " body_hash text, first_at timestamptz, last_at timestamptz, attempts int8, wanted bool);"
        "insert into penstock_documents.quarantine values"
        " ('shop', 'people', '1', 'too long', 4294967297, 'aa', now(), now(), 3, true),"
        " ('shop', 'people', '2', 'too long', null, 'aa', now(), now(), 1, false)"
    )
    with closing(open_quarantine(database.dsn, "shop")) as quarantine:
        found = {each.id: (each.position, each.attempts, each.wanted) for each in quarantine.entries()}
    assert found == {"1": (Lsn(4294967297), 3, True), "2": (None, 1, False)}
