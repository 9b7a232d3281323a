"""The contract of stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from penstock.errors import IllegalTransition, LeaseHeld, LeaseLost, LineageChanged, StateError
from penstock.lsn import Lsn, OrderKey, reaches
from penstock.source.lineage import Ancestry, Lineage, TimelineSwitch
from penstock.source.membership import Heap, Membership, PublicationOptions, RowVersion
from penstock.state import (
    Catchup,
    CommandKind,
    CommandStatus,
    DataSync,
    FinishedCopy,
    IndexBuild,
    IndexStatus,
    Init,
    Ready,
    Store,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableSchemaVersion,
    WorkKind,
)
from penstock.state.transitions import lose_position
from penstock.testing.stores.samples import LINEAGE, PATIENCE, failed, refused, table_version


class StoreContract:
    """What every store does. A test opens several store objects, as a pipeline has several processes."""

    def open(self, pipeline_id: str = "contract") -> Store:
        """Return a new store object over the state of this test."""
        raise NotImplementedError

    def setup_method(self) -> None:
        self._opened: list[Store] = []

    def teardown_method(self) -> None:
        for store in self._opened:
            store.close()

    def reader(self, pipeline_id: str = "contract") -> Store:
        """Return a store without the lease; closed after the test."""
        store = self.open(pipeline_id)
        self._opened.append(store)
        return store

    def driver(self, pipeline_id: str = "contract") -> Store:
        """Return a store that holds the lease."""
        store = self.reader(pipeline_id)
        store.acquire_lease()
        store.use_lineage(Ancestry(LINEAGE))
        return store

    def restarted(self, store: Store) -> Store:
        """Close a store and return what the next process sees."""
        store.close()
        return self.driver(store.pipeline_id)

    def now_and_restarted(self, store: Store) -> Iterator[Store]:
        """Yield a store, and then what the next process sees."""
        yield store
        yield self.restarted(store)

    def test_it_is_a_pipeline_store(self) -> None:
        assert isinstance(self.reader(), Store)

    # Phases

    def test_a_table_goes_through_its_phases_and_survives_a_restart(self) -> None:
        store = self.driver()
        phases: list[StoredPhase] = [Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(0x16_B374D848)), Ready()]
        for phase in phases:
            store.update_table_replication_state(16384, phase)
            assert store.get_table_replication_state(16384) == phase
        again = self.restarted(store)
        assert again.load_table_replication_states() == 1
        assert again.get_table_replication_states() == {16384: Ready()}
        assert again.get_table_replication_state(1) is None

    def test_an_error_keeps_everything_that_is_known_about_it(self) -> None:
        store = self.driver()
        self._bring_to_ready(store, 1)
        errored = failed(Ready(), (1 << 64) - 1)
        store.update_table_replication_state(1, errored)
        assert self.restarted(store).get_table_replication_state(1) == errored

    def test_an_illegal_step_is_refused_and_changes_nothing(self) -> None:
        store = self.driver()
        store.update_table_replication_state(1, Init())
        for phase in (FinishedCopy(), SyncDone(Lsn(1)), Ready(), SyncWait(), Catchup(Lsn(1))):
            with refused(IllegalTransition):
                store.update_table_replication_state(1, phase)
        with refused(IllegalTransition):
            store.update_table_replication_state(2, DataSync())
        assert store.get_table_replication_states() == {1: Init()}
        assert len(store.get_table_replication_history(1)) == 1

    def test_several_tables_change_together_or_not_at_all(self) -> None:
        store = self.driver()
        store.update_table_replication_states({1: Init(), 2: Init(), 3: Init()})
        with refused(IllegalTransition):
            store.update_table_replication_states({1: DataSync(), 2: Ready(), 3: DataSync()})
        assert set(store.get_table_replication_states().values()) == {Init()}
        assert set(self.restarted(store).get_table_replication_states().values()) == {Init()}

    def test_setting_the_same_phase_again_changes_nothing(self) -> None:
        store = self.driver()
        store.update_table_replication_state(1, Init())
        store.update_table_replication_state(1, Init())
        assert [record.phase for record in store.get_table_replication_history(1)] == [Init()]

    def test_rollback_continues_where_the_table_stopped(self) -> None:
        store = self.driver()
        self._bring_to_ready(store, 1)
        store.update_table_replication_state(1, failed(Ready(), 77))
        assert store.rollback_table_replication_state(1) == SyncDone(Lsn(77))
        assert store.get_table_replication_state(1) == SyncDone(Lsn(77))
        with refused(IllegalTransition):
            store.rollback_table_replication_state(1)
        with refused(IllegalTransition):
            store.rollback_table_replication_state(99)

    def test_rollback_of_a_copy_starts_it_again(self) -> None:
        store = self.driver()
        for phase in (Init(), DataSync(), failed(DataSync())):
            store.update_table_replication_state(1, phase)
        assert store.rollback_table_replication_state(1) == Init()

    def test_rollback_over_a_gap_is_refused(self) -> None:
        store = self.driver()
        self._bring_to_ready(store, 1)
        held = failed(Ready(), 77)
        store.update_table_replication_state(1, held)
        store.update_table_replication_state(1, lose_position(held))
        with refused(IllegalTransition) as errors:
            store.rollback_table_replication_state(1)
        assert "resync" in errors[0].hint
        with refused(IllegalTransition):
            store.update_table_replication_state(1, held)
        store.update_table_replication_state(1, Init())

    def test_history_is_in_order_and_bounded(self) -> None:
        store = self.driver()
        for _ in range(60):
            store.update_table_replication_state(1, Init())
            store.update_table_replication_state(1, DataSync())
        history = store.get_table_replication_history(1)
        assert 20 <= len(history) <= 100
        assert history[-1].phase == DataSync()
        assert history[-2].phase == Init()
        assert [record.at for record in history] == sorted(record.at for record in history)
        assert history[-1].at.tzinfo is not None

    def test_what_a_reader_was_given_does_not_change_under_it(self) -> None:
        store = self.driver()
        store.update_table_replication_state(1, Init())
        seen = store.get_table_replication_states()
        store.update_table_replication_states({1: DataSync(), 2: Init()})
        assert seen == {1: Init()}

    # Positions

    def test_progress_never_moves_back(self) -> None:
        store = self.driver()
        assert store.get_replication_progress() is None
        assert [store.upsert_replication_progress(Lsn(lsn)) for lsn in (5, 3, 5, 9)] == [5, 5, 5, 9]
        again = self.restarted(store)
        assert again.get_replication_progress() == Lsn(9)
        assert isinstance(again.get_replication_progress(), Lsn)
        assert again.upsert_replication_progress(Lsn((1 << 64) - 1)) == (1 << 64) - 1
        assert self.restarted(again).get_replication_progress() == (1 << 64) - 1

    def test_progress_of_another_lineage_is_neither_returned_nor_overwritten(self) -> None:
        store = self.driver()
        store.upsert_replication_progress(Lsn(9), table_positions={1: Lsn(8)})
        store.use_lineage(Ancestry(Lineage("7000000000000000002", 1, "app", "penstock_slot")))
        assert store.get_replication_progress() is None
        assert store.get_table_position(1) is None
        assert store.get_table_positions() == {}
        with refused(LineageChanged):
            store.upsert_replication_progress(Lsn(99))
        with refused(LineageChanged):
            store.upsert_table_positions({1: Lsn(99)})
        stored = store.get_stored_progress()
        assert stored is not None
        assert (stored.position, stored.lineage) == (9, LINEAGE)
        store.delete_replication_progress()
        assert store.get_stored_progress() is None
        assert store.upsert_replication_progress(Lsn(3)) == 3

    def test_after_a_failover_positions_count_on_the_new_timeline(self) -> None:
        store = self.driver()
        store.upsert_replication_progress(Lsn(9), table_positions={1: Lsn(8), 2: Lsn(12)})
        promoted = replace(LINEAGE, timeline=3)
        history = (TimelineSwitch(LINEAGE.timeline, Lsn(9)), TimelineSwitch(2, Lsn(11)))
        store.use_lineage(Ancestry(promoted, history))
        assert store.get_replication_progress() == 9
        assert store.get_table_positions() == {1: 8}, "12 is after the end of its timeline"
        assert store.upsert_replication_progress(Lsn(15)) == 15
        with refused(LineageChanged):
            store.upsert_table_positions({2: Lsn(20)})
        again = self.restarted(store)
        again.use_lineage(Ancestry(promoted))
        assert again.get_replication_progress() == 15
        assert {each.lineage.timeline for each in again.get_stored_positions()} == {LINEAGE.timeline, 3}

    def test_positions_need_a_lineage(self) -> None:
        store = self.reader()
        store.acquire_lease()
        with refused(StateError):
            store.upsert_replication_progress(Lsn(1))

    def test_positions_of_tables_never_move_back_and_travel_with_progress(self) -> None:
        store = self.driver()
        assert store.upsert_table_positions({1: Lsn(5), 2: Lsn(6)}) == {1: 5, 2: 6}
        assert store.upsert_table_positions({1: Lsn(4), 2: Lsn(7)}) == {1: 5, 2: 7}
        store.upsert_replication_progress(Lsn(5), table_positions={1: Lsn(8), 3: Lsn(9)})
        again = self.restarted(store)
        assert again.get_table_positions() == {1: 8, 2: 7, 3: 9}
        assert again.get_table_position(4) is None

    def test_what_is_refused_half_way_leaves_nothing(self) -> None:
        store = self.driver()
        store.upsert_replication_progress(Lsn(9))
        store.use_lineage(Ancestry(Lineage("7000000000000000002", 1, "app", "penstock_slot")))
        with refused(LineageChanged):
            store.upsert_replication_progress(Lsn(99), table_positions={1: Lsn(99)})
        assert store.get_table_positions() == {}
        store.close()
        again = self.reader()
        again.use_lineage(Ancestry(Lineage("7000000000000000002", 1, "app", "penstock_slot")))
        assert again.get_table_positions() == {}

    # Schemas

    def test_the_newest_version_not_after_a_position_is_found(self) -> None:
        store = self.driver()
        versions = [table_version(1, 10), table_version(1, 20, 3, columns=3), table_version(1, 20, 7, columns=4)]
        for version in reversed(versions):
            assert store.store_table_schema(version) == version
        store.store_table_schema(table_version(2, 15))

        def check(store: Store) -> None:
            def found(commit_lsn: int, ordinal: int) -> TableSchemaVersion | None:
                return store.get_table_schema(1, OrderKey(Lsn(commit_lsn), ordinal))

            assert found(9, 99) is None
            assert found(10, 0) == found(20, 2) == versions[0]
            assert found(20, 3) == found(20, 6) == versions[1]
            assert found(20, 7) == found((1 << 64) - 1, 0) == versions[2]
            assert store.get_table_schema(3, OrderKey(Lsn(99), 0)) is None

        check(store)
        again = self.restarted(store)
        check(again)
        assert again.load_table_schemas() == 4
        assert len(again.get_table_schemas()) == 4

    def test_a_cache_that_has_only_some_versions_does_not_answer(self) -> None:
        first = self.driver()
        for version in (table_version(1, 10), table_version(1, 20, columns=3)):
            first.store_table_schema(version)
        again = self.restarted(first)
        # Nothing was loaded, so the version stored now must not be taken for the only one.
        again.store_table_schema(table_version(1, 30, columns=4))
        assert again.get_table_schema(1, OrderKey(Lsn(25), 0)) == table_version(1, 20, columns=3)
        assert again.get_table_schema(1, OrderKey(Lsn(10), 0)) == table_version(1, 10)

    def test_a_version_stored_again_replaces_itself(self) -> None:
        store = self.driver()
        store.store_table_schema(table_version(1, 10))
        store.store_table_schema(table_version(1, 10, columns=5))
        assert store.get_table_schemas() == [table_version(1, 10, columns=5)]
        assert self.restarted(store).get_table_schemas() == [table_version(1, 10, columns=5)]

    def test_pruning_keeps_what_is_still_needed(self) -> None:
        store = self.driver()
        for commit_lsn in (10, 20, 30, 40):
            store.store_table_schema(table_version(1, commit_lsn, columns=commit_lsn))
            store.store_table_schema(table_version(2, commit_lsn))
        keep = {1: OrderKey(Lsn(35), 0), 7: OrderKey(Lsn(1), 0)}
        assert store.prune_table_schemas(keep) == 2
        assert store.prune_table_schemas(keep) == 0
        assert store.prune_table_schemas({1: OrderKey(Lsn(5), 0)}) == 0
        for each in self.now_and_restarted(store):
            mine = [version for version in each.get_table_schemas() if version.table_id == 1]
            assert mine == [table_version(1, lsn, columns=lsn) for lsn in (30, 40)]
            assert each.get_table_schema(1, OrderKey(Lsn(35), 0)) == mine[0]
            assert len(each.get_table_schemas()) == 6

    # Forgetting

    def test_a_new_copy_forgets_all_but_the_phase(self) -> None:
        store = self.driver()
        self._fill(store, 1)
        self._fill(store, 2)
        store.clear_table_copy_state(1)
        store.clear_table_copy_state(1)
        for each in self.now_and_restarted(store):
            assert each.get_table_replication_states() == {1: Ready(), 2: Ready()}
            assert self._remembered(each, 1) == (None, None)
            assert None not in self._remembered(each, 2)
            assert each.get_replication_progress() == 50
            assert each.get_table_replication_history(1)

    def test_a_table_that_left_is_forgotten(self) -> None:
        store = self.driver()
        self._fill(store, 1)
        self._fill(store, 2)
        store.delete_table_pipeline_state(1)
        for each in self.now_and_restarted(store):
            assert each.get_table_replication_states() == {2: Ready()}
            assert self._remembered(each, 1) == (None, None)
            assert each.get_table_replication_history(1) == []

    def test_a_new_slot_resets_all_tables_and_all_positions_together(self) -> None:
        store = self.driver()
        self._fill(store, 1)
        self._fill(store, 2)
        store.reset_replication()
        for each in self.now_and_restarted(store):
            assert each.get_table_replication_states() == {1: Init(), 2: Init()}
            assert each.get_stored_progress() is None
            assert each.get_table_positions() == {}
            assert each.get_table_schema(1, OrderKey(Lsn(99), 0)) is not None

    def test_what_was_seen_of_a_publication_survives_a_restart(self) -> None:
        store = self.driver()
        assert store.get_publication_membership("p") is None
        rows = frozenset({RowVersion(7, "700"), RowVersion(8, "42")})
        for version in ("1", "2"):
            names = {1: "public.a", 2: "public.b"}
            heaps = {"public.a": frozenset({Heap(1, "d 1,2")}), "public.b": frozenset({Heap(3, "f"), Heap(4, "f")})}
            options = PublicationOptions(("insert", "update"), True, False, "me")
            seen = Membership(
                *(RowVersion(5, version), {1: rows, 2: frozenset()}, names, heaps),
                options=options,
                generated=frozenset({1}),
            )
            store.store_publication_membership("p", seen)
            assert store.get_publication_membership("p") == self.reader().get_publication_membership("p") == seen
        assert store.get_publication_membership("another") is None
        store.delete_pipeline_state()
        assert store.get_publication_membership("p") is None

    def test_changed_cells_are_counted_until_the_next_copy(self) -> None:
        store = self.driver()
        store.add_changed_cells({1: 2, 2: 3})
        store.add_changed_cells({1: 5, 3: 0})
        assert store.get_changed_cells() == self.reader().get_changed_cells() == {1: 7, 2: 3}
        store.clear_table_copy_state(1)
        assert store.get_changed_cells() == {2: 3}

    def test_teardown_forgets_everything_but_the_epoch(self) -> None:
        store = self.driver()
        self._fill(store, 1)
        store.add_command(CommandKind.PAUSE)
        store.delete_pipeline_state()
        assert store.get_table_replication_states() == {}
        assert store.get_table_schemas() == []
        assert store.get_commands() == []
        epoch = store.get_lease()
        assert epoch is not None
        store.release_lease()
        assert store.acquire_lease().epoch == epoch.epoch + 1

    def test_pipelines_in_one_place_do_not_see_each_other(self) -> None:
        first, second = self.driver("first"), self.driver("second")
        self._fill(first, 1)
        first.add_command(CommandKind.PAUSE)
        second.reset_replication()
        second.delete_table_pipeline_state(1)
        second.delete_pipeline_state()
        assert second.get_table_replication_states() == {}
        assert second.get_commands() == []
        assert None not in self._remembered(self.restarted(first), 1)

    # Lease

    def test_a_second_driver_is_refused_and_told_who_drives(self) -> None:
        first, second = self.driver(), self.reader()
        lease = first.get_lease()
        assert lease is not None
        with refused(LeaseHeld) as errors:
            second.acquire_lease()
        assert (errors[0].host, errors[0].pid, errors[0].since) == (lease.host, lease.pid, lease.since)
        assert str(lease.pid) in errors[0].message
        with refused(LeaseHeld):
            first.acquire_lease()
        first.release_lease()
        first.release_lease()
        assert second.get_lease() is None
        assert second.acquire_lease().epoch == lease.epoch + 1

    def test_without_the_lease_nothing_is_written(self) -> None:
        store = self.reader()
        store.use_lineage(Ancestry(LINEAGE))
        writes: list[Callable[[], object]] = [
            lambda: store.update_table_replication_state(1, Init()),
            lambda: store.rollback_table_replication_state(1),
            lambda: store.upsert_replication_progress(Lsn(1)),
            lambda: store.delete_replication_progress(),
            lambda: store.upsert_table_positions({1: Lsn(1)}),
            lambda: store.store_table_schema(table_version(1, 1)),
            lambda: store.prune_table_schemas({}),
            lambda: store.clear_table_copy_state(1),
            lambda: store.delete_table_pipeline_state(1),
            lambda: store.reset_replication(),
            lambda: store.delete_pipeline_state(),
            lambda: store.take_commands(),
        ]
        for write in writes:
            with refused(LeaseLost):
                write()
        store.acquire_lease()
        store.release_lease()
        for write in writes:
            with refused(LeaseLost):
                write()

    def test_who_lost_the_lease_is_fenced_off_and_notices(self) -> None:
        slept, noticed = self.reader(), threading.Event()
        slept.acquire_lease(ttl=1.0, on_lost=lambda _: noticed.set())
        new = self.reader()
        new.acquire_lease(take_over=True)
        new.update_table_replication_state(1, Init())
        with refused(LeaseLost):
            slept.update_table_replication_state(1, DataSync())
        assert noticed.wait(PATIENCE)
        assert new.get_table_replication_state(1) == Init()
        with refused(LeaseLost):
            slept.update_table_replication_state(1, DataSync())

    def test_a_new_driver_sees_what_the_one_before_wrote(self) -> None:
        first, second = self.driver(), self.reader()
        assert second.get_table_replication_states() == {}
        self._bring_to_ready(first, 1)
        first.release_lease()
        second.acquire_lease()
        assert second.get_table_replication_states() == {1: Ready()}

    def test_a_lease_is_renewed_while_its_holder_lives(self) -> None:
        store = self.reader()
        lease = store.acquire_lease(ttl=0.6)
        before = store.get_lease()
        assert before is not None

        def renewed() -> bool:
            now = store.get_lease()
            return now is not None and now.expires > before.expires and now.epoch == before.epoch

        self._wait(renewed)
        lease.check()
        assert not lease.lost

    # Commands

    def test_commands_are_added_by_anybody_and_taken_once_by_the_driver(self) -> None:
        asker, driver = self.reader(), self.driver()
        first = asker.add_command(CommandKind.RESYNC, ["public.orders"], options={"wait": True})
        second = asker.add_command(CommandKind.PAUSE, requested_by="ops")
        assert first.number < second.number
        taken = driver.take_commands()
        assert [command.kind for command in taken] == [CommandKind.RESYNC, CommandKind.PAUSE]
        assert (taken[0].tables, taken[0].options) == (("public.orders",), {"wait": True})
        assert driver.take_commands() == []
        driver.answer_command(first.number, CommandStatus.DONE)
        driver.answer_command(second.number, CommandStatus.REFUSED, "not now")
        driver.answer_command(second.number, CommandStatus.DONE)
        answers = [(command.status, command.reason) for command in asker.get_commands()]
        assert answers == [(CommandStatus.DONE, None), (CommandStatus.REFUSED, "not now")]
        answer = asker.get_command(second.number)
        assert answer is not None
        assert answer.answered
        assert answer.requested_by == "ops"
        assert asker.get_command(99) is None

    def test_commands_wait_while_no_pipeline_runs(self) -> None:
        asker = self.reader()
        number = asker.add_command(CommandKind.REFRESH).number
        assert [command.number for command in self.driver().take_commands()] == [number]

    def test_a_command_whose_driver_died_is_taken_again(self) -> None:
        store = self.driver()
        number = store.add_command(CommandKind.ROLLBACK, ["public.orders"]).number
        assert [command.number for command in store.take_commands()] == [number]
        assert [command.number for command in self.restarted(store).take_commands()] == [number]

    def test_answered_commands_are_bounded(self) -> None:
        store = self.driver()
        for _ in range(210):
            store.answer_command(store.add_command(CommandKind.VERIFY).number, CommandStatus.DONE)
        numbers = [command.number for command in store.get_commands()]
        assert 100 <= len(numbers) <= 205
        assert numbers[-1] == 210

    # Search indexes

    def test_builds_of_indexes_survive_a_restart_range_by_range(self) -> None:
        store = self.driver()
        build = IndexBuild("people", "one", "f00", IndexStatus.FILLING, "new", {"ranges": [[1, 2, None]]})
        store.store_index_build(build)
        store.finish_index_ranges("people", "one", {0: 10, 2: 0})
        store.finish_index_ranges("people", "another", {1: 5})
        store.add_index_work("people", WorkKind.REMOVAL, [{"ids": ["1", "ä"]}], changed=7)
        store.add_index_work("people", WorkKind.FAN_OUT, [{"values": [["x"]]}, {"values": [["y"]]}])
        for each in self.now_and_restarted(store):
            assert each.get_index_builds() == {"people": replace(build, changed=7)}
            assert each.get_index_ranges("people", "one") == {0: 10, 2: 0}
            assert [work.details for work in each.get_index_work("people", WorkKind.REMOVAL)] == [{"ids": ["1", "ä"]}]
            assert [work.details["values"][0][0] for work in each.get_index_work("people", WorkKind.FAN_OUT)] == [
                "x",
                "y",
            ]

    def test_another_build_of_an_index_forgets_the_one_before(self) -> None:
        store = self.driver()
        store.store_index_build(IndexBuild("people", "one", "f00", IndexStatus.FILLING))
        store.finish_index_ranges("people", "one", {0: 10})
        store.add_index_work("people", WorkKind.REMOVAL, [{}])
        store.add_index_work("people", WorkKind.FAN_OUT, [{}, {}])
        store.store_index_build(IndexBuild("people", "one", "f00", IndexStatus.SEEDED))
        assert store.get_index_ranges("people", "one") == {0: 10}
        store.store_index_build(IndexBuild("people", "two", "f00", IndexStatus.WANTED))
        assert store.get_index_ranges("people", "one") == store.get_index_ranges("people", "two") == {}
        assert store.get_index_work("people", WorkKind.REMOVAL) == []
        first, second = store.get_index_work("people", WorkKind.FAN_OUT)
        store.delete_index_work("people", [first.number])
        assert store.get_index_work("people", WorkKind.FAN_OUT) == [second]
        store.delete_index("people")
        assert store.get_index_builds() == {}
        assert store.get_index_work("people", WorkKind.FAN_OUT) == []

    # Threads

    def test_threads_write_at_once(self) -> None:
        store = self.driver()

        def work(worker: int) -> None:
            for step in range(10):
                position = Lsn(step * 8 + worker)
                assert reaches(store.upsert_replication_progress(position), position)
                store.update_table_replication_state(worker, Init())
                store.update_table_replication_state(worker, DataSync())
                store.store_table_schema(table_version(worker, step))
                assert store.get_table_replication_state(worker) == DataSync()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        for each in self.now_and_restarted(store):
            assert each.get_replication_progress() == 75
            assert each.get_table_replication_states() == dict.fromkeys(range(4), DataSync())
            assert len(each.get_table_schemas()) == 40

    def _bring_to_ready(self, store: Store, table_id: int) -> None:
        for phase in (Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(5)), Ready()):
            store.update_table_replication_state(table_id, phase)

    def _fill(self, store: Store, table_id: int) -> None:
        self._bring_to_ready(store, table_id)
        store.store_table_schema(table_version(table_id, 10))
        store.upsert_replication_progress(Lsn(50), table_positions={table_id: Lsn(60)})

    def _remembered(self, store: Store, table_id: int) -> tuple[object, ...]:
        return (
            store.get_table_schema(table_id, OrderKey(Lsn(99), 0)),
            store.get_table_position(table_id),
        )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "timed out waiting for the condition"
            time.sleep(0.01)
