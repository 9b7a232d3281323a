"""Versions of tables' schemas, each valid from an order key on.

A version is named after its key, so versions are in the order of the WAL, not of their arrival: a message that arrives
again after a crash finds the version that it created, and never returns to an older one.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from penstock.errors import SpoolCorrupt
from penstock.lsn import OrderKey
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json
from penstock.spool.folder import SpoolFolder, read_file, replace_file


class SchemaVersions:
    """The versions in a spool. The writer adds versions; readers load single ones."""

    def __init__(self, folder: SpoolFolder) -> None:
        self._folder = folder
        self._versions: dict[int, dict[str, TableSchema]] = {}

    def version_for(self, schema: TableSchema, since: OrderKey) -> str:
        """The version that is valid at `since`; a new one only if the schema differs from the previous one."""
        versions = self._known(schema.table_id)
        name = str(since)
        names = sorted(versions)
        position = bisect_right(names, name)
        if position and versions[names[position - 1]] == schema:
            name = names[position - 1]
            if not _knows_more(schema, versions[name]):
                return name
        path = self._path(schema.table_id, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, schema_to_json(schema))
        versions[name] = schema
        return name

    def at(self, table_id: int, key: OrderKey) -> TableSchema | None:
        """The version that is valid at a key. Later ones come from before a restart; their messages arrive again."""
        versions = self._known(table_id)
        names = sorted(versions)
        position = bisect_right(names, str(key))
        return versions[names[position - 1]] if position else None

    def latest(self, table_id: int) -> TableSchema | None:
        """The newest version, with which a RELATION message is compared."""
        versions = self._known(table_id)
        return versions[max(versions)] if versions else None

    def load(self, table_id: int, version: str) -> TableSchema:
        """One version."""
        versions = self._versions.setdefault(table_id, {})
        if version not in versions:
            record = read_file(self._path(table_id, version))
            if record is None:
                raise SpoolCorrupt(f"schema version {version} of table {table_id} is not in the spool")
            versions[version] = schema_from_json(record)
        return versions[version]

    def names(self, table_id: int) -> list[str]:
        """All versions of a table, oldest first."""
        return sorted(self._known(table_id))

    def _known(self, table_id: int) -> dict[str, TableSchema]:
        if table_id not in self._versions:
            self._versions[table_id] = {}
            for path in sorted((self._folder.schemas / str(table_id)).glob("*.json")):
                self.load(table_id, path.stem)
        return self._versions[table_id]

    def _path(self, table_id: int, version: str) -> Path:
        return self._folder.schemas / str(table_id) / f"{version}.json"


def _knows_more(schema: TableSchema, known: TableSchema) -> bool:
    """True if values of earlier rows are known now; they are not part of the comparison of schemas."""
    pairs = zip(schema.columns, known.columns, strict=True)
    return any(new.missing is not None and old.missing is None for new, old in pairs)
