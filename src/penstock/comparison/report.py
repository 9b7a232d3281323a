"""The result of a comparison, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.lsn import Lsn


class Kind(StrEnum):
    """How a row differs."""

    MISSING = "missing"
    """Only the source has it."""
    EXTRA = "extra"
    """Only the destination has it, or has it more often."""
    CHANGED = "changed"
    """Both have the key, with different cells."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that differs."""

    kind: Kind
    key: Mapping[str, Any]
    """The key columns by name; empty for a table without a key."""
    columns: tuple[str, ...] = ()
    """The columns that differ, for a changed row."""
    source: Mapping[str, Any] | None = None
    """Values of these columns, or of all columns if the row is missing or extra. None unless values were requested."""
    destination: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": self.kind.value, "key": dict(self.key)}
        if self.kind is Kind.CHANGED:
            record["columns"] = list(self.columns)
        if self.source is not None:
            record["source"] = dict(self.source)
        if self.destination is not None:
            record["destination"] = dict(self.destination)
        return record


class ColumnKind(StrEnum):
    """How a column differs."""

    MISSING = "missing"
    """Only the source has it."""
    EXTRA = "extra"
    """Only the destination has it."""
    RENAMED = "renamed"
    """The destination has it under another name."""
    TYPE = "type"
    """The destination has another type, which may hold other values."""


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """One column that differs."""

    kind: ColumnKind
    column: str
    source: str | None
    """The type at the source, or its name if it was renamed; None if the source does not have it."""
    destination: str | None
    """The same at the destination. For another type, both are the types of values at the destination."""

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": self.kind.value, "column": self.column}
        sides = {"source": self.source, "destination": self.destination}
        return record | {side: what for side, what in sides.items() if what is not None}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows are equal, and how many are not."""

    equal: int = 0
    missing: int = 0
    extra: int = 0
    changed: int = 0
    unsettled: int = 0
    """Keys that could not be judged, because their rows changed while source and destination were being read."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.equal + other.equal,
            self.missing + other.missing,
            self.extra + other.extra,
            self.changed + other.changed,
            self.unsettled + other.unsettled,
        )

    @property
    def different(self) -> int:
        return self.missing + self.extra + self.changed

    @property
    def source_rows(self) -> int:
        return self.equal + self.missing + self.changed

    @property
    def destination_rows(self) -> int:
        return self.equal + self.extra + self.changed


@dataclass(frozen=True, slots=True)
class TableReport:
    """The result for one table."""

    table: str
    counts: Counts = field(default_factory=Counts)
    differences: tuple[Difference, ...] = ()
    """Some of them."""
    seconds: float = 0.0
    reason: str | None = None
    """Why the table was not compared; None if it was."""
    columns: tuple[ColumnDifference, ...] = ()
    """Columns that differ; rows are compared in the others."""
    not_compared: tuple[str, ...] = ()
    """What the comparison did not cover, as phrases for people."""

    @property
    def result(self) -> str:
        """Return `equal`, `different`, `unsettled` (equal except for rows that cannot be judged) or `not compared`."""
        if self.reason is not None:
            return "not compared"
        if self.counts.different or self.columns:
            return "different"
        return "unsettled" if self.counts.unsettled else "equal"

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"table": self.table, "result": self.result}
        if self.reason is not None:
            return {**record, "reason": self.reason}
        return {
            **record,
            "source_rows": self.counts.source_rows,
            "destination_rows": self.counts.destination_rows,
            "equal": self.counts.equal,
            "missing": self.counts.missing,
            "extra": self.counts.extra,
            "changed": self.counts.changed,
            "unsettled": self.counts.unsettled,
            "differences": [difference.to_json() for difference in self.differences],
            "columns": [column.to_json() for column in self.columns],
            "not_compared": list(self.not_compared),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The result for all tables."""

    position: Lsn
    """The position of both sides."""
    tables: tuple[TableReport, ...]
    sample: float = 1.0
    """The fraction of the rows that was compared."""
    held_seconds: float = 0.0
    """How long changes were held back, so that both sides could be compared."""
    exact: bool = True
    """True if both sides were at one position. Otherwise rows that changed between two reads may be unsettled."""

    @property
    def exit_code(self) -> int:
        """0: all equal; 1: rows or columns differ; 2: nothing differs, but a table could not be compared."""
        results = {table.result for table in self.tables}
        return 1 if "different" in results else 0 if results == {"equal"} else 2

    def to_json(self) -> dict[str, Any]:
        return {
            "position": str(self.position),
            "exact": self.exact,
            "sample": self.sample,
            "held_seconds": round(self.held_seconds, 3),
            "tables": [table.to_json() for table in self.tables],
        }
