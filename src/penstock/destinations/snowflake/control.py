"""The control table: one row for each table of a pipeline says what Snowflake has of it.

Every transaction that writes rows ends with an update of this row, on the condition that attempt, epoch and position
are still those that the writer knows. If the row has changed, nothing is updated and the transaction is rolled back. So
a repeated batch changes nothing, and neither does a process that lost its lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.destinations.refusals import other_writer, unusable
from penstock.destinations.snowflake.connection import STAGE, Connection, Session
from penstock.destinations.snowflake.layout import Layout, Mode, layout_from_json
from penstock.lsn import Lsn

TABLE = "PENSTOCK_TABLES"
FORMAT = 1
_COLUMNS = {
    "PIPELINE": "VARCHAR",
    "TABLE_ID": "NUMBER(38,0)",
    "TARGET": "VARCHAR",
    "SOURCE": "VARCHAR",
    "ATTEMPT": "VARCHAR",
    "EPOCH": "NUMBER(38,0)",
    "LINEAGE": "VARCHAR",
    "GENERATION": "VARCHAR",
    "POSITION": "VARCHAR",
    "LAYOUT": "VARCHAR",
    "FORMAT": "NUMBER(38,0)",
}


@dataclass(frozen=True, slots=True)
class Record:
    """The row of a table."""

    pipeline: str
    table_id: int
    target: str
    """The view."""
    source: str
    """Namespace and name, for people."""
    attempt: str
    epoch: int
    lineage: str = ""
    generation: str | None = None
    """The physical table that the view shows; of the copy before while there is no position."""
    position: Lsn | None = None
    layout: Layout | None = None

    @property
    def mode(self) -> Mode | None:
        return None if self.layout is None else self.layout.mode

    @property
    def is_copied(self) -> bool:
        """True if changes may be applied: no newer copy has started."""
        return self.position is not None and self.generation is not None


@dataclass(frozen=True, slots=True)
class Control:
    """The control table, for one pipeline. Pickles."""

    to: Connection
    pipeline: str

    @property
    def table(self) -> str:
        return self.to.name(TABLE)

    @property
    def transaction(self) -> str:
        """The name of this pipeline's transactions."""
        return f"penstock_{digest(f'{self.to.place} {self.pipeline}')}"

    @property
    def folder(self) -> str:
        """The folder of this pipeline on the stage."""
        return digest(self.pipeline)

    def create(self, session: Session) -> None:
        """Create the control table and the stage if they do not exist."""
        columns = ", ".join(f"{name} {type_}" for name, type_ in _COLUMNS.items())
        session.run(f"create table if not exists {self.table} ({columns})")
        session.run(f"create stage if not exists {self.to.place}.{STAGE}")
        newer = session.rows(f"select max(FORMAT) from {self.table} where PIPELINE = ?", [self.pipeline])
        if newer[0][0] is not None and newer[0][0] > FORMAT:
            raise unusable(f"{TABLE} was written by a newer version (format {newer[0][0]})", hint="Run that version.")

    def end_others(self, session: Session) -> None:
        """Abort transactions of processes of this pipeline that are gone, or that lost the lease: they hold locks."""
        for row in session.rows("show transactions"):
            if str(row[3]).lower() == self.transaction:
                session.rows(f"select system$abort_transaction({int(row[0])})")

    def load(self, session: Session, table_ids: Sequence[int] | None = None) -> dict[int, Record]:
        """Return the rows of tables of this pipeline; of all without `table_ids`."""
        where = "PIPELINE = ?"
        if table_ids is not None:
            where += f" and TABLE_ID in ({', '.join(map(str, table_ids))})"
        return {record.table_id: record for record in self.find(session, where, [self.pipeline])}

    def find(self, session: Session, where: str, values: Sequence[Any]) -> list[Record]:
        """Return the rows of all pipelines for which a condition holds."""
        names = ", ".join(list(_COLUMNS)[:-1])
        return [_record(row) for row in session.rows(f"select {names} from {self.table} where {where}", values)]

    def begin(self, session: Session, record: Record) -> None:
        """Record a new attempt, which fences off all others; the rows of the copy before stay readable."""
        with session.transaction(self.transaction):
            changed = session.run(
                f"merge into {self.table} using (select ? as P, ? as I, ? as T, ? as S, ? as A, ? as E, ? as L) as N "
                f"on {TABLE}.PIPELINE = N.P and {TABLE}.TABLE_ID = N.I "
                f"when matched and {TABLE}.EPOCH <= N.E then update set "
                "TARGET = N.T, SOURCE = N.S, ATTEMPT = N.A, EPOCH = N.E, LINEAGE = N.L, POSITION = null "
                "when not matched then insert (PIPELINE, TABLE_ID, TARGET, SOURCE, ATTEMPT, EPOCH, LINEAGE, FORMAT) "
                f"values (N.P, N.I, N.T, N.S, N.A, N.E, N.L, {FORMAT})",
                [
                    *(self.pipeline, record.table_id, record.target, record.source, record.attempt),
                    *(record.epoch, record.lineage),
                ],
            )
        if not changed:
            raise other_writer(record.source)

    def move(
        self,
        session: Session,
        before: Record,
        epoch: int,
        *,
        transaction: str,
        lineage: str,
        position: Lsn,
        layout: Layout,
        generation: str,
    ) -> bool:
        """Record the position of a table, at the end of a transaction; False if the row is no longer `before`."""
        was = "POSITION is null" if before.position is None else "POSITION = ?"
        values: list[Any] = [str(position), lineage, epoch, layout.to_json(), generation, str(layout.schema)]
        values += [self.pipeline, before.table_id, before.attempt, epoch, transaction]
        values += [] if before.position is None else [str(before.position)]
        changed = session.run(
            f"update {self.table} set POSITION = ?, LINEAGE = ?, EPOCH = ?, LAYOUT = ?, GENERATION = ?, SOURCE = ? "
            f"where PIPELINE = ? and TABLE_ID = ? and ATTEMPT = ? and EPOCH <= ? "
            f"and current_transaction() = ? and {was}",
            values,
        )
        return changed == 1

    def forget(self, session: Session, table_id: int) -> None:
        """Remove the row of a table."""
        with session.transaction(self.transaction):
            session.run(f"delete from {self.table} where PIPELINE = ? and TABLE_ID = ?", [self.pipeline, table_id])


def digest(text: str) -> str:
    """Return a short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _record(row: tuple[Any, ...]) -> Record:
    pipeline, table_id, target, source, attempt, epoch, lineage, generation, position, layout = row
    return Record(
        *(pipeline, int(table_id), target, source, attempt, int(epoch), lineage or "", generation),
        None if position is None else Lsn.parse(position),
        None if layout is None else _layout(layout),
    )


@lru_cache(maxsize=4096)
def _layout(text: str) -> Layout:
    return layout_from_json(text)
