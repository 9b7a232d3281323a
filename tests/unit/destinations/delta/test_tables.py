"""The life of a table in the lake: lost indexes, odd rows, other modes and names, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from penstock.changes.events import Unchanged
from penstock.changes.segment import UNREPRESENTABLE_TYPE
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.naming import FOLDERS
from penstock.errors import ConfigError, IllegalTransition, PenstockError, TableOwned, TableRejected
from penstock.schema import Column, PostgresType
from penstock.source.lineage import Ancestry, Lineage
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import INT8, LINES, ORDERS, TEXT
from tests.unit.destinations.delta.orders import assert_durable, copied, expected, notes, order, started, update, write
from tests.unit.destinations.delta.reading import read_rows, read_table

TIME = PostgresType(1083, "time")


@pytest.mark.trap(38, 54)
@pytest.mark.parametrize("damage", ["deleted", "cut", "empty", "zeroed"])
def test_an_index_that_is_lost_or_broken_is_made_anew(lake: Path, source: ScriptedSource, damage: str) -> None:
    destination = copied(lake, source)
    assert_durable(write(destination, update(source, 1, note="first")))
    folder = lake / FOLDERS.table(ORDERS) / "_penstock" / "index"
    found = sorted(path for path in folder.iterdir())
    assert found
    for path in found:
        content = path.read_bytes()
        # Another file under the same name: what is mapped already stays as it is.
        path.unlink()
        if damage != "deleted":
            # The machine went down, and started again since.
            zeroed = content[:32] + b"an earlier start" + bytes(len(content) - 48)
            path.write_bytes({"cut": content[:20], "empty": b"", "zeroed": zeroed}[damage])
    _forget_indexes()
    assert_durable(write(destination, update(source, 1, 2, note="second")))
    assert notes(lake) == expected(_1="second", _2="second")


def _forget_indexes() -> None:
    from penstock.destinations.delta import index

    index._indexes._known.clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.trap(30)
def test_every_row_of_a_key_is_replaced(lake: Path, source: ScriptedSource) -> None:
    """A copy that was resumed may have a row twice."""
    destination = started(lake)
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    rows = [order(1), order(2), order(1), order(1)]
    destination.write_table_rows(ORDERS, source.copy(ORDERS, rows, ranges=2))
    assert_durable(write(destination, update(source, 1)))
    assert notes(lake) == {1: "new", 2: "n"}


@pytest.mark.trap(29)
def test_a_row_without_a_key_that_is_not_there_stops_its_table(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [{"level": 1, "line": "there"}]))
    with source.transaction() as transaction:
        transaction.delete(LINES, {"level": 1, "line": "not there"})
    error = destination.write_events(source.batch()).result().of(LINES.table_id).error
    assert isinstance(error, PenstockError)
    assert "not there" not in str(error)
    assert read_rows(lake, LINES) == [{"level": 1, "line": "there"}]


@dataclass(frozen=True)
class SourceOf:
    """A source whose rows are at hand (`penstock.destinations.base.SourceRows`)."""

    rows: tuple[tuple[int, str], ...]

    def fetch(self, schema: Any, keys: pa.Table) -> pa.Table:
        wanted = set(keys["id"].to_pylist())
        found = [(number, note) for number, note in self.rows if number in wanted]
        return pa.table(
            {
                "id": pa.array([number for number, _ in found], pa.int64()),
                "note": pa.array([f"large {number}" for number, _ in found]),
                "due": pa.nulls(len(found), pa.date32()),
                "state": pa.array([note for _, note in found]),
                "_unrepresentable": pa.nulls(len(found), UNREPRESENTABLE_TYPE),
            }
        )


@pytest.mark.trap(25)
def test_a_row_that_came_into_view_and_changed_since_waits_for_that_change(lake: Path, source: ScriptedSource) -> None:
    """The cells that were not sent are taken from the source only if all others are the same there."""
    schema = replace(ORDERS, columns=(*ORDERS.columns, Column("state", 4, TEXT)))
    destination = DeltaDestination(lake, maintenance=False)
    context = make_context()
    destination.startup(replace(context, source_rows=SourceOf(((1, "same"), (2, "newer")))))
    destination.drop_table_for_copy(schema, "attempt-1")
    destination.write_table_rows(schema, source.copy(schema, []))

    def row(number: int, state: str, note: Any = Unchanged) -> dict[str, Any]:
        return {"id": number, "note": note, "due": None, "state": state}

    with source.transaction() as transaction:
        transaction.insert(schema, row(1, "same"))
        transaction.insert(schema, row(2, "older"))
        transaction.insert(schema, row(3, "gone at the source"))
    assert_durable(write(destination, source.batch()))
    assert read_rows(lake, schema) == [row(1, "same", "large 1")]
    with source.transaction() as transaction:
        transaction.update(schema, row(2, "newer"))
        transaction.delete(schema, {"id": 3})
        transaction.update(schema, row(4, "same"), old={"id": 1})
    assert_durable(write(destination, source.batch()))
    rows = sorted(read_rows(lake, schema) or [], key=lambda cells: cells["id"])
    assert rows == [row(2, "newer", "large 2"), row(4, "same", "large 1")]


@pytest.mark.trap(25)
def test_without_a_source_to_ask_such_a_row_stops_its_table(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 50, "note": Unchanged, "due": None})
    assert isinstance(write(destination, source.batch()).error, PenstockError)
    assert notes(lake) == expected()


@pytest.mark.trap(31)
def test_times_of_day_are_printed_alike_wherever_they_stand(lake: Path, source: ScriptedSource) -> None:
    """Delta has no type for them; a key of one is found again, and a history says the same before and after."""
    hour = Column("hour", 1, TIME, identity=True, primary_key_position=1)
    schema = replace(ORDERS, table_id=17_000, columns=(hour, Column("note", 2, TEXT)))
    noon, later = time(12), time(12, 30, 0, 250_000)
    for mode in ("mirror", "history"):
        destination = started(lake / mode, mode=mode)
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, [{"hour": noon, "note": "n"}]))
        with source.transaction() as transaction:
            transaction.update(schema, {"hour": later, "note": Unchanged}, old={"hour": noon})
        result = destination.write_events(source.batch()).result()
        assert result.tables == {}
    assert read_rows(lake / "mirror", schema) == [{"hour": "12:30:00.25", "note": "n"}]
    history = read_table(lake / "history", schema)
    assert history is not None
    changes = sorted(history.to_pylist(), key=lambda row: row["_ordinal"])
    assert [(row["hour"], row["_old"]) for row in changes] == [
        ("12:00:00", None),
        ("12:30:00.25", {"hour": "12:00:00"}),
    ]


def test_a_table_without_columns_is_refused(lake: Path) -> None:
    with pytest.raises(TableRejected, match="no columns"):
        started(lake).drop_table_for_copy(replace(ORDERS, columns=()), "attempt-1")


def test_a_table_that_others_made_is_left_alone(lake: Path, source: ScriptedSource) -> None:
    row = pa.table({"id": [1]})
    folder = lake / FOLDERS.table(ORDERS)
    folder.mkdir(parents=True)
    write_deltalake(str(folder), row)
    with pytest.raises(TableOwned):
        started(lake).drop_table_for_copy(ORDERS, "attempt-1")


def test_tables_that_exchanged_their_names_take_over_each_others_folders(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    other = replace(ORDERS, table_id=ORDERS.table_id + 1, name="others")
    destination.drop_table_for_copy(other, "attempt-1")
    destination.write_table_rows(other, source.copy(other, [order(7)]))
    here, there = replace(ORDERS, name="others"), replace(other, name="orders")
    zombie, late = started(lake), update(source, 1, note="late")
    assert zombie.position(ORDERS.table_id) is not None
    for schema in (here, there):
        destination.drop_table_for_copy(schema, f"attempt-{schema.table_id}")
    # Until the copies are complete readers see what was there, and nobody adds to it.
    assert DeltaReader(lake).tables() == ["public.orders", "public.others"]
    assert notes(lake) == expected()
    assert isinstance(write(zombie, late).error, IllegalTransition)
    for schema, number in ((here, 5), (there, 6)):
        rows = source.copy(schema, [order(number)], attempt=f"attempt-{schema.table_id}")
        destination.write_table_rows(schema, rows)
    assert (read_rows(lake, here), read_rows(lake, there)) == ([order(5)], [order(6)])
    with source.transaction() as transaction:
        transaction.update(here, order(5, "here"))
        transaction.update(there, order(6, "there"))
    assert started(lake).write_events(source.batch()).result().tables == {}
    assert (read_rows(lake, here), read_rows(lake, there)) == ([order(5, "here")], [order(6, "there")])
    assert started(lake).folder_of(ORDERS.table_id) == "public/others"
    assert {Path(place).name for place in destination.locations("contract").values()} == {"orders", "others"}


def test_a_copy_that_was_superseded_by_another_table_is_not_committed(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    other = replace(ORDERS, table_id=ORDERS.table_id + 1)
    destination.drop_table_for_copy(other, "attempt-3")
    late = started(lake)
    with pytest.raises(IllegalTransition):
        late.write_table_rows(ORDERS, source.copy(ORDERS, [order(9)], attempt="attempt-2"))
    assert notes(lake) == expected()


def test_a_table_of_another_server_has_no_folder(lake: Path, source: ScriptedSource) -> None:
    """Another server may give the number of a table to another one."""
    copied(lake, source)
    assert started(lake).folder_of(ORDERS.table_id) == "public/orders"
    elsewhere = DeltaDestination(lake, maintenance=False)
    elsewhere.startup(make_context(ancestry=Ancestry(Lineage("another", 1, "shop", "slot"))))
    assert elsewhere.folder_of(ORDERS.table_id) is None


def test_a_renamed_table_goes_on_and_moves_with_its_next_copy(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    renamed = replace(ORDERS, name="purchases")
    with source.transaction() as transaction:
        transaction.update(renamed, order(1, "after"))
    assert_durable(write(destination, source.batch()))
    assert notes(lake)[1] == "after"
    destination = started(lake)
    destination.drop_table_for_copy(renamed, "attempt-2")
    destination.write_table_rows(renamed, source.copy(renamed, [order(5)], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.update(renamed, order(5, "moved"))
    assert_durable(write(destination, source.batch()))
    assert read_rows(lake, renamed) == [order(5, "moved")]
    assert notes(lake)[1] == "after"


def test_vectors_can_be_turned_on_and_off(lake: Path, source: ScriptedSource) -> None:
    """The tables stay; files that have vectors lose them when they are rewritten."""
    destination = copied(lake, source, deletion_vectors=False)
    for number, vectors in enumerate([False, True, False, True]):
        destination = started(lake, deletion_vectors=vectors)
        assert_durable(write(destination, update(source, number, 9, note=f"{number}")))
        assert notes(lake)[9] == f"{number}"
    assert notes(lake) == expected(_0="0", _1="1", _2="2", _3="3", _9="3")


def test_another_mode_needs_another_copy(lake: Path, source: ScriptedSource) -> None:
    copied(lake, source)
    batch = update(source, 1)
    error = write(started(lake, mode="soft_delete"), batch).error
    assert isinstance(error, TableRejected)
    assert "resync" in error.hint
    assert notes(lake) == expected()
    other = started(lake, mode="soft_delete")
    other.drop_table_for_copy(ORDERS, "attempt-2")
    other.write_table_rows(ORDERS, source.copy(ORDERS, [order(1), order(2)], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
    assert_durable(write(other, source.batch()))
    assert notes(lake) == {2: "n"}
    assert len(read_rows(lake, ORDERS, deleted=True) or []) == 2


def test_a_pinned_version_stays_while_the_table_goes_on(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    renamed = replace(ORDERS, name="purchases")
    pinned = destination.pin(renamed)
    assert pinned is not None
    assert pinned.schema == ORDERS
    assert_durable(write(destination, update(source, *range(10))))
    batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
    assert {note for batch in batches for note in batch["note"].to_pylist()} == {"n"}
    assert sum(batch.num_rows for batch in batches) == 10
    pinned.close()
    assert destination.pin(replace(ORDERS, table_id=1)) is None


@pytest.mark.trap(29)
def test_rows_without_a_key_are_found_after_a_column_was_added(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    line = {"level": 1, "line": "same"}
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [line, line, line]))
    added = replace(LINES, columns=(*LINES.columns, Column("extra", 9, INT8, identity=True)))
    with source.transaction() as transaction:
        transaction.delete(LINES, line)
    with source.transaction() as transaction:
        transaction.delete(added, line | {"extra": None})
        transaction.insert(added, line | {"extra": 5})
    assert destination.write_events(source.batch()).result().tables == {}
    with source.transaction() as transaction:
        transaction.delete(added, line | {"extra": 5})
    assert destination.write_events(source.batch()).result().tables == {}
    assert read_rows(lake, LINES) == [line | {"extra": None}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "mirrored"}, "unknown mode"),
        ({"deletion_vectors": "yes"}, "true or false"),
        ({"commit_interval": 0}, "commit_interval"),
        ({"commit_interval": "1s"}, "commit_interval"),
        ({"file_retention_hours": 0.01}, "file_retention_hours"),
        ({"storage_options": {"aws_region": "x"}}, "storage options"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeltaDestination(tmp_path, **options)


def test_a_lake_of_a_newer_version_is_refused(lake: Path) -> None:
    started(lake).shutdown()
    (lake / "_penstock" / "lake.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="newer version"):
        started(lake)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        started(tmp_path / "file" / "lake")
