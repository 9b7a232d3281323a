"""Records of batches: stages, operations, what is kept, and what is not."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from penstock.observe import batches
from penstock.observe.batches import BatchRecord, RecentBatches, current_batch, spanned
from penstock.observe.tally import Tally


def write(recent: RecentBatches, number: int, *tables: str) -> None:
    with recent.recorded("apply") as record:
        record.position = f"0/{number}"
        for table in tables:
            record.add_table(table, Counter(insert=number))


def test_a_batch_has_its_operations_and_its_stages() -> None:
    tally = Tally()
    with tally.batches.recorded("apply") as record:
        record.position = "0/1"
        with tally.timed("batch_seconds", "build"):
            pass
        with spanned("job"), spanned("job"):
            pass
        record.add_table("a", Counter(insert=2))
        record.add_table("a", Counter(insert=1, update=1))
        record.add_table("b", Counter(delete=1))
    [kept] = tally.batches.all()
    assert set(kept.stages) == {"build", "job"}
    assert kept.operations == Counter(insert=3, update=1, delete=1)
    assert kept.table_count == 2
    [(same, operations)] = tally.batches.of("a")
    assert same is kept
    assert operations == Counter(insert=3, update=1)


def test_a_block_inside_a_batch_is_a_part_of_it() -> None:
    recent = RecentBatches()
    with recent.recorded("apply") as outer, recent.recorded("copy") as inner:
        inner.position = "0/1"
        assert inner is outer
    assert [each.worker for each in recent.all()] == ["apply"]
    assert current_batch() is None


def test_a_round_without_changes_is_not_kept() -> None:
    recent = RecentBatches()
    with recent.recorded("apply"):
        pass
    assert recent.all() == []


def test_a_batch_that_fails_is_kept_with_the_class_of_its_error_alone() -> None:
    recent = RecentBatches()

    def fail() -> None:
        with recent.recorded("apply") as record:
            record.position = "0/1"
            raise ValueError("a cell")

    with pytest.raises(ValueError, match="a cell"):
        fail()
    assert recent.all()[0].error == "ValueError"


def test_only_the_last_ones_are_kept_of_tables_that_changed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "TABLES", 2)
    recent = RecentBatches()
    for number in range(batches.BATCHES + 5):
        write(recent, number, "busy")
    assert len(recent.all()) == batches.BATCHES
    last = batches.BATCHES + 4
    assert [each.position for each, _ in recent.of("busy")][:2] == [f"0/{last}", f"0/{last - 1}"]
    assert len(recent.of("busy")) == batches.TABLE_BATCHES
    write(recent, 1, "second")
    write(recent, 1, "busy")
    write(recent, 1, "third")
    assert recent.of("second") == []
    assert recent.of("busy")


def test_another_thread_has_another_batch() -> None:
    recent, seen = RecentBatches(), list[BatchRecord | None]()
    with recent.recorded("apply"):
        thread = threading.Thread(target=lambda: seen.append(current_batch()))
        thread.start()
        thread.join()
    assert seen == [None]
