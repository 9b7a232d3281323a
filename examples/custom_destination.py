"""A custom destination to copy and adapt: it writes rows as JSON to a SQLite file, each change exactly once.

Name its module and class in a config file; the module must be importable where Penstock runs:

    [destination]
    type = "custom_destination:SqliteRows"
    path = "replica.db"

To try it without a database: `python examples/custom_destination.py` replays transactions and prints the rows.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.changes.events import Delete, Event, Insert, Relation, Row, Truncate, Unchanged, Unrepresentable, Update
from penstock.destinations import Capabilities, DestinationContext, RowDestination
from penstock.destinations.json_lines import lossless
from penstock.errors import ConfigError
from penstock.lsn import Lsn
from penstock.schema import TableSchema

TABLES = """
create table if not exists tables (
  name text, table_id integer primary key, pipeline text, lineage text, position text, columns text);
create table if not exists rows (table_id integer, key text, content text);
create index if not exists rows_by_key on rows (table_id, key);
"""


class SqliteRows(RowDestination):
    """Store rows as JSON by table and key, and positions in the same transaction as their rows."""

    name = "sqlite"
    # This class stores positions (`flush` and `position` below), and rows as the source has them.
    capabilities = Capabilities(records_position=True, updates_rows=True, keeps_old_rows_while_copying=True)

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def open(self, context: DestinationContext) -> None:
        """Open the file. Called once at the start; raise here if the options cannot work."""
        self._context = context
        # Calls come from several threads, one at a time.
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        self._database.executescript(TABLES)

    def close(self) -> None:
        """Close the file. Called once at the end."""
        self._database.close()

    def claim(self, table: TableSchema) -> None:
        """Raise if another pipeline writes this table."""
        found = self._database.execute("select pipeline from tables where name = ?", (str(table),)).fetchone()
        if found is not None and found[0] != self._context.pipeline_id:
            raise ConfigError(f"{table} belongs to pipeline {found[0]!r}")

    def clear(self, table: TableSchema, attempt: str) -> None:
        """Prepare for a copy. Readers see nothing before `flush`, so the old rows stay readable until then."""
        self._database.execute("delete from rows where table_id = ?", (table.table_id,))
        self._database.execute("delete from tables where table_id = ?", (table.table_id,))
        # A table that was renamed, and lost its name to this one, gets another name with its next change.
        self._database.execute("update tables set name = null where name = ?", (str(table),))
        record = (str(table), table.table_id, self._context.pipeline_id, self._context.lineage, _columns(table))
        self._database.execute("insert into tables values (?, ?, ?, ?, null, ?)", record)

    def write(self, event: Event) -> None:
        """Apply one event; ignore those that do not matter here."""
        match event:
            case Relation():
                self._take_columns(event.table)
            case Insert():
                self._insert(event.table, event.row)
            case Update():
                # Without `old`, the key did not change.
                before = self._remove(event.table, event.row if event.old is None else event.old)
                # An omitted value is not NULL: it keeps its old value.
                sent = {name: value for name, value in event.row.items() if value is not Unchanged}
                self._insert(event.table, sent, before)
            case Delete():
                self._remove(event.table, event.old)
            case Truncate():
                for table_id in event.table_ids:
                    self._require_copy(table_id)
                    self._database.execute("delete from rows where table_id = ?", (table_id,))
            case _:
                pass

    def flush(self, positions: Mapping[int, Lsn]) -> None:
        """Make the rows and their positions durable, both or neither."""
        for table_id, position in positions.items():
            record = (str(position), self._context.lineage, table_id)
            self._database.execute("update tables set position = ?, lineage = ? where table_id = ?", record)
        self._database.commit()

    def discard(self) -> None:
        """Undo everything since the last flush, after a failure."""
        self._database.rollback()

    def position(self, table_id: int) -> Lsn | None:
        """Return the position of a table; Penstock skips changes that it covers."""
        found = self._database.execute(
            "select position, lineage from tables where table_id = ? and pipeline = ?",
            (table_id, self._context.pipeline_id),
        ).fetchone()
        if found is None or found[0] is None:
            return None
        position = Lsn.parse(found[0])
        return position if self._context.knows(found[1], position) else None

    def rows(self, table: str) -> list[dict[str, Any]] | None:
        """Return the rows of a table, for readers; Penstock does not call it."""
        found = self._database.execute("select table_id from tables where name = ?", (table,)).fetchone()
        if found is None:
            return None
        rows = self._database.execute("select content from rows where table_id = ?", found)
        return [json.loads(content) for (content,) in rows]

    def _require_copy(self, table_id: int) -> None:
        if self.position(table_id) is None:
            raise ValueError("a change of a table that was not copied here")

    def _insert(self, table: TableSchema, row: Row, before: Mapping[str, Any] | None = None) -> None:
        content = {**(before or {}), **{name: _cell(value) for name, value in row.items()}}
        record = (table.table_id, _key(table, content), json.dumps(content))
        self._database.execute("insert into rows values (?, ?, ?)", record)

    def _remove(self, table: TableSchema, identity: Row) -> dict[str, Any]:
        """Remove the identified row: exactly one, even if a table has no key and several rows are equal."""
        key = _key(table, {name: _cell(value) for name, value in identity.items()})
        found = self._database.execute(
            "select rowid, content from rows where table_id = ? and key = ? limit 1", (table.table_id, key)
        ).fetchone()
        if found is None:
            raise ValueError("a change of a row that is not here")
        self._database.execute("delete from rows where rowid = ?", found[:1])
        return json.loads(found[1])

    def _take_columns(self, table: TableSchema) -> None:
        """Follow columns by their number, because names can change."""
        self._require_copy(table.table_id)
        self._database.execute("update tables set name = ? where table_id = ?", (str(table), table.table_id))
        (text,) = self._database.execute("select columns from tables where table_id = ?", (table.table_id,)).fetchone()
        if text == _columns(table):
            return
        self._database.execute("update tables set columns = ? where table_id = ?", (_columns(table), table.table_id))
        old: dict[str, str] = json.loads(text)
        rows = self._database.execute(
            "select rowid, content from rows where table_id = ?", (table.table_id,)
        ).fetchall()
        for rowid, text in rows:
            before = json.loads(text)
            content = {column.name: before.get(old.get(str(column.attnum), "")) for column in table.columns}
            record = (_key(table, content), json.dumps(content), rowid)
            self._database.execute("update rows set key = ?, content = ? where rowid = ?", record)


def _columns(table: TableSchema) -> str:
    return json.dumps({str(column.attnum): column.name for column in table.columns})


def _cell(value: Any) -> Any:
    """Return a value as JSON; an unrepresentable value (`infinity`) stays recognizable."""
    return {"text": value.text} if isinstance(value, Unrepresentable) else lossless(value)


def _key(table: TableSchema, content: Mapping[str, Any]) -> str:
    """Return the cells of the key, or the whole row if the table has no key."""
    names = [column.name for column in table.key] or sorted(content)
    return json.dumps([content[name] for name in names])


def main() -> None:
    """Replay a few transactions without a database, and print the remaining rows."""
    from penstock.testing.destinations import ScriptedSource, make_context
    from penstock.testing.destinations.contract import ORDERS

    with tempfile.TemporaryDirectory() as folder:
        destination = SqliteRows(f"{folder}/replica.db")
        destination.startup(make_context("example"))
        source = ScriptedSource(Path(folder) / "segments")
        destination.drop_table_for_copy(ORDERS, "attempt-1")
        destination.write_table_rows(ORDERS, source.copy(ORDERS, [{"id": 1, "note": "copied", "due": None}]))
        with source.transaction() as transaction:
            transaction.insert(ORDERS, {"id": 2, "note": "new", "due": None})
            transaction.update(ORDERS, {"id": 3, "note": Unchanged, "due": None}, old={"id": 1})
        destination.write_events(source.batch()).result()
        print(*(destination.rows("public.orders") or []), sep="\n")
        destination.shutdown()


if __name__ == "__main__":
    main()
