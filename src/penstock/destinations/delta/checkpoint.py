"""Checkpoints: a table at a version in one or more Parquet files, so that the log before it is not needed.

Reads all kinds that writers create: one file, several parts, and version 2 with its sidecars. Writes one file.
`penstock.destinations.delta.maintenance.cleanup` decides what it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.destinations.delta.actions import Action, Add, compact_json, from_json, to_json
from penstock.destinations.delta.storage import Storage

LOG_FOLDER = "_delta_log"
LAST_CHECKPOINT = f"{LOG_FOLDER}/_last_checkpoint"
_NAME = re.compile(
    rf"{LOG_FOLDER}/(?P<version>\d{{20}})\.checkpoint"
    r"(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<uuid>[0-9a-f-]{36}))?\.(?P<kind>parquet|json)"
)
_ACTIONS = ("add", "txn", "metaData", "protocol", "sidecar")
_TOMBSTONES = "remove"
_TEXTS = pa.map_(pa.string(), pa.string())
_VECTOR = pa.struct(
    {
        "storageType": pa.string(),
        "pathOrInlineDv": pa.string(),
        "offset": pa.int32(),
        "sizeInBytes": pa.int32(),
        "cardinality": pa.int64(),
    }
)
_FILE = {
    "path": pa.string(),
    "partitionValues": _TEXTS,
    "size": pa.int64(),
    "dataChange": pa.bool_(),
    "deletionVector": _VECTOR,
}
_SCHEMA = pa.schema(
    {
        "protocol": pa.struct(
            {
                "minReaderVersion": pa.int32(),
                "minWriterVersion": pa.int32(),
                "readerFeatures": pa.list_(pa.string()),
                "writerFeatures": pa.list_(pa.string()),
            }
        ),
        "metaData": pa.struct(
            {
                "id": pa.string(),
                "name": pa.string(),
                "description": pa.string(),
                "format": pa.struct({"provider": pa.string(), "options": _TEXTS}),
                "schemaString": pa.string(),
                "partitionColumns": pa.list_(pa.string()),
                "configuration": _TEXTS,
                "createdTime": pa.int64(),
            }
        ),
        "txn": pa.struct({"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()}),
        "add": pa.struct({**_FILE, "modificationTime": pa.int64(), "stats": pa.string(), "tags": _TEXTS}),
        "remove": pa.struct({**_FILE, "deletionTimestamp": pa.int64(), "extendedFileMetadata": pa.bool_()}),
    }
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    version: int
    paths: tuple[str, ...]


def last_checkpoint_hint(storage: Storage) -> int | None:
    """Return the version in `_last_checkpoint`; there may be newer ones, and this one may no longer exist."""
    content = storage.get(LAST_CHECKPOINT)
    if content is None:
        return None
    try:
        version = json.loads(content)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def find_checkpoints(paths: Iterable[str]) -> list[Checkpoint]:
    """Return the complete checkpoints among the files of a log, oldest first."""
    parts: dict[tuple[int, int], dict[int, str]] = {}
    found: dict[int, Checkpoint] = {}
    for path in paths:
        match = _NAME.fullmatch(path)
        if match is None:
            continue
        version = int(match["version"])
        if match["part"] is None:
            found[version] = Checkpoint(version, (path,))
        else:
            parts.setdefault((version, int(match["parts"])), {})[int(match["part"])] = path
    for (version, count), by_number in parts.items():
        if sorted(by_number) == list(range(1, count + 1)):
            found.setdefault(version, Checkpoint(version, tuple(by_number[number] for number in sorted(by_number))))
    return [found[version] for version in sorted(found)]


def checkpoint_version(path: str) -> int | None:
    """Return the version of a file that belongs to a checkpoint; None for other files."""
    match = _NAME.fullmatch(path)
    return None if match is None else int(match["version"])


def read_checkpoint(storage: Storage, checkpoint: Checkpoint, *, tombstones: bool) -> Iterator[Action]:
    """Yield the actions of a checkpoint, with or without tombstones, of which there may be more than files.

    Raises `FileNotFoundError` if one of its files is missing.
    """
    names = (*_ACTIONS, _TOMBSTONES) if tombstones else _ACTIONS
    for path in checkpoint.paths:
        for record in _records(storage, path, names):
            sidecar = record.get("sidecar")
            found = [record] if sidecar is None else _records(storage, sidecar_path(sidecar["path"]), names)
            for each in found:
                action = from_json(each)
                if action is not None:
                    yield action


def write_checkpoint_file(storage: Storage, version: int, actions: Sequence[Action]) -> None:
    """Write the checkpoint of a version, unless it exists, and name it as the newest."""
    target = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([to_json(action) for action in actions], _SCHEMA), target)
    content = target.getvalue().to_pybytes()
    storage.put_if_absent(f"{LOG_FOLDER}/{version:020d}.checkpoint.parquet", content)
    files = sum(isinstance(action, Add) for action in actions)
    hint = {"version": version, "size": len(actions), "sizeInBytes": len(content), "numOfAddFiles": files}
    storage.put(LAST_CHECKPOINT, compact_json(hint).encode())


def sidecar_path(path: str) -> str:
    """Return the path of a sidecar file of a version 2 checkpoint."""
    return path if "/" in path else f"{LOG_FOLDER}/_sidecars/{path}"


def _records(storage: Storage, path: str, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the actions with these names as JSON objects."""
    if path.endswith(".json"):
        content = storage.get(path)
        if content is None:
            raise FileNotFoundError(path)
        for line in content.splitlines():
            record = json.loads(line) if line.strip() else {}
            if any(record.get(name) is not None for name in names):
                yield record
        return
    # Action by action, because it is cold: it runs once when a table is opened, and an action is a file of the table.
    with storage.open(path) as source:
        file = pq.ParquetFile(source)
        columns = [leaf for leaf in _leaves(file) if leaf.split(".", 1)[0] in names and not _is_parsed(leaf)]
        for batch in file.iter_batches(columns=columns):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                yield from ({name: value} for value in column.drop_null().to_pylist())


def _leaves(file: pq.ParquetFile) -> list[str]:
    return [file.schema.column(number).path for number in range(len(file.schema))]


def _is_parsed(leaf: str) -> bool:
    """Return True for statistics and partition values repeated as columns, which may have types that Penstock lacks."""
    return leaf.startswith(("add.stats_parsed.", "add.partitionValues_parsed."))
