"""A published table with a snapshot, ready to be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.transform import Transforms
from penstock.copy import CopyRows, CopySettings, prepare_copy
from penstock.source import SourceSettings
from penstock.source.snapshots import Snapshot, take_snapshot
from penstock.values import TypeSettings

SMALL_RANGES = CopySettings(range_bytes=16 * 8192, chunk_bytes=64 << 10)
PUBLICATION = "pub"

Prepare = Callable[..., CopyRows]


class Source:
    """A database as the source of copies."""

    def __init__(self, database: Any) -> None:
        self.database = database
        self.settings = SourceSettings(database.dsn)
        self.execute = database.execute
        self._snapshots: list[Snapshot] = []

    def oid(self, table: str) -> int:
        return self.execute("select %s::regclass::oid::int8", [table])[0][0]

    def snapshot(self) -> Snapshot:
        self._snapshots.append(take_snapshot(self.settings, timeout=30))
        return self._snapshots[-1]

    def prepare(
        self,
        table: str = "t",
        *,
        snapshot: Snapshot | None = None,
        settings: CopySettings = SMALL_RANGES,
        types: TypeSettings | None = None,
        transforms: Transforms | None = None,
    ) -> CopyRows:
        snapshot = snapshot or self.snapshot()
        options = {"settings": settings, "types": types, "transforms": transforms}
        return prepare_copy(snapshot, self.settings, PUBLICATION, self.oid(table), **options)

    def close(self) -> None:
        for snapshot in self._snapshots:
            snapshot.close()


def read(rows: CopyRows) -> pa.Table:
    return pa.Table.from_batches(rows.arrow(), rows.arrow_schema)


@pytest.fixture
def source(database: Any) -> Iterator[Source]:
    source = Source(database)
    yield source
    source.close()


@pytest.fixture
def any_source(any_database: Any) -> Iterator[Source]:
    source = Source(any_database)
    yield source
    source.close()
