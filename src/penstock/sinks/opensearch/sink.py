"""Documents in OpenSearch: an alias over generations, each filled beside the one that serves.

A document is durable when the server has answered the bulk request with its translog synced
(`index.translog.durability: request`). Every document carries an external version, so sending one twice or late changes
nothing.

On the driver the sink knows the generations since `ensure_index`. A copy in a task knows only what was pickled:
settings and names. It writes, flushes, and returns the rejections.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DestinationUnavailable, IndexUnusable
from penstock.sinks.base import SCAN_CHUNK, FlushReport, IndexFacts, IndexMapping, Rejection, Sink
from penstock.sinks.opensearch.bulk import BulkSender, Target, documents_size, routings
from penstock.sinks.opensearch.client import (
    FILLING_GC_DELETES,
    NOT_FOUND,
    OK,
    SERVING_GC_DELETES,
    Answer,
    OpenSearchClient,
    OpenSearchSettings,
    RetryLimit,
    Transient,
)
from penstock.sinks.opensearch.generations import (
    Generation,
    IndexState,
    describe,
    in_paths,
    new_generation,
    paths_of,
    read_state,
    require_owned,
)

_KEEP_ALIVE = "2m"
_SAMPLE_MOST = 10_000
_HIGHEST_PRIORITY = 2**31 - 1
_LOOK_SECONDS = 1.0
"""Interval for checking the generations while documents keep arriving."""
_FILLING = {"refresh_interval": "-1", "gc_deletes": f"{FILLING_GC_DELETES}s"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Targets:
    """The generations that the documents of an index go to."""

    serving: Target | None = None
    filling: Target | None = None

    @property
    def newest(self) -> Target | None:
        return self.filling or self.serving

    def __iter__(self) -> Iterator[Target]:
        return iter([each for each in (self.serving, self.filling) if each is not None])


class OpenSearchSink(Sink):
    """Writes documents to a search server; the options are those of `OpenSearchSettings`."""

    OPTIONS = OpenSearchSettings

    def __init__(self, url: str, **options: Any) -> None:
        self.settings = OpenSearchSettings(url, **options)
        self._targets: dict[str, Targets] = {}
        self._known: dict[str, IndexState] = {}
        self._begin()

    def _begin(self) -> None:
        self._stop = threading.Event()
        self._client_: OpenSearchClient | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._retries: RetryLimit | None = None
        """Since the first of the waiting documents came: none may arrive later than that after its build."""
        self._rejections: list[Rejection] = []
        self._looked_at = float("-inf")
        self._mappings: dict[str, IndexMapping] = {}
        """Since `ensure_index`, on the driver."""

    @classmethod
    def of(cls, settings: OpenSearchSettings, targets: Mapping[str, Targets]) -> Self:
        """Return a sink that only writes to these generations, as in a task."""
        sink = cls.__new__(cls)
        sink.__setstate__((settings, dict(targets)))
        return sink

    def __getstate__(self) -> tuple[OpenSearchSettings, dict[str, Targets]]:
        return self.settings, self._targets

    def __setstate__(self, state: tuple[OpenSearchSettings, dict[str, Targets]]) -> None:
        self.settings, self._targets = state
        self._known = {}
        self._begin()

    def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        if self._client_ is not None:
            self._client_.close()
            self._client_ = None

    def retry_until(self, stop: threading.Event) -> None:
        self.close()
        self._stop = stop

    @property
    def _client(self) -> OpenSearchClient:
        if self._client_ is None:
            self._client_ = OpenSearchClient(self.settings, self._stop)
        return self._client_

    # Documents

    def write(self, batch: pa.Table) -> None:
        """See `Sink`. Sends as soon as a request is full."""
        self._retries = self._retries or RetryLimit(self.settings.retry_seconds, stop=self._stop)
        self._waiting.append(batch)
        self._waiting_bytes += int(documents_size(batch).sum())
        count = sum(each.num_rows for each in self._waiting)
        if count >= self.settings.bulk_documents or self._waiting_bytes >= self.settings.bulk_bytes:
            self._send()

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`. On the driver it also checks that the indexes were not replaced."""
        self._send()
        if self._known:
            if caught_up or time.monotonic() - self._looked_at >= _LOOK_SECONDS:
                self._look_after(self._survey(list(self._known)))
            if caught_up:
                self._refresh([each.serving for each in self._targets.values()])
        report = FlushReport(tuple(self._rejections))
        self._rejections = []
        return report

    def filling(self, index: str) -> Sink:
        newest = self._targets[index].newest
        sink = OpenSearchSink.of(self.settings, {index: Targets(serving=newest)})
        sink.retry_until(self._stop)
        return sink

    def _send(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        retries, self._retries = self._retries, None
        if not waiting or retries is None:
            return
        batch = pa.concat_tables(waiting)
        sender = BulkSender(self._client, self.settings)
        indexes = pc.unique(batch.column("index")).to_pylist()
        for index in indexes:
            if self._targets.get(index, Targets()).newest is None:
                raise IndexUnusable(f"cannot write documents of index {index!r} before ensure_index", index=index)
            mine = batch if len(indexes) == 1 else batch.filter(pc.equal(batch.column("index"), index))
            for target in self._targets[index]:
                refused = sender.send(target, mine, retries)
                if target is self._targets[index].newest:
                    self._rejections += refused
                elif refused:
                    # An older generation cannot take every document; it serves only until the new one is complete.
                    logger.warning("old generation rejected documents index=%s count=%d", index, len(refused))

    def _refresh(self, targets: Sequence[Target | None]) -> None:
        for names in in_paths([each.alias for each in targets if each is not None]):
            self._client.expect("POST", f"/{names}/_refresh")

    # Generations

    def check(self, mapping: IndexMapping) -> str:
        """See `Sink`. Asks once: a check does not wait for a server."""
        try:
            body = self._body(mapping, self._client.try_once)
            asked = {"index_patterns": [f"{mapping.index}_check"], "priority": _HIGHEST_PRIORITY, "template": body}
            answer = self._client.try_once("POST", "/_index_template/_simulate", asked)
            answer.require_said()
        except Transient as error:
            raise DestinationUnavailable(f"the search server does not answer: {error}") from None
        return "" if answer.status in OK else answer.reason()

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`. Continues a generation that was begun, and finishes an interrupted swap."""
        self._mappings[mapping.index] = mapping
        state = self._survey([mapping.index])[mapping.index]
        require_owned(state, mapping)
        if state.unserved is not None:
            state = self._serve(state, state.unserved)
        filling = state.filling(mapping.fingerprint)
        for each in state.generations:
            begun = not each.seeded and each.retired_at is None and each is not state.serving
            if begun and each is not filling:
                self._delete(each)
        if filling is not None:
            # A crash may have interrupted this after the settings were changed for serving.
            self._configure(filling, _FILLING)
        elif state.serving is None or not _is_current(state.serving, mapping):
            filling = self._create(state, mapping)
        self._know(mapping, filling)
        if state.serving is not None:
            self._configure(state.serving, self._in_place(mapping.index))
            self._alias(
                [_action("add", state.serving, each) for each in mapping.aliases if each not in state.serving.aliases]
            )

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`. Deletes generations that were begun before."""
        self._mappings[mapping.index] = mapping
        state = self._survey([mapping.index])[mapping.index]
        require_owned(state, mapping)
        for each in state.generations:
            if not each.seeded and each.retired_at is None and each is not state.serving:
                self._delete(each)
        self._know(mapping, self._create(state, mapping))

    def is_seeded(self, index: str) -> bool:
        targets = self._targets.get(index)
        if targets is None or targets.serving is None or targets.filling is not None:
            return False
        known = self._known[index].find(targets.serving.generation)
        return known is not None and known.seeded

    def mark_seeded(self, index: str) -> None:
        """See `Sink`. Marks the generation as complete, then moves the alias in one step."""
        self._send()
        targets = self._targets[index]
        if targets.filling is None:
            return
        state = self._survey([index])[index]
        filling = state.find(targets.filling.generation)
        if filling is None or filling.uuid != self._uuid_of(targets.filling):
            self._confirm_gone(targets.filling)
        self._prepare_serving(index, filling)
        self._remember(filling, index, seeded=filling.uuid)
        self._serve(state, filling)
        self._targets[index] = Targets(serving=targets.filling)
        self._known[index] = self._survey([index])[index]

    def serve(self, index: str) -> None:
        """See `Sink`. Does not record that the generation is complete, so a start that may fill it does."""
        targets = self._targets[index]
        state = self._survey([index])[index]
        filling = targets.filling and state.find(targets.filling.generation)
        if targets.filling is None or filling is None:
            return
        if state.serving is None:
            self._prepare_serving(index, filling)
            self._serve(state, filling)
            self._targets[index] = Targets(serving=targets.filling)
        elif state.serving.fingerprint == filling.fingerprint:
            # It serves since an earlier start, though it was never filled.
            self._delete(filling)
            self._targets[index] = Targets(serving=targets.serving)
        self._known[index] = self._survey([index])[index]

    def _prepare_serving(self, index: str, filling: Generation) -> None:
        self._client.expect("POST", f"/{quote(filling.name, safe='')}/_refresh")
        self._configure(filling, {**self._in_place(index), "gc_deletes": f"{SERVING_GC_DELETES}s"})

    def _in_place(self, index: str) -> dict[str, Any]:
        settings = self.settings
        return self._mappings[index].in_place(replicas=settings.replicas, refresh_interval=settings.refresh_interval)

    def _survey(self, indexes: Sequence[str]) -> dict[str, IndexState]:
        answer: dict[str, Any] = {}
        for path in paths_of(indexes):
            answer |= self._client.expect("GET", path)
        return {each: read_state(each, answer) for each in indexes}

    def _know(self, mapping: IndexMapping, filling: Generation | None) -> None:
        state = self._survey([mapping.index])[mapping.index]
        fields = frozenset(_paths(mapping.mappings))
        serving = state.serving
        self._targets[mapping.index] = Targets(
            serving=serving and _target(mapping.index, serving, fields),
            filling=filling and _target(mapping.index, filling, fields),
        )
        self._known[mapping.index] = state
        self._look_after({mapping.index: state})

    def _create(self, state: IndexState, mapping: IndexMapping) -> Generation:
        name = new_generation(state, mapping, time.time())
        body = self._body(mapping, self._client.ask)
        body["settings"]["index"] |= {**_FILLING, "translog.durability": "request"}
        body["mappings"] = {**body["mappings"], "_meta": describe(mapping.index, mapping)}
        generation = Generation(name, 0, mapping.fingerprint, "", seeded=False)
        body["aliases"] = {generation.alias: {}}
        # A retried request gets this error if the first one succeeded and only its answer was lost.
        self._client.expect("PUT", f"/{quote(name, safe='')}", body, allowed=("resource_already_exists_exception",))
        found = self._survey([mapping.index])[mapping.index].find(name)
        if found is None:
            raise _contradictory(mapping.index)
        logger.info("generation created index=%s generation=%s", mapping.index, name)
        return found

    def _body(self, mapping: IndexMapping, ask: Callable[[str, str], Answer]) -> dict[str, Any]:
        """Return the body that creates an index; vectors have other names in Elasticsearch."""
        body = mapping.body(shards=self.settings.shards, replicas=self.settings.replicas)
        return for_elasticsearch(body) if mapping.settings.get("knn") and _is_elasticsearch(ask) else body

    def _serve(self, state: IndexState, generation: Generation) -> IndexState:
        """Move the alias in one step; the former generation is removed later."""
        names = (state.index, *self._mappings[state.index].aliases)
        actions = [_action("add", generation, each) for each in names]
        before = state.serving
        if before is not None:
            actions = [_action("remove", before, each) for each in (state.index, *sorted(before.aliases))] + actions
        self._alias(actions)
        logger.info("alias moved index=%s generation=%s", state.index, generation.name)
        return replace(state, serving=generation)

    def _alias(self, actions: Sequence[Mapping[str, Any]]) -> None:
        if actions:
            self._client.expect("POST", "/_aliases", {"actions": actions})

    def _look_after(self, states: Mapping[str, IndexState]) -> None:
        """Raise `IndexUnusable` if another program changed an index, and remove expired generations."""
        now = time.time()
        self._looked_at = time.monotonic()
        for index, state in states.items():
            for target in self._targets[index]:
                found = state.find(target.generation)
                if found is None or found.uuid != self._uuid_of(target):
                    self._confirm_gone(target)
            expected = self._targets[index].serving
            if expected is not None and (state.serving is None or state.serving.name != expected.generation):
                there = "nothing" if state.serving is None else repr(state.serving.name)
                raise IndexUnusable(
                    f"alias {index!r} points to {there} instead of {expected.generation!r}",
                    hint=f"Restart Penstock, which corrects the alias, or run: penstock index rebuild {index}",
                    index=index,
                )
            for each in state.former:
                if each.retired_at is None:
                    self._remember(each, index, seeded=each.uuid if each.seeded else None, retired_at=now)
                elif each.retired_at + self.settings.grace_seconds <= now:
                    self._delete(each)

    def _confirm_gone(self, target: Target) -> NoReturn:
        """Raise `IndexUnusable` if the server states that a generation is gone or replaced; an answer that merely lacks
        it may be a proxy's."""
        path = f"/{quote(target.generation, safe='')}?filter_path=*.settings.index.uuid"
        found = self._client.expect("GET", path, allowed=(NOT_FOUND,)) or {}
        uuid = found.get(target.generation, {}).get("settings", {}).get("index", {}).get("uuid")
        if uuid != self._uuid_of(target):
            raise _gone(target.index, target.generation)
        raise _contradictory(target.index)

    def _uuid_of(self, target: Target) -> str:
        known = self._known[target.index].find(target.generation)
        return known.uuid if known is not None else ""

    def _configure(self, generation: Generation, settings: Mapping[str, Any]) -> None:
        self._client.expect("PUT", f"/{quote(generation.name, safe='')}/_settings", {"index": settings})

    def _remember(
        self, generation: Generation, index: str, *, seeded: str | None, retired_at: float | None = None
    ) -> None:
        meta = describe(index, generation, seeded=seeded, retired_at=retired_at)
        self._client.expect("PUT", f"/{quote(generation.name, safe='')}/_mapping", {"_meta": meta})

    def _delete(self, generation: Generation) -> None:
        self._client.expect("DELETE", f"/{quote(generation.name, safe='')}", allowed=(NOT_FOUND,))
        logger.info("generation removed generation=%s", generation.name)

    # Reading: see `penstock.documents.base.ReadableSink`

    def count(self, index: str) -> int | None:
        targets = self._targets.get(index)
        if targets is None or targets.serving is None:
            return None
        self._refresh([targets.serving])
        return self._count(targets.serving.alias)

    def facts(self, index: str) -> IndexFacts:
        """See `ReadableSink`."""
        state = self._survey([index])[index]
        unserved = [each for each in state.generations if each is not state.serving and each.retired_at is None]
        last = state.serving.number if state.serving is not None else -1
        begun = [each.name for each in unserved if each.number > last]
        count = self._count(index) if state.serving is not None else 0
        return IndexFacts(state.serving.name if state.serving else None, begun[-1] if begun else None, count)

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """See `ReadableSink`."""
        if not ids:
            return {}
        serving = self._survey([index])[index].serving
        if serving is None:
            return {}
        prefix, asked = serving.id_prefix, [{"_id": serving.id_prefix + id_} for id_ in ids]
        if serving.routing is not None:
            # Ids that Penstock did not write need not have as many parts.
            width = serving.routing[1]
            mine = [id_ for id_ in ids if width == 1 or id_.count(":") + 1 == width]
            routed = routings(pa.chunked_array([pa.array(mine, pa.string())]), serving.routing).to_pylist()
            asked = [{"_id": prefix + id_, "routing": each} for id_, each in zip(mine, routed, strict=True)]
        if not asked:
            return {}
        path = f"/{quote(index, safe='')}/_mget"
        found = self._client.expect("POST", path, {"docs": asked}, allowed=(NOT_FOUND,))
        docs = found["docs"] if found else []
        return {each["_id"].removeprefix(prefix): each["_source"] for each in docs if each.get("found")}

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """See `ReadableSink`. All ids are of one point in time."""
        path = f"/{quote(index, safe='')}"
        self._client.expect("POST", f"{path}/_refresh", allowed=(NOT_FOUND,))
        place, name = ("/_pit", "id") if _is_elasticsearch(self._client.ask) else ("/_search/point_in_time", "pit_id")
        opened = self._client.expect("POST", f"{path}{place}?keep_alive={_KEEP_ALIVE}", allowed=(NOT_FOUND,))
        if opened is None:
            return
        point = opened[name]
        try:
            prefix = self._id_prefix(index)
            for ids in self._pages(point, chunk):
                yield [id_.removeprefix(prefix) for id_ in ids]
        finally:
            closed = {name: point if name == "id" else [point]}
            self._client.expect("DELETE", place, closed, allowed=(NOT_FOUND,))

    def sample(self, index: str, count: int) -> list[str]:
        """See `ReadableSink`."""
        score = {"random_score": {"seed": random.getrandbits(31), "field": "_seq_no"}}
        query = {"function_score": {"query": {"match_all": {}}, **score}}
        body = {"size": min(count, _SAMPLE_MOST), "_source": False, "query": query}
        found = self._client.expect("POST", f"/{quote(index, safe='')}/_search", body, allowed=(NOT_FOUND,))
        prefix = self._id_prefix(index)
        return [each["_id"].removeprefix(prefix) for each in found["hits"]["hits"]] if found else []

    def _id_prefix(self, index: str) -> str:
        serving = self._survey([index])[index].serving
        return "" if serving is None else serving.id_prefix

    def _count(self, name: str) -> int:
        found = self._client.expect("GET", f"/{quote(name, safe='')}/_count", allowed=(NOT_FOUND,))
        return int(found["count"]) if found else 0

    def _pages(self, point: str, chunk: int) -> Iterator[list[str]]:
        after: list[Any] | None = None
        while True:
            body: dict[str, Any] = {
                "size": chunk,
                "_source": False,
                "track_total_hits": False,
                "pit": {"id": point, "keep_alive": _KEEP_ALIVE},
                "sort": [{"_shard_doc": "asc"}],
            }
            if after is not None:
                body["search_after"] = after
            hits = self._client.expect("POST", "/_search", body)["hits"]["hits"]
            if hits:
                yield [each["_id"] for each in hits]
                after = hits[-1]["sort"]
            if len(hits) < chunk:
                return


def _action(verb: str, generation: Generation, alias: str) -> dict[str, Any]:
    return {verb: {"index": generation.name, "alias": alias}}


def _target(index: str, generation: Generation, fields: frozenset[str]) -> Target:
    return Target(index, generation.name, generation.alias, fields, generation.routing, generation.id_prefix)


def _is_current(serving: Generation, mapping: IndexMapping) -> bool:
    """Return True if the serving generation is complete and has the wanted shape."""
    return serving.seeded and serving.fingerprint == mapping.fingerprint


def _paths(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, each in mapping.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _paths(each, f"{prefix}{name}.")


def _is_elasticsearch(ask: Callable[[str, str], Answer]) -> bool:
    """Return True unless the server says that it is OpenSearch, as only OpenSearch does."""
    version = (ask("GET", "/").json() or {}).get("version")
    return isinstance(version, dict) and version.get("distribution") != "opensearch"


def for_elasticsearch(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body that creates an index, with `dense_vector` instead of `knn_vector`."""

    def renamed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = {key: renamed(each) for key, each in value.items() if not (key == "knn" and each is True)}
        if value.get("type") == "knn_vector":
            named = {"dims" if key == "dimension" else key: each for key, each in value.items()}
            return named | {"type": "dense_vector"}
        return value

    return renamed(body)


def _gone(index: str, generation: str) -> IndexUnusable:
    return IndexUnusable(f"{generation!r}, a generation of index {index!r}, was deleted or replaced", index=index)


def _contradictory(index: str) -> DestinationUnavailable:
    return DestinationUnavailable(f"the search server's answers about index {index!r} contradict each other")
