"""Continuing an interrupted copy: which ranges are done, and the rows that changed since the copy began.

Ranges that were read in an earlier snapshot stay as they are. In the newest snapshot S the others are read, and then
all rows whose keys occur in a change between the beginning of the copy and S: those replace whatever the ranges have
under these keys. All other rows are the same in every snapshot of the copy and in the same place, so exactly one range
has them. The result is the table at S (docs/decisions/0023-copies-that-resume.md has the proof).

A range counts as done only if the table is as it was when the range was read, by its *fingerprint*: the schema, the
files of its heaps, the versions of its rows in the catalog and of its types, and how the publication sends it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg import sql

from penstock.changes.batch import Rows
from penstock.copy.plan import Leaf
from penstock.lsn import Lsn
from penstock.schema import Column, TableSchema
from penstock.schema.table import schema_to_json
from penstock.schema.types import PG_CATALOG
from penstock.source.membership import Membership
from penstock.source.shapes import TableShape, shape_to_json
from penstock.values import TypeSettings

KEYS_AT_ONCE = 10_000
"""How many rows one statement asks for."""
_ALL = frozenset({"insert", "update", "delete", "truncate"})
_KEY_TYPES = frozenset(
    {
        *("bool", "int2", "int4", "int8", "numeric", "text", "varchar", "bpchar", "uuid", "bytea"),
        *("date", "timestamp", "timestamptz"),
    }
)
"""The types of keys whose texts are known to find the same row again."""


class Blocks(NamedTuple):
    """A part of a heap that was read."""

    heap: int
    first: int
    """0 means no lower end."""
    end: int | None
    """The first block after it; None means no upper end."""
    bytes: int
    """On the source's disk, estimated."""

    def overlaps(self, other: Blocks) -> bool:
        """True if both have a block in common."""
        return (
            self.heap == other.heap
            and (other.end is None or self.first < other.end)
            and (self.end is None or other.first < self.end)
        )


@dataclass(frozen=True, slots=True)
class FinishedRanges:
    """Ranges that a task has read and written, durably."""

    fingerprint: str
    blocks: tuple[Blocks, ...]
    rows: int
    changed_cells: int
    files: Any = None
    """What the destination needs to know of them."""


@dataclass(frozen=True, slots=True)
class ResumableCopy:
    """A copy that the next attempt can continue, and what is already done of it."""

    copy: str
    """Its name, the same in all attempts."""
    fingerprint: str
    changes: Callable[[], Sequence[Rows]]
    """Waits, and returns the table's changes since the copy began, up to the position of the snapshot."""
    leaves: tuple[Leaf, ...]
    """The heaps of the table."""
    finished: tuple[FinishedRanges, ...] = ()
    """Ranges of earlier attempts; those of `CopyRows` are the others."""


@dataclass(frozen=True, slots=True)
class Resuming:
    """What an attempt knows of its copy before it has a snapshot."""

    copy: str
    changes: Callable[[TableSchema, Lsn], Sequence[Rows]]
    """Waits, and returns the table's changes since the copy began, up to a position; raises if its schema changed."""
    finished: tuple[FinishedRanges, ...] = ()
    """Read before the snapshot is taken, so the snapshots that they were read in are earlier."""

    def at(self, position: Lsn, schema: TableSchema, wanted: str, leaves: tuple[Leaf, ...]) -> ResumableCopy:
        """Return the copy in a snapshot, where the table has the fingerprint `wanted`."""
        changes = partial(self.changes, schema, position)
        return ResumableCopy(self.copy, wanted, changes, leaves, usable(self.finished, wanted))


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The rows of a heap that have one of some keys: what a task reads again."""

    leaf: Leaf
    condition: str
    index: int = -1
    """No range of the plan."""
    estimated_bytes: int = 0


def finds_rows_again(schema: TableSchema) -> bool:
    """Return True if rows of a table can be told apart and read again by their keys."""
    types = [column.type for column in schema.key]
    return bool(types) and all(each.namespace == PG_CATALOG and each.name in _KEY_TYPES for each in types)


def fingerprint(
    schema: TableSchema,
    shape: TableShape,
    row_filter: str | None,
    membership: Membership,
    relations: str,
    types: TypeSettings,
    timeline: int,
) -> str | None:
    """Return what must stay the same while a copy is unfinished; None if the stream does not tell all changes.

    `relations` are versions of the table's rows in the catalog. Versions, because what was altered and altered back
    looks the same, although the server omitted changes in between.
    """
    if membership.options is None or not {*membership.options.operations} >= _ALL:
        return None
    entries = sorted((each.oid, each.xmin) for each in membership.tables.get(schema.table_id, ()))
    publication = membership.publication
    facts = [
        schema_to_json(schema),
        {name: value for name, value in shape_to_json(shape).items() if name != "copied_at"},
        [row_filter, publication.oid, publication.xmin, entries, relations, repr(types), timeline],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def usable(finished: Iterable[FinishedRanges], wanted: str) -> tuple[FinishedRanges, ...]:
    """Return ranges of the table as it is now, none of them twice.

    A task of an attempt that was believed dead may have read ranges that a later attempt read, too.
    """
    taken: list[FinishedRanges] = []
    for each in finished:
        known = [blocks for other in taken for blocks in other.blocks]
        if each.fingerprint == wanted and not any(one.overlaps(other) for one in each.blocks for other in known):
            taken.append(each)
    return tuple(taken)


def key_ranges(leaves: Sequence[Leaf], columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> Iterator[KeyRange]:
    """Yield ranges for the rows with these keys; `texts` are those of each key column."""
    for begin in range(0, len(texts[0]), KEYS_AT_ONCE):
        condition = _condition(columns, [list(each[begin : begin + KEYS_AT_ONCE]) for each in texts])
        yield from (KeyRange(leaf, condition) for leaf in leaves)


def cell_texts(cells: pa.Array | pa.ChunkedArray, exact: pa.Array | None = None) -> list[str]:
    """Return cells of a key as text that the server can parse; `exact` has the texts that their type cannot hold.

    They pass through Python one by one, because only single rows are asked for by their keys.
    """
    texts = [_text(value) for value in cells.to_pylist()]
    if exact is None:
        return texts
    return [text if other is None else other for text, other in zip(texts, exact.to_pylist(), strict=True)]


def _text(value: Any) -> str:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _condition(columns: Sequence[Column], texts: Sequence[list[str]]) -> str:
    names = [sql.Identifier(f"k{number}") for number in range(len(columns))]
    casts = [
        sql.SQL("k.{}::{}").format(name, sql.Identifier(column.type.namespace, column.type.name))
        for name, column in zip(names, columns, strict=True)
    ]
    arrays = [sql.SQL("pg_catalog.unnest({}::pg_catalog.text[])").format(sql.Literal(each)) for each in texts]
    condition = sql.SQL("({}) in (select {} from rows from ({}) k ({}))").format(
        sql.SQL(", ").join(sql.Identifier(column.name) for column in columns),
        *(sql.SQL(", ").join(parts) for parts in (casts, arrays, names)),
    )
    return condition.as_string(None)


def blocks_by_heap(finished: Iterable[FinishedRanges]) -> Mapping[int, list[tuple[int, int | None]]]:
    """Return the finished parts of each heap."""
    found: dict[int, list[tuple[int, int | None]]] = {}
    for each in finished:
        for heap, first, end, _ in each.blocks:
            found.setdefault(heap, []).append((first, end))
    return found
