"""An update or delete that does not say which row it concerns is an error, and adds no row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.memory import MemoryDestination
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import ValuesNotSent
from penstock.schema import ReplicaIdentity
from penstock.testing.destinations.contract import LINES, ORDERS
from penstock.testing.destinations.script import ScriptedSource, ScriptedTransaction, make_context

NOTHING = replace(
    LINES,
    columns=tuple(replace(column, identity=False) for column in LINES.columns),
    replica_identity=ReplicaIdentity.NOTHING,
)
"""A table without a key, whose changes carry no old values."""
LINE = {"level": 1, "line": "one"}
ORDER = {"id": 1, "note": "one", "due": None}

Change = Callable[[ScriptedTransaction], None]
CHANGES: dict[str, tuple[Any, dict[str, Any], Change]] = {
    "an update without an identity": (NOTHING, LINE, lambda t: t.update(NOTHING, {"level": 2, "line": "two"})),
    "a delete without an identity": (
        NOTHING,
        LINE,
        lambda t: t.delete(NOTHING, {"level": Unchanged, "line": Unchanged}),
    ),
    "an update without its whole old row": (LINES, LINE, lambda t: t.update(LINES, {"level": 2, "line": "two"})),
    "a delete without its key": (
        ORDERS,
        ORDER,
        lambda t: t.delete(ORDERS, {"id": None, "note": Unchanged, "due": Unchanged}),
    ),
    "an update whose old row lacks the key": (ORDERS, ORDER, lambda t: t.update(ORDERS, ORDER, old={"id": None})),
}


def destinations(folder: Path) -> dict[str, Destination]:
    return {
        "memory": MemoryDestination(),
        "delta": DeltaDestination(str(folder / "lake")),
        "soft_delete": DeltaDestination(str(folder / "lake"), mode="soft_delete"),
        "parquet": ParquetDestination(folder / "lake"),
    }


@pytest.mark.trap(25)
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("kind", ["memory", "delta", "soft_delete", "parquet"])
def test_what_identifies_no_row_is_an_error(tmp_path: Path, kind: str, case: str) -> None:
    schema, row, change = CHANGES[case]
    source, destination = ScriptedSource(tmp_path / "segments"), destinations(tmp_path)[kind]
    destination.startup(make_context())
    copy = source.copy(schema, [row])
    destination.drop_table_for_copy(schema, copy.attempt)
    destination.write_table_rows(schema, copy)
    with source.transaction() as transaction:
        change(transaction)
    result = destination.write_events(source.batch()).result(30)
    if kind == "parquet":  # it keeps changes; whoever reads rows notices
        with pytest.raises(ValuesNotSent):
            ParquetReader(tmp_path / "lake").read_table(str(schema))
        return
    error = result.of(schema.table_id).error
    assert isinstance(error, ValuesNotSent)
    assert "which row it concerns" in error.message
