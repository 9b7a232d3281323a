"""Upserts into Delta tables by Spark's `MERGE`: each table has the rows of the source, exactly once.

A commit records the position of its changes under the name `penstock/<attempt>/<lineage>`: Delta's own transaction
identifiers, which writers of streams use. A batch that a table has is not written again, and of two writers of one
table Delta lets only one commit. Properties of the table say which pipeline and which attempt may write. They change
when a copy begins, so a late writer of an earlier attempt fails.

Columns are matched by the number of the source's column, which stands in the comment of each, because names change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.functions import col as column

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges
from penstock.changes.frames import spark_type_name
from penstock.changes.segment import OP, UNCHANGED, UNREPRESENTABLE, field_names
from penstock.destinations.base import Capabilities, CopyRows
from penstock.destinations.batch_events import leave_out
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    not_copied,
    not_followed,
    other_lineage,
    rejected,
)
from penstock.destinations.spark.checkpoint import Checkpoint
from penstock.destinations.spark.frames import (
    DELETE,
    LIMIT,
    LONG,
    ORIGIN,
    UNKNOWN_ROW,
    NetWork,
    after_truncate,
    copy_frame,
    has_omitted,
    hash_column,
    hidden_name,
    key_names,
    literal,
    net_frame,
    quote,
)
from penstock.destinations.spark.target import Tables
from penstock.destinations.spark.transforms import Projection
from penstock.lsn import Lsn, furthest
from penstock.schema import TableSchema
from penstock.values.datetimes import times_as_text

_APP, _VERSION = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"
_COMMENT = re.compile(r"source column (\d+)")
_NET = "penstock_net"
_PLACE, _LIMIT, _GONE = f"place{LONG}", f"most{LONG}", f"gone{LONG}"
_NO_TEXTS = (pa.int64(), pa.int32(), pa.int16(), pa.string(), pa.large_string(), pa.bool_(), pa.binary())
"""Types of segments that hold every value of the source."""


@dataclass(frozen=True, slots=True)
class _State:
    """What the log of a table says."""

    pipeline: str
    table_id: int
    attempt: str
    positions: dict[str, Lsn]
    """Of the current attempt, by lineage."""
    exists: bool


class DeltaTarget:
    """See the module's docstring."""

    capabilities = Capabilities(
        records_position=True, updates_rows=True, keeps_old_rows_while_copying=True, loses_nothing_by_a_copy=True
    )

    def __init__(
        self, name_of: Callable[[TableSchema], str], options: dict[str, str], checkpoint: Checkpoint, *, is_path: bool
    ) -> None:
        self._name_of = name_of
        self._options = options
        self._checkpoint = checkpoint
        self._is_path = is_path

    def startup(self, tables: Tables) -> None:
        self._tables = tables
        self._checkpoint.open(tables.context.store)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        session, context = self._tables.session(schema.table_id), self._tables.context
        location = self._find(session, self._name_of(schema))
        state = None if location is None else self._state(session, location)
        if location is None or state is None or not state.exists:
            # The copy creates the table.
            self._checkpoint.store(schema.table_id, {"location": location, "attempt": attempt})
            return
        if not state.pipeline:
            raise rejected(
                str(schema),
                f"{location} is a Delta table that Penstock did not write",
                hint="Use another path or table, or delete that one.",
            )
        if state.pipeline != context.pipeline_id:
            raise foreign_table(str(schema), state.pipeline, context.pipeline_id)
        if state.table_id != schema.table_id:
            other = self._checkpoint.load(state.table_id)
            is_used = other is not None and other["location"] == location
            if is_used and state.table_id in context.store.get_table_replication_states():
                raise rejected(
                    str(schema),
                    f"{location} is in use by another table of this pipeline, whose name is the same there",
                    hint="Use {name} or a path, which tell such names apart; or rename one of the tables.",
                )
        if state.attempt != attempt:
            properties = self._properties(schema, attempt)
            session.sql(f"alter table delta.{quote(location)} set tblproperties ({properties})")
        self._checkpoint.store(schema.table_id, {"location": location, "attempt": attempt})

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        session = self._tables.session(schema.table_id)
        record = self._checkpoint.load(schema.table_id)
        if record is None or record["attempt"] != rows.attempt:
            raise fenced_copy(str(schema), rows.attempt)
        frame = copy_frame(session, rows)
        projection = self._tables.projection(schema, frame)
        control = (UNREPRESENTABLE, *hash_column(schema))
        frame = projection.apply(session, frame, control, key_names(schema), strict=True)
        frame = _commented(frame.selectExpr(*map(quote, (*projection.names, *control))), schema, projection)
        location = record["location"] or self._create(session, schema, rows.attempt, frame)
        state = self._state(session, location)
        if not state.exists:
            location = self._create(session, schema, rows.attempt, frame)
            state = self._state(session, location)
        if state.attempt != rows.attempt or state.pipeline != self._tables.context.pipeline_id:
            raise fenced_copy(str(schema), rows.attempt)
        self._checkpoint.store(schema.table_id, {"location": location, "attempt": rows.attempt})
        lineage = self._tables.context.lineage
        if lineage in state.positions:
            return
        _allow(session, f"delta.{quote(location)}", (kind for _, kind in frame.dtypes))
        frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true").options(**self._options).option(
            "txnAppId", _app(rows.attempt, lineage)
        ).option("txnVersion", str(int(rows.position))).save(location)

    def write_changes(self, batch: EventBatch, changes: TableChanges) -> bool:
        session, context = self._tables.session(changes.table_id), self._tables.context
        record = self._checkpoint.load(changes.table_id)
        location: str | None = None if record is None else record["location"]
        state = None if location is None else self._state(session, location)
        if location is None or state is None or state.table_id != changes.table_id:
            self._refuse_foreign(session, changes)
            raise not_copied(changes.table)
        if state.pipeline != context.pipeline_id:
            raise foreign_table(changes.table, state.pipeline, context.pipeline_id)
        if not state.positions:
            raise not_copied(changes.table)
        position = self._known(state)
        if position is None:
            raise other_lineage(changes.table, ", ".join(sorted(state.positions)), context.lineage)
        changes = leave_out(changes, position, batch.begin)
        if not changes.steps:
            return True
        app = _app(state.attempt, context.lineage)
        self._apply(session, location, changes, app, batch.end)
        return True

    def finish(self, batch: EventBatch) -> dict[int, Callable[[], None]]:
        """See `Target`: nothing is only accepted."""
        return {}

    def position(self, table_id: int) -> Lsn | None:
        record = self._checkpoint.load(table_id)
        if record is None or record["location"] is None:
            return None
        state = self._state(self._tables.session(table_id), record["location"])
        if state.pipeline != self._tables.context.pipeline_id or state.table_id != table_id:
            return None
        return self._known(state)

    def _known(self, state: _State) -> Lsn | None:
        """Return the last position; None if some change in the table is not part of the server's history."""
        context = self._tables.context
        if not all(context.knows(lineage, position) for lineage, position in state.positions.items()):
            return None
        # A server that took over continues where the one before ended, so the last position is the furthest.
        return furthest(*state.positions.values()) if state.positions else None

    def _refuse_foreign(self, session: Any, changes: TableChanges) -> None:
        for schema in (step.schema for step in changes.steps if isinstance(step, Rows)):
            location = self._find(session, self._name_of(schema))
            state = None if location is None else self._state(session, location)
            if state is not None and state.exists and state.pipeline != self._tables.context.pipeline_id:
                raise foreign_table(str(schema), state.pipeline, self._tables.context.pipeline_id)

    def _find(self, session: Any, name: str) -> str | None:
        """Return the location of a table; None if a table with this name does not exist."""
        if self._is_path:
            return name
        if not session.catalog.tableExists(name):
            return None
        return session.sql(f"describe detail {_quoted_table(name)}").select("location").first()[0]

    def _create(self, session: Any, schema: TableSchema, attempt: str, frame: Any) -> str:
        """Create an empty table that only this attempt may write; return its location."""
        name = self._name_of(schema)
        table = f"delta.{quote(name)}" if self._is_path else _quoted_table(name)
        columns = ", ".join(f"{quote(field.name)} {field.dataType.simpleString()}" for field in frame.schema.fields)
        properties = f"{self._properties(schema, attempt)}, 'delta.columnMapping.mode' = 'name'"
        session.sql(f"create table if not exists {table} ({columns}) using delta tblproperties ({properties})")
        location = self._find(session, name)
        assert location is not None
        return location

    def _properties(self, schema: TableSchema, attempt: str) -> str:
        known = {
            "penstock.pipeline": self._tables.context.pipeline_id,
            "penstock.table_id": str(schema.table_id),
            "penstock.table": str(schema),
            "penstock.attempt": attempt,
        }
        return ", ".join(f"{literal(name)} = {literal(value)}" for name, value in known.items())

    def _state(self, session: Any, location: str) -> _State:
        jvm = session._jvm
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session._jsparkSession, location)
        snapshot = log.update(False, jvm.scala.Option.empty(), jvm.scala.Option.empty())
        properties = _entries(snapshot.metadata().configuration())
        attempt = properties.get("penstock.attempt", "")
        prefix = _app(attempt, "")
        positions = {
            name.removeprefix(prefix): Lsn(version)
            for name, version in _entries(snapshot.transactions()).items()
            if attempt and name.startswith(prefix)
        }
        table_id = int(properties.get("penstock.table_id", 0))
        return _State(properties.get("penstock.pipeline", ""), table_id, attempt, positions, snapshot.version() >= 0)

    def _apply(self, session: Any, location: str, changes: TableChanges, app: str, end: Lsn) -> None:
        table = f"delta.{quote(location)}"
        rows = [step for step in changes.steps if isinstance(step, Rows)]
        last = changes.last_schema_change
        schema = rows[-1].schema if rows else None if last is None else last.new
        for change in (step for step in changes.steps if isinstance(step, SchemaChange) and step.old is not None):
            assert change.old is not None
            if [each.attnum for each in change.old.key] != [each.attnum for each in change.new.key]:
                raise not_followed(changes.table, "the columns that identify its rows changed")
        columns = rows[-1].segments[-1].arrow_schema() if rows else None
        if schema is not None:
            # Also without a change of the schema: a longer batch that was interrupted may have followed a later one.
            self._follow(session, table, location, changes, schema, columns)
        steps, truncated = after_truncate(changes)
        with _transaction(session, app, end):
            if not steps:
                if truncated:
                    session.sql(f"delete from {table}")
                return
            assert schema is not None
            assert columns is not None
            types = pa.schema([columns.field(name) for name in field_names(schema)])
            work = NetWork(changes.table, changes.table_id, schema, steps, truncated)
            net = net_frame(session, work, types)
            projection = self._tables.projection(schema, net)
            control = (OP, UNCHANGED, ORIGIN, LIMIT, UNREPRESENTABLE, *hash_column(schema))
            net = projection.apply(session, net, control, key_names(schema), strict=True)
            net.createOrReplaceTempView(_NET)
            fill = has_omitted(steps) and bool(schema.key) and not truncated
            if schema.key:
                merge = _merge_keyed(table, schema, projection, types, fill=fill)
            else:
                merge = _merge_rows(table, schema, projection)
            session.sql(merge + (" when not matched by source then delete" if truncated else ""))

    def _follow(
        self,
        session: Any,
        table: str,
        location: str,
        changes: TableChanges,
        schema: TableSchema,
        columns: pa.Schema | None,
    ) -> None:
        """Rename, drop and add columns as the source did; each statement may have been executed before."""
        if self._tables.context.transform_of(schema) is not None:
            changed = [step for step in changes.steps if isinstance(step, SchemaChange)]
            if any(step.old is not None and not step.new.has_columns_of(step.old) for step in changed):
                raise not_followed(changes.table, "its columns changed, and it has a transform")
            return
        wanted = {column.attnum: name for column, name in zip(schema.columns, field_names(schema), strict=True)}
        fields = session.read.format("delta").load(location).schema.fields
        there: dict[int, Any] = {}
        for field in fields:
            if found := _COMMENT.fullmatch(field.metadata.get("comment", "")):
                there[int(found[1])] = field
        others = {field.name for field in fields} - {field.name for field in there.values()}
        if {number: field.name for number, field in there.items()} == wanted and columns is None:
            return
        types = {} if columns is None else _spark_types(columns)
        kept = {name: there[number] for number, name in wanted.items() if number in there}
        retyped = [name for name, field in kept.items() if types.get(name) not in (None, field.dataType.simpleString())]
        renamed = {field.name: name for name, field in kept.items() if field.name != name}
        added = {number: name for number, name in wanted.items() if number not in there}
        dropped = [field.name for number, field in there.items() if number not in wanted]
        if not (retyped or renamed or added or dropped):
            return
        if retyped or not schema.key or (added and columns is None):
            raise not_followed(changes.table, "its columns changed")
        if set(renamed.values()) & {*others, *(field.name for field in there.values())} - set(dropped):
            raise not_followed(changes.table, "columns took the names of others")
        if dropped and self._tables.context.keeps_dropped_columns(schema):
            raise rejected(
                changes.table,
                "its dropped columns cannot stay in Delta by Spark",
                hint='Set drop_column = "follow" in [schema_changes].',
            )
        if renamed or dropped:
            # The texts of unrepresentable values stand under the names of their columns. First, because a statement
            # that was executed shows in the columns, and this one does not.
            moves = " ".join(f"when {literal(before)} then {literal(name)}" for before, name in renamed.items())
            renaming = f"(name, text) -> case name {moves} else name end" if moves else "(name, text) -> name"
            gone = f"array({', '.join(map(literal, dropped))})" if dropped else "cast(array() as array<string>)"
            session.sql(
                f"update {table} set {UNREPRESENTABLE} = transform_keys(map_filter({UNREPRESENTABLE}, "
                f"(name, text) -> not array_contains({gone}, name)), {renaming}) where {UNREPRESENTABLE} is not null"
            )
        if dropped:
            session.sql(f"alter table {table} drop columns ({', '.join(map(quote, dropped))})")
        for before, name in renamed.items():
            session.sql(f"alter table {table} rename column {quote(before)} to {quote(name)}")
        _allow(session, table, (types[name] for name in added.values()))
        for number, name in added.items():
            session.sql(
                f"alter table {table} add columns ({quote(name)} {types[name]} comment 'source column {number}')"
            )


