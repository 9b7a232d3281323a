"""The data source itself: what Spark asks for when it plans, and what its tasks read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from penstock.changes.frames import exchange_with, spark_columns, spark_type_name
from penstock.changes.segment import UNREPRESENTABLE
from penstock.copy.plan import RANGE_BYTES, TID_RANGES_SINCE, CopyRange, CopySettings, plan_ranges
from penstock.copy.reader import RangeReader
from penstock.copy.rows import load_leaves
from penstock.datasource.filters import condition
from penstock.datasource.keeper import KeeperAddress
from penstock.datasource.options import explained, find_table, parse_count, parse_options, parse_types, split_names
from penstock.errors import ConfigError, SourceError
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.snapshots import enter_snapshot
from penstock.values import OutOfRange, TypeSettings

TASK_BYTES = 256 << 20
"""The most that a task reads of a table's files. In Spark's own workers, a task takes 0.2 s of processor time before
its first row, as much as for 30 MB of rows."""


class PenstockSource(DataSource):
    """A Postgres table as a data frame: a consistent copy, read in parallel; or its changes, as a stream.

    **`spark.read`**, a copy:

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
    | `partitions` | by size | about how many tasks read the table: by default as many as there are cores, or a \
multiple so that none reads more than 256 MB; fewer for tables below 32 MB per core |
    | `outOfRange` | `error` | values that the column's type cannot hold, like `infinity`: `error`, `null`, \
`clamp`, `text`, or `keep`: NULL, and the text in a further column `_unrepresentable` |
    | `numeric` | `string` | the type of `numeric` without precision: `string`, `decimal` or `double` |
    | `unknownTypes` | `text` | the type of types that Penstock does not know: `text` or `bytes` |

    Spark does not tell Python data sources which columns it needs, so name them in `columns`. From Spark 4.1 on, simple
    filters are passed on to the server: comparisons with numbers, dates, times and booleans, equality of text, and
    `is not null`. On Spark 4.0 a time of day is text.

    **`spark.readStream`**, the changes; the option `slot` makes the difference:

        changes = (
            spark.readStream.format("penstock")
            .option("url", "postgresql://replicator@db.example/shop")
            .option("table", "public.orders")
            .option("slot", "orders_to_lake")
            .option("startingPosition", "snapshot")
            .load()
        )
        changes.writeStream.foreachBatch(upsert).option("checkpointLocation", "…").start()

    A row is a change. It has the table's columns, and then:

    | Column | Type | Meaning |
    |---|---|---|
    | `_op` | string | `insert`, `update`, `delete`, `truncate`, or `snapshot` for a copied row |
    | `_commit_lsn`, `_ordinal` | bigint | the order of changes: position of the commit, number in its transaction |
    | `_commit_time` | timestamp | of the commit, by the database's clock; for a copied row, when it was read |
    | `_xid` | bigint | of the transaction; NULL for a copied row |
    | `_unchanged` | array<string> | columns whose values the server omitted; they are NULL, and not known |
    | `_old` | struct | of an update, the key before it changed; with REPLICA IDENTITY FULL, the row before it |

    A delete has the values of the key, or of the row with REPLICA IDENTITY FULL, in the table's columns. With several
    `tables`, every row has `_table` and instead of the table's columns `_key`, `_row` and `_old`: maps from names of
    columns to the text that Postgres writes. Omitted values are not in `_row`.

    | Option | Default | Meaning |
    |---|---|---|
    | `slot` | required | the name of the query's replication slot, created at its first start |
    | `table` or `tables` | required | one name, as in SQL; or names and patterns like `sales.*`, separated by commas |
    | `publication` | the slot's name | created if it does not exist |
    | `startingPosition` | `latest` | where a new query begins: `latest`, at the slot's position if the slot exists; \
`snapshot`, a copy and then every change since; or a position like `16/B374D848` |
    | `maxRowsPerBatch` | all | the most rows of a batch; a batch has whole transactions, and at least one |
    | `spoolLocation` | a temporary folder | where captured changes wait for Spark |
    | `outOfRange`, `numeric`, `unknownTypes` | as above | for one `table`; `tables` have text |

    A batch has the same changes whenever Spark repeats it, so a sink that Spark calls exactly once stays exactly once,
    and `foreachBatch` sees a batch again only after a failure. The one exception is a query that ends before its copy
    is committed: that batch is then empty, and the next one has a truncate and another copy. The slot moves when Spark
    commits a batch, and with it the WAL that the server keeps. The query ends with an error when the columns of the
    table change; started again from its checkpoint, it continues with the new ones. The role needs REPLICATION, SELECT
    for `snapshot`, and to own the table and have CREATE on the database if the publication is to be created.
    """

    keeper: ClassVar[KeeperAddress | None] = None
    cores: ClassVar[int] = 1

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        """Ask the catalog for the table's columns."""
        with explained():
            if _is_stream(self.options):
                return _streams().StreamOptions.of(self.options).columns()
            read = _Read.of(self.options)
            with closing(connect(read.source, Role.CATALOG)) as connection:
                return spark_columns(read.columns_of(read.describe(connection)))

    def reader(self, schema: StructType) -> TableReader:
        """Return what plans and reads."""
        with explained():
            if _is_stream(self.options):
                raise ConfigError("the option 'slot' is for spark.readStream", hint="Remove it for spark.read.")
            return TableReader(_Read.of(self.options), _columns(schema), self.keeper, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """Return what plans and reads the batches of a stream. Spark calls this in tasks, too."""
        with explained():
            if not _is_stream(self.options):
                raise ConfigError(
                    "spark.readStream needs the option 'slot', a name for the replication slot of this query",
                    hint="Use lower-case letters, digits and underscores; the slot is created at the first start.",
                )
            streams = _streams()
            return streams.ChangesReader(streams.StreamOptions.of(self.options), _columns(schema), self.cores)


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
        given = parse_options(options, ("url", "table"), ("columns", "snapshot", "partitions"))
        return cls(
            SourceSettings(given["url"]),
            given["table"],
            _names(given["columns"]) if "columns" in given else None,
            given.get("snapshot"),
            parse_count(given, "partitions"),
            parse_types(given),
        )

    def describe(self, connection: psycopg.Connection[Any]) -> TableSchema:
        """Return the table with the chosen columns, as the catalog has it now."""
        oid = find_table(connection, self.table)
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

    def __init__(
        self, read: _Read, columns: list[tuple[str, str]], keeper: KeeperAddress | None, cores: int = 1
    ) -> None:
        self._read = read
        self._columns = columns
        self._keeper = keeper
        self._cores = cores
        self._filters: Sequence[Any] = ()

    def pushFilters(self, filters: list[Any]) -> list[Any]:  # noqa: N802 (Spark's name)
        """Remember the filters for the server; Spark applies them all again."""
        self._filters = filters
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the ranges of the table in a snapshot."""
        with explained():
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
        size = sum(leaf.bytes for leaf in leaves)
        count = read.partitions if read.partitions is not None else task_count(size, self._cores)
        # What is clamped is equal to a value that the server does not see.
        is_exact = read.types.out_of_range is not OutOfRange.CLAMP
        reader = read.range_reader(schema, name, condition(self._filters, schema) if is_exact else None)
        return reader, plan_ranges(schema.table_id, leaves, range_bytes=max(1, -(-size // count)), can_seek=can_seek)

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
        with explained():
            for batch in reader.read(part):
                yield exchange(batch if self._read.shows_texts else batch.drop_columns([UNREPRESENTABLE]))


class _Part(InputPartition):
    """A range of the table, with what a task needs to read it: Spark does not send the reader that planned it."""

    value: tuple[RangeReader, CopyRange] | None


def task_count(size: int, cores: int) -> int:
    """Return how many tasks read a table of so many bytes: all cores get the same share, and end at the same time."""
    largest = -(-size // TASK_BYTES)
    return max(1, min(-(-largest // cores) * cores, -(-size // RANGE_BYTES)))


def _streams() -> Any:
    """Return the module for streams. It imports capture, and processes that plan or read a table should start fast."""
    from penstock.datasource import changes

    return changes


def _is_stream(options: Mapping[str, str]) -> bool:
    """Spark does not say which of the two it asks the columns for; only a stream has a slot."""
    return any(name.lower() == "slot" for name in options)


def _columns(schema: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in schema]


def _names(text: str) -> tuple[str, ...]:
    """Split names as SQL does: unquoted ones are in lower case."""
    names: list[str] = []
    for part in split_names(text):
        quoted = len(part) > 1 and part[0] == part[-1] == '"'
        names.append(part[1:-1].replace('""', '"') if quoted else part.lower())
    if not names or not all(names):
        raise ConfigError("the option 'columns' should be names, separated by commas")
    return tuple(names)
