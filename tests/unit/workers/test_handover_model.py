"""The protocol, explored to its end: nothing is lost or doubled, unless a rule is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.state import transitions
from tests.support import handover_model
from tests.support.handover_model import SCENARIOS, Rule, Scenario, explore

SMALL = {
    "hand-over": Scenario(("a", "", "a"), crashes=1),
    "two tables": Scenario(("a", "b"), crashes=0),
    "one transaction, two tables": Scenario(("ab",), crashes=1),
    "errors": Scenario(("a", "a"), crashes=1, errors=2),
    "errors and resyncs": Scenario(("a", "a"), crashes=1, errors=1, resyncs=1),
    "resync": Scenario(("a", "a"), crashes=2, resyncs=1),
    "removal": Scenario(("a", "a"), crashes=1, removals=1),
    "outputs": Scenario(("a",), outputs=2, crashes=1),
    "resumed copies": Scenario(("a", "a", "a"), crashes=1, resumes=True),
    "resumed copies and errors": Scenario(("a", "a"), crashes=1, errors=1, resumes=True),
}
"""Seconds each; the larger ones are `SCENARIOS`."""

TWO = Scenario(("a", "a"))
RESUMED = Scenario(("a", "a"), resumes=True)
LEFT_OUT = {
    (Rule.ACKNOWLEDGE_THROUGH_APPLY, Rule.CATCHUP_ABOVE_ACKNOWLEDGED): (TWO, "lost"),
    (Rule.MINIMUM,): (TWO, "lost"),
    (Rule.SKIP_RECORDED,): (TWO, "2 times"),
    (Rule.HOLD_BEFORE_SNAPSHOT,): (TWO, "spool was released"),
    (Rule.LOSE_BEFORE_PROGRESS,): (replace(TWO, errors=1), "lost"),
    (Rule.NO_WAY_BACK_OVER_A_GAP,): (replace(TWO, errors=1), "lost"),
    (Rule.COPY_READDED,): (replace(TWO, removals=1), "lost"),
    (Rule.REMEMBER_MEMBERSHIP,): (replace(TWO, removals=1), "lost"),
    (Rule.ONE_WORKER,): (replace(TWO, resyncs=1), "spool was released"),
    (Rule.SLOWEST_OUTPUT,): (Scenario(("a",), outputs=2), "lost"),
    (Rule.HOLD_WHILE_RESUMABLE, Rule.RESUME_ONLY_WITH_CHANGES): (RESUMED, "spool was released"),
    (Rule.REREAD_CHANGED,): (RESUMED, "lost"),
}


@pytest.mark.trap(3, 4, 5, 18, 23, 28, 33)
@pytest.mark.parametrize("scenario", SMALL.values(), ids=SMALL.keys())
def test_nothing_is_lost_or_doubled_whatever_the_order(scenario):
    explored = explore(scenario, limit=500_000)
    assert explored.finding is None, str(explored.finding)
    assert explored.complete, "the end is never reached"


@pytest.mark.trap(3, 4, 5, 18, 23, 28, 33)
@pytest.mark.parametrize("rules", LEFT_OUT, ids=lambda rules: " and ".join(rules))
def test_without_a_rule_rows_are_lost_or_doubled(rules):
    scenario, problem = LEFT_OUT[rules]
    finding = explore(replace(scenario, left_out=frozenset(rules)), limit=500_000).finding
    assert finding is not None, "the rule is not needed, or the model does not show what for"
    assert problem in finding.problem


@pytest.mark.trap(5, 23)
@pytest.mark.parametrize("rule", [Rule.ACKNOWLEDGE_THROUGH_APPLY, Rule.CATCHUP_ABOVE_ACKNOWLEDGED])
def test_either_of_two_rules_protects_the_hand_over(rule):
    assert explore(replace(TWO, left_out=frozenset({rule}))).finding is None


@pytest.mark.parametrize("rule", [Rule.HOLD_WHILE_RESUMABLE, Rule.RESUME_ONLY_WITH_CHANGES])
def test_either_of_two_rules_protects_a_resumed_copy(rule):
    """Without the hold, copies start again; without the check, the hold is enough."""
    assert explore(replace(RESUMED, left_out=frozenset({rule}))).finding is None


def test_every_rule_is_left_out_once():
    assert sorted(rule for rules in LEFT_OUT for rule in rules) == sorted(Rule)


def test_a_wrong_transition_of_the_product_is_found(monkeypatch):
    """The model calls the product's functions, so that a mistake in them is a finding here."""

    def hand_over(current, *, snapshot, applied, acknowledged):
        return transitions.hand_over(current, snapshot=snapshot, applied=snapshot, acknowledged=snapshot)

    monkeypatch.setattr(handover_model, "hand_over", hand_over)
    assert explore(TWO).finding is not None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_nothing_is_lost_or_doubled_in_larger_worlds(scenario):
    explored = explore(scenario)
    assert explored.finding is None, str(explored.finding)
    assert explored.complete
