"""Compares the documents of an index with the current rows of the database: missing, extra, different, unbuildable.

The keys of the root table come in pieces. Each piece is built by one statement, fetched from the sink by one request,
and compared as values. Documents that only the sink has are built as well, to confirm that they should not exist.

Both sides may change meanwhile. A sink is slightly behind, so documents that do not match are compared again until they
do or the time is up. A document whose rows changed between any two comparisons is reported as unsettled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import psycopg
import pyarrow as pa

from penstock.documents.builder import DocumentKeys, PostgresDocuments, build_apart, join_key
from penstock.documents.resolve import ResolvedKeys
from penstock.sinks.base import ReadableSink, Rejection

MOST_SUSPECTS = 100_000
"""With more differences the index is plainly wrong, and the comparison stops."""
_SHOWN_FIELDS = 8
_PAUSE_SECONDS = 0.5


class Kind(StrEnum):
    """How a document differs."""

    MISSING = "missing"
    """Only the database has it."""
    EXTRA = "extra"
    """Only the sink has it."""
    DIFFERENT = "different"
    UNSETTLED = "unsettled"
    """Its rows changed between any two comparisons."""
    UNBUILDABLE = "unbuildable"
    """The server cannot compute it from its rows; the sink has an earlier document, or none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that differs."""

    id: str
    kind: Kind
    fields: tuple[str, ...] = ()
    """The paths at which two bodies differ, without values."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result for one index."""

    index: str
    compared: int
    """The number of documents that the database or the sink has."""
    differences: tuple[Difference, ...] = ()
    complete: bool = True
    """False for a sample, and if the comparison stopped because nearly everything differs."""

    def count(self, kind: Kind) -> int:
        """Return the number of differences of a kind."""
        return sum(each.kind is kind for each in self.differences)

    @property
    def equal(self) -> bool:
        """True if nothing differs and nothing is unsettled."""
        return not self.differences

    @property
    def differs(self) -> bool:
        return any(each.kind is not Kind.UNSETTLED for each in self.differences)


class DiffObserver(Protocol):
    """Receives the progress of a comparison."""

    def on_compared(self, index: str, compared: int) -> None:
        """This many documents were compared so far."""

    def on_rechecking(self, index: str, suspects: int) -> None:
        """This many documents do not match yet and are compared again."""


