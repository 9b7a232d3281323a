"""Upserts into PostgreSQL by JDBC: each table has the rows of the source, exactly once.

Executors write the net effect of a batch to a staging table. One transaction of the driver then takes it over: it fills
omitted values from the rows that they were in, deletes, inserts, follows the columns, and moves the position in
`penstock.tables`. The row there is locked, and it names the attempt and the position from which the batch continues, so
a process that lost its lease changes nothing.

The driver uses Spark's own JDBC connections: the options of the destination are those of Spark's format `jdbc`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError

from penstock.changes.batch import EventBatch, Rows, TableChanges
from penstock.changes.segment import OP, UNCHANGED, UNREPRESENTABLE, field_names
from penstock.destinations.base import Capabilities, CopyRows
from penstock.destinations.batch_events import leave_out
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    not_copied,
    not_followed,
    other_lineage,
    other_writer,
    out_of_reach,
    rejected,
    unusable,
)
from penstock.destinations.spark.frames import (
    AWAY_STATES,
    DELETE,
    LIMIT,
    ORIGIN,
    NetWork,
    after_truncate,
    as_json,
    copy_frame,
    has_omitted,
    hash_column,
    hidden_name,
    key_names,
    net_frame,
    quote,
    sql_state,
)
from penstock.destinations.spark.target import Tables
from penstock.errors import ValuesNotSent
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json

_LOCK = "select pg_catalog.pg_advisory_xact_lock(1885696619)"
"""Before a schema is created: `if not exists` does not help if two sessions do it at once."""
_CONTROL = f"""
    {_LOCK};
    create schema if not exists penstock;
    create table if not exists penstock.tables (
        pipeline text not null,
        table_id int8 not null,
        source text not null,
        target text not null unique,
        attempt text not null,
        lineage text not null default '',
        position text,
        columns text,
        primary key (pipeline, table_id)
    )
