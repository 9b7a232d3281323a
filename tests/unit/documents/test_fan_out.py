"""Questions that are answered beside the stream: what is remembered is stored."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.documents.fan_out import FanOuts
from penstock.documents.resolve import Question
from penstock.errors import ServerUnavailable
from penstock.state import MemoryStore, WorkKind

QUESTION = Question("people", ("a path",), (["1"],))


class OnceAwayStore(MemoryStore):
    """Stores work from the second attempt on."""

    away = True

    def add_index_work(
        self, index: str, kind: WorkKind, details: Sequence[Mapping[str, Any]], *, changed: int = 0
    ) -> None:
        if self.away:
            self.away = False
            raise ServerUnavailable("the state is away")
        super().add_index_work(index, kind, details, changed=changed)


def test_a_question_that_could_not_be_stored_is_stored_when_it_comes_again() -> None:
    store = OnceAwayStore("tests")
    store.acquire_lease()
    nothing: Any = None
    fan_outs = FanOuts(
        store=store,
        tasks=nothing,
        writer=nothing,
        documents=nothing,
        stop=threading.Event(),
    )
    with pytest.raises(ServerUnavailable):
        fan_outs.add([QUESTION], {"people": "f"})
    for _ in range(2):
        fan_outs.add([QUESTION], {"people": "f"})
    assert len(store.get_index_work("people", WorkKind.FAN_OUT)) == 1
