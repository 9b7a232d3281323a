"""The wrapper that makes trouble: without orders it is as good as what it wraps, with orders exactly as bad."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.memory import MemoryDestination, MemoryTables
from penstock.errors import PenstockError
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract, ScriptedSource, make_context
from penstock.testing.destinations.contract import ITEMS, ORDERS
from penstock.testing.faults import FaultyDestination


class FaultyHarness:
    def __init__(self) -> None:
        self.storage = MemoryTables()

    def open(self) -> FaultyDestination:
        return FaultyDestination(MemoryDestination(self.storage))

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        try:
            return self.open().rows(str(schema))
        except KeyError:
            return None


class TestWithoutOrders(DestinationContract):
    @pytest.fixture
    def harness(self) -> FaultyHarness:
        return FaultyHarness()


@pytest.fixture
def faulty() -> FaultyDestination:
    destination = FaultyHarness().open()
    destination.startup(make_context())
    return destination


@pytest.fixture
def source(tmp_path: Path, faulty: FaultyDestination) -> ScriptedSource:
    source = ScriptedSource(tmp_path / "segments")
    for schema in (ORDERS, ITEMS):
        faulty.drop_table_for_copy(schema, "attempt-1")
        faulty.write_table_rows(schema, source.copy(schema, []))
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 1, "note": "x", "due": None})
        transaction.insert(ITEMS, {"id": 1, "note": "x", "due": None})
    return source


def test_one_table_is_rejected_until_it_is_accepted(faulty: FaultyDestination, source: ScriptedSource) -> None:
    faulty.reject("public.orders")
    batch = source.batch()
    result = faulty.write_events(batch).result()
    assert result.of(ORDERS.table_id).error is not None
    assert result.of(ITEMS.table_id).error is None
    assert faulty.rows("public.orders") == []
    assert len(faulty.rows("public.Order items")) == 1
    with pytest.raises(PenstockError, match="a test rejects"):
        faulty.write_table_rows(ORDERS, source.copy(ORDERS, []))
    faulty.accept("public.orders")
    assert faulty.write_events(batch).result().tables == {}
    assert len(faulty.rows("public.orders")) == 1


def test_a_rejection_can_be_over_after_some_times(faulty: FaultyDestination, source: ScriptedSource) -> None:
    faulty.reject("public.orders", times=1)
    assert faulty.write_events(source.batch()).result().of(ORDERS.table_id).error is not None
    assert faulty.write_events(source.batch()).result().of(ORDERS.table_id).error is None


def test_an_answer_can_be_lost(faulty: FaultyDestination, source: ScriptedSource) -> None:
    faulty.fail_after("write_events")
    with pytest.raises(PenstockError, match="loses the answer"):
        faulty.write_events(source.batch())
    assert len(faulty.rows("public.orders")) == 1
    assert faulty.write_events(source.batch()).result().tables == {}
    assert len(faulty.rows("public.orders")) == 1


def test_a_call_can_fail_before_anything_is_done(faulty: FaultyDestination, source: ScriptedSource) -> None:
    faulty.fail_before("write_events", ConnectionError("gone"), times=2)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            faulty.write_events(source.batch())
    assert faulty.rows("public.orders") == []
    faulty.write_events(source.batch())
    assert len(faulty.rows("public.orders")) == 1


def test_a_call_can_be_held(faulty: FaultyDestination, source: ScriptedSource) -> None:
    batch = source.batch()
    with faulty.hold("write_events") as hold:
        thread = threading.Thread(target=faulty.write_events, args=(batch,))
        thread.start()
        hold.wait_until_reached()
        assert faulty.rows("public.orders") == []
        hold.release()
        thread.join(30)
    assert len(faulty.rows("public.orders")) == 1
    assert faulty.calls[-1].batch == batch


def test_calls_can_be_waited_for_and_slowed(faulty: FaultyDestination, source: ScriptedSource) -> None:
    faulty.slow("write_events", 0.05)
    before = time.monotonic()
    faulty.write_events(source.batch())
    assert time.monotonic() - before >= 0.05
    faulty.wait_for(lambda calls: calls[-1].method == "write_events")
    with pytest.raises(TimeoutError):
        faulty.wait_for(lambda calls: len(calls) > 100, timeout=0.01)