"""
_LIMIT = "_limit"
_POSTGRES = "jdbc:postgresql:"
_ARRAYS = ("array<string>", "array<int>", "array<bigint>", "array<smallint>", "array<boolean>", "array<double>")
"""Arrays that Spark writes to PostgreSQL exactly."""
_NESTED = ("array<", "map<", "struct<")


@dataclass(frozen=True, slots=True)
class _Known:
    """What `penstock.tables` says of a table."""

    pipeline: str
    table_id: int
    target: str
    attempt: str
    lineage: str
    position: Lsn | None
    schema: TableSchema | None


class PostgresTarget:
    """See the module's docstring."""

    capabilities = Capabilities(
        records_position=True, updates_rows=True, keeps_old_rows_while_copying=True, loses_nothing_by_a_copy=True
    )

    def __init__(self, name_of: Callable[[TableSchema], tuple[str, str]], options: dict[str, str]) -> None:
        self._name_of = name_of
        self._options = {"driver": "org.postgresql.Driver", **options}
        self._process = secrets.token_hex(4)
        """In the names of staging tables: a process that lost its lease must not write into those of its successor."""

    def startup(self, tables: Tables) -> None:
        self._tables = tables
        mark = f"stage_{_digest(tables.context.pipeline_id)}_"
        with self._transaction(tables.context.session) as database:
            database.run(_CONTROL)
            # What killed processes left behind.
            found = database.rows(
                "select format('%I.%I', schemaname, tablename) from pg_catalog.pg_tables "
                f"where schemaname = 'penstock' and starts_with(tablename, {_text(mark)})"
            )
            for (name,) in found:
                database.run(f"drop table {name}")

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        context, target = self._tables.context, self._target(schema)
        with self._transaction(self._tables.session(schema.table_id)) as database:
            owner = _known(database, f"target = {_text(target)}")
            own = _known(database, self._is(schema.table_id))
            if owner is not None and owner.pipeline != context.pipeline_id:
                raise foreign_table(str(schema), owner.pipeline, context.pipeline_id)
            if owner is None and database.rows(f"select 1 where to_regclass({_text(target)}) is not null"):
                raise rejected(
                    str(schema),
                    f"{target} exists in the target database, and Penstock did not create it",
                    hint="Choose another name with table, or drop that table.",
                )
            if owner is not None and owner.table_id != schema.table_id:
                if owner.table_id in context.store.get_table_replication_states():
                    raise rejected(
                        str(schema),
                        f"{target} is in use by another table of this pipeline",
                        hint="Use {schema} and {table} in table, so that each has its own name.",
                    )
                database.run(f"delete from penstock.tables where {self._is(owner.table_id)}")
            if own is None or own.attempt != attempt or own.target != target:
                values = f"{_text(str(schema))}, {_text(target)}, {_text(attempt)}"
                database.run(f"delete from penstock.tables where {self._is(schema.table_id)}")
                database.run(
                    "insert into penstock.tables (pipeline, table_id, source, target, attempt) "
                    f"values ({_text(context.pipeline_id)}, {schema.table_id}, {values})"
                )

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        session = self._tables.session(schema.table_id)
        frame = copy_frame(session, rows)
        projection = self._tables.projection(schema, frame)
        control = (UNREPRESENTABLE, *hash_column(schema))
        frame = projection.apply(session, frame, control, key_names(schema), strict=True)
        frame = frame.selectExpr(*map(quote, (*projection.names, *control)))
        with self._staged(session, schema.table_id, frame) as stage, self._transaction(session) as database:
            known = _known(database, self._is(schema.table_id), lock=True)
            if known is None or known.attempt != rows.attempt:
                raise fenced_copy(str(schema), rows.attempt)
            if known.position is None:
                self._replace(database, known.target, stage, schema)
                self._move(database, schema.table_id, rows.position, schema)

    def write_changes(self, batch: EventBatch, changes: TableChanges) -> bool:
        session, context = self._tables.session(changes.table_id), self._tables.context
        with self._transaction(session) as database:
            known = _known(database, self._is(changes.table_id))
            if known is None:
                self._refuse_foreign(database, changes)
        if known is None or known.position is None:
            raise not_copied(changes.table)
        if not context.knows(known.lineage, known.position):
            raise other_lineage(changes.table, known.lineage, context.lineage)
        changes = leave_out(changes, known.position, batch.begin)
        if not changes.steps:
            return True
        rows = [step for step in changes.steps if isinstance(step, Rows)]
        last = changes.last_schema_change
        schema = rows[-1].schema if rows else known.schema if last is None else last.new
        assert schema is not None
        steps, truncated = after_truncate(changes)
        if not steps:
            with self._transaction(session) as database:
                self._lock(database, changes, known)
                self._follow(database, known, changes, schema, {})
                if truncated:
                    database.run(f"delete from {known.target}")
                self._move(database, changes.table_id, batch.end, schema)
            return True
        columns = rows[-1].segments[-1].arrow_schema()
        types = pa.schema([columns.field(name) for name in field_names(schema)])
        net = net_frame(session, NetWork(changes.table, changes.table_id, schema, steps, truncated), types)
        projection = self._tables.projection(schema, net)
        control = (OP, UNCHANGED, ORIGIN, LIMIT, UNREPRESENTABLE, *hash_column(schema))
        net = projection.apply(session, net, control, key_names(schema), strict=True)
        origins = [
            f"{ORIGIN}.{quote(name)} as {_origin(schema, number)}" for number, name in enumerate(key_names(schema))
        ]
        kept = [quote(name) for name in net.columns if name not in (ORIGIN, LIMIT)]
        net = net.selectExpr(*kept, *origins, f"{LIMIT} as {hidden_name(schema, _LIMIT)}")
        with self._staged(session, changes.table_id, net) as stage, self._transaction(session) as database:
            self._lock(database, changes, known)
            self._follow(database, known, changes, schema, _columns(database, stage))
            if truncated:
                database.run(f"delete from {known.target}")
            if schema.key:
                if has_omitted(steps) and not truncated:
                    _fill(database, changes.table, known.target, stage, schema, projection.names)
                _delete_keys(database, known.target, stage, schema)
            else:
                _delete_rows(database, known.target, stage, schema)
            listed = ", ".join(map(_name, (*projection.names, UNREPRESENTABLE, *hash_column(schema))))
            database.run(f"insert into {known.target} ({listed}) select {listed} from {stage} where {OP} <> '{DELETE}'")
            self._move(database, changes.table_id, batch.end, schema)
        return True

    def finish(self, batch: EventBatch) -> dict[int, Callable[[], None]]:
        """See `Target`: nothing is only accepted."""
        return {}

    def position(self, table_id: int) -> Lsn | None:
        context = self._tables.context
        with self._transaction(self._tables.session(table_id)) as database:
            known = _known(database, self._is(table_id))
        if known is None or known.position is None or not context.knows(known.lineage, known.position):
            return None
        return known.position

    def _is(self, table_id: int) -> str:
        return f"pipeline = {_text(self._tables.context.pipeline_id)} and table_id = {table_id}"

    def _target(self, schema: TableSchema) -> str:
        return ".".join(map(_name, self._name_of(schema)))

    def _refuse_foreign(self, database: _Database, changes: TableChanges) -> None:
        for schema in (step.schema for step in changes.steps if isinstance(step, Rows)):
            owner = _known(database, f"target = {_text(self._target(schema))}")
            if owner is not None and owner.pipeline != self._tables.context.pipeline_id:
                raise foreign_table(str(schema), owner.pipeline, self._tables.context.pipeline_id)

    def _lock(self, database: _Database, changes: TableChanges, expected: _Known) -> None:
        """Raise if another process wrote the table since it was looked at; until the commit, none can."""
        found = _known(database, self._is(changes.table_id), lock=True)
        if found is None or (found.attempt, found.position) != (expected.attempt, expected.position):
            raise other_writer(changes.table)

    def _move(self, database: _Database, table_id: int, position: Lsn, schema: TableSchema) -> None:
        database.run(
            f"update penstock.tables set position = {_text(str(position))}, "
            f"lineage = {_text(self._tables.context.lineage)}, source = {_text(str(schema))}, "
            f"columns = {_text(json.dumps(schema_to_json(schema)))} where {self._is(table_id)}"
        )

    def _replace(self, database: _Database, target: str, stage: str, schema: TableSchema) -> None:
        """Give a table the rows of a copy. One with the same columns stays, with its indexes, grants and views."""
        staged, there = _columns(database, stage), _columns(database, target)
        namespace, name = self._name_of(schema)
        index = f"penstock_{_digest(target)}"
        if there == staged:
            listed = ", ".join(map(_name, staged))
            # Without the index, because the key may be another one now.
            database.run(f"drop index if exists {_name(namespace)}.{index}; delete from {target}")
            database.run(f"insert into {target} ({listed}) select {listed} from {stage}")
        else:
            database.run(_LOCK)
            database.run(f"create schema if not exists {_name(namespace)}; drop table if exists {target}")
            moved = stage.partition(".")[2]
            database.run(f"alter table {stage} set schema {_name(namespace)}")
            database.run(f"alter table {_name(namespace)}.{moved} rename to {_name(name)}")
        columns = ", ".join(map(_name, key_names(schema) or hash_column(schema)))
        database.run(f"create {'unique ' if schema.key else ''}index {index} on {target} ({columns})")

    def _follow(
        self, database: _Database, known: _Known, changes: TableChanges, schema: TableSchema, staged: dict[str, str]
    ) -> None:
        """Rename, drop and add columns as the source did, in the transaction of the batch."""
        before = known.schema
        if before is None or before == schema or before.has_columns_of(schema):
            return
        context = self._tables.context
        names = dict(zip((each.attnum for each in schema.columns), field_names(schema), strict=True))
        former = dict(zip((each.attnum for each in before.columns), field_names(before), strict=True))
        there = _columns(database, known.target)
        dropped = [name for number, name in former.items() if number not in names]
        renamed = {name: names[number] for number, name in former.items() if names.get(number, name) != name}
        added = [name for number, name in names.items() if number not in former]
        retyped = [
            name
            for number, name in names.items()
            if number in former and name in staged and there.get(former[number]) != staged[name]
        ]
        if (
            retyped
            or not schema.key
            or [each.attnum for each in before.key] != [each.attnum for each in schema.key]
            or context.transform_of(schema) is not None
            or any(name not in staged for name in added)
            or set(renamed.values()) & set(former.values()) - set(dropped)
        ):
            raise not_followed(changes.table, "its columns changed")
        if dropped and context.keeps_dropped_columns(schema):
            raise rejected(
                changes.table,
                "its dropped columns cannot stay",
                hint='Set drop_column = "follow" in [schema_changes].',
            )
        for name in dropped:
            database.run(f"alter table {known.target} drop column {_name(name)}")
            database.run(
                f"update {known.target} set {UNREPRESENTABLE} = ({UNREPRESENTABLE}::jsonb - {_text(name)})::text "
                f"where jsonb_exists({UNREPRESENTABLE}::jsonb, {_text(name)})"
            )
        for name, now in renamed.items():
            database.run(f"alter table {known.target} rename column {_name(name)} to {_name(now)}")
            database.run(
                f"update {known.target} set {UNREPRESENTABLE} = (({UNREPRESENTABLE}::jsonb - {_text(name)}) || "
                f"jsonb_build_object({_text(now)}, {UNREPRESENTABLE}::jsonb -> {_text(name)}))::text "
                f"where jsonb_exists({UNREPRESENTABLE}::jsonb, {_text(name)})"
            )
        for name in added:
            database.run(f"alter table {known.target} add column {_name(name)} {staged[name]}")

    @contextmanager
    def _staged(self, session: Any, table_id: int, frame: Any) -> Iterator[str]:
        """Write a frame to a new staging table; it is dropped after the block, unless it has become the table."""
        mark = f"{_digest(self._tables.context.pipeline_id)}_{table_id}_{self._process}"
        stage = f"penstock.stage_{mark}"
        with self._transaction(session) as database:
            database.run(f"drop table if exists {stage}")
        write_jdbc(frame, self._options, stage, "overwrite")
        try:
            yield stage
        finally:
            with self._transaction(session) as database:
                database.run(f"drop table if exists {stage}")

    @contextmanager
    def _transaction(self, session: Any) -> Iterator[_Database]:
        """Run statements of the driver in one transaction."""
        jvm = session._jvm
        settings = jvm.java.util.HashMap()
        for name, value in {**self._options, "dbtable": "penstock.tables"}.items():
            settings.put(name, value)
        options = jvm.org.apache.spark.sql.execution.datasources.jdbc.JDBCOptions(jvm.PythonUtils.toScalaMap(settings))
        dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(self._options["url"])
        try:
            connection = dialect.createConnectionFactory(options).apply(-1)
        except Py4JJavaError as error:
            raise _unreachable(error) from None
        try:
            connection.setAutoCommit(False)
            yield _Database(connection)
            connection.commit()
        except Py4JJavaError as error:
            raise _translated(error) from None
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Database:
    """A connection of the driver to the target."""

    connection: Any

    def run(self, statements: str) -> None:
        """Execute statements."""
        statement = self.connection.createStatement()
        try:
            statement.execute(statements)
        finally:
            statement.close()

    def rows(self, query: str) -> list[tuple[str | None, ...]]:
        """Return the rows of a query, as text. Cold: the driver only asks about tables."""
        statement = self.connection.createStatement()
        try:
            found = statement.executeQuery(query)
            width = found.getMetaData().getColumnCount()
            rows: list[tuple[str | None, ...]] = []
            while found.next():
                rows.append(tuple(found.getString(number + 1) for number in range(width)))
            return rows
        finally:
            statement.close()


