"""Questions that are answered beside the stream: what is remembered is stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.documents.builds import Builds
from penstock.documents.fan_out import FanOuts
from penstock.documents.mapping import IndexMapping
from penstock.documents.resolve import Question, ResolvedKeys
from penstock.errors import QueryFailed, ServerUnavailable
from penstock.state import MemoryStore, WorkKind
from penstock.workers.process_tasks import ProcessTasks

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
        builds=nothing,
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


def test_a_question_whose_values_do_not_fit_a_new_type_is_answered_by_a_rebuild() -> None:
    store = MemoryStore("tests")
    store.acquire_lease()
    builds = Builds(store)
    builds.skip("people", "f", "built before")

    def answer(question: Question, *, apart: bool) -> Iterator[ResolvedKeys]:
        raise QueryFailed("a value does not fit its type", sqlstate="22P02")
        yield

    documents: Any = SimpleNamespace(index_mappings=lambda: [IndexMapping("people", "f", {}, {})], answer=answer)
    writer: Any = SimpleNamespace(write_apart=lambda parts: sum(map(len, parts)))
    fan_outs = FanOuts(
        store=store,
        builds=builds,
        tasks=ProcessTasks(),
        writer=writer,
        documents=lambda: documents,
        stop=threading.Event(),
    )
    fan_outs.add([QUESTION], {"people": "f"})
    fan_outs.round(0)
    assert [each.index for each in builds.unfinished] == ["people"]
    assert store.get_index_work("people", WorkKind.FAN_OUT) == []
