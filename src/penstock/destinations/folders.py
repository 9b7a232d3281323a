"""Which folder a table has at a destination, and which one its next copy gets.

A folder belongs to one table of the source, identified by its oid. When the table is renamed or moves to another
schema, `RenameRules` decide:

| rule | |
|---|---|
| `follow` | the table is copied to the folder of its new name; the old rows stay readable until the copy is complete |
| `keep` | the table keeps its folder |

No copy goes to a folder with the rows of another table that the pipeline has. A table waits for a folder until the
table in it has moved. Tables that exchanged their names wait for each other, so they go at once: in each folder, the
copy replaces the other table's rows in one commit. Where the table in the folder keeps it, the other one gets a folder
of its own: `public/orders--oid16412`.

The folders are recorded by the destination, with the rows; nothing here is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema
from penstock.source.patterns import TableName, refers_to

_OWN = "--oid"
_THREADS = 8


class RenameTable(StrEnum):
    """What happens to the folder of a table that is renamed."""

    FOLLOW = "follow"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class RenameRules:
    """The rule of each table."""

    default: RenameTable | None = None
    """None: `keep` for tables that Penstock does not copy again without being asked, `follow` for others."""
    tables: Mapping[str, RenameTable] = field(default_factory=dict[str, RenameTable])
    """By pattern, of the table's name or of the name that its folder has; the first that matches counts."""

    def rule(self, table: TableName, folder: str | None, otherwise: RenameTable) -> RenameTable:
        """Return the rule of a table that is in `folder`."""
        names = [table] if folder is None else [table, _name_of(folder)]
        for text, rule in self.tables.items():
            if any(refers_to(text, name) for name in names):
                return rule
        return self.default or otherwise


class TableFolders:
    """The folders of all tables of an output. Thread-safe."""

    def __init__(self, rules: RenameRules, folder_of: Callable[[int], str | None]) -> None:
        """`folder_of` asks the destination for the folder that has the rows of a table."""
        self._rules = rules
        self._keeping: frozenset[int] = frozenset()
        self._folder_of = folder_of
        self._lock = threading.RLock()
        self._names: dict[int, TableName] = {}
        self._held: dict[int, str] = {}
        """Where the rows of each table are."""
        self._holders: dict[str, list[int]] = {}
        """The same, by folder; there may be many tables."""
        self._next: dict[int, str] = {}
        """Where the copies in progress go."""

    def publish(self, names: Mapping[int, TableName], keeping: Collection[int] = ()) -> None:
        """Set the tables of the pipeline, with their current names; tables that have left give up their folders.

        `keeping` are those that keep their folders unless a rule says otherwise.
        """
        new = list(names.keys() - self._names.keys())
        # Each answer of an object store takes a while.
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="folders") as pool:
            found = dict(zip(new, pool.map(self._folder_of, new), strict=True))
        with self._lock:
            self._names = dict(names)
            self._keeping = frozenset(keeping)
            known = self._held | {table_id: folder for table_id, folder in found.items() if folder is not None}
            self._held = {table_id: folder for table_id, folder in known.items() if table_id in names}
            self._next = {table_id: folder for table_id, folder in self._next.items() if table_id in names}
            self._index()

    def knows(self, table_id: int) -> bool:
        """Return False for a table that is not published yet, as when the destination did not answer."""
        with self._lock:
            return table_id in self._names

    def finish(self, table_ids: Collection[int]) -> None:
        """Record that the copies of these tables are complete."""
        with self._lock:
            finished = self._next.keys() & set(table_ids)
            for table_id in finished:
                self._held[table_id] = self._next.pop(table_id)
            if finished:
                self._index()

    def misplaced(self) -> dict[int, tuple[str, str]]:
        """Return the tables that are, or are being copied, in another folder than they should be: (is, should be)."""
        with self._lock:
            placed = self._held | self._next
            return {
                table_id: (folder, self._target(table_id))
                for table_id, folder in placed.items()
                if folder != self._target(table_id)
            }

    def waits_for(self, table_id: int, to_copy: Collection[int]) -> int | None:
        """Return the table that must leave the folder before `table_id` can be copied to it; None if it is free.

        `to_copy` are the tables that no worker writes to: only they give up their folders to each other.
        """
        with self._lock:
            other = self._holder(self._target(table_id), table_id)
            if other is None:
                return None
            chain = [table_id]
            following: int | None = other
            while following is not None and following not in chain:
                chain.append(following)
                following = self._holder(self._target(following), following)
            return None if following == table_id and other in to_copy else other

    def take(self, schema: TableSchema) -> str:
        """Return the folder for a copy that begins now."""
        with self._lock:
            table_id = schema.table_id
            # The name may be newer than the one that was published.
            self._names[table_id] = TableName(schema.namespace, schema.name)
            folder = self._target(table_id)
            if self.waits_for(table_id, self._names) is not None:
                folder = self._own(table_id)
            self._next[table_id] = folder
            return folder

    def _target(self, table_id: int) -> str:
        wanted, held = FOLDERS.name(*self._names[table_id]), self._held.get(table_id, self._next.get(table_id))
        if held is not None and self._keeps(table_id, held):
            return held
        other = self._holder(wanted, table_id)
        return wanted if other is None or not self._keeps(other, wanted) else self._own(table_id)

    def _keeps(self, table_id: int, folder: str) -> bool:
        name = self._names.get(table_id)
        otherwise = RenameTable.KEEP if table_id in self._keeping else RenameTable.FOLLOW
        # A table that has the folder of its name does not leave it.
        return name is not None and (
            FOLDERS.name(*name) == folder or self._rules.rule(name, folder, otherwise) is RenameTable.KEEP
        )

    def _holder(self, folder: str, besides: int) -> int | None:
        """Return another table whose rows are in a folder."""
        return next((each for each in self._holders.get(folder, ()) if each != besides), None)

    def _index(self) -> None:
        self._holders = {}
        for table_id, folder in self._held.items():
            self._holders.setdefault(folder, []).append(table_id)

    def _own(self, table_id: int) -> str:
        return f"{FOLDERS.name(*self._names[table_id])}{_OWN}{table_id}"


def _name_of(folder: str) -> TableName:
    """Return the name after which a folder was named, unless it had letters that folders cannot have."""
    namespace, _, name = folder.partition("/")
    return TableName(namespace, name.partition(_OWN)[0])
