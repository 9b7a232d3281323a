"""Replays a spool over the initial rows, in the slow and obvious way: row by row.

Cells are compared as the server's text. Values with a native Arrow type are formatted as the server would; floats and
lists, whose text is not unique or simple, are parsed on both sides. Nothing here is fast, and it shares only the names
of columns and files with the code it checks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    Operation,
    segment_layout,
)
from penstock.changes.steps import Message, Segment, Truncation
from penstock.lsn import Lsn, OrderKey, is_in, reaches
from penstock.schema import Column, ReplicaIdentity, TableSchema, resolve_domain
from penstock.spool import Entry, SpoolReader
from penstock.spool.folder import SpoolFolder
from penstock.spool.log import read_parts


class Discrepancy(AssertionError):
    """The spool differs from what happened."""


class Missing(Enum):
    """A cell that the server omitted."""

    UNCHANGED = "unchanged"


Cell = Any
"""None for NULL, `Missing.UNCHANGED`, or a hashable value that is equal exactly if the server's texts are."""
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one row, or a truncate (no operation and no row)."""

    key: OrderKey
    table_id: int
    table: str
    xid: int
    commit_time: int
    operation: Operation | None
    row: Row | None = None
    old: Row | None = None
    """The cells in `_old`; UNCHANGED for other columns."""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Replayable:
    """The contents of a spool."""

    entries: tuple[Entry, ...]
    changes: tuple[Change, ...]
    """In key order."""
    messages: tuple[Message, ...]
    schemas: Mapping[int, tuple[TableSchema, ...]]
    """The schema versions in segments, by table, oldest first."""

    def transactions(self) -> list[tuple[int, int]]:
        """Return each top-level transaction with its number of changes (a truncate is one), in commit order."""
        keys = {(change.key, change.xid) for change in self.changes}
        counts: dict[tuple[int, int], int] = {}
        for key, xid in sorted(keys):
            counts[key.commit_lsn, xid] = counts.get((key.commit_lsn, xid), 0) + 1
        return [(xid, count) for (_, xid), count in counts.items()]

    def comparable(self) -> list[tuple[Any, ...]]:
        """Return every change without what may differ between two captures of the same WAL (entry boundaries)."""
        return [
            (change.key, change.table, change.xid, change.commit_time, change.operation, change.row, change.old)
            for change in self.changes
        ]


def read_spool(path: Path) -> Replayable:
    """Read a spool from its beginning and check everything that does not need the source."""
    reader = SpoolReader(path)
    entries = tuple(entry for _, part in read_parts(SpoolFolder(path), repair=False) for entry in part)
    changes: list[Change] = []
    messages: list[Message] = []
    schemas: dict[int, dict[str, TableSchema]] = {}
    last_of: dict[int, OrderKey] = {}
    for before, entry in zip((None, *entries), entries, strict=False):
        _check_entry(before, entry)
        inside: list[Change] = []
        for step in entry.steps:
            match step:
                case Segment():
                    schema = reader.schema(step)
                    schemas.setdefault(step.table_id, {})[step.version] = schema
                    rows = list(_read_segment(reader, step, schema))
                    _check_segment(step, rows)
                    inside += rows
                case Truncation():
                    rows = [Change(step.key, step.table_id, step.table, step.xid, step.commit_time, None)]
                    inside += rows
                case Message():
                    messages.append(step)
                    continue
            before_key = last_of.get(step.table_id)
            if before_key is not None and rows[0].key <= before_key:
                raise Discrepancy(f"entry {entry.number}: {step.table} goes back from {before_key} to {rows[0].key}")
            last_of[step.table_id] = rows[-1].key
        inside.sort(key=lambda change: change.key)
        _check_whole(entry, inside)
        changes += inside
    versions = {table_id: tuple(found[name] for name in sorted(found)) for table_id, found in schemas.items()}
    return Replayable(entries, tuple(changes), tuple(messages), versions)


def _check_entry(before: Entry | None, entry: Entry) -> None:
    if before is not None and (before.end != entry.begin or before.number + 1 != entry.number):
        raise Discrepancy(f"entry {entry.number} does not follow entry {before.number}")
    if not reaches(entry.end, entry.begin):
        raise Discrepancy(f"entry {entry.number} ends before it begins")


def _check_segment(segment: Segment, rows: Sequence[Change]) -> None:
    keys = [row.key for row in rows]
    if not keys or len(keys) != segment.rows or keys[0] != segment.first or keys[-1] != segment.last:
        raise Discrepancy(f"{segment.path} has rows that differ from its record")
    if any(after <= before for before, after in pairwise(keys)):
        raise Discrepancy(f"{segment.path} is not in order")


def _check_whole(entry: Entry, changes: Sequence[Change]) -> None:
    """Check that every transaction of an entry is complete: its ordinals are 0, 1, 2, … over all tables."""
    ordinals: dict[Lsn, set[int]] = {}
    about: dict[Lsn, set[tuple[int, int]]] = {}
    for change in changes:
        if is_in(change.key.commit_lsn, entry.begin) or not is_in(change.key.commit_lsn, entry.end):
            raise Discrepancy(f"entry {entry.number} ({entry.begin}–{entry.end}) has a change of {change.key}")
        ordinals.setdefault(change.key.commit_lsn, set()).add(change.key.ordinal)
        about.setdefault(change.key.commit_lsn, set()).add((change.xid, change.commit_time))
        if not entry.first_commit_time <= change.commit_time <= entry.last_commit_time:
            raise Discrepancy(f"entry {entry.number} has a change outside its commit times: {change.key}")
    if len(ordinals) > entry.transactions:
        raise Discrepancy(
            f"entry {entry.number} has {len(ordinals)} transactions, its record says {entry.transactions}"
        )
    for lsn, found in ordinals.items():
        if found != set(range(len(found))):
            raise Discrepancy(f"the transaction that commits at {lsn} is torn: ordinals {sorted(found)[:20]} …")
        if len(about[lsn]) != 1:
            raise Discrepancy(f"the transaction that commits at {lsn} has several numbers or times: {about[lsn]}")


def _read_segment(reader: SpoolReader, segment: Segment, schema: TableSchema) -> Iterator[Change]:
    layout = segment_layout(schema)
    table = reader.read(segment)
    expected = [*layout.arrow_schema.names, *([UNREPRESENTABLE] if UNREPRESENTABLE in table.column_names else [])]
    if table.column_names != expected:
        raise Discrepancy(f"{segment.path} has columns {table.column_names}, not {expected}")
    kept: list[dict[str, str]] = [{}] * table.num_rows
    if UNREPRESENTABLE in table.column_names:
        kept = [_texts_by_name(cell) for cell in table.column(UNREPRESENTABLE).to_pylist()]
    cells = [
        _cells(table.column(column.field_name), [texts.get(column.field_name) for texts in kept], column.column)
        for column in layout.columns
    ]
    old_columns: list[list[Cell] | None] = [None] * len(layout.columns)
    has_old: list[bool] = [False] * table.num_rows
    if layout.old_columns:
        old = table.column(OLD).combine_chunks()
        has_old = old.is_valid().to_pylist()
        for column in layout.old_columns:
            texts = [found.get(f"{OLD}.{column.field_name}") for found in kept]
            values = old.field(column.field_name)
            old_columns[column.index] = _cells(pa.chunked_array([values]), texts, column.column)
    bitmaps = table.column(UNCHANGED).to_pylist()
    times = table.column(COMMIT_TIME).cast(pa.int64()).to_pylist()
    head = zip(*(table.column(name).to_pylist() for name in (OP, COMMIT_LSN, ORDINAL, XID)), strict=True)
    for index, (operation, commit_lsn, ordinal, xid) in enumerate(head):
        bitmap = bitmaps[index]
        row = tuple(
            Missing.UNCHANGED if bitmap is not None and bitmap[at >> 3] >> (at & 7) & 1 else column[index]
            for at, column in enumerate(cells)
        )
        before = None
        if has_old[index]:
            before = tuple(Missing.UNCHANGED if column is None else column[index] for column in old_columns)
        yield Change(
            OrderKey(Lsn(commit_lsn), ordinal), segment.table_id, segment.table, xid, times[index],
            Operation(operation), row, before, segment.version,
        )  # fmt: skip


def _texts_by_name(cell: list[tuple[str, str]] | None) -> dict[str, str]:
    found = dict(cell or ())
    if len(found) != len(cell or ()):
        raise Discrepancy(f"two texts of one column in {UNREPRESENTABLE}: {[name for name, _ in cell or ()]}")
    return found


# Cells


def _cells(values: pa.ChunkedArray, texts: Sequence[str | None], column: Column) -> list[Cell]:
    delimiter = element_delimiter(column)
    cells: list[Cell] = []
    for value, text in zip(values.to_pylist(), texts, strict=True):
        if text is None:
            cells.append(from_arrow(value, values.type))
        elif value is not None:
            raise Discrepancy(f"a cell of {column.name} has both a value and a text")
        elif fits(text, values.type, delimiter):
            raise Discrepancy(f"an unrepresentable cell of {column.name} fits {values.type}: {text[:80]!r}")
        else:
            cells.append(from_text(text, values.type, delimiter))
    return cells


def element_delimiter(column: Column) -> str:
    type_, _ = resolve_domain(column.type, column.type_modifier)
    return type_.element.delimiter if type_.element is not None else ","


def from_arrow(value: Any, type_: pa.DataType) -> Cell:
    """Format an Arrow value as the server would."""
    if value is None or pa.types.is_string(type_):
        return value
    if pa.types.is_boolean(type_):
        return "t" if value else "f"
    if pa.types.is_integer(type_):
        return str(value)
    if pa.types.is_floating(type_):
        return _float(value)
    if pa.types.is_decimal(type_):
        return f"{value:f}"
    if pa.types.is_binary(type_):
        return "\\x" + value.hex()
    if pa.types.is_list(type_):
        return tuple(from_arrow(element, type_.value_type) for element in value)
    if pa.types.is_date(type_):
        return value.isoformat()
    if pa.types.is_time(type_):
        return _trimmed(value.isoformat())
    if pa.types.is_timestamp(type_):
        text = _trimmed(value.replace(tzinfo=None).isoformat(sep=" "))
        return text if type_.tz is None else f"{text}+00"
    raise Discrepancy(f"a column has an unexpected type: {type_}")


def from_text(text: str | None, type_: pa.DataType, delimiter: str = ",") -> Cell:
    """Convert the server's text to the form that `from_arrow` returns."""
    if text is None:
        return None
    if pa.types.is_floating(type_):
        return _float(np.float32(text) if type_ == pa.float32() else float(text))
    if pa.types.is_list(type_):
        elements = split_array(text, delimiter)
        if elements is not None:
            return tuple(from_text(element, type_.value_type) for element in elements)
    return text


