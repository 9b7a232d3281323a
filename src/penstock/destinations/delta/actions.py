"""The actions of a Delta log as values, and their JSON.

A commit is a file of actions, one JSON object per line. This module has only the actions that Penstock reads or writes.
Others (`cdc`, `domainMetadata` …) are ignored, which is safe because tables whose features need more are rejected
(`penstock.destinations.delta.schema`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from penstock.destinations.delta.statistics import loosened, record_count

ENGINE = "penstock"


@dataclass(frozen=True, slots=True)
class VectorDescriptor:
    """Where the deleted rows of a file are stored; `penstock.destinations.delta.vectors` reads and writes them."""

    storage_type: str
    """`u`: a file beside the data, named by a UUID; `i`: in the descriptor itself; `p`: a file by its path."""
    path_or_inline: str
    size: int
    """Size of the serialised bitmap, in bytes."""
    cardinality: int
    """Number of deleted rows."""
    offset: int | None = None

    @property
    def unique_id(self) -> str:
        """Identifies a vector among those of the same file."""
        suffix = "" if self.offset is None else f"@{self.offset}"
        return f"{self.storage_type}{self.path_or_inline}{suffix}"


@dataclass(frozen=True, slots=True)
class Protocol:
    """The features that a reader and a writer of the table must support."""

    min_reader_version: int
    min_writer_version: int
    reader_features: frozenset[str] = frozenset()
    writer_features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Metadata:
    """The table's schema and properties."""

    id: str
    schema_string: str
    configuration: Mapping[str, str] = field(default_factory=dict[str, str])
    partition_columns: tuple[str, ...] = ()
    created_time: int | None = None
    name: str | None = None
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Makes a file part of the table, without the rows of its vector."""

    path: str
    """As in the log: relative, URL-encoded."""
    size: int
    modification_time: int
    """Milliseconds since the epoch."""
    data_change: bool = True
    """False if the rows are the same, only stored differently."""
    stats: str | None = None
    """JSON; see `penstock.destinations.delta.statistics`."""
    vector: VectorDescriptor | None = None
    partition_values: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def file(self) -> str:
        """The path of the file below the table's folder."""
        return unquote(self.path)

    @property
    def row_count(self) -> int | None:
        """Rows in the file, including deleted ones; None if the writer did not state it."""
        return record_count(self.stats)

    def with_vector(self, vector: VectorDescriptor | None, *, data_change: bool = True) -> Add:
        """Return the same file with other rows deleted. Its statistics become bounds and are no longer exact."""
        stats = self.stats
        if stats is not None and vector is not None:
            stats = loosened(stats)
        return replace(self, vector=vector, stats=stats, data_change=data_change)

    def removed(self, timestamp: int, *, data_change: bool = True) -> Remove:
        """Return the action that removes this file, with this vector, from the table."""
        return Remove(self.path, timestamp, data_change, self.vector, self.size, self.partition_values)


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes a file with this vector from the table."""

    path: str
    deletion_timestamp: int | None
    """Milliseconds since the epoch."""
    data_change: bool = True
    vector: VectorDescriptor | None = None
    size: int | None = None
    partition_values: Mapping[str, str | None] | None = None

    @property
    def file(self) -> str:
        """The path of the file below the table's folder."""
        return unquote(self.path)

    @property
    def time(self) -> int:
        """Milliseconds since the epoch; 0 if the writer did not state it."""
        return self.deletion_timestamp or 0


@dataclass(frozen=True, slots=True)
class Txn:
    """The position of an application, recorded atomically with the rest of its commit."""

    app_id: str
    version: int
    last_updated: int | None = None


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """Who committed, and why. Penstock sets `commit_id` and recognises its own commits by it."""

    timestamp: int
    operation: str
    commit_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    engine: str = ENGINE
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])


Action = Protocol | Metadata | Add | Remove | Txn | CommitInfo


def to_json(action: Action) -> dict[str, Any]:
    """Return an action as a record of the log."""
    match action:
        case Add():
            return {"add": _add_to_json(action)}
        case Remove():
            return {"remove": _remove_to_json(action)}
        case Txn():
            return {
                "txn": _present(appId=action.app_id, version=action.version, lastUpdated=action.last_updated),
            }
        case CommitInfo():
            return {
                "commitInfo": {
                    "timestamp": action.timestamp,
                    "operation": action.operation,
                    "operationParameters": dict(action.parameters),
                    "operationMetrics": dict(action.metrics),
                    "engineInfo": action.engine,
                    "txnId": action.commit_id,
                }
            }
        case Protocol():
            return {"protocol": _protocol_to_json(action)}
        case Metadata():
            return {
                "metaData": _present(
                    id=action.id,
                    name=action.name,
                    description=action.description,
                    format={"provider": "parquet", "options": {}},
                    schemaString=action.schema_string,
                    partitionColumns=list(action.partition_columns),
                    configuration=dict(action.configuration),
                    createdTime=action.created_time,
                )
            }


def from_json(record: Mapping[str, Any]) -> Action | None:
    """Parse a line of the log, or a row of a checkpoint; None for actions that Penstock does not read."""
    for name, parse in _PARSERS.items():
        value = record.get(name)
        if value is not None:
            return parse(value)
    return None