def require_postgres(options: dict[str, str]) -> None:
    """Raise `ConfigError` unless the options name a PostgreSQL database."""
    url = options.get("url", "")
    if not url.startswith(_POSTGRES):
        raise unusable(
            'the spark destination upserts by jdbc into PostgreSQL only: options.url should be "jdbc:postgresql://…"',
            hint='Use mode = "append" for other databases, or a function that merges.',
        )


def write_jdbc(frame: Any, options: dict[str, str], table: str, mode: str) -> None:
    """Write a frame by JDBC: nested values as JSON, except the arrays that PostgreSQL has.

    PostgreSQL gets dates and timestamps as text: the driver would take them for moments in the JVM's time zone and
    calendar, in which some do not exist.
    """
    is_postgres, given = options["url"].startswith(_POSTGRES), {**options, "dbtable": table}
    arrays = _ARRAYS if is_postgres else ()
    nested = [name for name, kind in frame.dtypes if kind.startswith(_NESTED) and kind not in arrays]
    frame = frame.selectExpr(
        *(f"{as_json(quote(name))} as {quote(name)}" if name in nested else quote(name) for name in frame.columns)
    )
    if is_postgres:
        # Spark chooses the types of a new table, and the server then reads the text as these.
        frame.limit(0).write.format("jdbc").mode(mode).options(**given).save()
        mode, given = "append", {**given, "stringtype": "unspecified"}
        frame = frame.selectExpr(*(f"{_moment(quote(name), kind)} as {quote(name)}" for name, kind in frame.dtypes))
    frame.write.format("jdbc").mode(mode).options(**given).save()


