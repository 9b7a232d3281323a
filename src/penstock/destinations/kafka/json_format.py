"""Values and keys in JSON: Debezium's envelope without a schema, or the row alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.destinations.kafka.json_cells import TEXT, join, json_cells, json_objects, quoted
from penstock.destinations.kafka.messages import Origin, Side
from penstock.destinations.postgres.encoding import Cells
from penstock.schema import TableSchema
from penstock.values.cells import large_text


@dataclass(frozen=True, slots=True)
class Source:
    """What all events of a pipeline say about their source."""

    name: str
    database: str
    unavailable: str
    """Stands for a value that the server omitted because the update did not change it."""


@dataclass(frozen=True, slots=True)
class JsonEnvelope:
    """`{"before": …, "after": …, "source": …, "op": "u", …}`."""

    source: Source

    def keys(self, schema: TableSchema, cells: Sequence[Cells], count: int) -> pa.Array:
        """See `Format`."""
        return json_objects([column.name for column in schema.key], [json_cells(each) for each in cells], count)

    def values(
        self, schema: TableSchema, before: Side | None, after: Side | None, operations: pa.Array, origin: Origin
    ) -> pa.Array:
        """See `Format`."""
        count = len(origin)
        constant = {
            "version": penstock_version(),
            "connector": "postgresql",
            "name": self.source.name,
            "snapshot": "true" if origin.snapshot else "false",
            "db": self.source.database,
            "schema": schema.namespace,
            "table": schema.name,
            "xmin": None,
        }
        micros = pc.cast(origin.commit_time, TEXT)
        now = time.time_ns() // 1000
        return join(
            large_text('{"before":'),
            self._row(schema, before, count),
            large_text(',"after":'),
            self._row(schema, after, count),
            large_text(f',"source":{_dumps(constant)[:-1]},"ts_ms":'),
            pc.cast(pc.divide(origin.commit_time, 1000), TEXT),
            large_text(',"ts_us":'),
            micros,
            large_text(',"ts_ns":'),
            micros,
            large_text('000,"txId":'),
            pc.cast(origin.xid, TEXT),
            large_text(',"lsn":'),
            pc.cast(origin.commit_lsn, TEXT),
            large_text(',"sequence":"[\\"'),
            pc.cast(origin.commit_lsn, TEXT),
            large_text('\\",\\"'),
            pc.cast(origin.ordinal, TEXT),
            large_text('\\"]"},"op":"'),
            pc.cast(operations, TEXT),
            large_text(f'","ts_ms":{now // 1000},"ts_us":{now},"ts_ns":{now}000,"transaction":null}}'),
        )

    def _row(self, schema: TableSchema, side: Side | None, count: int) -> pa.Array | pa.Scalar:
        if side is None:
            return large_text("null")
        names, columns = [column.name for column in schema.columns], row_cells(side, self.source.unavailable)
        whole = json_objects(names, columns, count)
        return whole if side.valid is None else pc.if_else(pa.array(side.valid), whole, pa.scalar(None, TEXT))


@dataclass(frozen=True, slots=True)
class JsonFlat:
    """The row, with `__op`, `__lsn`, `__ordinal`, `__ts_ms` and `__deleted` beside its columns."""

    source: Source

    def keys(self, schema: TableSchema, cells: Sequence[Cells], count: int) -> pa.Array:
        """See `Format`."""
        return JsonEnvelope(self.source).keys(schema, cells, count)

    def values(
        self, schema: TableSchema, before: Side | None, after: Side | None, operations: pa.Array, origin: Origin
    ) -> pa.Array:
        """See `Format`."""
        side = before if after is None else after
        names = [] if side is None else [column.name for column in schema.columns]
        columns = [] if side is None else row_cells(side, self.source.unavailable)
        deleted = large_text('"true"' if after is None and before is not None else '"false"')
        extra: dict[str, Any] = {
            "__op": quoted(pc.cast(operations, TEXT)),
            "__table": large_text(_dumps(str(schema))),
            "__lsn": pc.cast(origin.commit_lsn, TEXT),
            "__ordinal": pc.cast(origin.ordinal, TEXT),
            "__ts_ms": pc.cast(pc.divide(origin.commit_time, 1000), TEXT),
            "__deleted": deleted,
        }
        return json_objects([*names, *extra], [*columns, *extra.values()], len(origin))


def row_cells(side: Side, unavailable: str) -> list[pa.Array]:
    """Return the cells of rows as JSON, with the placeholder for omitted values."""
    columns: list[pa.Array] = []
    for number, cells in enumerate(side.cells):
        column = json_cells(cells)
        if number in side.omitted:
            column = pc.if_else(pa.array(side.omitted[number]), large_text(_dumps(unavailable)), column)
        columns.append(column)
    return columns


def penstock_version() -> str:
    """Return the version of the package, for `source.version`."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
