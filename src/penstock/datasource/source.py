"""The data source itself: what Spark asks for when it plans, and what its tasks read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import psycopg
import pyarrow as pa
import pyspark
from psycopg.rows import tuple_row
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.changes.frames import exchange_with, spark_columns, spark_type_name
from penstock.changes.segment import UNREPRESENTABLE
from penstock.copy.plan import TID_RANGES_SINCE, CopyRange, CopySettings, plan_ranges
from penstock.copy.reader import RangeReader
from penstock.copy.rows import load_leaves
from penstock.datasource.filters import condition
from penstock.datasource.keeper import KeeperAddress
from penstock.errors import (
    ConfigError,
    PenstockError,
    SnapshotLost,
    SourceError,
    TableRewritten,
    ValueOutOfRange,
    with_hint,
)
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.snapshots import enter_snapshot
from penstock.values import NumericPolicy, OutOfRange, TypeSettings, UnknownTypes

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "i": "an index"}
_TABLE = """
    select c.oid::int8, c.relkind::text from pg_catalog.pg_class c
    where c.oid = pg_catalog.to_regclass(
        case when pg_catalog.cardinality(pg_catalog.parse_ident(%(name)s)) = 1 then 'public.' || %(name)s
             else %(name)s end
    )::pg_catalog.oid
"""
_Choice = TypeVar("_Choice", OutOfRange, NumericPolicy, UnknownTypes)


class PenstockSource(DataSource):
    """A Postgres table as a data frame: a consistent copy, read in parallel.

        penstock.register(spark)
        orders = (
            spark.read.format("penstock")
            .option("url", "postgresql://reader@db.example/shop")
            .option("table", "public.orders")
            .load()
        )

    All tasks read in one snapshot, so the frame has the rows of one moment, however long reading takes and whatever
    is written meanwhile. Each task reads a range of the table's blocks, as binary COPY, and decodes it into Arrow;
    there is no column to choose for partitioning. The role needs SELECT on the table, and nothing else. Every action on
    a frame reads the table again, in a new snapshot; `penstock.snapshot` gives several frames the same one.

    Options, whose names ignore case:

    | Option | Default | Meaning |
    |---|---|---|
    | `url` | required | of the database, `postgresql://…`; libpq's environment variables complete it |
    | `table` | required | its name, as in SQL: `shop.orders`, `"Odd Name"`; in the schema `public` if it names none |
    | `columns` | all | names of columns to read, separated by commas, as in SQL |
    | `snapshot` | a new one | the `name` of a `penstock.snapshot` |
    | `partitions` | one per 32 MB | about how many tasks read the table |
    | `outOfRange` | `error` | values that the column's type cannot hold, like `infinity`: `error`, `null`, \
`clamp`, `text`, or `keep`: NULL, and the text in a further column `_unrepresentable` |
    | `numeric` | `string` | the type of `numeric` without precision: `string`, `decimal` or `double` |
    | `unknownTypes` | `text` | the type of types that Penstock does not know: `text` or `bytes` |

    Spark does not tell Python data sources which columns it needs, so name them in `columns`. From Spark 4.1 on, simple
    filters are passed on to the server: comparisons with numbers, dates, times and booleans, equality of text, and
    `is not null`. On Spark 4.0 a time of day is text.
    """

    keeper: ClassVar[KeeperAddress | None] = None

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        """Ask the catalog for the table's columns."""
        with _explained():
            read = _Read.of(self.options)
            with closing(connect(read.source, Role.CATALOG)) as connection:
                return spark_columns(read.columns_of(read.describe(connection)))

    def reader(self, schema: StructType) -> TableReader:
        """Return what plans and reads."""
        columns = [(field.name, field.dataType.simpleString()) for field in schema]
        return TableReader(_Read.of(self.options), columns, self.keeper)


@dataclass(frozen=True, slots=True)
class _Read:
    """The options of a read."""

    source: SourceSettings
    table: str
    columns: tuple[str, ...] | None
    snapshot: str | None
    partitions: int | None
    types: TypeSettings

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Read:
        given = {name.lower(): value for name, value in options.items()}
        for name in ("url", "table"):
            if not given.get(name):
                raise ConfigError(f'format("penstock") needs the option {name!r}')
        unknown = given.keys() - {"url", "table", "columns", "snapshot", "partitions", *_POLICIES}
        if unknown:
            raise ConfigError(
                f'format("penstock") has no option {min(unknown)!r}',
                hint=f"Options are: url, table, columns, snapshot, partitions, {', '.join(_POLICIES.values())}.",
            )
        partitions = given.get("partitions")
        if partitions is not None and (not partitions.isdecimal() or int(partitions) < 1):
            raise ConfigError("the option 'partitions' should be a whole number of at least 1")
        types = TypeSettings(
            out_of_range=_choice(OutOfRange, given, "outofrange", OutOfRange.ERROR),
            numeric=_choice(NumericPolicy, given, "numeric", NumericPolicy.STRING),
            unknown_types=_choice(UnknownTypes, given, "unknowntypes", UnknownTypes.TEXT),
        )
        return cls(
            SourceSettings(given["url"]),
            given["table"],
            _names(given["columns"]) if "columns" in given else None,
            given.get("snapshot"),
            None if partitions is None else int(partitions),
            types,
        )

    def describe(self, connection: psycopg.Connection[Any]) -> TableSchema:
        """Return the table with the chosen columns, as the catalog has it now."""
        doing = f"find the table {self.table}"
        with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(_TABLE, {"name": self.table}).fetchone()
        if row is None:
            raise ConfigError(
                f"there is no table {self.table} that this role can see",
                hint="Name it as in SQL, with its schema, and quoted if it has upper-case letters.",
            )
        oid, kind = row
        if kind not in "rp":
            raise ConfigError(
                f"{self.table} is {_KINDS.get(kind, 'no table')}, and only tables can be read",
                hint='Read it with Spark\'s format("jdbc").',
            )
        table = load_table(connection, oid)
        if table is None:
            raise ConfigError(f"the table {self.table} was just dropped")
        attributes = {each.name: each for each in table.live_attributes}
        missing = [name for name in self.columns or () if name not in attributes]
        if missing:
            raise ConfigError(f"{self.table} has no column {missing[0]!r}")
        chosen = [each.attnum for each in attributes.values() if self.columns is None or each.name in self.columns]
        types = load_types(connection, [each.type_oid for each in attributes.values()])
        return schema_from_catalog(table, types, chosen)

    def columns_of(self, schema: TableSchema) -> pa.Schema:
        """Return the columns of the frame."""
        columns = self.range_reader(schema, "").arrow_schema
        fields = [field for field in columns if self.shows_texts or field.name != UNREPRESENTABLE]
        return exchange_with(pyspark.__version__, pa.schema(fields))[0]

    @property
    def shows_texts(self) -> bool:
        return self.types.out_of_range is OutOfRange.KEEP

    def range_reader(self, schema: TableSchema, snapshot: str, where: str | None = None) -> RangeReader:
        return RangeReader(self.source, snapshot, schema, self.types, where=where)


