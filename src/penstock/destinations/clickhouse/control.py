"""What Penstock records in ClickHouse: for each table its place, its copy, its layout and its position.

ClickHouse has neither transactions nor updates. A record is replaced by inserting a newer one; a record with a higher
epoch is newer, whatever the clocks say, so a process that lost its lease changes nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import pyarrow as pa

from penstock.destinations.clickhouse.layout import DURABLE, Layout, Mode, layout_from_json
from penstock.destinations.clickhouse.server import Server, literal
from penstock.lsn import Lsn

TABLES = "penstock_tables"
_COLUMNS = (
    *(
        "pipeline",
        "source",
        "place",
        "view",
        "next_place",
        "next_view",
        "attempt",
        "copied",
        "generation",
        "lineage",
        "position",
    ),
    *("floor", "layout"),
)
_lock = Lock()
_last = 0


@dataclass(frozen=True, slots=True)
class Known:
    """The record of a table."""

    pipeline: str
    table_id: int
    source: str
    """The name of the table at the source."""
    attempt: str
    """The newest attempt to copy it; all others are fenced off."""
    next_place: str
    """The folder that the copy would go to, if it went to folders."""
    next_view: str
    """The view that will show it."""
    epoch: int
    place: str = ""
    view: str = ""
    """Where readers find the table; empty if no copy is complete."""
    copied: str = ""
    """The attempt whose copy readers see."""
    generation: str = ""
    """The table under the view."""
    lineage: str = ""
    position: Lsn | None = None
    floor: int = 0
    """Rows with this `_version` or a lower one were truncated."""
    layout: Layout | None = None

    @property
    def mode(self) -> Mode | None:
        return None if self.layout is None else self.layout.mode

    @property
    def is_copied(self) -> bool:
        """True if readers see the copy of the newest attempt."""
        return bool(self.attempt) and self.copied == self.attempt


@dataclass(frozen=True, slots=True)
class Control:
    """Reads and writes the records of a pipeline."""

    server: Server
    pipeline: str

    def create(self, *, fsync: bool) -> None:
        """Create the database and the table of the records, if they do not exist."""
        if not self.server.rows(f"select 1 from system.databases where name = {literal(self.server.database)}"):
            self.server.run(f"create database if not exists {self.server.name('x').partition('.')[0]}")
        columns = ", ".join(f"{name} String" for name in _COLUMNS)
        self.server.run(
            f"create table if not exists {self.server.name(TABLES)} "
            f"({columns}, table_id UInt64, epoch UInt64, written UInt128) "
            "engine = ReplacingMergeTree(written) order by (pipeline, table_id)"
            f"{f' settings {DURABLE}' if fsync else ''}"
        )

    def exists(self) -> bool:
        """Return True if there are records of any pipeline."""
        where = f"database = {literal(self.server.database)} and name = {literal(TABLES)}"
        return bool(self.server.rows(f"select 1 from system.tables where {where}"))

    def load(self, table_ids: Sequence[int] | None = None) -> dict[int, Known]:
        """Return the records of this pipeline."""
        where = f"pipeline = {literal(self.pipeline)}"
        if table_ids is not None:
            where += f" and table_id in ({', '.join(map(str, table_ids))})"
        return {known.table_id: known for known in self.find(where)}

    def find(self, where: str) -> list[Known]:
        """Return the records of all pipelines for which a condition holds."""
        found = self.server.rows(
            f"select {', '.join(_COLUMNS)}, table_id, epoch from {self.server.name(TABLES)} final where {where}"
        )
        return [known for row in found if (known := _known(row)).attempt]

    def save(self, records: Iterable[Known]) -> None:
        """Replace records, all at once."""
        rows = list(records)
        columns = {name: [_text(each, name) for each in rows] for name in _COLUMNS}
        written = b"".join(_stamp().to_bytes(8, "little") + each.epoch.to_bytes(8, "little") for each in rows)
        table = pa.table(
            {
                **{name: pa.array(cells, pa.string()) for name, cells in columns.items()},
                "table_id": pa.array([each.table_id for each in rows], pa.uint64()),
                "epoch": pa.array([each.epoch for each in rows], pa.uint64()),
                "written": pa.Array.from_buffers(pa.binary(16), len(rows), [None, pa.py_buffer(written)]),
            }
        )
        self.server.insert(TABLES, table, hashlib.sha256(written).hexdigest())

    def forget(self, known: Known) -> None:
        """Remove the record of a table."""
        self.save([replace(known, attempt="", place="", view="", next_place="", next_view="", copied="", layout=None)])

    def generation(self, table_id: int, attempt: str) -> str:
        """Return the table that the rows of an attempt are copied to."""
        return f"{self.generations(table_id)}{_digest(attempt)}"

    def generations(self, table_id: int) -> str:
        """Return how the names of all generations of a table begin."""
        return f"penstock_{_digest(self.pipeline)}_{table_id}_"

    def drop_generations(self, table_id: int, but: str) -> None:
        """Drop the tables of other copies: what writes to them fails from now on."""
        begin = self.generations(table_id)
        where = f"database = {literal(self.server.database)} and startsWith(name, {literal(begin)})"
        for (name,) in self.server.rows(f"select name from system.tables where {where}"):
            if name != but:
                self.server.run(f"drop table if exists {self.server.name(name)} sync")


def _text(known: Known, name: str) -> str:
    value = getattr(known, name)
    return value.to_json() if isinstance(value, Layout) else "" if value is None else str(value)


def _known(row: Sequence[str]) -> Known:
    record = dict(zip((*_COLUMNS, "table_id", "epoch"), row, strict=True))
    return Known(
        pipeline=record["pipeline"],
        table_id=int(record["table_id"]),
        source=record["source"],
        attempt=record["attempt"],
        next_place=record["next_place"],
        next_view=record["next_view"],
        epoch=int(record["epoch"]),
        place=record["place"],
        view=record["view"],
        copied=record["copied"],
        generation=record["generation"],
        lineage=record["lineage"],
        position=Lsn.parse(record["position"]) if record["position"] else None,
        floor=int(record["floor"] or 0),
        layout=layout_from_json(record["layout"]) if record["layout"] else None,
    )


def _stamp() -> int:
    """Return a number that grows with every call, also across restarts."""
    global _last
    with _lock:
        _last = max(time.time_ns(), _last + 1)
        return _last


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