def _spark_types(columns: pa.Schema) -> dict[str, str]:
    return {field.name: spark_type_name(times_as_text(field.type)) for field in columns}


def _allow(session: Any, table: str, types: Iterable[str]) -> None:
    """Allow a table to have columns of these types: an existing one does not get this feature by itself."""
    if any("timestamp_ntz" in kind for kind in types):
        features = session.sql(f"describe detail {table}").select("tableFeatures").first()[0]
        if "timestampNtz" not in features:
            session.sql(f"alter table {table} set tblproperties ('delta.feature.timestampNtz' = 'supported')")


def _app(attempt: str, lineage: str) -> str:
    return f"penstock/{attempt}/{lineage}"


def _entries(mapping: Any) -> dict[str, Any]:
    pairs = mapping.toSeq()
    found = [pairs.apply(number) for number in range(pairs.size())]
    return {pair._1(): pair._2() for pair in found}


def _quoted_table(name: str) -> str:
    return ".".join(quote(part) for part in name.split("."))


@contextmanager
def _transaction(session: Any, app: str, end: Lsn) -> Iterator[None]:
    """Let the commit of a statement record the position; Delta skips one that the table has."""
    session.conf.set(_APP, app)
    session.conf.set(_VERSION, str(int(end)))
    try:
        yield
    finally:
        session.conf.unset(_APP)
        session.conf.unset(_VERSION)


