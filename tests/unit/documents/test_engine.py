"""The engine's loop: what is flushed when, what is confirmed when, and what happens when something fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.documents.base import (
    BackfillScope,
    BatchPolicy,
    BatchStatistics,
    Change,
    ChangeCapture,
    DocumentBuilder,
    FailurePolicies,
    FailurePolicy,
    FlushReport,
    NoopObserver,
    Rejection,
    SnapshotTable,
)
from penstock.documents.build import BUILT
from penstock.documents.engine import DEFAULT_QUEUE_CAPACITY, ChangeQueue, Engine
from penstock.documents.images import Changes, RowChanges
from penstock.documents.mapping import IndexMapping
from penstock.documents.resolve import Resolution, ResolvedKeys
from penstock.documents.sinks import MemorySink, TeeSink
from penstock.errors import DocumentsRejected, QueryFailed
from penstock.source.patterns import TableName

TABLE = TableName("public", "users")
PASSED = ["build one a", "flush caught_up=False", "flush caught_up=True", "remember"]
"""What happens to a batch with one document: its chunk is durable, then all of the batch is."""


@dataclass
class Journal:
    """What happened, in its order."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)


@dataclass
class JournalAck:
    journal: Journal
    name: str

    def confirm(self) -> None:
        self.journal.add(f"ack {self.name}")


def piece(journal: Journal, name: str, rows: int = 1, *, truncated: bool = False) -> Change:
    """`rows` changes that concern the document `name`."""
    ordinals = np.arange(rows, dtype=np.int64)
    changed = RowChanges(TableName("public", name), np.ones(rows, np.int8), ordinals, ordinals, {}, {})
    gone = frozenset({TABLE}) if truncated else frozenset[TableName]()
    return Change(Changes((changed,), gone), JournalAck(journal, name))


class ListedCapture(ChangeCapture):
    """Gives what it was told to, and then ends."""

    def __init__(self, journal: Journal, live: Sequence[Any], snapshot: Sequence[Any] = ()) -> None:
        self.journal = journal
        self._live = live
        self._snapshot = snapshot

    def prepare(self) -> None:
        self.journal.add("prepare")

    def live(self) -> Iterator[Change]:
        yield from _listed(self._live)

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        self.journal.add(f"snapshot {', '.join(str(each.table) for each in tables)}")
        yield from _listed(self._snapshot)


def _listed(changes: Sequence[Any]) -> Iterator[Change]:
    for each in changes:
        if isinstance(each, Exception):
            raise each
        yield each


class NamedDocuments(DocumentBuilder):
    """A change of the table `a` concerns the document `a` of every index."""

    def __init__(self, journal: Journal, indexes: Sequence[str] = ("one",)) -> None:
        self.journal = journal
        self.indexes = indexes

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        names = list(dict.fromkeys(rows.table.name for rows in changes.rows))
        wanted = [each for each in self.indexes if scope is None or each in scope]
        found = [ResolvedKeys(index, (names,)) for index in wanted]
        return Resolution(iter(found), frozenset(wanted) if changes.truncated else frozenset())

    def build(self, keys: ResolvedKeys) -> pa.Table:
        rows = [{"id": each, "version": 1, "body": f'{{"id": "{each}"}}'} for each in keys.keys[0]]
        self.journal.add(f"build {keys.index} {','.join(keys.keys[0])}")
        return pa.Table.from_pylist(rows, BUILT)

    def remember(self, resolution: Resolution) -> None:
        self.journal.add("remember")

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        yield ResolvedKeys(index, (["left"],))

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        return [BackfillScope(each, SnapshotTable(TABLE, ("id",))) for each in self.indexes]

    def index_mappings(self) -> Sequence[IndexMapping]:
        return [IndexMapping(each, "f", {}, {}) for each in self.indexes]


