"""Positions of one server are refused on another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import LineageChanged, PositionAhead, QueryFailed
from penstock.lsn import Lsn
from penstock.source.lineage import Lineage, TimelineSwitch, check_lineage, parse_timeline_history

STORED = Lineage("7000", 2, "shop", "penstock")
HISTORY = [TimelineSwitch(1, Lsn(100)), TimelineSwitch(2, Lsn(500))]
pytestmark = pytest.mark.trap(10)


def test_the_same_lineage_passes_up_to_the_servers_position() -> None:
    check_lineage(STORED, STORED, Lsn(1000), Lsn(1000))
    with pytest.raises(PositionAhead):
        check_lineage(STORED, STORED, Lsn(1001), Lsn(1000))


@pytest.mark.parametrize("change", [{"system_identifier": "8000"}, {"database": "other"}, {"slot": "other"}])
def test_another_system_database_or_slot_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LineageChanged):
        check_lineage(STORED, replace(STORED, **change), Lsn(1), Lsn(1000))


def test_a_failover_after_the_position_passes_and_one_before_it_does_not() -> None:
    promoted = replace(STORED, timeline=3)
    check_lineage(STORED, promoted, Lsn(500), Lsn(900), HISTORY)
    with pytest.raises(LineageChanged, match="0/1F4"):
        check_lineage(STORED, promoted, Lsn(501), Lsn(900), HISTORY)


def test_a_timeline_that_is_no_ancestor_is_refused() -> None:
    with pytest.raises(LineageChanged):
        check_lineage(replace(STORED, timeline=4), replace(STORED, timeline=3), Lsn(1), Lsn(900), HISTORY)
    with pytest.raises(LineageChanged):
        check_lineage(STORED, replace(STORED, timeline=1), Lsn(1), Lsn(900), [])


def test_history_files_are_read_with_comments_and_reasons() -> None:
    text = "1\t0/3000000\tno recovery target specified\n\n# a comment\n2\t1/0\tbefore 2000-01-01 00:00:00+00\n"
    assert parse_timeline_history(text) == [TimelineSwitch(1, Lsn(0x3000000)), TimelineSwitch(2, Lsn(1 << 32))]
    with pytest.raises(QueryFailed):
        parse_timeline_history("nonsense")
