"""Which tables lie where: a note for each table of the source, so that its folder is found by its number alone.

    <path>/_penstock/tables/<pipeline>/<table id>.json    {"folder": "public/orders"}

A table that is renamed in the source keeps its folder until it is copied anew. Whose table it is and what it holds
stands in its log; a note that is lost comes back with the next copy.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from urllib.parse import quote

from penstock.destinations.delta.storage import Storage
from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema

_FOLDER = "_penstock/tables"


@dataclass(slots=True)
class Catalog:
    """The folders of one pipeline's tables."""

    storage: Storage
    """Of the lake."""
    pipeline_id: str
    _known: dict[int, str] = field(default_factory=dict[int, str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def folder(self, table_id: int) -> str | None:
        """Where a table is; None if nobody has copied it here."""
        with self._lock:
            known = self._known.get(table_id)
        if known is None:
            content = self.storage.get(self._path(table_id))
            if content is None:
                return None
            known = str(json.loads(content)["folder"])
            with self._lock:
                self._known[table_id] = known
        return known

    def place(self, schema: TableSchema) -> str:
        """Where a copy of a table goes, by its name."""
        return FOLDERS.table(schema)

    def note(self, table_id: int, folder: str) -> None:
        """Remember where a table is."""
        if self.folder(table_id) != folder:
            self.storage.put(self._path(table_id), json.dumps({"folder": folder}).encode())
            with self._lock:
                self._known[table_id] = folder

    def known(self) -> dict[int, str]:
        """The tables that were asked for since the start."""
        with self._lock:
            return dict(self._known)

    def _path(self, table_id: int) -> str:
        return f"{_FOLDER}/{quote(self.pipeline_id, safe='')}/{table_id}.json"


def noted_folders(storage: Storage) -> list[str]:
    """The folders of all tables of a lake, whoever writes them."""
    notes = [storage.get(file.path) for file in storage.list(_FOLDER) if file.path.endswith(".json")]
    return sorted({str(json.loads(note)["folder"]) for note in notes if note is not None})
