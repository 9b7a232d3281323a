"""What sinks without a server share: generations of documents, and one small file per index that describes them.

The file says which generation serves, which one is being filled, and who owns them. The driver alone writes it, in one
step. What readers see follows it (`_publish`); a start and a retry repeat that,
because a kill or a fault may have come between the two. Tasks know the generations that were pickled with the sink.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.destinations.refusals import is_passing, unexpected
from penstock.errors import ConfigError, IndexUnusable
from penstock.sinks.base import SCAN_CHUNK, FlushReport, IndexFacts, IndexMapping, Sink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """One build of an index."""

    name: str
    fingerprint: str
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class IndexState:
    """The generations of an index."""

    owner: str = ""
    """The output that writes the index."""
    serving: Generation | None = None
    filling: Generation | None = None
    former: str = ""
    """The generation that served before, for readers that are not done with it."""

    @property
    def generations(self) -> list[Generation]:
        """The generations that changes go to, the newest last."""
        return [each for each in (self.serving, self.filling) if each is not None]

    @classmethod
    def parse(cls, content: bytes | None) -> IndexState:
        if content is None:
            return cls()
        found = json.loads(content)
        parts = {name: Generation(**found[name]) for name in ("serving", "filling") if found[name] is not None}
        return cls(**(found | parts))


def newest(rows: pa.Table) -> pa.Table:
    """Return the row with the highest version of each id; of equal versions, the last."""
    order = rows.select(["id", "version"]).append_column("place", pa.array(np.arange(rows.num_rows)))
    keys = [("id", "ascending"), ("version", "descending"), ("place", "descending")]
    order = order.take(pc.sort_indices(order, sort_keys=keys)).combine_chunks()
    ids = order["id"]
    first = np.ones(len(ids), np.bool_)
    first[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy()
    return rows.take(pa.array(np.sort(order["place"].to_numpy()[first])))


@contextmanager
def writing(index: str) -> Iterator[None]:
    """Turn faults of disks into errors of the sink: missing folders were deleted, other faults may pass."""
    try:
        yield
    except FileNotFoundError:
        raise gone(index) from None
    except OSError as error:
        raise unexpected(f"index {index!r}", error) from error


def gone(index: str) -> IndexUnusable:
    """A generation does not exist, although it should."""
    return IndexUnusable(f"a generation of index {index!r} was deleted", index=index)


class WholeReads:
    """Reads an index from all its documents in memory (`ReadableSink`)."""

    def bodies(self, index: str) -> Mapping[str, str]:
        """Return the documents that serve, as JSON by id."""
        raise NotImplementedError

    def fetch(self, index: str, ids: Sequence[str]) -> dict[str, Any]:
        """See `ReadableSink`."""
        found = self.bodies(index)
        return {id_: json.loads(found[id_]) for id_ in ids if id_ in found}

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """See `ReadableSink`."""
        ids = list(self.bodies(index))
        for start in range(0, len(ids), chunk):
            yield ids[start : start + chunk]

    def sample(self, index: str, count: int) -> list[str]:
        """See `ReadableSink`."""
        ids = list(self.bodies(index))
        return random.sample(ids, min(count, len(ids)))


class FolderSink(WholeReads, Sink):
    """Keeps generations; a sink adds how their documents are stored."""

    def __init__(self) -> None:
        self._states: dict[str, IndexState] = {}
        self._waiting: list[pa.Table] = []

    # What a sink adds

    def _probe(self) -> None:
        """Write something where documents go, and remove it."""
        raise NotImplementedError

    def _load(self, index: str) -> bytes | None:
        """Return the content of the file that describes an index; None if it does not exist."""
        raise NotImplementedError

    def _store(self, index: str, content: bytes) -> None:
        """Replace that file, durably and in one step."""
        raise NotImplementedError

    def _create(self, index: str, generation: Generation, owner: str) -> None:
        """Create an empty generation."""
        raise NotImplementedError

    def _exists(self, index: str, generation: Generation) -> bool:
        """Return False if the generation was deleted."""
        raise NotImplementedError

    def _append(self, index: str, generation: Generation, rows: pa.Table) -> None:
        """Store documents and removals (`id`, `version`, `body`), durably; one of each id."""
        raise NotImplementedError

    def _publish(self, index: str, state: IndexState) -> None:
        """Let readers see the generation that serves, in one step, and remove others; may be repeated."""
        raise NotImplementedError

    def _count(self, index: str, generation: Generation) -> int:
        """Return the number of documents."""
        raise NotImplementedError

    def _tidy(self, index: str) -> None:
        """Keep reading cheap; called on the driver when no changes are waiting."""

    def probe(self) -> None:
        """See `penstock.destinations.base.ProbedDestination`."""
        try:
            self._probe()
        except OSError as error:
            if is_passing(error):
                raise unexpected("sink", error) from error
            raise ConfigError(
                f"sink: documents cannot be written: {error.strerror} ({error.filename})",
                hint="Set sink.path to a folder that can be written.",
            ) from None

    # Documents

    def write(self, batch: pa.Table) -> None:
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        waiting, self._waiting = self._waiting, []
        if waiting:
            batch = pa.concat_tables(waiting)
            for index in pc.unique(batch.column("index")).to_pylist():
                mine = newest(batch.filter(pc.equal(batch.column("index"), index)).drop_columns(["index"]))
                for generation in self._known(index).generations:
                    self._append(index, generation, mine)
        if caught_up:
            for index in self._states:
                with writing(index):
                    self._tidy(index)
        return FlushReport()

    # Generations

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`. Continues a generation that was begun, and finishes an interrupted swap."""
        state = self._owned(mapping)
        if state.serving is not None:
            self._publish(mapping.index, state)
        filling, serving = state.filling, state.serving
        is_current = serving is not None and serving.seeded and serving.fingerprint == mapping.fingerprint
        if filling is not None and filling.fingerprint == mapping.fingerprint:
            self._states[mapping.index] = state
        elif is_current:
            self._put(mapping.index, replace(state, filling=None))
        else:
            self._begin(mapping, state)

    def reindex(self, mapping: IndexMapping) -> None:
        self._begin(mapping, self._owned(mapping))

    def is_seeded(self, index: str) -> bool:
        state = self._states.get(index, IndexState())
        return state.serving is not None and state.serving.seeded and state.filling is None

    def mark_seeded(self, index: str) -> None:
        self._swap(index, seeded=True)

    def serve(self, index: str) -> None:
        state = self._known(index)
        if state.serving is None:
            self._swap(index, seeded=False)
        elif state.filling is not None and state.serving.fingerprint == state.filling.fingerprint:
            self._put(index, replace(state, filling=None))

    def filling(self, index: str) -> Sink:
        sink = copy(self)
        sink._waiting = []
        sink._states = {index: IndexState(serving=self._known(index).generations[-1])}
        return sink

    def count(self, index: str) -> int | None:
        serving = self._known(index).serving
        with writing(index):
            return None if serving is None else self._count(index, serving)

    def facts(self, index: str) -> IndexFacts:
        """See `ReadableSink`."""
        state = IndexState.parse(self._load(index))
        serving, filling = state.serving, state.filling
        count = 0 if serving is None else self._count(index, serving)
        return IndexFacts(serving and serving.name, filling and filling.name, count)

    def _owned(self, mapping: IndexMapping) -> IndexState:
        with writing(mapping.index):
            state = IndexState.parse(self._load(mapping.index))
            known = [
                each if each and self._exists(mapping.index, each) else None for each in (state.serving, state.filling)
            ]
        if state.owner and mapping.owner and state.owner != mapping.owner:
            raise IndexUnusable(
                f"index {mapping.index!r} belongs to another pipeline, {state.owner!r}: both would write to it",
                hint="Give the index another name or path. If that pipeline no longer exists, delete the folder.",
                index=mapping.index,
            )
        return replace(state, owner=mapping.owner or state.owner, serving=known[0], filling=known[1])

    def _known(self, index: str) -> IndexState:
        state = self._states.get(index)
        if state is None:
            raise IndexUnusable(f"cannot write documents of index {index!r} before ensure_index", index=index)
        return state

    def _begin(self, mapping: IndexMapping, state: IndexState) -> None:
        stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime())
        generation = Generation(f"{mapping.fingerprint}_{stamp}_{secrets.token_hex(2)}", mapping.fingerprint)
        self._create(mapping.index, generation, state.owner)
        self._put(mapping.index, replace(state, filling=generation))
        logger.info("generation created index=%s generation=%s", mapping.index, generation.name)

    def _swap(self, index: str, *, seeded: bool) -> None:
        state = self._known(index)
        if state.filling is not None:
            former = "" if state.serving is None else state.serving.name
            state = IndexState(state.owner, replace(state.filling, seeded=seeded), former=former)
            self._put(index, state)
            logger.info("generation serves index=%s generation=%s", index, state.generations[0].name)
        if state.serving is not None:
            # Also if it serves already: the last attempt may have failed before readers saw it.
            self._publish(index, state)

    def _put(self, index: str, state: IndexState) -> None:
        self._store(index, json.dumps(asdict(state)).encode())
        self._states[index] = state
