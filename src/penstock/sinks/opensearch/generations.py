"""Generations of an index as plain values: which exist, which one serves, and which one is being filled.

    customers ─alias─▶ customers_5f1c0a9e77d23b90c4e1_20261115161500
                                │                    └ time of creation; unique
                                └ fingerprint of the build

The name in the config is an alias, and the index behind it is a generation. What Penstock knows about a generation is
stored in the index itself (`_meta`), so it does not depend on Penstock's state. Writers use a second alias that only
this generation has: if the index is deleted, the alias is gone too. Its name has capital letters, which an index must
not have, so the server cannot create an index with guessed mappings in its place. (`require_alias` is not enough: it
does not apply to removals, and a removal with an external version creates an index, too.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.errors import IndexUnusable
from penstock.sinks.base import IndexMapping

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
    """Filled completely. Bound to the index's uuid: one restored from a backup is outdated and counts as not seeded."""
    retired_at: float | None = None
    """When it was replaced."""
    owner: str = ""
    """The output that writes it; empty if an earlier version of Penstock created it."""
    routing: tuple[int, int] | None = None
    """As in `IndexMapping`, like the prefix of ids."""
    id_prefix: str = ""
    aliases: frozenset[str] = frozenset()
    """Its aliases, except for the index's name and the alias to write to."""

    @property
    def alias(self) -> str:
        """The alias to write to."""
        return self.name + WRITE_SUFFIX


@dataclass(frozen=True, slots=True)
class IndexState:
    """All generations of an index, oldest first, and the one that serves."""

    index: str
    generations: tuple[Generation, ...] = ()
    serving: Generation | None = None

    def find(self, name: str) -> Generation | None:
        """Return a generation by its name."""
        return next((each for each in self.generations if each.name == name), None)

    @property
    def unserved(self) -> Generation | None:
        """A complete generation that does not serve because of a crash."""
        last = self.serving.number if self.serving is not None else -1
        complete = [each for each in self.generations if each.seeded and each.retired_at is None and each.number > last]
        return complete[-1] if complete else None

    def filling(self, fingerprint: str) -> Generation | None:
        """Return a generation of this shape that was begun and can be continued."""
        last = self.serving.number if self.serving is not None else -1
        begun = [each for each in self.generations if not each.seeded and each.number > last]
        return begun[-1] if begun and begun[-1].fingerprint == fingerprint else None

    @property
    def former(self) -> tuple[Generation, ...]:
        """The generations that served before."""
        if self.serving is None:
            return ()
        return tuple(each for each in self.generations if each.number < self.serving.number)


def paths_of(indexes: Sequence[str]) -> Iterator[str]:
    """Yield the paths that return the states of indexes: aliases, their targets, and possible generations."""
    wanted = "*.aliases,*.mappings._meta,*.settings.index.uuid"
    for names in in_paths([f"{index},{index}_*" for index in indexes]):
        yield f"/{names}?ignore_unavailable=true&allow_no_indices=true&expand_wildcards=all&filter_path={wanted}"


def in_paths(names: Sequence[str]) -> Iterator[str]:
    """Join names into parts of paths that fit a request, whose first line has at most 4 KB."""
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
    """Return the state of an index, from an answer that may contain others; raise `IndexUnusable` if it is not
    Penstock's."""
    if index in answer:
        raise IndexUnusable(
            f"an index named {index!r} exists where Penstock needs an alias of this name",
            hint=f"Delete or rename the index {index!r}, or give Penstock's index another name.",
            index=index,
        )
    generations = {name: found for name, each in answer.items() if (found := _generation(index, name, each))}
    named = [name for name, each in answer.items() if index in each.get("aliases", {})]
    foreign = sorted(set(named) - set(generations))
    if foreign:
        raise IndexUnusable(
            f"alias {index!r} points to {foreign[0]!r}, which is not an index of Penstock",
            hint=f"Remove the alias from {foreign[0]!r}, or give Penstock's index another name.",
            index=index,
        )
    if len(named) > 1:
        raise IndexUnusable(
            f"alias {index!r} points to several indexes: {', '.join(sorted(named))}",
            hint="Keep it on the newest index and remove it from the others.",
            index=index,
        )
    ordered = tuple(sorted(generations.values(), key=lambda each: each.number))
    return IndexState(index, ordered, generations[named[0]] if named else None)


def new_generation(state: IndexState, mapping: IndexMapping, now: float) -> str:
    """Return a name that no generation had before, even if the clock went back."""
    number = int(time.strftime(_STAMP, time.gmtime(now)))
    if state.generations:
        number = max(number, state.generations[-1].number + 1)
    return f"{mapping.index}_{mapping.fingerprint}_{number}"


def describe(
    index: str, like: Generation | IndexMapping, *, seeded: str | None = None, retired_at: float | None = None
) -> Any:
    """Return the `_meta` of a generation; `seeded` is the uuid of the index that was filled."""
    described = {"index": index, "fingerprint": like.fingerprint, "seeded": seeded, "retired_at": retired_at}
    return {OWNER: {**described, "owner": like.owner, "routing": like.routing, "id_prefix": like.id_prefix}}


def require_owned(state: IndexState, mapping: IndexMapping) -> None:
    """Raise `IndexUnusable` if another output writes the index."""
    for each in state.generations:
        if each.retired_at is None and each.owner and mapping.owner and each.owner != mapping.owner:
            raise IndexUnusable(
                f"index {mapping.index!r} belongs to another pipeline, {each.owner!r}: both would write to it",
                hint=f"Give the index another name. If that pipeline no longer exists, delete the index {each.name!r}.",
                index=mapping.index,
            )


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
        owner=str(meta.get("owner") or ""),
        routing=tuple(meta["routing"]) if meta.get("routing") else None,
        id_prefix=str(meta.get("id_prefix") or ""),
        aliases=frozenset(described.get("aliases", {})) - {index, name + WRITE_SUFFIX},
    )
