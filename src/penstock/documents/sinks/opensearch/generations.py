"""Generations of an index, as plain values: what is there, what serves, and what a start makes of it.

    customers ─alias─▶ customers_5f1c0a9e77d23b90c4e1_20261115161500
                                │                    └ when it was made; never the same twice
                                └ fingerprint of the build

A name of the specification is an alias, and the index behind it is a generation. What Penstock knows about a generation
is in the index itself (`_meta`), so it survives whatever happens to Penstock. Who writes does so by a second alias that
only the generation has: if somebody deletes the index the alias is gone too. Its name has capital letters, which an
index must not have, so the server cannot make an index of its own in its place, with guessed mappings. (`require_alias`
would not do: it does not hold for removals, and one with an external version makes an index, too.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.documents.mapping import IndexMapping
from penstock.errors import IndexUnusable

OWNER = "penstock"
WRITE_SUFFIX = "_WRITE"

_LONGEST_PATH = 2_000
_STAMP = "%Y%m%d%H%M%S"


@dataclass(frozen=True, slots=True)
class Generation:
    """One build of an index."""

    name: str
    number: int
    fingerprint: str
    uuid: str
    seeded: bool
    """Filled completely. Bound to the index's own id: what is restored from a backup is old and counts as unseeded."""
    retired_at: float | None = None
    """Since when it serves no more."""

    @property
    def alias(self) -> str:
        """The name to write to."""
        return self.name + WRITE_SUFFIX


@dataclass(frozen=True, slots=True)
class IndexState:
    """All generations of an index, the oldest first, and the one that serves."""

    index: str
    generations: tuple[Generation, ...] = ()
    serving: Generation | None = None

    def find(self, name: str) -> Generation | None:
        """A generation by its name."""
        return next((each for each in self.generations if each.name == name), None)

    @property
    def unserved(self) -> Generation | None:
        """A generation that is complete, and that a crash kept from serving."""
        last = self.serving.number if self.serving is not None else -1
        complete = [each for each in self.generations if each.seeded and each.retired_at is None and each.number > last]
        return complete[-1] if complete else None

    def filling(self, fingerprint: str) -> Generation | None:
        """A generation of this shape that was begun and can be gone on with."""
        last = self.serving.number if self.serving is not None else -1
        begun = [each for each in self.generations if not each.seeded and each.number > last]
        return begun[-1] if begun and begun[-1].fingerprint == fingerprint else None

    @property
    def former(self) -> tuple[Generation, ...]:
        """Those that served before."""
        if self.serving is None:
            return ()
        return tuple(each for each in self.generations if each.number < self.serving.number)


def paths_of(indexes: Sequence[str]) -> Iterator[str]:
    """Where to ask for the states of indexes: names, what they point to, and all that could be a generation."""
    wanted = "*.aliases,*.mappings._meta,*.settings.index.uuid"
    for names in in_paths([f"{index},{index}_*" for index in indexes]):
        yield f"/{names}?ignore_unavailable=true&allow_no_indices=true&expand_wildcards=all&filter_path={wanted}"


def in_paths(names: Sequence[str]) -> Iterator[str]:
    """Names as parts of addresses, as many in each as a server reads: the first line of a request has 4 KB at most."""
    part: list[str] = []
    length = 0
    for each in names:
        quoted = quote(each, safe=",*")
        if part and length + len(quoted) > _LONGEST_PATH:
            yield ",".join(part)
            part, length = [], 0
        part.append(quoted)
        length += len(quoted) + 1
    if part:
        yield ",".join(part)


def read_state(index: str, answer: Mapping[str, Any]) -> IndexState:
    """The state of an index, from an answer that may tell of others too; refuses what is not ours."""
    if index in answer:
        raise IndexUnusable(
            f"there is an index named {index!r}, where Penstock needs an alias of this name",
            hint=f"Delete the index {index!r} or copy it to another name; or name the one of Penstock differently.",
            index=index,
        )
    generations = {name: found for name, each in answer.items() if (found := _generation(index, name, each))}
    named = [name for name, each in answer.items() if index in each.get("aliases", {})]
    foreign = sorted(set(named) - set(generations))
    if foreign:
        raise IndexUnusable(
            f"alias {index!r} points to {foreign[0]!r}, which is not an index of Penstock's",
            hint=f"Remove the alias from {foreign[0]!r}, or name the index of Penstock differently.",
            index=index,
        )
    if len(named) > 1:
        raise IndexUnusable(
            f"alias {index!r} points to several indexes: {', '.join(sorted(named))}",
            hint="Leave it on the newest of them, and remove it from the others.",
            index=index,
        )
    ordered = tuple(sorted(generations.values(), key=lambda each: each.number))
    return IndexState(index, ordered, generations[named[0]] if named else None)


def new_generation(state: IndexState, mapping: IndexMapping, now: float) -> str:
    """A name that no generation had before, also when the clock went back."""
    number = int(time.strftime(_STAMP, time.gmtime(now)))
    if state.generations:
        number = max(number, state.generations[-1].number + 1)
    return f"{mapping.index}_{mapping.fingerprint}_{number}"


def describe(index: str, fingerprint: str, *, seeded: str | None = None, retired_at: float | None = None) -> Any:
    """What is kept in a generation's `_meta`; `seeded` is the id of the index that was filled."""
    return {OWNER: {"index": index, "fingerprint": fingerprint, "seeded": seeded, "retired_at": retired_at}}


def _generation(index: str, name: str, described: Mapping[str, Any]) -> Generation | None:
    found = re.fullmatch(rf"{re.escape(index)}_([0-9a-z]+)_([0-9]+)", name)
    meta = described.get("mappings", {}).get("_meta", {}).get(OWNER)
    if found is None or not isinstance(meta, dict) or meta.get("index") != index:
        return None
    uuid = str(described.get("settings", {}).get("index", {}).get("uuid", ""))
    return Generation(
        name=name,
        number=int(found[2]),
        fingerprint=str(meta.get("fingerprint")),
        uuid=uuid,
        seeded=bool(uuid) and meta.get("seeded") == uuid,
        retired_at=meta.get("retired_at"),
    )