def _commented(frame: Any, schema: TableSchema, projection: Projection) -> Any:
    """Return a frame whose columns say which column of the source they are."""
    numbers = {name: column.attnum for column, name in zip(schema.columns, field_names(schema), strict=True)}
    comments = {
        output.name: {"comment": f"source column {numbers[output.name]}"}
        for output in projection.outputs
        if output.plain
    }
    # Not `withMetadata`, which takes a name with a dot for another column.
    cells = ((name, column(quote(name))) for name in frame.columns)
    return frame.select(
        *(cell.alias(name, metadata=comments[name]) if name in comments else cell for name, cell in cells)
    )


def _merge_keyed(table: str, schema: TableSchema, projection: Projection, columns: pa.Schema, *, fill: bool) -> str:
    key = key_names(schema)
    types = {output.name: output.type for output in projection.outputs}
    cells = {name: f"n.{quote(name)}" for name in projection.names}
    texts, before = f"n.{UNREPRESENTABLE}", ""
    if fill:
        for name in projection.names:
            if name not in key:
                lost = f"cast(raise_error({literal(UNKNOWN_ROW)}) as {types[name]})"
                old = f"if(p.{quote(key[0])} is null and p.{UNREPRESENTABLE} is null, {lost}, p.{quote(name)})"
                cells[name] = f"if(array_contains(n.{UNCHANGED}, {literal(name)}), {old}, {cells[name]})"
        kept = f"map_filter(p.{UNREPRESENTABLE}, (name, text) -> array_contains(n.{UNCHANGED}, name))"
        none = "cast(map() as map<string,string>)"
        both = f"map_concat(coalesce({texts}, {none}), coalesce({kept}, {none}))"
        texts = f"if(n.{UNCHANGED} is null, {texts}, if(size({both}) = 0, null, {both}))"
        on = " and ".join(f"n.{ORIGIN}.{quote(name)} = p.{quote(name)}" for name in key)
        before = f" left join {table} p on n.{UNCHANGED} is not null and {on}"
    shown = [f"{cell} as {quote(name)}" for name, cell in cells.items()]
    source = f"select n.{OP}, {', '.join(shown)}, {texts} as {UNREPRESENTABLE} from {_NET} n{before}"
    same = " and ".join(_same(name, exact=columns.field(name).type in _NO_TEXTS) for name in key)
    names = [*map(quote, cells), UNREPRESENTABLE]
    sets = ", ".join(f"t.{name} = s.{name}" for name in names)
    return (
        f"merge into {table} t using ({source}) s on {same} "
        f"when matched and s.{OP} = '{DELETE}' then delete "
        f"when matched then update set {sets} "
        f"when not matched and s.{OP} <> '{DELETE}' then insert ({', '.join(names)}) "
        f"values ({', '.join(f's.{name}' for name in names)})"
    )