def serialize_commit(actions: Iterable[Action]) -> bytes:
    """Return the content of a commit's file."""
    return "".join(f"{compact_json(to_json(action))}\n" for action in actions).encode()


def parse_commit(content: bytes) -> list[Action]:
    """Parse a commit's file, of Penstock or of another writer; raise `ValueError` if it is incomplete."""
    if not content.endswith(b"\n"):
        # Some writers omit the last line end, so a complete object without one is fine; a truncated one does not parse
        # below.
        content += b"\n"
    found = (from_json(json.loads(line)) for line in content.splitlines() if line.strip())
    return [action for action in found if action is not None]


def compact_json(value: Any) -> str:
    """Return JSON without whitespace and without escaping letters."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _add_to_json(action: Add) -> dict[str, Any]:
    return _present(
        path=action.path,
        partitionValues=dict(action.partition_values),
        size=action.size,
        modificationTime=action.modification_time,
        dataChange=action.data_change,
        stats=action.stats,
        tags=dict(action.tags) or None,
        deletionVector=_vector_to_json(action.vector),
    )


def _remove_to_json(action: Remove) -> dict[str, Any]:
    extended = action.size is not None and action.partition_values is not None
    return _present(
        path=action.path,
        deletionTimestamp=action.deletion_timestamp,
        dataChange=action.data_change,
        extendedFileMetadata=extended,
        partitionValues=dict(action.partition_values or {}) if extended else None,
        size=action.size if extended else None,
        deletionVector=_vector_to_json(action.vector),
    )


def _protocol_to_json(action: Protocol) -> dict[str, Any]:
    # These versions introduced the lists.
    return _present(
        minReaderVersion=action.min_reader_version,
        minWriterVersion=action.min_writer_version,
        readerFeatures=sorted(action.reader_features) if action.min_reader_version >= 3 else None,
        writerFeatures=sorted(action.writer_features) if action.min_writer_version >= 7 else None,
    )


def _vector_to_json(vector: VectorDescriptor | None) -> dict[str, Any] | None:
    if vector is None:
        return None
    return _present(
        storageType=vector.storage_type,
        pathOrInlineDv=vector.path_or_inline,
        offset=vector.offset,
        sizeInBytes=vector.size,
        cardinality=vector.cardinality,
    )


def _vector_from_json(record: Mapping[str, Any] | None) -> VectorDescriptor | None:
    if record is None or record.get("storageType") is None:
        return None
    return VectorDescriptor(
        record["storageType"],
        record["pathOrInlineDv"],
        record["sizeInBytes"],
        record["cardinality"],
        record.get("offset"),
    )


def _add_from_json(record: Mapping[str, Any]) -> Add:
    return Add(
        path=record["path"],
        size=record["size"],
        modification_time=record["modificationTime"],
        data_change=bool(record.get("dataChange")),
        stats=record.get("stats"),
        vector=_vector_from_json(record.get("deletionVector")),
        partition_values=_mapping(record.get("partitionValues")),
        tags=_mapping(record.get("tags")),
    )


def _remove_from_json(record: Mapping[str, Any]) -> Remove:
    values = record.get("partitionValues")
    return Remove(
        path=record["path"],
        deletion_timestamp=record.get("deletionTimestamp"),
        data_change=bool(record.get("dataChange")),
        vector=_vector_from_json(record.get("deletionVector")),
        size=record.get("size"),
        partition_values=None if values is None else _mapping(values),
    )


def _txn_from_json(record: Mapping[str, Any]) -> Txn:
    return Txn(record["appId"], record["version"], record.get("lastUpdated"))


def _commit_info_from_json(record: Mapping[str, Any]) -> CommitInfo:
    return CommitInfo(
        timestamp=record.get("timestamp") or 0,
        operation=record.get("operation") or "",
        commit_id=record.get("txnId") or "",
        engine=record.get("engineInfo") or "",
        parameters=_mapping(record.get("operationParameters")),
        metrics=_mapping(record.get("operationMetrics")),
    )


def _protocol_from_json(record: Mapping[str, Any]) -> Protocol:
    return Protocol(
        record["minReaderVersion"],
        record["minWriterVersion"],
        frozenset(record.get("readerFeatures") or ()),
        frozenset(record.get("writerFeatures") or ()),
    )


def _metadata_from_json(record: Mapping[str, Any]) -> Metadata:
    return Metadata(
        id=record["id"],
        schema_string=record["schemaString"],
        configuration=_mapping(record.get("configuration")),
        partition_columns=tuple(record.get("partitionColumns") or ()),
        created_time=record.get("createdTime"),
        name=record.get("name"),
        description=record.get("description"),
    )


_PARSERS = {
    "add": _add_from_json,
    "remove": _remove_from_json,
    "txn": _txn_from_json,
    "commitInfo": _commit_info_from_json,
    "protocol": _protocol_from_json,
    "metaData": _metadata_from_json,
}


def _mapping(value: Any) -> dict[str, Any]:
    """Return a map given as JSON, or as a list of pairs, as Arrow returns it."""
    return dict(value or {})


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
