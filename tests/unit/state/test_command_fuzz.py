"""Whatever another process or version wrote as a command, the one that runs the pipeline answers it and goes on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.state import CommandKind, CommandStatus, MemoryStore
from penstock.state.records import CommandRecord

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@st.composite
def records(draw: st.DrawFn) -> list[CommandRecord]:
    return [
        CommandRecord(
            number=number,
            token=f"{number}",
            kind=draw(st.sampled_from([each.value for each in CommandKind]) | st.text(max_size=5)),
            tables=draw(st.lists(st.text(max_size=5), max_size=2)),
            options=draw(st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2)),
            status=draw(st.sampled_from([each.value for each in CommandStatus]) | st.text(max_size=5)),
            reason=draw(st.none() | st.text(max_size=5)),
            requested_by=draw(st.text(max_size=5)),
            requested_at=NOW,
            answered_at=draw(st.none() | st.just(NOW)),
            epoch=draw(st.integers(10, 13)),
        )
        for number in range(1, draw(st.integers(1, 4)))
    ]


def a_record(**fields: Any) -> CommandRecord:
    known: dict[str, Any] = {
        "kind": "resync",
        "tables": [],
        "options": {},
        "status": "pending",
        "reason": None,
        "answered_at": None,
    }
    more: dict[str, Any] = {"number": 1, "token": "1", "requested_by": "", "requested_at": NOW, "epoch": 0}
    return CommandRecord(**(known | more | fields))


@given(records())
@example([a_record(status="postponed")])
@example([a_record(kind="explode")])
def test_any_command_is_taken_once_and_answered(written: list[CommandRecord]) -> None:
    store = MemoryStore("fuzz")
    store.acquire_lease(on_lost=lambda *_: None)
    store.database.run(lambda transaction: transaction.put(written))
    store.is_paused()
    for command in store.take_commands():
        assert not command.answered
        store.answer_command(command.number, CommandStatus.REFUSED, "no")
    assert store.take_commands() == []
    assert all(command.answered for command in store.get_commands())
    store.release_lease()