def _same(name: str, *, exact: bool) -> str:
    """Return the condition for equal cells of a key; unless the type is exact, they may be known as a text only."""
    if exact:
        return f"t.{quote(name)} = s.{quote(name)}"
    texts = f"t.{UNREPRESENTABLE}[{literal(name)}] <=> s.{UNREPRESENTABLE}[{literal(name)}]"
    return f"t.{quote(name)} <=> s.{quote(name)} and {texts}"


def _merge_rows(table: str, schema: TableSchema, projection: Projection) -> str:
    """Return the statement for a table without a key.

    Of equal rows, all are deleted, and those that stay are inserted again: nothing tells them apart.
    """
    row = quote(hidden_name(schema))
    names = [*map(quote, projection.names), UNREPRESENTABLE]
    nulls = ", ".join(f"null as {name}" for name in names)
    shown = ", ".join(names)
    staying = (
        f"select p.*, row_number() over (partition by p.{row} order by p.{row}) as {_PLACE}, n.{LIMIT} as {_LIMIT} "
        f"from {table} p join {_NET} n on n.{OP} = '{DELETE}' and n.{row} = p.{row}"
    )
    source = (
        f"select {shown}, {row}, cast(null as string) as {_GONE} from {_NET} where {OP} <> '{DELETE}' "
        f"union all select {shown}, {row}, cast(null as string) from ({staying}) where {_PLACE} > {_LIMIT} "
        f"union all select {nulls}, null, {row} from {_NET} where {OP} = '{DELETE}'"
    )
    values = ", ".join(f"s.{name}" for name in (*names, row))
    return (
        f"merge into {table} t using ({source}) s on t.{row} = s.{_GONE} "
        f"when matched then delete "
        f"when not matched and s.{_GONE} is null then insert ({shown}, {row}) values ({values})"
    )
