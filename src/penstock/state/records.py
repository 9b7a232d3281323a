"""The records of a store, and the contract of the database that keeps them.

`Store` has all rules and caches; a database only keeps records. A record is a frozen dataclass whose fields are the
columns of its table. Every table also has `pipeline_id`, as the first column of its key; it is not a field because a
transaction belongs to one pipeline.

To keep the state elsewhere, implement `Database` and `Transaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

from penstock.lsn import Lsn


class ColumnKind(Enum):
    """The kinds of columns: str, int, `Lsn`, JSON values, datetime."""

    TEXT = "text"
    INTEGER = "integer"
    LSN = "lsn"
    JSON = "json"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Record:
    """The base of all records."""

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class PipelineRecord(Record):
    """The lease. `holder` is None while it is free; the epoch only grows."""

    table: ClassVar[str] = "pipelines"
    epoch: int
    holder: str | None
    host: str | None
    pid: int | None
    machine: str | None
    started: str | None
    since: datetime | None
    expires: datetime | None


@dataclass(frozen=True, slots=True)
class TableStateRecord(Record):
    """A table's phase."""

    table: ClassVar[str] = "table_states"
    key: ClassVar[tuple[str, ...]] = ("table_id",)
    table_id: int
    sequence: int
    phase: str
    details: dict[str, Any]
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class PhaseHistoryRecord(Record):
    """An earlier phase of a table; `ring` is its sequence modulo the length of the history."""

    table: ClassVar[str] = "table_state_history"
    key: ClassVar[tuple[str, ...]] = ("table_id", "ring")
    table_id: int
    ring: int
    sequence: int
    phase: str
    details: dict[str, Any]
    epoch: int
    recorded_at: datetime


@dataclass(frozen=True, slots=True)
class TableSchemaRecord(Record):
    """A version of a table's schema."""

    table: ClassVar[str] = "table_schemas"
    key: ClassVar[tuple[str, ...]] = ("table_id", "commit_lsn", "ordinal")
    table_id: int
    commit_lsn: Lsn
    ordinal: int
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressRecord(Record):
    """Progress; there is one record, with worker `apply` and table 0."""

    table: ClassVar[str] = "replication_progress"
    key: ClassVar[tuple[str, ...]] = ("worker", "table_id")
    worker: str
    table_id: int
    flush_lsn: Lsn
    lineage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TablePositionRecord(Record):
    """The boundary up to which a table is durable."""

    table: ClassVar[str] = "table_positions"
    key: ClassVar[tuple[str, ...]] = ("table_id",)
    table_id: int
    position: Lsn
    lineage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TableShapeRecord(Record):
    """What the catalog said of a table when it was copied, or when its shape was last compared."""

    table: ClassVar[str] = "table_shapes"
    key: ClassVar[tuple[str, ...]] = ("table_id",)
    table_id: int
    shape: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangedCellsRecord(Record):
    """How many cells of a table `out_of_range` changed, since its copy began."""

    table: ClassVar[str] = "changed_cells"
    key: ClassVar[tuple[str, ...]] = ("table_id",)
    table_id: int
    cells: int


@dataclass(frozen=True, slots=True)
class CommandRecord(Record):
    """A command; `token` distinguishes a repeated request from a second one."""

    table: ClassVar[str] = "commands"
    key: ClassVar[tuple[str, ...]] = ("number",)
    number: int
    token: str
    kind: str
    tables: list[str]
    options: dict[str, Any]
    status: str
    reason: str | None
    requested_by: str
    requested_at: datetime
    answered_at: datetime | None
    epoch: int


@dataclass(frozen=True, slots=True)
class PublicationRecord(Record):
    """The membership of a publication when it was last acted upon."""

    table: ClassVar[str] = "publications"
    key: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    membership: dict[str, Any]


