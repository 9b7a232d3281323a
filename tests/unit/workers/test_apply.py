"""The apply worker, round by round, over a spool that is written by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.changes.batch import EventBatch
from penstock.changes.segment import segment_layout
from penstock.destinations.base import WriteHandle, WriteResult, completed
from penstock.errors import DestinationUnavailable, PenstockError, Retry, TakesLong, TasksFailed
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.source.lineage import Ancestry, Lineage
from penstock.spool import Readers, SpoolSettings, SpoolWriter
from penstock.spool.folder import SpoolFolder
from penstock.state import (
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    MemoryStore,
    Ready,
    RetryPolicy,
    SyncDone,
    TableSchemaVersion,
)
from penstock.state.transitions import LONGEST_RETRY_SECONDS
from penstock.workers import ApplyWorker, BatchSettings, Board, ErrorHold, Lifecycle, Outages, Recopy, SchemaChanges

LINEAGE = Lineage("7000000000000000001", 1, "postgres", "penstock")
START = Lsn(100)
TABLE, LATE = 1, 2


class Recording:
    """A destination that remembers batches: their boundaries, and tables."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, list[int]]] = []
        self.rows: dict[int, list[int]] = {}
        self.killers: set[int] = set()
        """Tables whose part kills the job."""
        self.error: PenstockError | None = None
        self.long: set[int] = set()
        """Tables that are only written alone, and then as soon as `may_end` is set."""
        self.may_end = threading.Event()

    def write_events(self, batch: EventBatch) -> WriteHandle:
        if batch.alone:
            assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        long = self.long & {table.table_id for table in batch.tables}
        if long and not batch.alone:
            batch = replace(batch, tables=tuple(each for each in batch.tables if each.table_id not in long))
            self.write_events(batch)
            return completed(WriteResult.failures({table_id: TakesLong("slow") for table_id in long}))
        if self.killers & {table.table_id for table in batch.tables}:
            raise TasksFailed("a Python worker was killed")
        self.batches.append((batch.begin, batch.end, sorted(table.table_id for table in batch.tables)))
        for table in batch.tables:
            for step in table.steps:
                for content in step.arrow() if hasattr(step, "arrow") else ():
                    self.rows.setdefault(table.table_id, []).extend(content["_commit_lsn"].to_pylist())
        return completed()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[SpoolWriter]:
    """Transactions that commit at 100, 108, 116 … and change both tables."""
    writer = SpoolWriter(SpoolSettings(tmp_path / "spool", min_free_bytes=0, position_interval=0.0))
    writer.begin_at(START, Ancestry(LINEAGE))
    yield writer
    writer.close()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore("test")
    made.acquire_lease()
    made.use_lineage(Ancestry(LINEAGE))
    for table in (TABLE, LATE):
        for phase in (Init(), DataSync(), FinishedCopy(), SyncDone(START), Ready()):
            made.update_table_replication_state(table, phase)
    yield made
    made.close()


def schema(table_id: int, *names: str) -> TableSchema:
    text = PostgresType(25, "text")
    columns = tuple(Column(name, number, text) for number, name in enumerate(names or ("a",), start=1))
    return TableSchema(table_id, "public", f"t{table_id}", columns)


def publish(spool: SpoolWriter, *commits: int) -> None:
    for commit in commits:
        for table in (schema(TABLE), schema(LATE)):
            layout = segment_layout(table)
            values = {"_op": 1, "_commit_lsn": commit, "_ordinal": 0, "_commit_time": 0, "_xid": 1, "a": "x"}
            content = pa.Table.from_pylist([values], schema=layout.arrow_schema)
            spool.write_rows(table, content, OrderKey(Lsn(commit), 0), OrderKey(Lsn(commit), 0))
        spool.publish(Lsn(commit + 8), transactions=1, commit_times=(1, 1))


