"""Stores against a model of a few lines: whatever is done to them, in any order, they say the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import IllegalTransition, PenstockError
from penstock.lsn import Lsn, OrderKey, furthest
from penstock.source.lineage import Ancestry
from penstock.state import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    Store,
    StoredPhase,
    SyncDone,
    TableSchemaVersion,
)
from penstock.state.transitions import check_stored, lose_position, roll_back
from penstock.testing.stores import LINEAGE, failed, table_version

tables = st.integers(1, 3)
lsns = st.integers(1, 6).map(Lsn)
keys = st.builds(OrderKey, lsns, st.integers(0, 1))
phases = st.one_of(
    st.sampled_from([Init(), DataSync(), FinishedCopy(), Ready(), failed(DataSync()), failed(FinishedCopy())]),
    lsns.map(SyncDone),
    lsns.map(Catchup),
    lsns.map(lambda lsn: failed(Ready(), lsn)),
    lsns.map(lambda lsn: lose_position(failed(Ready(), lsn))),
)


class Model:
    """What a store remembers, without any of how."""

    def __init__(self) -> None:
        self.states: dict[int, StoredPhase] = {}
        self.history: dict[int, list[StoredPhase]] = {}
        self.progress: Lsn | None = None
        self.positions: dict[int, Lsn] = {}
        self.schemas: dict[int, dict[OrderKey, TableSchemaVersion]] = {}

    def update_table_replication_states(self, updates: Mapping[int, Any]) -> None:
        checked = {table: check_stored(self.states.get(table), phase) for table, phase in updates.items()}
        for table, phase in checked.items():
            self._set(table, phase)

    def rollback_table_replication_state(self, table: int) -> StoredPhase:
        if table not in self.states:
            raise IllegalTransition("not known")
        self._set(table, roll_back(self.states[table]))
        return self.states[table]

    def upsert_replication_progress(self, lsn: Lsn, *, table_positions: dict[int, Lsn]) -> Lsn:
        self.upsert_table_positions(table_positions)
        self.progress = lsn if self.progress is None else furthest(lsn, self.progress)
        return self.progress

    def delete_replication_progress(self) -> None:
        self.progress = None

    def upsert_table_positions(self, positions: dict[int, Lsn]) -> dict[int, Lsn]:
        for table, position in positions.items():
            self.positions[table] = furthest(position, self.positions.get(table, position))
        return {table: self.positions[table] for table in positions}

    def store_table_schema(self, version: TableSchemaVersion) -> TableSchemaVersion:
        self.schemas.setdefault(version.table_id, {})[version.snapshot_id] = version
        return version

    def prune_table_schemas(self, needed: dict[int, OrderKey]) -> int:
        gone = 0
        for table, oldest in needed.items():
            versions = self.schemas.get(table, {})
            kept = max((key for key in versions if key <= oldest), default=None)
            for key in [key for key in versions if kept is not None and key < kept]:
                del versions[key]
                gone += 1
        return gone

    def get_table_schema(self, table: int, key: OrderKey) -> TableSchemaVersion | None:
        versions = self.schemas.get(table, {})
        found = max((each for each in versions if each <= key), default=None)
        return None if found is None else versions[found]

    def clear_table_copy_state(self, table: int) -> None:
        for each in (self.positions, self.schemas):
            each.pop(table, None)

    def delete_table_pipeline_state(self, table: int) -> None:
        self.clear_table_copy_state(table)
        self.states.pop(table, None)
        self.history.pop(table, None)

    def reset_replication(self) -> None:
        for table in self.states:
            self._set(table, Init())
        self.progress = None
        self.positions.clear()

    def _set(self, table: int, phase: StoredPhase) -> None:
        if self.states.get(table) != phase:
            self.states[table] = phase
            self.history.setdefault(table, []).append(phase)


class StoreMachine(RuleBasedStateMachine):
    """Does the same to the model and to each store; `openers` is set by whoever runs it."""

    openers: Callable[[], list[Callable[[], Store]]]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.stores: list[Store] = []

    @initialize()
    def open(self) -> None:
        self.places = type(self).openers()
        self.stores = [_driving(place()) for place in self.places]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()

    def do(self, method: str, *arguments: Any, **options: Any) -> None:
        wanted = _outcome(self.model, method, arguments, options)
        for store in self.stores:
            assert _outcome(store, method, arguments, options) == wanted, store

    @rule(updates=st.dictionaries(tables, phases, min_size=1))
    def update(self, updates: dict[int, Any]) -> None:
        self.do("update_table_replication_states", updates)

    @rule(table=tables, lsn=lsns)
    def advance(self, table: int, lsn: Lsn) -> None:
        steps = {None: Init(), Init(): DataSync(), DataSync(): FinishedCopy(), FinishedCopy(): SyncDone(lsn)}
        current = self.model.states.get(table)
        self.do("update_table_replication_states", {table: steps.get(current, Ready())})

    @rule(table=tables, lsn=lsns)
    def break_down(self, table: int, lsn: Lsn) -> None:
        current = self.model.states.get(table)
        if current is not None:
            self.do("update_table_replication_states", {table: failed(current, lsn)})

    @rule(table=tables)
    def give_up(self, table: int) -> None:
        current = self.model.states.get(table)
        if isinstance(current, Errored) and current.position is not None:
            self.do("update_table_replication_states", {table: lose_position(current)})

    @rule(table=tables)
    def roll_back(self, table: int) -> None:
        self.do("rollback_table_replication_state", table)

    @rule(lsn=lsns, positions=st.dictionaries(tables, lsns))
    def advance_progress(self, lsn: Lsn, positions: dict[int, Lsn]) -> None:
        self.do("upsert_replication_progress", lsn, table_positions=positions)

    @rule()
    def delete_progress(self) -> None:
        self.do("delete_replication_progress")

    @rule(positions=st.dictionaries(tables, lsns))
    def advance_positions(self, positions: dict[int, Lsn]) -> None:
        self.do("upsert_table_positions", positions)

    @rule(table=tables, key=keys, columns=st.integers(1, 3))
    def store_schema(self, table: int, key: OrderKey, columns: int) -> None:
        self.do("store_table_schema", table_version(table, key.commit_lsn, key.ordinal, columns=columns))

    @rule(needed=st.dictionaries(tables, keys))
    def prune(self, needed: dict[int, OrderKey]) -> None:
        self.do("prune_table_schemas", needed)

    @rule(table=tables, key=keys)
    def look_up(self, table: int, key: OrderKey) -> None:
        self.do("get_table_schema", table, key)

    @rule(table=tables)
    def copy_again(self, table: int) -> None:
        self.do("clear_table_copy_state", table)

    @rule(table=tables)
    def leave(self, table: int) -> None:
        self.do("delete_table_pipeline_state", table)

    @rule()
    def lose_slot(self) -> None:
        self.do("reset_replication")

    @rule()
    def restart(self) -> None:
        for store in self.stores:
            store.close()
        self.stores = [_driving(place()) for place in self.places]

    @invariant()
    def all_say_the_same(self) -> None:
        model = self.model
        for store in self.stores:
            assert store.get_table_replication_states() == model.states
            assert store.get_table_positions() == model.positions
            versions = {(each.table_id, each.snapshot_id): each for each in store.get_table_schemas()}
            assert versions == {
                (table, key): version for table, found in model.schemas.items() for key, version in found.items()
            }
            for table in range(1, 4):
                history = [record.phase for record in store.get_table_replication_history(table)]
                assert history == model.history.get(table, [])[-50:]
            assert store.get_replication_progress() == model.progress

    @invariant()
    def no_table_is_ready_over_a_gap(self) -> None:
        for phases_of in self.model.history.values():
            for before, after in pairwise(phases_of):
                if isinstance(before, Errored) and before.position_lost:
                    assert isinstance(after, Init | Errored)


def _driving(store: Store) -> Store:
    store.acquire_lease()
    store.use_lineage(Ancestry(LINEAGE))
    return store


def _outcome(target: Any, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "returned", getattr(target, method)(*arguments, **options)
    except PenstockError as error:
        return "raised", type(error)