@dataclass(frozen=True, slots=True)
class IndexBuildRecord(Record):
    """The last build of a search index."""

    table: ClassVar[str] = "index_builds"
    key: ClassVar[tuple[str, ...]] = ("index_name",)
    index_name: str
    build: str
    fingerprint: str
    status: str
    reason: str
    plan: dict[str, Any]
    changed: int
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class IndexRangeRecord(Record):
    """A finished range of a build."""

    table: ClassVar[str] = "index_ranges"
    key: ClassVar[tuple[str, ...]] = ("index_name", "build", "part")
    index_name: str
    build: str
    part: int
    documents: int


@dataclass(frozen=True, slots=True)
class IndexWorkRecord(Record):
    """Work left for an index."""

    table: ClassVar[str] = "index_work"
    key: ClassVar[tuple[str, ...]] = ("index_name", "number")
    index_name: str
    number: int
    work: str
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class QuarantineRecord(Record):
    """A document that a sink rejected; `wanted` is 1 if a user asked for a retry, else 0."""

    table: ClassVar[str] = "quarantine"
    key: ClassVar[tuple[str, ...]] = ("index_name", "id")
    index_name: str
    id: str
    reason: str
    position: Lsn | None
    body_hash: str
    first_at: datetime
    last_at: datetime
    attempts: int
    wanted: int


@dataclass(frozen=True, slots=True)
class PollPositionRecord(Record):
    """Where polling for changes is; there is one record."""

    table: ClassVar[str] = "poll_positions"
    position: dict[str, Any]


RECORDS: tuple[type[Record], ...] = (
    PipelineRecord,
    TableStateRecord,
    PhaseHistoryRecord,
    TableSchemaRecord,
    ProgressRecord,
    TablePositionRecord,
    TableShapeRecord,
    ChangedCellsRecord,
    CommandRecord,
    PublicationRecord,
    IndexBuildRecord,
    IndexRangeRecord,
    IndexWorkRecord,
    QuarantineRecord,
    PollPositionRecord,
)

_KINDS: dict[Any, ColumnKind] = {
    str: ColumnKind.TEXT,
    int: ColumnKind.INTEGER,
    Lsn: ColumnKind.LSN,
    dict: ColumnKind.JSON,
    list: ColumnKind.JSON,
    datetime: ColumnKind.TIME,
}

RecordT = TypeVar("RecordT", bound=Record)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a record's table, without `pipeline_id`."""

    names: tuple[str, ...]
    kinds: tuple[ColumnKind, ...]
    key: tuple[str, ...]


@cache
def layout_of(kind: type[Record]) -> Layout:
    """Return the columns of a record's table."""
    hints = get_type_hints(kind)
    names = tuple(column.name for column in fields(kind))
    return Layout(names, tuple(_kind_of(hints[name]) for name in names), kind.key)


def _kind_of(annotation: Any) -> ColumnKind:
    """Return the kind of a field from its annotation, with or without `| None`."""
    if get_origin(annotation) is UnionType:
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    return _KINDS[get_origin(annotation) or annotation]


class Transaction(Protocol):
    """One atomic transaction on the records of one pipeline."""

    def now(self) -> datetime:
        """Return the time of the database's clock, which measures the leases of all processes."""
        ...

    def rows(self, kind: type[RecordT], **values: Any) -> list[RecordT]:
        """Return the records whose columns have these values, ordered by key."""
        ...

    def put(self, records: Iterable[Record]) -> None:
        """Write records, replacing those with the same key."""
        ...

    def delete(self, kind: type[Record], **values: Any) -> int:
        """Delete the records whose columns have these values; return their number."""
        ...


class Database(Protocol):
    """The records of one pipeline. Thread-safe: transactions of one object run one after the other."""

    pipeline_id: str

    def run(self, work: Callable[[Transaction], ResultT], *, writing: bool = True) -> ResultT:
        """Run `work` in a transaction, serialised with all other writers of the pipeline, and commit durably.

        After a lost connection `work` may run again, even if its commit had succeeded; it reads before it writes, and
        so notices. An exception in `work` rolls the transaction back and is raised.
        """
        ...

    def another(self) -> Database:
        """Return another database object for the same records, which does not wait for this one's transactions."""
        ...

    def close(self) -> None:
        """Close all connections; may be called again."""
        ...
