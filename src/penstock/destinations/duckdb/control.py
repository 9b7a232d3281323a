"""What Penstock records in the database: who writes a table, from which copy, and up to where.

The table `penstock.destination_tables` has one row per table of a pipeline. Every transaction that writes a table
compares attempt, epoch and position with its row, and moves the position. So a repeated batch changes nothing, and
neither does a process that lost its lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.destinations.duckdb.database import Session
from penstock.destinations.refusals import fenced_copy, foreign_table, other_writer, rejected
from penstock.destinations.table_layout import Known, Target, known_from_row
from penstock.schema import TableSchema, fold_case, quote_identifier

NAMESPACE = "penstock"
_TABLES = Target(NAMESPACE, "destination_tables")
_COLUMNS = (
    "pipeline, table_id, source, place, namespace, name, former_namespace, former_name, attempt, copied, epoch, "
    "lineage, position, layout"
)
_TYPES = {"table_id": "bigint", "epoch": "bigint"}


@dataclass(frozen=True, slots=True)
class Control:
    """The records of a pipeline. Pickles."""

    pipeline: str

    def create(self, session: Session) -> None:
        """Create the schema and the table of the records."""
        create_schema(session, NAMESPACE)
        if not session.exists(_TABLES):
            columns = ", ".join(f"{name} {_TYPES.get(name, 'varchar')}" for name in _COLUMNS.split(", "))
            session.run(f"create table {session.name(_TABLES)} ({columns})")

    def exists(self, session: Session) -> bool:
        """Return True if there are records of any pipeline."""
        return session.exists(_TABLES)

    def take_over(self, session: Session, epoch: int) -> None:
        """Fence off earlier processes of this pipeline, whose tasks may still wait for the file."""
        session.run(
            f"update {session.name(_TABLES)} set epoch = ? where pipeline = ? and epoch < ?",
            [epoch, self.pipeline, epoch],
        )

    def all(self, session: Session) -> list[Known]:
        """Return the records of all pipelines."""
        return [known_from_row(row) for row in session.rows(f"select {_COLUMNS} from {session.name(_TABLES)}")]

    def load(self, session: Session) -> dict[int, Known]:
        """Return the records of this pipeline."""
        return {known.table_id: known for known in self.all(session) if known.pipeline == self.pipeline}

    def require(self, session: Session, table_id: int, table: str, attempt: str, epoch: int) -> Known:
        """Return the record of a table; raise if a newer attempt or a newer process has taken it."""
        known = self.load(session).get(table_id)
        if known is None or known.attempt != attempt or known.target is None:
            raise fenced_copy(table, attempt)
        if known.epoch > epoch:
            raise other_writer(table)
        return known

    def save(self, session: Session, records: Sequence[Known]) -> None:
        """Replace records."""
        for known in records:
            self.forget(session, known.table_id)
            target, former = known.target, known.former
            session.run(
                f"insert into {session.name(_TABLES)} ({_COLUMNS}) values ({', '.join('?' * 14)})",
                [
                    *(known.pipeline, known.table_id, known.source, known.place),
                    *((None, None) if target is None else (target.namespace, target.name)),
                    *((None, None) if former is None else (former.namespace, former.name)),
                    *(known.attempt, known.copied, known.epoch, known.lineage),
                    None if known.position is None else str(known.position),
                    None if known.layout is None else known.layout.to_json(),
                ],
            )

    def forget(self, session: Session, table_id: int) -> None:
        """Remove the record of a table."""
        session.run(
            f"delete from {session.name(_TABLES)} where pipeline = ? and table_id = ?", [self.pipeline, table_id]
        )

    def begin(
        self, session: Session, schema: TableSchema, place: str, target: Target, attempt: str, epoch: int
    ) -> None:
        """Record a new attempt, which fences off all others."""
        self._claim(session, schema, target)
        known = self.load(session)
        before = known.get(schema.table_id)
        if before is not None and before.epoch > epoch:
            raise other_writer(str(schema))
        # A table that gave its place to this one is copied to another.
        self.save(
            session,
            [
                replace(other, target=None, former=None, copied=None, position=None)
                for other in known.values()
                if other.table_id != schema.table_id and other.target == target
            ],
        )
        if before is not None and before.attempt == attempt:
            return
        now = before or Known(
            *(self.pipeline, schema.table_id, str(schema), place, target, None, attempt),
            copied=None,
            epoch=epoch,
            lineage="",
            position=None,
            layout=None,
        )
        former = None if before is None or before.readable == target else before.readable
        now = replace(now, source=str(schema), place=place, target=target, former=former, attempt=attempt, epoch=epoch)
        self.save(session, [now])

    def owner(self, session: Session, target: Target) -> str | None:
        """Return the pipeline that writes a table of the database."""
        for known in self.all(session):
            if target in (known.target, known.former):
                return known.pipeline
        return None

    def _claim(self, session: Session, schema: TableSchema, target: Target) -> None:
        """Raise `TableOwned` if another pipeline owns a table, `TableRejected` if Penstock did not create it."""
        owner = self.owner(session, target)
        if owner is None and session.exists(target):
            raise rejected(
                str(schema),
                f"{target} exists in the database, and Penstock did not create it",
                hint="Choose another path, or drop that table; then run: penstock rollback.",
            )
        if owner not in (None, self.pipeline):
            raise foreign_table(str(schema), str(owner), self.pipeline)


def create_schema(session: Session, namespace: str) -> None:
    """Create a schema if it does not exist."""
    session.run(f"create schema if not exists {quote_identifier(session.catalog)}.{quote_identifier(namespace)}")


def require_allowed(schema: TableSchema, target: Target) -> None:
    """Raise `TableRejected` for a schema that is Penstock's own."""
    if fold_case(target.namespace) == NAMESPACE:
        raise rejected(str(schema), f"the schema {NAMESPACE} of the database is Penstock's own")
