"""Apply is held for one comparison at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.lsn import Lsn, furthest
from penstock.state import CommandKind, CommandStatus, MemoryStore
from penstock.workers import Lifecycle
from penstock.workers.apply_hold import PATIENCE_SECONDS, ApplyHold


class Site:
    """Apply, which is where it is told to go, and comparisons that ask."""

    def __init__(self) -> None:
        self.store = MemoryStore("hold")
        self.store.acquire_lease()
        self.apply = SimpleNamespace(limit=None)
        self.board = SimpleNamespace(applied=Lsn(100), positions=dict, phases=dict)
        self.now = 0.0
        apply: Any = self.apply
        board: Any = self.board
        self.lifecycle = Lifecycle("hold")
        self.hold = ApplyHold(
            *(apply, board, self.store, self.lifecycle),
            server_position=lambda: Lsn(self.board.applied + 10),
            name_of=str,
            clock=lambda: self.now,
        )

    def ask(self, asker: str, step: str, **options: str) -> CommandStatus:
        command = self.store.add_command(CommandKind.VERIFY, options={"step": step, "asker": asker, **options})
        self.hold.take(command)
        if self.apply.limit is not None:
            self.board.applied = furthest(self.board.applied, self.apply.limit)
        self.hold.answer()
        answer = self.store.get_command(command.number)
        assert answer is not None
        return answer.status


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.parametrize("step", ["hold", "advance", "renew", "release"])
def test_whoever_comes_second_does_not_move_the_boundary(site: Site, step: str) -> None:
    assert site.ask("one", "hold") is CommandStatus.DONE
    assert site.ask("one", "advance", position="0/D0") is CommandStatus.DONE
    with pytest.raises(PenstockError, match="another comparison"):
        site.ask("two", step, position="0/E0")
    assert site.apply.limit == Lsn(0xD0)
    assert site.ask("one", "release") is CommandStatus.DONE
    assert site.ask("two", "hold") is CommandStatus.DONE


def test_one_that_has_died_is_forgotten(site: Site) -> None:
    site.ask("one", "hold")
    site.now += PATIENCE_SECONDS + 1
    site.hold.answer()
    assert site.ask("two", "hold") is CommandStatus.DONE


def test_a_hold_ends_when_it_is_released_although_the_pipeline_is_paused(site: Site) -> None:
    site.ask("one", "hold")
    site.lifecycle.pause()
    assert site.ask("one", "release") is CommandStatus.DONE
    assert site.apply.limit is None


def test_apply_may_pass_the_servers_position_while_that_is_asked_for(site: Site) -> None:
    """Asking takes up to a second, if the last commit is asynchronous."""

    def ask_slowly() -> Lsn:
        position = Lsn(site.board.applied)
        site.board.applied = Lsn(position + 10)
        return position

    site.hold._server_position = ask_slowly
    assert site.ask("one", "hold") is CommandStatus.DONE
    assert site.apply.limit == Lsn(110)
    with pytest.raises(PenstockError, match="already past"):
        site.ask("one", "advance", position="0/10")