class TableReader(DataSourceReader):
    """Plans the tasks of a read, and reads in them."""

    def __init__(self, read: _Read, columns: list[tuple[str, str]], keeper: KeeperAddress | None) -> None:
        self._read = read
        self._columns = columns
        self._keeper = keeper
        self._filters: Sequence[Any] = ()

    def pushFilters(self, filters: list[Any]) -> list[Any]:  # noqa: N802 (Spark's name)
        """Remember the filters for the server; Spark applies them all again."""
        self._filters = filters
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges of the table in a snapshot."""
        with _explained():
            reader, ranges = self._plan()
        return [_Part((reader, each)) for each in ranges] or [_Part(None)]

    def _plan(self) -> tuple[RangeReader, Sequence[CopyRange]]:
        read = self._read
        name = read.snapshot
        if name is None:
            assert self._keeper is not None, "registered by penstock.register"
            name = self._keeper.open_snapshot(read.source.url)
        settings = CopySettings()
        with closing(connect(read.source, Role.COPY, parameters=settings.session_parameters)) as connection:
            enter_snapshot(connection, name)
            schema = read.describe(connection)
            self._require_same(schema)
            leaves = load_leaves(connection, schema, with_unlogged=True)
            can_seek = connection.info.server_version >= TID_RANGES_SINCE
        if read.partitions is not None:
            size = sum(leaf.bytes for leaf in leaves)
            settings = replace(settings, range_bytes=max(1, -(-size // read.partitions)))
        # What is clamped is equal to a value that the server does not see.
        is_exact = read.types.out_of_range is not OutOfRange.CLAMP
        reader = read.range_reader(schema, name, condition(self._filters, schema) if is_exact else None)
        return reader, plan_ranges(schema.table_id, leaves, range_bytes=settings.range_bytes, can_seek=can_seek)

    def _require_same(self, schema: TableSchema) -> None:
        if self._columns != [(field.name, spark_type_name(field.type)) for field in self._read.columns_of(schema)]:
            raise SourceError(
                f"the columns of {schema} are not those that the data frame was made with",
                hint="Call load() again; a schema of your own must name the columns and types of the table.",
                table=str(schema),
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a range of the table."""
        if partition.value is None:
            return
        reader, part = partition.value
        _, exchange = exchange_with(pyspark.__version__, reader.arrow_schema)
        with _explained():
            for batch in reader.read(part):
                yield exchange(batch if self._read.shows_texts else batch.drop_columns([UNREPRESENTABLE]))


class _Part(InputPartition):
    """A range of the table, with what a task needs to read it: Spark does not send the reader that planned it."""

    value: tuple[RangeReader, CopyRange] | None


@contextmanager
def _explained() -> Iterator[None]:
    """Put hints into messages: Spark shows nothing else."""
    try:
        yield
    except PenstockError as error:
        error.hint = _HINTS.get(type(error), error.hint)
        raise PenstockError(with_hint(error), hint="") from None


_HINTS: dict[type[PenstockError], str] = {
    SnapshotLost: "The snapshot of a data frame ends after five minutes without a reader, that of "
    "penstock.snapshot with its block or its time. Take another one, and call load() again.",
    TableRewritten: "Call load() again.",
    ValueOutOfRange: "Choose what happens to such values with the option 'outOfRange'.",
}
"""Where the hint of a pipeline does not help."""


_POLICIES = {"outofrange": "outOfRange", "numeric": "numeric", "unknowntypes": "unknownTypes"}


def _choice(kind: type[_Choice], given: Mapping[str, str], name: str, default: _Choice) -> _Choice:
    value = given.get(name, default)
    try:
        return kind(value.lower())
    except ValueError:
        choices = ", ".join(f"{each.value!r}" for each in kind)
        raise ConfigError(f"the option {_POLICIES[name]!r} should be one of {choices}") from None


def _names(text: str) -> tuple[str, ...]:
    """Split names as SQL does: unquoted ones are in lower case."""
    names: list[str] = []
    for part in _split(text):
        quoted = len(part) > 1 and part[0] == part[-1] == '"'
        names.append(part[1:-1].replace('""', '"') if quoted else part.lower())
    if not names or not all(names):
        raise ConfigError("the option 'columns' should be names, separated by commas")
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    part, is_quoted = "", False
    for each in text:
        is_quoted ^= each == '"'
        if each == "," and not is_quoted:
            yield part.strip()
            part = ""
        else:
            part += each
    yield part.strip()