class JournalSink(MemorySink):
    """A memory sink that says what it is asked, and refuses what it is told to."""

    def __init__(self, journal: Journal, refused: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.journal = journal
        self.refused = refused
        self.failing = False

    def flush(self, caught_up: bool) -> FlushReport:
        if self.failing:
            raise ConnectionError("the server is gone")
        written = {(row["index"], row["id"]) for batch in self._waiting for row in batch.to_pylist()}
        super().flush(caught_up)
        self.journal.add(f"flush caught_up={caught_up}")
        return FlushReport(tuple(Rejection(*each, "bad value") for each in self.refused if each in written))

    def mark_seeded(self, index: str) -> None:
        super().mark_seeded(index)
        self.journal.add(f"seeded {index}")


class JournalObserver(NoopObserver):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.statistics: list[BatchStatistics] = []

    def on_indexes_ensured(self, count: int) -> None:
        self.heard.append(f"ensured {count}")

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        self.heard.append(f"backfill {','.join(indexes)}")

    def on_index_seeded(self, index: str) -> None:
        self.heard.append(f"seeded {index}")

    def on_backfill_completed(self) -> None:
        self.heard.append("backfilled")

    def on_live_started(self) -> None:
        self.heard.append("live")

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        self.statistics.append(statistics)

    def on_document_quarantined(self, rejection: Rejection) -> None:
        self.heard.append(f"quarantined {rejection.index} {rejection.id}")

    def on_error(self, message: str) -> None:
        self.heard.append(f"error {message}")


def engine(
    journal: Journal, live: Sequence[Any], *, sink: Any = None, indexes: Sequence[str] = ("one",), **options: Any
):
    sink = sink or JournalSink(journal)
    snapshot = options.pop("snapshot", ())
    options.setdefault("skip_backfill", True)
    options.setdefault("batch", BatchPolicy(max_changes=256, max_delay=5))
    return Engine(ListedCapture(journal, live, snapshot), NamedDocuments(journal, indexes), sink, **options)


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.mark.trap(4)
def test_nothing_is_confirmed_before_it_is_flushed_and_remembered(journal: Journal) -> None:
    engine(journal, [piece(journal, "a"), piece(journal, "b")]).run()
    written = ["build one a,b", "flush caught_up=False"]
    assert journal.lines == ["prepare", *written, "flush caught_up=True", "remember", "ack b", "ack a"]


def test_a_batch_ends_at_its_number_of_changes(journal: Journal) -> None:
    pieces = [piece(journal, name) for name in "abcde"]
    engine(journal, pieces, batch=BatchPolicy(max_changes=2, max_delay=5)).run()
    assert [line for line in journal.lines if line.startswith("build")] == [
        "build one a,b",
        "build one c,d",
        "build one e",
    ]


def test_a_batch_ends_at_its_delay(journal: Journal) -> None:
    """The second change comes when the first is confirmed: a batch that waited for it would never end."""
    confirmed = threading.Event()

    class Told(JournalAck):
        def confirm(self) -> None:
            super().confirm()
            confirmed.set()

    class Waiting(ListedCapture):
        def live(self) -> Iterator[Change]:
            yield Change(piece(journal, "a").changes, Told(journal, "a"))
            assert confirmed.wait(30)
            yield piece(journal, "b")

    policy = BatchPolicy(max_changes=256, max_delay=0.01)
    Engine(Waiting(journal, []), NamedDocuments(journal), JournalSink(journal), skip_backfill=True, batch=policy).run()
    assert [line for line in journal.lines if line.startswith(("build", "ack"))] == [
        "build one a",
        "ack a",
        "build one b",
        "ack b",
    ]


def test_a_transaction_is_never_divided(journal: Journal) -> None:
    engine(journal, [piece(journal, "a", rows=1000)], batch=BatchPolicy(max_changes=10, max_delay=5)).run()
    assert journal.lines == ["prepare", *PASSED, "ack a"]


def test_several_changes_of_a_document_are_one_build(journal: Journal) -> None:
    engine(journal, [piece(journal, "a"), piece(journal, "a")]).run()
    assert [line for line in journal.lines if line.startswith("build")] == ["build one a"]


@pytest.mark.trap(47)
def test_indexes_that_are_not_seeded_are_seeded_first_and_only_they(journal: Journal) -> None:
    sink = JournalSink(journal)
    first = engine(journal, [], sink=sink, indexes=["one"], skip_backfill=False, snapshot=[piece(journal, "s")])
    first.run()
    assert sink.documents("one") == {"s": {"id": "s"}}
    journal.lines.clear()
    observer = JournalObserver()
    second = engine(
        journal,
        [piece(journal, "l")],
        sink=sink,
        indexes=["one", "two"],
        skip_backfill=False,
        snapshot=[piece(journal, "t")],
        observer=observer,
    )
    second.run()
    assert observer.heard == ["ensured 2", "backfill two", "seeded two", "backfilled", "live"]
    assert sink.documents("one") == {"s": {"id": "s"}, "l": {"id": "l"}}
    assert sink.documents("two") == {"t": {"id": "t"}, "l": {"id": "l"}}
    assert journal.lines.index("prepare") < journal.lines.index("snapshot public.users")


@pytest.mark.trap(47)
def test_seeding_that_was_interrupted_begins_anew(journal: Journal) -> None:
    sink = JournalSink(journal)
    interrupted = [piece(journal, "a"), piece(journal, "b"), ConnectionError("the server is gone")]
    with pytest.raises(ConnectionError):
        engine(journal, [], sink=sink, skip_backfill=False, snapshot=interrupted, batch=BatchPolicy(1, 5)).run()
    assert "build one b" in journal.lines
    engine(journal, [], sink=sink, skip_backfill=False, snapshot=[piece(journal, "b")]).run()
    assert set(sink.documents("one")) == {"b"}, "a went meanwhile"


def test_seeding_can_be_skipped(journal: Journal) -> None:
    observer = JournalObserver()
    engine(journal, [], skip_backfill=True, snapshot=[piece(journal, "s")], observer=observer).run()
    assert not any(line.startswith("snapshot") for line in journal.lines)
    assert observer.heard == ["ensured 1", "backfilled", "live"]


def test_what_was_not_filled_serves_as_it_is_and_does_not_count_as_filled(journal: Journal) -> None:
    sink = JournalSink(journal)
    engine(journal, [piece(journal, "a")], sink=sink, skip_backfill=True).run()
    assert set(sink.documents("one")) == {"a"}
    assert not sink.is_seeded("one")
    engine(journal, [], sink=sink, skip_backfill=False, snapshot=[piece(journal, "s")]).run()
    assert set(sink.documents("one")) == {"s"}
    assert sink.is_seeded("one")


def test_a_source_that_does_not_resume_fills_all_indexes_again(journal: Journal) -> None:
    sink = JournalSink(journal)
    engine(journal, [], sink=sink, skip_backfill=False, snapshot=[piece(journal, "a")]).run()
    assert sink.is_seeded("one")

    class Lost(ListedCapture):
        def resumes(self) -> bool:
            return False

        def prepare(self) -> None:
            assert not sink.is_seeded("one"), "before there is a position"
            super().prepare()

    Engine(Lost(journal, [], [piece(journal, "b")]), NamedDocuments(journal), sink).run()
    assert set(sink.documents("one")) == {"b"}


def test_the_lag_of_the_source_is_sampled(journal: Journal) -> None:
    heard = threading.Event()

    class Lagging(ListedCapture):
        def live(self) -> Iterator[Change]:
            assert heard.wait(30)
            return iter(())

        def lag(self) -> int | None:
            return 42

    class Listening(JournalObserver):
        def on_slot_lag(self, lag: int) -> None:
            self.heard.append(f"lag {lag}")
            heard.set()

    observer = Listening()
    source = Lagging(journal, [])
    Engine(
        source, NamedDocuments(journal), MemorySink(), skip_backfill=True, observer=observer, lag_interval=0.01
    ).run()
    assert "lag 42" in observer.heard


def test_a_capture_that_only_follows_has_no_snapshot_and_no_lag(journal: Journal) -> None:
    class Following(ChangeCapture):
        def live(self) -> Iterator[Change]:
            yield piece(journal, "a")

    capture, sink = Following(), JournalSink(journal)
    assert (list(capture.snapshot([SnapshotTable(TABLE, ("id",))])), capture.lag()) == ([], None)
    Engine(capture, NamedDocuments(journal), sink).run()
    assert sink.is_seeded("one"), "an empty snapshot is one, too"
    assert set(sink.documents("one")) == {"a"}


def test_an_error_at_the_start_is_told_once(journal: Journal) -> None:
    class Away(JournalSink):
        def ensure_index(self, mapping: IndexMapping) -> None:
            raise ConnectionError("the server is gone")

    observer = JournalObserver()
    with pytest.raises(ConnectionError):
        engine(journal, [], sink=Away(journal), observer=observer).run()
    assert observer.heard == ["error the server is gone"]


def test_a_run_is_logged_with_its_settings(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.documents.engine")
    engine(journal, [], queue_capacity=7, batch=BatchPolicy(3, 0.5)).run()
    first, last = caplog.messages[0], caplog.messages[-1]
    assert first == "engine started skip_backfill=True queue_capacity=7 max_changes=3 max_delay=0.5s"
    assert last.startswith("engine ended seconds=")


def test_the_queue_can_be_another_one(journal: Journal) -> None:
    made: list[int] = []

    class Counted(ChangeQueue):
        def __init__(self, capacity: int) -> None:
            made.append(capacity)
            super().__init__(capacity)

    engine(journal, [piece(journal, "a")], queue=Counted, queue_capacity=7).run()
    assert made == [7]
    assert "ack a" in journal.lines


def test_a_document_that_cannot_be_built_is_rejected_alone(journal: Journal) -> None:
    class Failing(NamedDocuments):
        def build(self, keys: ResolvedKeys) -> pa.Table:
            if "b" in keys.keys[0]:
                raise QueryFailed("a value does not fit its type", sqlstate="22003")
            return super().build(keys)

    pieces = [piece(journal, name) for name in "abc"]
    sink, observer = JournalSink(journal), JournalObserver()
    policies = FailurePolicies(FailurePolicy.SKIP)
    options: dict[str, Any] = {"skip_backfill": True, "observer": observer, "batch": BatchPolicy(256, 5)}
    Engine(ListedCapture(journal, pieces), Failing(journal), sink, failure_policies=policies, **options).run()
    assert set(sink.documents("one")) == {"a", "c"}
    assert "quarantined one b" in observer.heard
    with pytest.raises(DocumentsRejected, match="cannot be built"):
        Engine(ListedCapture(journal, pieces), Failing(journal), sink, **options).run()


def test_the_observer_hears_of_each_batch(journal: Journal) -> None:
    observer = JournalObserver()
    engine(journal, [piece(journal, "a", rows=3), piece(journal, "b")], indexes=["one", "two"], observer=observer).run()
    (statistics,) = observer.statistics
    assert (statistics.changes, dict(statistics.documents)) == (4, {"one": 2, "two": 2})
    assert statistics.flush_seconds >= 0


def test_a_failed_flush_confirms_nothing_and_the_batch_comes_again(journal: Journal) -> None:
    sink = JournalSink(journal)
    sink.failing = True
    observer = JournalObserver()
    with pytest.raises(ConnectionError):
        engine(journal, [piece(journal, "a")], sink=sink, observer=observer).run()
    assert not any(line.startswith(("ack", "remember")) for line in journal.lines)
    assert observer.heard[-1] == "error the server is gone"
    sink.failing = False
    engine(journal, [piece(journal, "a")], sink=sink).run()
    sink.mark_seeded("one")
    assert sink.documents("one") == {"a": {"id": "a"}}
    assert journal.lines[-2] == "ack a"


def test_an_error_of_the_source_ends_the_run_after_what_came_before(journal: Journal) -> None:
    with pytest.raises(ValueError, match="broken"):
        engine(journal, [piece(journal, "a"), ValueError("broken")], batch=BatchPolicy(1, 5)).run()
    assert journal.lines[-1] == "ack a"


@pytest.mark.trap(46)
def test_under_stop_a_refused_document_leaves_the_batch_unconfirmed(journal: Journal) -> None:
    sink = JournalSink(journal, [("one", "a")])
    observer = JournalObserver()
    with pytest.raises(DocumentsRejected, match=r"1 document was rejected; the first, of index 'one': bad value"):
        engine(journal, [piece(journal, "a"), piece(journal, "b")], sink=sink, observer=observer).run()
    assert not any(line.startswith("ack") for line in journal.lines)
    assert not any(line.startswith("quarantined") for line in observer.heard)


@pytest.mark.trap(46)
def test_under_skip_it_is_set_aside_and_the_rest_is_confirmed(journal: Journal) -> None:
    sink = JournalSink(journal, [("one", "a")])
    observer = JournalObserver()
    policies = FailurePolicies(FailurePolicy.SKIP)
    pieces = [piece(journal, "a"), piece(journal, "b")]
    engine(journal, pieces, sink=sink, observer=observer, failure_policies=policies).run()
    assert journal.lines[-2:] == ["ack b", "ack a"]
    assert observer.heard[-1] == "quarantined one a"


@pytest.mark.trap(46)
def test_the_policy_of_an_index_beats_the_one_for_all(journal: Journal) -> None:
    sink = JournalSink(journal, [("one", "a"), ("two", "a")])
    observer = JournalObserver()
    policies = FailurePolicies(FailurePolicy.SKIP, {"two": FailurePolicy.STOP})
    run = engine(
        journal, [piece(journal, "a")], sink=sink, indexes=["one", "two"], observer=observer, failure_policies=policies
    )
    with pytest.raises(DocumentsRejected, match="of index 'two'"):
        run.run()
    assert not any(line.startswith("quarantined") for line in observer.heard), "decided before anything is said"


def test_an_emptied_table_rebuilds_the_index_beside_the_old_one(journal: Journal) -> None:
    sink = JournalSink(journal)
    engine(journal, [], sink=sink, skip_backfill=False, snapshot=[piece(journal, "old")]).run()
    engine(journal, [piece(journal, "a", truncated=True)], sink=sink).run()
    assert set(sink.documents("one")) == {"a", "left"}
    assert journal.lines[-3:] == ["flush caught_up=True", "remember", "ack a"]


def test_settings_have_their_defaults_and_their_bounds(journal: Journal) -> None:
    plain = Engine(ListedCapture(journal, []), NamedDocuments(journal), JournalSink(journal))
    assert plain.queue_capacity == DEFAULT_QUEUE_CAPACITY == 1024
    assert plain.batch == BatchPolicy(max_changes=256, max_delay=0.05)
    assert not plain.skip_backfill
    assert plain.failure_policies.of("any") is FailurePolicy.STOP
    clamped = engine(journal, [], queue_capacity=0, batch=BatchPolicy(0, -1))
    assert (clamped.queue_capacity, clamped.batch) == (1, BatchPolicy(1, 0))


# The queue


def received(queue: ChangeQueue) -> Change:
    change = queue.receive()
    assert change is not None
    return change


def test_a_full_queue_makes_capture_wait(journal: Journal) -> None:
    queue = ChangeQueue(2)
    assert queue.publish(piece(journal, "a", rows=2))
    published = threading.Event()

    def publish() -> None:
        queue.publish(piece(journal, "b"))
        published.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert not published.wait(0.05)
    assert received(queue).changes.rows[0].table.name == "a"
    assert published.wait(10)
    thread.join()
    assert received(queue).changes.rows[0].table.name == "b"
    assert queue.receive(0) is None
    assert queue.is_empty
    assert not queue.is_finished


def test_a_piece_larger_than_the_queue_passes_alone(journal: Journal) -> None:
    queue = ChangeQueue(1)
    assert queue.publish(piece(journal, "a", rows=50))
    assert received(queue).count == 50


def test_a_closed_queue_frees_whoever_waits(journal: Journal) -> None:
    queue = ChangeQueue(1)
    queue.publish(piece(journal, "a"))
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(queue.publish(piece(journal, "b"))))
    thread.start()
    queue.close()
    thread.join(10)
    assert results == [False]
    assert queue.receive() is not None
    assert queue.receive() is None
    assert queue.is_finished


def test_a_fan_out_forwards_everything(journal: Journal) -> None:
    sinks = [JournalSink(journal, [("one", "a")]), JournalSink(journal)]
    fan_out = TeeSink(sinks)
    policies = FailurePolicies(FailurePolicy.SKIP)
    observer = JournalObserver()
    run = engine(
        journal,
        [piece(journal, "b", truncated=True)],
        sink=fan_out,
        skip_backfill=False,
        snapshot=[piece(journal, "a")],
        failure_policies=policies,
        observer=observer,
    )
    run.run()
    assert observer.heard.count("quarantined one a") == 1
    assert fan_out.is_seeded("one")
    assert set(sinks[0].documents("one")) == set(sinks[1].documents("one")) == {"b", "left"}
    sinks[1].reindex(IndexMapping("one", "f", {}, {}))
    assert not fan_out.is_seeded("one")
