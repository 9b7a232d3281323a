"""What Penstock records in the destination's database: who writes a table, from which copy, and up to where.

| table in the schema `penstock` | |
|---|---|
| `destination_tables` | one row per table of a pipeline: place, attempt, position, columns, and the writer's epoch |
| `destination_names` | the tables that Penstock has created, with their owners |
| `destination_ranges` | the ranges of a copy in progress that are done |

Every write locks the row of its table, compares attempt, epoch and position, and moves the position in its own
transaction. So a repeated batch changes nothing, and neither does a process that lost its lease.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from penstock.destinations.postgres.server import Session
from penstock.destinations.refusals import fenced_copy, foreign_table, other_writer, rejected
from penstock.destinations.table_layout import Known, Layout, Target, known_from_row
from penstock.lsn import Lsn
from penstock.schema import TableSchema, quote_identifier, quote_literal

_LOCK = "select pg_catalog.pg_advisory_xact_lock(1885696620)"
"""Before something is created: `if not exists` does not help if two sessions do it at once."""
_CREATE = """
    create table if not exists {control}.destination_tables (
        pipeline text not null,
        table_id int8 not null,
        source text not null,
        place text not null,
        namespace text,
        name text,
        former_namespace text,
        former_name text,
        attempt text not null,
        copied text,
        epoch int8 not null,
        lineage text not null default '',
        position text,
        layout jsonb,
        primary key (pipeline, table_id)
    );
    create table if not exists {control}.destination_names (
        namespace text not null,
        name text not null,
        pipeline text not null,
        primary key (namespace, name)
    );
    create table if not exists {control}.destination_ranges (
        pipeline text not null,
        table_id int8 not null,
        attempt text not null,
        range int8 not null,
        rows int8 not null,
        primary key (pipeline, table_id, attempt, range)
    )
