"""The outputs of one stream, which start and end together.

An output reads a stream's spool and writes somewhere: a `penstock.tables.TablesOutput` tables, a
`penstock.documents.output.DocumentsOutput` search documents. Each has its own lease, positions and progress.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from penstock.state import Store, TableReplicationPhase
from penstock.stream import Stream, StreamSettings
from penstock.workers import ApplyStatus, CopyStatus, SnapshotWait

WAIT_SECONDS = 0.5
"""How soon one hears that an output has ended."""


class Output(Protocol):
    """What all readers of a stream have in common. Only `Coordinator` calls the second half, in its order."""

    @property
    def output(self) -> str:
        """Its name among the outputs of the stream, and as a reader of the spool."""
        ...

    @property
    def settings(self) -> StreamSettings:
        """Those of the stream; of the first output they count."""
        ...

    @property
    def store(self) -> Store:
        """Its own."""
        ...

    @property
    def status(self) -> ApplyStatus | None:
        """How far it is; None before the start."""
        ...

    @property
    def phases(self) -> Mapping[str, TableReplicationPhase]:
        """The phase of each table, by name; empty where there are none."""
        ...

    @property
    def copies(self) -> Mapping[str, CopyStatus]:
        """The copy of each table, by name."""
        ...

    @property
    def waits(self) -> Mapping[str, SnapshotWait]:
        """What waits for open transactions to end, by name."""
        ...

    @property
    def paused(self) -> bool:
        """Whether it was told to wait."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when it has not come in time. Raises what ended it."""
        ...

    def stop(self) -> None:
        """Ask it to end, without waiting."""
        ...

    def lead(self) -> None:
        """Take the lease."""
        ...

    def follow(self, stream: Stream) -> None:
        """Begin, over a stream that is open."""
        ...

    def settle(self) -> None:
        """Finish the batch at hand; the stream still runs. May be called before `follow`, and twice."""
        ...

    def retire(self) -> None:
        """Give the lease back, last of all."""
        ...


class Coordinator:
    """All outputs of one stream; each has its own store, destination and positions."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        """The first one's settings are those of the stream."""
        self._outputs = {each.output: each for each in outputs}
        if len(self._outputs) < len(outputs):
            raise ValueError("the outputs of a stream have different names")
        self._stream = Stream(outputs[0].settings)

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __iter__(self) -> Iterator[Output]:
        return iter(self._outputs.values())

    def __len__(self) -> int:
        return len(self._outputs)

    def start(self) -> None:
        """Returns when changes flow; copies run on. Raises what prevents it, and leaves nothing running then."""
        try:
            for output in self:
                output.lead()
            self._stream.open({name: output.store for name, output in self._outputs.items()})
            for output in self:
                output.follow(self._stream)
        except BaseException:
            self.shutdown()
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until one of them ends; False when none has in time. Raises what ended it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if any(output.wait(0) for output in self):
                return True
            left = WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            next(iter(self)).wait(min(left, WAIT_SECONDS))

    def stop(self) -> None:
        """Ask all of them to end, without waiting."""
        for output in self:
            output.stop()

    def shutdown(self) -> None:
        """Finish the batches at hand, store how far they went, and stop everything; may be called twice."""
        self.stop()
        for output in self:
            output.settle()
        self._stream.close()
        for output in self:
            output.retire()