def fits(text: str, type_: pa.DataType, delimiter: str = ",") -> bool:
    """True if a column of this type can hold a value with this text."""
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return re.fullmatch(r"(?!0000)\d{4}-\d\d-\d\d( [\d:.]+(\+00)?)?", text) is not None
    if pa.types.is_time(type_):
        return not text.startswith("24:")
    if pa.types.is_decimal(type_):
        return text not in ("NaN", "Infinity", "-Infinity")
    if pa.types.is_list(type_):
        elements = split_array(text, delimiter)
        return elements is not None and all(each is None or fits(each, type_.value_type) for each in elements)
    return True


def _float(value: Any) -> str:
    return float(value).hex()


def _trimmed(text: str) -> str:
    return text.rstrip("0") if "." in text else text


_ELEMENT = r'"((?:[^"\\]|\\.)*)"|([^"{}]*?)'


def split_array(text: str, delimiter: str) -> list[str | None] | None:
    """Return the elements of a one-dimensional array; None for other arrays."""
    if text == "{}":
        return []
    if not text.startswith("{") or text.startswith("{{"):
        return None
    elements: list[str | None] = []
    pattern = re.compile(f"(?:{_ELEMENT})([{re.escape(delimiter)}}}])", re.DOTALL)
    at = 1
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            raise ValueError("not the text of an array")
        quoted, plain, _ = found.groups()
        if quoted is not None:
            elements.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
        else:
            elements.append(None if plain == "NULL" else plain)
        at = found.end()
    return elements


