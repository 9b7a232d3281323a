"""A small Delta table to test storage with: rows with an id, written through the log as the destination does it."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.destinations.delta.actions import Action, Add, CommitInfo, Metadata, Txn
from penstock.destinations.delta.files import (
    iterate_data_file,
    now_milliseconds,
    vector_of,
    write_data_file,
)
from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.destinations.delta.schema import protocol_for, schema_string, table_configuration
from penstock.destinations.delta.snapshot import Application, Snapshot, Verdict
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, write_vectors

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("amount", pa.decimal128(30, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("day", pa.date32()),
        pa.field("ratio", pa.float64()),
    ]
)
_BEGIN = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


def make_rows(ids: Iterable[int]) -> pa.Table:
    """Rows whose cells follow from their ids, so that a wrong row cannot look right."""
    ids = list(ids)
    moments = [_BEGIN + datetime.timedelta(hours=each, microseconds=each + 1) for each in ids]
    return pa.table(
        {
            "id": ids,
            # Longer than what statistics keep, and different only behind that.
            "name": [None if each % 7 == 3 else f"{'ü' * 40}{each:06d}" for each in ids],
            "amount": [decimal.Decimal(each).scaleb(-2) + 12345678901234567890123456 for each in ids],
            "at": moments,
            "local": [each.replace(tzinfo=None) for each in moments],
            "day": [each.date() for each in moments],
            "ratio": [each / 3 for each in ids],
        },
        schema=SCHEMA,
    )


class LakeTable:
    """A table of one writer, with the position that it has recorded."""

    def __init__(self, storage: Storage, *, pipeline: str = "lake", attempt: str = "1", vectors: bool = True) -> None:
        self.storage = storage
        self.vectors = vectors
        self.log = DeltaLog(storage)
        self.application = Application(pipeline, "public.items", "lineage", attempt)
        self.position = 0

    @property
    def snapshot(self) -> Snapshot:
        snapshot = self.log.refresh()
        assert snapshot is not None
        return snapshot

    def create(self, ids: Iterable[int] = ()) -> Committed | Lost:
        """The first version, with these rows."""
        return self.log.commit(None, self._copy_actions(None, ids))

    def copy(self, ids: Iterable[int], *, attempt: str) -> None:
        """A new copy in the place of all rows."""
        self.application = Application(self.application.pipeline, "public.items", "lineage", attempt)
        ids = list(ids)
        self.write(lambda snapshot: self._copy_actions(snapshot, ids))

    def append(self, ids: Iterable[int]) -> Add:
        """One file more."""
        add = write_data_file(self.storage, make_rows(ids))
        self.write(lambda _: [add])
        return add

    def delete(self, ids: Iterable[int]) -> None:
        """Rows marked as dead, whatever file they are in; files without live rows are removed."""
        wanted = np.array(list(ids), np.int64)
        self.write(lambda snapshot: self.delete_actions(snapshot, wanted))

    def delete_actions(self, snapshot: Snapshot, ids: Any) -> list[Action]:
        """What `delete` commits."""
        touched: list[tuple[Add, Vector]] = []
        actions: list[Action] = []
        for add in snapshot.files.values():
            batches = iterate_data_file(self.storage, add, SCHEMA, Vector.EMPTY)
            found = np.concatenate([batch["id"].to_numpy() for batch in batches])
            dead = vector_of(self.storage, add)
            after = dead.union(Vector.of(np.flatnonzero(np.isin(found, ids))))
            if len(after) == len(found):
                actions.append(add.removed(now_milliseconds()))
            elif len(after) > len(dead):
                touched.append((add, after))
        descriptors = write_vectors(self.storage, [vector for _, vector in touched])
        for (add, _), descriptor in zip(touched, descriptors, strict=True):
            actions += [add.removed(now_milliseconds()), add.with_vector(descriptor)]
        return actions

    def write(self, make_actions: Callable[[Snapshot], list[Action]]) -> Snapshot:
        """Commit, again after maintenance of others, which may not change what the actions are about."""
        self.position += 10
        snapshot = self.snapshot
        while True:
            answer = self.log.commit(snapshot, [*self.head(), *make_actions(snapshot)])
            if isinstance(answer, Committed):
                return answer.snapshot
            assert answer.verdict(self.application) is Verdict.MAINTENANCE
            snapshot = answer.snapshot

    def head(self, operation: str = "MERGE") -> list[Action]:
        """What every commit of the writer has."""
        now = now_milliseconds()
        return [CommitInfo(now, operation), Txn(self.application.id, self.position, now)]

    def ids(self, snapshot: Snapshot | None = None) -> list[int]:
        """The ids of the live rows, in order, by our own reader; checks that the other cells are theirs."""
        snapshot = self.snapshot if snapshot is None else snapshot
        parts = [table for add in snapshot.files.values() for table in iterate_data_file(self.storage, add, SCHEMA)]
        rows = pa.concat_tables([SCHEMA.empty_table(), *parts]).sort_by("id")
        assert rows.equals(make_rows(rows["id"].to_pylist()))
        return rows["id"].to_pylist()

    def _copy_actions(self, snapshot: Snapshot | None, ids: Iterable[int]) -> list[Action]:
        configuration = table_configuration(self.application.pipeline, log_retention_hours=1, file_retention_hours=1)
        removed = [] if snapshot is None else [add.removed(now_milliseconds()) for add in snapshot.files.values()]
        name = str(uuid.uuid4()) if snapshot is None else snapshot.metadata.id
        metadata = Metadata(name, schema_string(SCHEMA), configuration, created_time=now_milliseconds())
        data = make_rows(ids)
        added = [write_data_file(self.storage, data)] if data.num_rows else []
        protocol = protocol_for(SCHEMA, deletion_vectors=self.vectors)
        begin: list[Action] = [] if snapshot is not None else [*self.head("CREATE TABLE"), protocol]
        return [*begin, metadata, *removed, *added]