class _Silent(DiffObserver):
    pass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a sink may take to catch up."""

    seconds: float = 15.0
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class _Suspect:
    key: tuple[str, ...]
    kind: Kind
    body: str | None
    fields: tuple[str, ...] = ()
    looks: int = 1
    stood_still: bool = False
    """True if two comparisons in a row found the same rows."""

    @property
    def verdict(self) -> Kind:
        return self.kind if self.stood_still or self.looks == 1 else Kind.UNSETTLED


@dataclass(frozen=True, slots=True)
class _Built:
    """A document of the database; without a body if there is none, or if it cannot be built."""

    key: tuple[str, ...]
    body: str | None
    is_buildable: bool = True


@dataclass(slots=True)
class _Seen:
    """A set of ids, kept as hashes of eight bytes each."""

    hashes: list[np.ndarray[Any, np.dtype[np.int64]]] = field(default_factory=list[Any])

    def add(self, ids: Sequence[str]) -> None:
        self.hashes.append(_hashes(ids))

    def others(self, ids: Sequence[str]) -> list[str]:
        """Return the ids that were not added."""
        if len(self.hashes) > 1:
            self.hashes = [np.sort(np.concatenate(self.hashes))]
        known = self.hashes[0] if self.hashes else np.empty(0, np.int64)
        new = ~np.isin(_hashes(ids), known)
        return [id_ for id_, is_new in zip(ids, new, strict=True) if is_new]


class IndexDiff:
    """Compares one index, once."""

    def __init__(
        self,
        documents: PostgresDocuments,
        keys: DocumentKeys,
        reader: ReadableSink,
        *,
        patience: Patience | None = None,
        observer: DiffObserver | None = None,
    ) -> None:
        self._documents = documents
        self._keys = keys
        self._reader = reader
        self._index = keys.specification.name
        self._excludes = keys.specification.source_excludes
        self._patience = patience or Patience()
        self._observer = observer or _Silent()
        self._compared = 0
        self._suspects: dict[str, _Suspect] = {}
        self._strangers: dict[str, None] = {}

    def full(self) -> DiffReport:
        """Compare every document of both sides."""
        seen = _Seen()
        for keys in self._documents.every_key(self._index):
            seen.add(self._look_at(keys))
            if len(self._suspects) > MOST_SUSPECTS:
                return self._report(complete=False)
        for ids in self._reader.scan(self._index):
            self._look_at_stored(seen.others(ids))
            if len(self._suspects) + len(self._strangers) > MOST_SUSPECTS:
                return self._report(complete=False)
        return self._report(complete=True)

    def sample(self, connection: psycopg.Connection[Any], count: int) -> DiffReport:
        """Compare a random sample of `count` documents from each side."""
        seen = _Seen()
        seen.add(self._look_at(self._keys.some(connection, count)))
        self._look_at_stored(seen.others(self._reader.sample(self._index, count)))
        return self._report(complete=False)

    def _look_at(self, keys: ResolvedKeys) -> list[str]:
        """Compare documents of the database with those of the sink, and return their ids."""
        ids: list[str] = []
        for built in self._build(keys):
            stored = self._reader.fetch(self._index, list(built))
            exists = (each.body is not None or not each.is_buildable for each in built.values())
            self._compared += sum(there or id_ in stored for id_, there in zip(built, exists, strict=True))
            self._suspects.update(_suspects(built, stored, self._excludes))
            ids += built
        self._observer.on_compared(self._index, self._compared)
        return ids

    def _look_at_stored(self, ids: Sequence[str]) -> None:
        """Compare documents of the sink that were not among those of the database."""
        known: set[str] = set()
        for keys in self._keys.of_ids(ids, max(1, len(ids))):
            mistyped = {each.id for each in build_apart(self._read_keys, keys) if isinstance(each, Rejection)}
            fitting = [key for key in zip(*keys.keys, strict=True) if join_key(key) not in mistyped]
            known.update(self._look_at(self._keys.resolved(fitting)))
        # Ids that no key can have: of the wrong type, or not canonical.
        strangers = self._reader.fetch(self._index, [id_ for id_ in ids if id_ not in known])
        self._strangers |= dict.fromkeys(strangers)
        self._compared += len(strangers)

    def _report(self, *, complete: bool) -> DiffReport:
        deadline = self._patience.clock() + self._patience.seconds
        while self._suspects and self._patience.clock() < deadline:
            self._observer.on_rechecking(self._index, len(self._suspects))
            self._patience.pause(_PAUSE_SECONDS)
            self._look_again()
        found = [Difference(id_, each.verdict, each.fields) for id_, each in self._suspects.items()]
        found += [Difference(id_, Kind.EXTRA) for id_ in self._strangers]
        return DiffReport(self._index, self._compared, tuple(found), complete)

    def _look_again(self) -> None:
        found: dict[str, _Suspect] = {}
        for built in self._build(self._keys.resolved([each.key for each in self._suspects.values()])):
            found.update(_suspects(built, self._reader.fetch(self._index, list(built)), self._excludes))
        for id_, each in found.items():
            before = self._suspects[id_]
            each.looks = before.looks + 1
            each.stood_still = before.stood_still or before.body == each.body
        self._suspects = found

    def _build(self, keys: ResolvedKeys) -> Iterator[dict[str, _Built]]:
        """Yield documents by their ids, in pieces."""
        for built in build_apart(lambda part: [self._documents.build(part)], keys) if len(keys) else ():
            if isinstance(built, Rejection):
                yield {built.id: _Built(self._keys.parse(built.id), None, is_buildable=False)}
            else:
                ids, bodies = built.column("id").to_pylist(), built.column("body").to_pylist()
                yield {id_: _Built(self._keys.parse(id_), body) for id_, body in zip(ids, bodies, strict=True)}

    def _read_keys(self, keys: ResolvedKeys) -> Iterator[pa.Table]:
        """Let the server read keys; it fails if one does not fit the types of its columns."""
        self._keys.read(self._documents.connection, keys)
        return iter(())


def without_fields(document: Any, paths: Sequence[str]) -> Any:
    """Return a document without the fields at these paths, in arrays too."""
    if isinstance(document, list):
        return [without_fields(each, paths) for each in document]
    if not isinstance(document, dict) or not paths:
        return document
    below = {key: [path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")] for key in document}
    return {key: without_fields(each, below[key]) for key, each in document.items() if key not in paths}


def _suspects(
    built: Mapping[str, _Built], stored: Mapping[str, Any], excludes: Sequence[str]
) -> Iterator[tuple[str, _Suspect]]:
    # Cold: a comparison on request, and parsed bodies have no columns.
    for id_, each in built.items():
        if not each.is_buildable:
            yield id_, _Suspect(each.key, Kind.UNBUILDABLE, None)
        elif each.body is None:
            if id_ in stored:
                yield id_, _Suspect(each.key, Kind.EXTRA, None)
        elif id_ not in stored:
            yield id_, _Suspect(each.key, Kind.MISSING, each.body)
        else:
            wanted, found = (without_fields(body, excludes) for body in (json.loads(each.body), stored[id_]))
            if wanted != found:
                fields = tuple(_differing(wanted, found, ""))[:_SHOWN_FIELDS]
                yield id_, _Suspect(each.key, Kind.DIFFERENT, each.body, fields)


def _differing(wanted: Any, found: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key not in wanted or key not in found or wanted[key] != found[key]:
                yield from _differing(wanted.get(key), found.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
            if one != other:
                yield from _differing(one, other, f"{path}[{place}]")
    else:
        yield path


def _hashes(ids: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter((hash(each) for each in ids), np.int64, len(ids))