def make_worker(
    tmp_path: Path,
    store: MemoryStore,
    board: Board,
    destination: Recording,
    try_tasks: Callable[[], None] = lambda: None,
    schema_changes: Callable[[int], SchemaChanges] = lambda _: SchemaChanges(),
    **limits: int,
) -> ApplyWorker:
    folder = tmp_path / "spool"
    Readers(SpoolFolder(folder)).register("tables", START)
    lifecycle = Lifecycle("tables")
    lifecycle.stop.set()
    # Already told to stop, it does one round each time that it is run.
    return ApplyWorker(
        name="tables",
        spool=folder,
        board=board,
        store=store,
        destination=destination,
        lifecycle=lifecycle,
        settings=BatchSettings(**limits),
        error_hold=ErrorHold(),
        try_tasks=try_tasks,
        schema_changes=schema_changes,
    )


def wait_for(look: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not look():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.01)


def test_a_table_that_is_a_little_behind_joins_the_batch_of_the_others(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    board.record_progress(Lsn(116), {TABLE: Lsn(116)})
    publish(spool, 100, 108, 116, 124)
    destination = Recording()
    worker = make_worker(tmp_path, store, board, destination)
    worker.run()
    assert destination.batches == [(100, 132, [TABLE, LATE])]
    # Each gets what it does not have.
    assert destination.rows == {TABLE: [116, 124], LATE: [100, 108, 116, 124]}
    assert board.positions() == {TABLE: 132, LATE: 132}
    publish(spool, 132)
    worker.run()
    assert destination.batches[1:] == [(132, 140, [TABLE, LATE])]
    assert store.get_replication_progress() == 140


def test_nobody_waits_for_a_table_that_is_far_behind(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    board.record_progress(Lsn(132), {TABLE: Lsn(132)})
    publish(spool, 100, 108, 116, 124, 132, 140)
    destination = Recording()
    worker = make_worker(tmp_path, store, board, destination, max_rows=4)
    worker.run()
    assert destination.batches == [(132, 148, [TABLE]), (100, 116, [LATE])]
    assert board.positions() == {TABLE: 148, LATE: 116}
    for _ in range(4):
        worker.run()
    assert destination.rows == {TABLE: [132, 140], LATE: [100, 108, 116, 124, 132, 140]}
    assert board.positions() == {TABLE: 148, LATE: 148}


def test_nobody_waits_for_a_table_that_takes_long(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100, 108)
    destination = Recording()
    destination.long = {LATE}
    worker = make_worker(tmp_path, store, board, destination)
    stop = worker._lifecycle.stop
    stop.clear()
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_for(lambda: destination.rows.get(TABLE) == [100, 108], "the other table")
    publish(spool, 116)
    wait_for(lambda: destination.rows.get(TABLE) == [100, 108, 116], "what came meanwhile")
    # The slow one keeps its phase and holds back progress, and no copy of it can begin.
    assert board.phases() == {TABLE: Ready(), LATE: Ready()}
    assert (board.positions()[LATE], destination.rows.get(LATE)) == (START, None)
    assert store.get_replication_progress() in (None, START)
    board.set_phase(LATE, Init())
    assert board.to_copy() == []
    board.set_phase(LATE, DataSync())
    board.set_phase(LATE, FinishedCopy())
    board.set_phase(LATE, SyncDone(START), position=START)
    destination.long = set()
    destination.may_end.set()
    wait_for(lambda: board.positions() == {TABLE: 124, LATE: 124}, "both tables")
    stop.set()
    thread.join(10)
    assert destination.rows == {TABLE: [100, 108, 116], LATE: [100, 108, 116]}
    assert store.get_replication_progress() == 124


@pytest.mark.parametrize("error", [DestinationUnavailable("no answer"), TasksFailed("a Python worker was killed")])
def test_a_table_that_fails_while_it_is_written_by_itself_is_tried_again(tmp_path, spool, store, error):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100, 108)
    destination = Recording()
    destination.long = {LATE}
    worker = make_worker(tmp_path, store, board, destination)
    stop = worker._lifecycle.stop
    stop.clear()
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_for(lambda: destination.rows.get(TABLE) == [100, 108], "the other table")
    destination.error = error
    destination.may_end.set()
    wait_for(lambda: not worker._solo.tables or isinstance(board.phase(LATE), Errored), "the failure")
    destination.error = None
    wait_for(lambda: board.positions().get(LATE) == 116, "the next try")
    stop.set()
    thread.join(10)
    assert destination.rows == {TABLE: [100, 108], LATE: [100, 108]}


def test_versions_of_schemas_that_no_position_needs_are_forgotten(tmp_path, spool, store):
    for key, names in ((50, "a"), (60, "ab"), (90, "abc"), (120, "abcd")):
        store.store_table_schema(TableSchemaVersion(OrderKey(Lsn(key), 0), schema(TABLE, *names)))
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    make_worker(tmp_path, store, board, Recording()).run()
    assert [version.snapshot_id.commit_lsn for version in store.get_table_schemas()] == [90, 120]


def test_a_destination_that_is_away_stops_no_table_and_progress_waits(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100, 108)
    destination = Recording()
    destination.error = DestinationUnavailable("no answer")
    worker = make_worker(tmp_path, store, board, destination)
    for _ in range(3):
        worker.run()
    assert board.phases() == {TABLE: Ready(), LATE: Ready()}
    assert (board.applied, board.positions()) == (START, {TABLE: START, LATE: START})
    assert store.get_replication_progress() is None
    destination.error = None
    worker.run()
    assert board.positions() == {TABLE: 116, LATE: 116}


def test_a_table_that_kills_the_job_stops_and_the_others_go_on(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100)
    destination = Recording()
    destination.killers = {LATE}
    worker = make_worker(tmp_path, store, board, destination)
    worker.run()
    # Once may be chance: an executor was lost, and the batch comes again.
    assert board.phases() == {TABLE: Ready(), LATE: Ready()}
    worker.run()
    stopped = board.phase(LATE)
    assert isinstance(stopped, Errored)
    assert (stopped.position, stopped.retry_policy.retry) == (START, Retry.TIMED)
    assert board.positions() == {TABLE: 108}
    # Tried again, it goes alone: others are not concerned.
    publish(spool, 108)
    board.roll_back([LATE])
    worker.run()
    assert isinstance(board.phase(LATE), Errored)
    assert board.positions() == {TABLE: 116}
    destination.killers = set()
    board.roll_back([LATE])
    for _ in range(3):
        worker.run()
    assert board.positions() == {TABLE: 116, LATE: 116}
    assert destination.rows == {TABLE: [100, 108], LATE: [100, 108]}


def test_while_no_task_runs_no_table_stops(tmp_path, spool, store):
    def nothing_runs() -> None:
        raise TasksFailed("Spark has no executor")

    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100)
    destination = Recording()
    destination.killers = {TABLE, LATE}
    worker = make_worker(tmp_path, store, board, destination, try_tasks=nothing_runs)
    for _ in range(5):
        worker.run()
    assert board.phases() == {TABLE: Ready(), LATE: Ready()}
    assert board.applied == START