def _moment(name: str, kind: str) -> str:
    """Return the expression for a cell that has the text of a date or timestamp, whatever the session's time zone."""
    if kind == "timestamp":
        utc = f"timestampadd(microsecond, unix_micros({name}), timestamp_ntz'1970-01-01')"
        return f"cast({utc} as string) || '+00'"
    return f"cast({name} as string)" if kind in ("date", "timestamp_ntz") else name


def _known(database: _Database, condition: str, *, lock: bool = False) -> _Known | None:
    found = database.rows(
        "select pipeline, table_id, target, attempt, lineage, position, columns from penstock.tables "
        f"where {condition}{' for update' if lock else ''}"
    )
    if not found:
        return None
    pipeline, table_id, target, attempt, lineage, position, columns = found[0]
    return _Known(
        str(pipeline),
        int(table_id or 0),
        str(target),
        str(attempt),
        str(lineage),
        None if position is None else Lsn.parse(position),
        None if columns is None else schema_from_json(json.loads(columns)),
    )


def _columns(database: _Database, table: str) -> dict[str, str]:
    """Return the columns of a table with their types; empty if it does not exist."""
    query = (
        "select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) from pg_catalog.pg_attribute a "
        f"where a.attrelid = pg_catalog.to_regclass({_text(table)}) and a.attnum > 0 and not a.attisdropped order by 1"
    )
    return {str(name): str(type_) for name, type_ in database.rows(query)}