# Replay


class Table:
    """The rows of one table, to which changes are applied one by one."""

    def __init__(self, name: str, schema: TableSchema, rows: Iterable[Row]) -> None:
        self.name = name
        self._positions = {column.name: index for index, column in enumerate(schema.columns)}
        self._full = schema.replica_identity is ReplicaIdentity.FULL
        self._key = [self._positions[column.name] for column in schema.key]
        self._rows: dict[Row, Row] = {}
        self._many: Counter[Row] = Counter()
        for row in rows:
            self._insert(row, f"the first rows of {name}")

    def rows(self) -> Counter[Row]:
        return Counter(self._rows.values()) if self._key else +self._many

    def apply(self, change: Change) -> None:
        """Apply a change; raise `Discrepancy` if it does not fit the rows."""
        where = f"{self.name} at {change.key}"
        if change.operation is None:
            self._rows.clear()
            self._many.clear()
            return
        assert change.row is not None
        if change.operation is Operation.DELETE:
            _check_image(change.row, self._take(change.row, where), where)
        elif change.operation is Operation.UPDATE:
            before = self._take(change.row if change.old is None else change.old, where)
            if change.old is not None:
                _check_image(change.old, before, where)
            row = tuple(old if new is Missing.UNCHANGED else new for new, old in zip(change.row, before, strict=True))
            self._insert(row, where)
        else:
            self._insert(change.row, where)

    def _insert(self, row: Row, where: str) -> None:
        if Missing.UNCHANGED in row:
            raise Discrepancy(f"{where}: a new row lacks cells")
        if not self._key:
            self._many[row] += 1
            return
        key = tuple(row[index] for index in self._key)
        if key in self._rows:
            raise Discrepancy(f"{where}: a second row with the key {_short(key)}")
        self._rows[key] = row

    def _take(self, row: Row, where: str) -> Row:
        """Remove the row that this one identifies."""
        if self._key:
            key = tuple(row[index] for index in self._key)
            if key not in self._rows:
                raise Discrepancy(f"{where}: no row with the key {_short(key)}")
            return self._rows.pop(key)
        if not self._full:
            raise Discrepancy(f"{where}: an update or delete in a table without identity")
        if self._many[row] < 1:
            raise Discrepancy(f"{where}: no row like {_short(row)}")
        self._many[row] -= 1
        return row


def _check_image(image: Row, before: Row, where: str) -> None:
    """Check that the old values equal the row before the change; an omitted value must not read as NULL."""
    for sent, cell in zip(image, before, strict=True):
        if sent is not Missing.UNCHANGED and sent != cell:
            raise Discrepancy(f"{where}: the old row had {_short([cell])}, not {_short([sent])}")


def _short(cells: Iterable[Cell]) -> str:
    return repr([str(cell)[:60] for cell in cells])