def test_tables_that_kill_every_job_stop_if_tasks_run_and_progress_goes_on(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100)
    destination = Recording()
    destination.killers = {TABLE, LATE}
    worker = make_worker(tmp_path, store, board, destination)
    worker.run()
    assert all(isinstance(phase, Ready) for phase in board.phases().values())
    worker.run()
    assert all(isinstance(phase, Errored) for phase in board.phases().values())
    assert board.applied == 108


def test_the_store_knows_a_schema_before_the_destination_has_it(tmp_path, spool, store):
    class Looking(Recording):
        def write_events(self, batch: EventBatch) -> WriteHandle:
            self.known = {each: store.get_table_schema(each, OrderKey(batch.end, 0)) for each in (TABLE, LATE)}
            return super().write_events(batch)

    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100)
    destination = Looking()
    make_worker(tmp_path, store, board, destination).run()
    assert {each: known and known.schema for each, known in destination.known.items()} == {
        TABLE: schema(TABLE),
        LATE: schema(LATE),
    }


def test_a_schema_that_comes_back_after_a_copy_is_known_again(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    worker = make_worker(tmp_path, store, board, Recording())
    publish(spool, 100)
    worker.run()
    # The column was renamed, and the table copied again, without a change that capture would have seen.
    store.store_table_schema(TableSchemaVersion(OrderKey(Lsn(108), 0), schema(TABLE, "renamed")))
    publish(spool, 108)
    worker.run()
    known = store.get_table_schema(TABLE, OrderKey(Lsn(116), 0))
    assert known is not None
    assert known.schema == schema(TABLE)


def test_a_table_whose_transaction_fills_a_batch_and_kills_the_job_stops_and_the_others_go_on(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    table = schema(LATE)
    values = {"_op": 1, "_commit_lsn": 100, "_commit_time": 0, "_xid": 1, "a": "x"}
    rows = [values | {"_ordinal": number} for number in range(5)]
    content = pa.Table.from_pylist(rows, schema=segment_layout(table).arrow_schema)
    spool.write_rows(table, content, OrderKey(Lsn(100), 0), OrderKey(Lsn(100), 4))
    spool.publish(Lsn(108), transactions=1, commit_times=(1, 1))
    publish(spool, 108)
    destination = Recording()
    destination.killers = {LATE}
    worker = make_worker(tmp_path, store, board, destination, max_rows=4)
    for _ in range(6):
        worker.run()
    assert destination.rows == {TABLE: [108]}
    assert isinstance(board.phase(LATE), Errored)


def test_nobody_waits_for_a_table_that_is_far_behind_and_kills_the_job(tmp_path, spool, store):
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    board.record_progress(Lsn(132), {TABLE: Lsn(132)})
    publish(spool, 100, 108, 116, 124, 132, 140)
    destination = Recording()
    destination.killers = {LATE}
    worker = make_worker(tmp_path, store, board, destination, max_rows=4)
    for _ in range(6):
        worker.run()
    assert board.positions()[TABLE] == 148
    assert isinstance(board.phase(LATE), Errored)
    # Not the same rows in every round.
    assert destination.rows == {TABLE: [132, 140]}


def test_a_comparison_may_end_its_hold_at_any_moment(tmp_path, spool, store):
    class Released(ApplyWorker):
        """The limit is taken away by another thread, right after it was looked at."""

        looks = 0

        @property
        def limit(self):
            self.looks += 1
            return Lsn(108) if self.looks == 1 else None

        @limit.setter
        def limit(self, value):
            pass

    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100)
    worker = make_worker(tmp_path, store, board, Recording())
    worker.__class__ = Released
    worker.run()
    assert board.positions() == {TABLE: 108, LATE: 108}


@pytest.mark.parametrize(
    ("heals", "recopy", "phase"),
    [(True, Recopy.AUTOMATIC, "init"), (True, Recopy.STOP, "errored"), (False, Recopy.AUTOMATIC, "errored")],
)
def test_after_its_hold_a_table_whose_error_time_heals_is_copied_again_if_its_policy_allows_it(
    tmp_path, spool, store, heals, recopy, phase
):
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    later = datetime.now(UTC) + timedelta(seconds=LONGEST_RETRY_SECONDS / 2)
    policy = RetryPolicy(Retry.TIMED, later) if heals else RetryPolicy()
    store.update_table_replication_state(LATE, Errored("busy", None, policy, Ready(), long_ago, START))
    board = Board(store, START, {TABLE: START, LATE: START}.get)
    publish(spool, 100, 108)
    worker = make_worker(tmp_path, store, board, Recording(), schema_changes=lambda _: SchemaChanges(recopy=recopy))
    worker.run()
    found = store.get_table_replication_states()[LATE]
    assert found.name == phase
    assert found == Init("it held back progress for too long: busy") if phase == "init" else found.position_lost
    assert store.get_replication_progress() == 116, "it no longer holds back progress"


def test_an_outage_begins_with_the_first_failure_shows_from_the_second_on_and_ends_with_a_success() -> None:
    outages = Outages()
    before = time.time()
    outages.add(DestinationUnavailable("away", hint="Bring it back."))
    first = time.time()
    assert outages.current is None
    outages.add(DestinationUnavailable("still away", hint="Bring it back."))
    assert outages.current is not None
    assert (outages.current.reason, outages.current.hint) == ("still away", "Bring it back.")
    assert before <= outages.current.since <= first
    outages.end()
    assert outages.current is None
    outages.add(DestinationUnavailable("away again"))
    assert outages.current is None