"""
_COLUMNS = (
    "pipeline, table_id, source, place, namespace, name, former_namespace, former_name, attempt, copied, epoch, "
    "lineage, position, layout::text"
)


@dataclass(frozen=True, slots=True)
class Control:
    """The tables in the control schema, for one pipeline. Pickles."""

    namespace: str
    pipeline: str

    def table(self, name: str) -> str:
        """Return the name of a table of the schema, for SQL."""
        return f"{quote_identifier(self.namespace)}.{quote_identifier(name)}"

    @property
    def tables(self) -> str:
        return self.table("destination_tables")

    def create(self, session: Session) -> None:
        """Create the schema and its tables."""
        session.run(_LOCK)
        create_schema(session, self.namespace)
        session.run(_CREATE.format(control=quote_identifier(self.namespace)))

    def exists(self, session: Session) -> bool:
        """Return True if `create` was called."""
        return bool(session.rows("select 1 where pg_catalog.to_regclass(%s) is not null", [self.tables]))

    def load(self, session: Session, table_ids: list[int] | None = None) -> dict[int, Known]:
        """Return the rows of tables of this pipeline; of all without `table_ids`."""
        found = session.rows(
            f"select {_COLUMNS} from {self.tables} where pipeline = %s and (%s or table_id = any(%s))",
            [self.pipeline, table_ids is None, table_ids or []],
        )
        return {known.table_id: known for known in map(known_from_row, found)}

    def find(self, session: Session, table_id: int) -> list[Known]:
        """Return the rows of all pipelines for a table."""
        query = f"select {_COLUMNS} from {self.tables} where table_id = %s"
        return [known_from_row(row) for row in session.rows(query, [table_id])]

    def lock(self, session: Session, table_id: int, table: str, attempt: str, epoch: int) -> Known:
        """Return the row of a table, which nobody else can change until the commit. Raise if the writer is fenced.

        Constraints that can be deferred are checked at the commit.
        """
        query = f"select {_COLUMNS} from {self.tables} where pipeline = {quote_literal(self.pipeline)}"
        found = session.rows(f"set constraints all deferred; {query} and table_id = {table_id} for update")
        known = known_from_row(found[0]) if found else None
        if known is None or known.attempt != attempt:
            raise fenced_copy(table, attempt)
        if known.epoch > epoch:
            raise other_writer(table)
        return known

    def move(
        self, session: Session, table_id: int, *, position: Lsn, lineage: str, epoch: int, layout: Layout | None
    ) -> None:
        """Record the position of a table, and its layout if that changed."""
        changed = "" if layout is None else ", layout = %s::jsonb, source = %s"
        values = [] if layout is None else [layout.to_json(), str(layout.source)]
        session.run(
            f"update {self.tables} set position = %s, lineage = %s, epoch = %s{changed} "
            "where pipeline = %s and table_id = %s",
            [str(position), lineage, epoch, *values, self.pipeline, table_id],
        )

    def begin(
        self, session: Session, schema: TableSchema, place: str, target: Target, attempt: str, epoch: int
    ) -> Known | None:
        """Record a new attempt, which fences off all others; return the row as it was before."""
        self._claim(session, schema, target)
        before = self.load(session, [schema.table_id]).get(schema.table_id)
        if before is not None and before.epoch > epoch:
            raise other_writer(str(schema))
        taken = session.rows(
            f"select source from {self.tables} where pipeline = %s and table_id <> %s and namespace = %s and name = %s "
            "and place <> %s",
            [self.pipeline, schema.table_id, target.namespace, target.name, place],
        )
        if taken:
            raise rejected(
                str(schema),
                f"{target} at the destination has the rows of {taken[0][0]}",
                hint="Write {schema} in the option schema, so that each schema has tables of its own; or exclude one "
                "of the two tables, drop its table at the destination, and run: penstock rollback.",
            )
        # A table that gave its place to this one is copied to another.
        session.run(
            f"update {self.tables} set namespace = null, name = null, former_namespace = null, former_name = null, "
            "copied = null, position = null where pipeline = %s and table_id <> %s and namespace = %s and name = %s",
            [self.pipeline, schema.table_id, target.namespace, target.name],
        )
        if before is not None and before.attempt == attempt:
            return before
        former = None if before is None or before.readable == target else before.readable
        former_parts = (None, None) if former is None else (former.namespace, former.name)
        session.run(
            f"""
            insert into {self.tables} as t
                (pipeline, table_id, source, place, namespace, name, former_namespace, former_name, attempt, epoch)
            values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
            on conflict (pipeline, table_id) do update
            set source = excluded.source, place = excluded.place, namespace = excluded.namespace, name = excluded.name,
                former_namespace = excluded.former_namespace, former_name = excluded.former_name,
                attempt = excluded.attempt, epoch = excluded.epoch
            """,
            [
                *(self.pipeline, schema.table_id, str(schema), place, target.namespace, target.name),
                *(*former_parts, attempt, epoch),
            ],
        )
        return before

    def complete(self, session: Session, table_id: int, attempt: str) -> None:
        """Record that the copy of an attempt is the table."""
        session.run(
            f"update {self.tables} set copied = %s, former_namespace = null, former_name = null "
            "where pipeline = %s and table_id = %s",
            [attempt, self.pipeline, table_id],
        )
        session.run(
            f"delete from {self.table('destination_ranges')} where pipeline = %s and table_id = %s",
            [self.pipeline, table_id],
        )

    def forget(self, session: Session, table_id: int) -> None:
        """Remove the row of a table."""
        session.run(f"delete from {self.tables} where pipeline = %s and table_id = %s", [self.pipeline, table_id])

    def release(self, session: Session, target: Target) -> None:
        """Record that a table that Penstock created no longer exists."""
        session.run(
            f"delete from {self.table('destination_names')} where namespace = %s and name = %s",
            [target.namespace, target.name],
        )

    def owner(self, session: Session, target: Target) -> str | None:
        """Return the pipeline that owns a table at the destination."""
        query = f"select pipeline from {self.table('destination_names')} where namespace = %s and name = %s"
        found = session.rows(query, [target.namespace, target.name])
        return found[0][0] if found else None

    def take_range(self, session: Session, table_id: int, attempt: str, index: int) -> bool:
        """Record that this transaction writes a range; False if another one has done so and committed."""
        return bool(
            session.run(
                f"insert into {self.table('destination_ranges')} (pipeline, table_id, attempt, range, rows) "
                "values (%s, %s, %s, %s, 0) on conflict do nothing",
                [self.pipeline, table_id, attempt, index],
            )
        )

    def generation(self, table_id: int, attempt: str) -> Target:
        """Return the table that the rows of an attempt are copied to."""
        return Target(self.namespace, f"{self.generations(table_id)}{_digest(attempt)}")

    def generations(self, table_id: int) -> str:
        """Return how the names of all generations of a table begin."""
        return f"copy_{_digest(self.pipeline)}_{table_id}_"

    def require_other(self, session: Session, schema: TableSchema, database: str) -> None:
        """Raise if a table of the source is one that Penstock writes: its copy would be copied, and so on.

        `database` is the source's.
        """
        found = session.rows(
            "select 1 where pg_catalog.current_database() = %s and pg_catalog.to_regclass(%s)::oid::int8 = %s",
            [database, Target(schema.namespace, schema.name).sql, schema.table_id],
        )
        is_own = schema.namespace == self.namespace or self.owner(session, Target(schema.namespace, schema.name))
        if found and is_own:
            raise rejected(
                str(schema),
                "Penstock writes this table, so it cannot be a source as well",
                hint="Exclude the schema of the destination, and control_schema, with exclude in [source].",
            )

    def _claim(self, session: Session, schema: TableSchema, target: Target) -> None:
        """Raise `TableOwned` if another pipeline owns a table, `TableRejected` if Penstock did not create it."""
        names, place = self.table("destination_names"), [target.namespace, target.name]
        exists = bool(session.rows("select 1 where pg_catalog.to_regclass(%s) is not null", [target.sql]))
        if not exists:
            # Somebody dropped it, and so gave it up; unless its first copy is not complete yet.
            session.run(
                f"delete from {names} n where namespace = %s and name = %s and pipeline <> %s and not exists (select "
                f"from {self.tables} t where t.namespace = n.namespace and t.name = n.name and t.copied is null)",
                [*place, self.pipeline],
            )
        is_new = session.run(
            f"insert into {names} (namespace, name, pipeline) values (%s, %s, %s) on conflict do nothing",
            [*place, self.pipeline],
        )
        if is_new and exists:
            raise rejected(
                str(schema),
                f"{target} exists at the destination, and Penstock did not create it",
                hint="Choose another schema with schema, or drop that table; then run: penstock rollback.",
            )
        owner = self.owner(session, target)
        if owner != self.pipeline:
            raise foreign_table(str(schema), str(owner), self.pipeline)


def create_schema(session: Session, namespace: str) -> None:
    """Create a schema if it does not exist; a role may lack the privilege to create one that exists."""
    exists = "select 1 from pg_catalog.pg_namespace where nspname = %s"
    if session.rows(exists, [namespace]):
        return
    session.run(_LOCK)
    # Not `if not exists`: the server may remember from before the lock that there is no such schema.
    if not session.rows(exists, [namespace]):
        session.run(f"create schema {quote_identifier(namespace)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
