"""Positions of one server are refused on another; after a failover they are valid up to where the standby took over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import LineageChanged, PositionAhead, QueryFailed, ServerUnavailable
from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry, Lineage, SystemIdentity, TimelineSwitch, parse_timeline_history

STORED = Lineage("7000", 2, "shop", "penstock")
PROMOTED = Ancestry(replace(STORED, timeline=3), (TimelineSwitch(1, Lsn(100)), TimelineSwitch(2, Lsn(500))))
pytestmark = pytest.mark.trap(10)


def test_a_position_beyond_the_servers_wal_is_refused() -> None:
    system = SystemIdentity("7000", 2, Lsn(1000), "shop")
    Ancestry(STORED).require(STORED, Lsn(1000))
    system.require_reached(Lsn(1000))
    with pytest.raises(PositionAhead, match="ahead of the server"):
        system.require_reached(Lsn(1001))


def test_a_standby_may_still_reach_a_position() -> None:
    system = SystemIdentity("7000", 2, Lsn(1000), "shop", is_standby=True)
    system.require_reached(Lsn(1000))
    with pytest.raises(ServerUnavailable, match="a standby that has replayed its WAL up to 0/3E8"):
        system.require_reached(Lsn(1001))


@pytest.mark.parametrize("change", [{"system_identifier": "8000"}, {"database": "other"}, {"slot": "other"}])
def test_another_system_database_or_slot_is_refused(change: dict[str, str]) -> None:
    other = Ancestry(replace(STORED, **change))
    with pytest.raises(LineageChanged):
        other.require(STORED, Lsn(1))
    assert not other.is_other_timeline(STORED)
    assert not other.follows(Ancestry(STORED))


@pytest.mark.parametrize(("timeline", "end"), [(1, 100), (2, 500)])
def test_every_earlier_timeline_counts_up_to_its_end(timeline: int, end: int) -> None:
    earlier = replace(STORED, timeline=timeline)
    PROMOTED.require(earlier, Lsn(end))
    assert PROMOTED.follows(Ancestry(earlier))
    assert not Ancestry(earlier).follows(PROMOTED)
    assert PROMOTED.ends[earlier.name] == end
    with pytest.raises(LineageChanged, match=str(Lsn(end))) as refused:
        PROMOTED.require(earlier, Lsn(end + 1))
    assert 'on_lost_slot = "recreate"' in str(refused.value.hint)


def test_a_timeline_that_is_no_ancestor_is_refused() -> None:
    with pytest.raises(LineageChanged):
        PROMOTED.require(replace(STORED, timeline=4), Lsn(1))
    with pytest.raises(LineageChanged):
        Ancestry(replace(STORED, timeline=1)).require(STORED, Lsn(1))


def test_history_files_are_read_with_comments_and_reasons() -> None:
    text = "1\t0/3000000\tno recovery target specified\n\n# a comment\n2\t1/0\tbefore 2000-01-01 00:00:00+00\n"
    assert parse_timeline_history(text) == (TimelineSwitch(1, Lsn(0x3000000)), TimelineSwitch(2, Lsn(1 << 32)))
    with pytest.raises(QueryFailed):
        parse_timeline_history("nonsense")
