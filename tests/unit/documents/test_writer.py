"""Documents on their way from the server to the sink."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.documents import writer
from penstock.documents.base import Rejection
from penstock.documents.build import BUILT
from penstock.documents.writer import Backlog


def piece(number: int) -> pa.Table:
    return pa.table([[str(number)], [number], ["x" * 1000]], schema=BUILT)


def test_what_does_not_fit_into_memory_waits_on_disk_and_comes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[pa.Table] = []
    of = writer._OnDisk.of  # pyright: ignore[reportPrivateUsage]

    def counting(built: pa.Table) -> object:
        spilled.append(built)
        return of(built)

    monkeypatch.setattr(writer._OnDisk, "of", counting)  # pyright: ignore[reportPrivateUsage]
    refused = Rejection("people", "7", "cannot be built")
    with Backlog(most_bytes=3 * piece(0).nbytes) as backlog:
        for number in range(10):
            backlog.put(piece(number))
        backlog.put(refused)
        backlog.end()
        assert list(backlog) == [*map(piece, range(10)), refused]
        backlog.put(piece(10))
        backlog.end()
        assert list(backlog) == [piece(10)]
    assert len(spilled) == 7
