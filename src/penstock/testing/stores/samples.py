"""Sample tables, errors and a lineage for the tests of stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

from penstock.errors import PenstockError
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.source.lineage import Lineage
from penstock.state import Errored, RetryPolicy, TableReplicationPhase, TableSchemaVersion
from penstock.state.transitions import fail

LINEAGE = Lineage("7000000000000000001", 1, "app", "penstock_slot")
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
TABLES = range(1, 9)
"""The tables that the processes of the durable contract write to, all at once."""
PATIENCE = 60.0
"""How long a test waits for an event, in seconds; generous, for busy machines."""


def table_version(table_id: int, commit_lsn: int, ordinal: int = 0, *, columns: int = 2) -> TableSchemaVersion:
    """Return a version of a sample table; two with the same number of columns have the same schema."""
    int4 = PostgresType(23, "int4")
    key = Column("id", 1, int4, identity=True, primary_key_position=1)
    others = tuple(Column(f"column {number} ✓", number, int4) for number in range(2, columns + 1))
    schema = TableSchema(table_id, "public", f"table {table_id}", (key, *others))
    return TableSchemaVersion(OrderKey(Lsn(commit_lsn), ordinal), schema)


def failed(current: TableReplicationPhase, position: int | None = None) -> Errored:
    """Return the phase of a table that failed."""
    return fail(
        current,
        reason="a bad row: 'x' ✗",
        solution="mend it",
        retry_policy=RetryPolicy(),
        at=NOW,
        position=None if position is None else Lsn(position),
    )


@contextlib.contextmanager
def refused(kind: type[PenstockError]) -> Iterator[list[PenstockError]]:
    """Expect an error of this kind; the list contains it afterwards."""
    caught: list[PenstockError] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