def _fill(database: _Database, table: str, target: str, stage: str, schema: TableSchema, names: list[str]) -> None:
    """Give staged rows the omitted values of the rows that they replace."""
    key = key_names(schema)
    same = " and ".join(f"p.{_name(name)} = n.{_origin(schema, number)}" for number, name in enumerate(key))
    lost = database.rows(
        f"select 1 from {stage} n where n.{UNCHANGED} is not null and not exists (select from {target} p where {same}) "
        "limit 1"
    )
    if lost:
        raise ValuesNotSent(
            f"{table}: a change omits values, and the destination does not have the row that it replaces", table=table
        )
    sets = [
        f"{_name(name)} = case when {_text(name)} = any(n.{UNCHANGED}) then p.{_name(name)} else n.{_name(name)} end"
        for name in names
        if name not in key
    ]
    kept = (
        f"select jsonb_object_agg(e.key, e.value) from jsonb_each(p.{UNREPRESENTABLE}::jsonb) e "
        f"where e.key = any(n.{UNCHANGED})"
    )
    both = f"coalesce(n.{UNREPRESENTABLE}::jsonb, '{{}}') || coalesce(({kept}), '{{}}')"
    sets.append(f"{UNREPRESENTABLE} = nullif({both}, '{{}}')::text")
    database.run(f"update {stage} n set {', '.join(sets)} from {target} p where n.{UNCHANGED} is not null and {same}")


def _delete_keys(database: _Database, target: str, stage: str, schema: TableSchema) -> None:
    key = key_names(schema)
    same = " and ".join(f"t.{_name(name)} = s.{_name(name)}" for name in key)
    database.run(f"analyze {stage}; delete from {target} t using {stage} s where {same}")
    nulls = " or ".join(f"s.{_name(name)} is null" for name in key)
    # Cells of a key that their type cannot hold are NULL, and known by their text.
    texts = " and ".join(
        f"t.{_name(name)} is not distinct from s.{_name(name)} and t.{UNREPRESENTABLE}::jsonb ->> {_text(name)} "
        f"is not distinct from s.{UNREPRESENTABLE}::jsonb ->> {_text(name)}"
        for name in key
    )
    if database.rows(f"select 1 from {stage} s where {nulls} limit 1"):
        database.run(f"delete from {target} t using {stage} s where ({nulls}) and {texts}")


def _delete_rows(database: _Database, target: str, stage: str, schema: TableSchema) -> None:
    """Delete as many equal rows as the changes say, and no more."""
    row, limit = _name(hidden_name(schema)), hidden_name(schema, _LIMIT)
    numbered = (
        f"select t.ctid as place, row_number() over (partition by t.{row}) as number, s.{limit} as wanted "
        f"from {target} t join {stage} s on s.{OP} = '{DELETE}' and s.{row} = t.{row}"
    )
    database.run(f"delete from {target} where ctid in (select place from ({numbered}) n where number <= wanted)")


def _origin(schema: TableSchema, number: int) -> str:
    return hidden_name(schema, f"_origin_{number}")


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    quoted = text.replace("'", "''")
    return f"'{quoted}'" if "\\" not in text else "E'" + quoted.replace("\\", "\\\\") + "'"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _unreachable(error: Py4JJavaError) -> Exception:
    state = sql_state(error)
    if state.startswith(("28", "3D")):
        return unusable(
            f"the target database refuses the connection (SQLSTATE {state})",
            hint="Check url, user and password in [destination.options].",
        )
    return out_of_reach("the target database", f"no connection (SQLSTATE {state or 'unknown'})")


def _translated(error: Py4JJavaError) -> Exception:
    """Return an error without the text, which may contain values."""
    state = sql_state(error)
    if state.startswith(AWAY_STATES):
        return out_of_reach("the target database", f"SQLSTATE {state}")
    return rejected("the table", f"the target database refused a statement (SQLSTATE {state or 'unknown'})")
